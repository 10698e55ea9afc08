"""Answers of a given form: options to StructuredOutputsParams, and `.parsed`, on a fake engine with real grammars."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.session import Session
from llmkernel.notebook.settings import sampling_params
from llmkernel.notebook.structured import parsed_answer, structured_outputs
from llmkernel.protocol.sampling_params import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Answer:
    """As a pydantic model behaves."""

    def __init__(self, a: int) -> None:
        self.a = a

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA

    @classmethod
    def model_validate(cls, value: dict[str, Any]) -> "Answer":
        return cls(**value)


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    with Session() as session:
        await session.load("fake:", name="fake")
        yield session


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Answer])
def test_a_schema_may_be_a_dict_a_text_or_a_model(schema: Any) -> None:
    made = structured_outputs({"json_schema": schema})
    assert made is not None and made.schema == SCHEMA and made.disable_additional_properties


def test_the_other_kinds() -> None:
    assert structured_outputs({}) is None and structured_outputs({"json_object": False}) is None
    for options in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}, {"json_object": True}):
        made = sampling_params(options).structured_outputs
        (kind,) = options
        assert made is not None and made.kind == kind
    assert structured_outputs({"choice": "only"}) == structured_outputs({"choice": ["only"]})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": SCHEMA, "regex": "a"}, "--json-schema and --regex exclude each other"),
        ({"json_schema": 3}, "json_schema must be a dict, JSON text or a pydantic model, not int"),
        ({"json_schema": "{no json"}, "is no JSON"),
        ({"json_schema": {"enum": []}}, "empty enum"),
        ({"json_schema": {"$ref": "http://example.org/x"}}, "never fetched"),
        ({"regex": ""}, "regex = '' must be a non-empty str"),
        ({"choice": []}, "choice = [] must be a non-empty list"),
        ({"template": 3}, "template must be the text of a jinja template"),
        ({"params": 3}, "params must be SamplingParams or a dict, not int"),
        ({"params": {"temprature": 1}}, "did you mean temperature?"),
    ],
)
async def test_mistakes_are_told_at_once(session: Session, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        session.generate("x", **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_answer_that_is_not_whole_is_no_value() -> None:
    assert parsed_answer({"json_schema": SCHEMA}, '{"a": 1') is None
    assert parsed_answer({"json_schema": SCHEMA}, '{"a": 1}') == {"a": 1}
    assert parsed_answer({"regex": "a+"}, "aa") == "aa"
    assert parsed_answer({}, "aa") is None
    made = parsed_answer({"json_schema": Answer}, '{"a": 1}')
    assert isinstance(made, Answer) and made.a == 1


async def test_the_engine_keeps_to_the_form_and_the_handle_has_the_value(session: Session) -> None:
    forms = {"json_schema": SCHEMA, "choice": ["red", "green"], "regex": "[ab]{3}", "json_object": True}
    got = {name: session.generate("x", raw=True, max_tokens=200, **{name: form}) for name, form in forms.items()}
    for generation in got.values():
        await generation
    assert got["choice"].parsed in ("red", "green")
    assert len(got["regex"].parsed) == 3 and set(got["regex"].parsed) <= {"a", "b"}
    cut = await session.generate("x", raw=True, max_tokens=1, json_schema=SCHEMA, n=2, temperature=1)
    assert cut.parsed_all == [None, None]


async def test_a_template_of_ones_own(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("[{{ messages[0].content }}]", "utf-8")
    for template in (file, file.read_text("utf-8")):
        generation = await session.generate("hi", template=template, max_tokens=1)
        assert generation.prompt == "[hi]"
    with pytest.raises(InvalidRequestError, match="only cats"):
        await session.generate("hi", template="{{ raise_exception('only cats') }}")
    with pytest.raises(InvalidRequestError, match="did not come to an end"):
        await session.generate(
            "hi", template="{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        )


async def test_params_hold_what_has_no_option_and_options_come_on_top(session: Session) -> None:
    params = SamplingParams(temperature=0.5, n=2, logit_bias={97: 1.0}, max_tokens=3)
    generation = await session.generate("hi", raw=True, params=params, max_tokens=2)
    sent = generation.requests[0].sampling_params  # type: ignore[union-attr]
    assert sent is not None and (sent.temperature, sent.n, sent.max_tokens) == (0.5, 2, 2)
    assert sent.logit_bias == {97: 1.0} and len(generation.outputs) == 2
    endless = await session.generate("hi", raw=True, params={"max_tokens": None, "stop": ["a"]})
    assert endless.requests[0].sampling_params.stop == ["a"]  # type: ignore[union-attr]


async def test_pydantic_models_and_type_adapters(session: Session) -> None:
    pydantic = pytest.importorskip("pydantic")
    city = pydantic.create_model("City", name=(str, ...), size=(int, ...))
    generation = await session.generate("x", raw=True, json_schema=city, max_tokens=400)
    if generation.outputs[0].finish_reason == "stop":
        assert isinstance(generation.parsed, city) and set(generation.parsed.model_dump()) == {"name", "size"}
    else:  # the fake model likes long words
        assert generation.parsed is None
    made = parsed_answer({"json_schema": city}, '{"name": "Rome", "size": 3}')
    assert made == city(name="Rome", size=3)
    adapter = pydantic.TypeAdapter(dict[str, int])
    assert structured_outputs({"json_schema": adapter}).schema["type"] == "object"  # type: ignore[union-attr]
    assert parsed_answer({"json_schema": adapter}, '{"a": 1}') == {"a": 1}
    assert parsed_answer({"json_schema": city}, '{"name": 3}') is None
