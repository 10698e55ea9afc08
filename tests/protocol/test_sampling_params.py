"""Each field out of range, of the wrong type or in a forbidden combination: one line with field, value and rule."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError
from llmkernel.protocol.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

NOT_NUMBERS = ["x", None, [1.0], math.nan, math.inf, True]
WRONG: dict[str, list[Any]] = {
    "n": [0, -1, 16385, 1.5, "2", None, True],
    "presence_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, *NOT_NUMBERS],
    "temperature": [-0.1, 2.1, *NOT_NUMBERS],
    "top_p": [0, 1.01, -1, *NOT_NUMBERS],
    "top_k": [-2, 1.5, "5", None],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "seed": [-2, 2**63, 1.5, "7"],
    "stop": ["", [""], ["a", 3], 5, [None]],
    "stop_token_ids": [[-1], ["x"], 5, [1.5]],
    "max_tokens": [0, -1, 2.5, "9"],
    "min_tokens": [-1, 17, "1", None],
    "logprobs": [-2, 21, 1.5, "5"],
    "prompt_logprobs": [-2, 21, 1.5, "5"],
    "stream_interval": [0, 1.5],
    "logit_bias": [[1], {"x": 1.0}, {1.5: 1.0}, {1: "x"}, {1: math.nan}],
    "allowed_token_ids": [[], [-1], ["x"], 5],
    "bad_words": [[""], "word", [3]],
    "logprob_token_ids": [[], [-1], list(range(129)), 5],
    "extra_args": ["x", {1: 2}, {"a": 2**63}, {"a": -(2**63) - 1}],
    "output_kind": [7, "delta", None],
    "detokenize": [1, None, "no"],
    "ignore_eos": [0, "yes"],
    "skip_special_tokens": [None],
    "include_stop_str_in_output": [1],
    "structured_outputs": [{"regex": "a"}, "a"],
    "repetition_detection": [3, {"max_pattern_size": 2}],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SamplingParams(max_tokns=5), "'max_tokns' of SamplingParams; did you mean 'max_tokens'?"),
        (lambda: SamplingParams.from_optional(temprature=0.5), "did you mean 'temperature'?"),
        (lambda: SamplingParams(what=1), "Unknown parameter 'what' of SamplingParams; known: n, presence_penalty"),
        (lambda: StructuredOutputsParams(rgex="a"), "did you mean 'regex'?"),
        (lambda: BeamSearchParams(beam_width=2, max_token=3), "did you mean 'max_tokens'?"),
        (lambda: RepetitionDetectionParams(max_patern_size=3), "did you mean 'max_pattern_size'?"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest_one(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_a_wrong_value_is_named_with_its_field_and_rule(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert "\n" not in message and name in message and "must be" in message
    assert caught.value.parameter is not None and caught.value.parameter.startswith(name)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2, "temperature": 0}, "n = 2"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5"),
        ({"stop": ["a"], "detokenize": False}, "stop = "),
        ({"logprobs": 2, "logprob_token_ids": [1, 2, 3]}, "logprobs = 2"),
    ],
    ids=str,
)
def test_forbidden_combinations(fields: dict, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprob_token_ids": [[1]]},
        {"prompt_logprob_start": 0},
        {"flat_logprobs": True},
        {"thinking_token_budget": 5},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_by_name(fields: dict) -> None:
    with pytest.raises(UnsupportedFeatureError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_values_are_brought_to_one_form() -> None:
    params = SamplingParams(
        stop="END",
        seed=-1,
        top_k=-1,
        logprobs=True,
        prompt_logprobs=True,
        temperature=0.001,
        stop_token_ids=[3, 3, 1],
        logit_bias={"5": 200, 6: -200},
        output_kind=1,
        thinking_token_budget=-1,
    )
    assert params.stop == ["END"] and params.seed is None and params.top_k == 0
    assert params.logprobs == params.prompt_logprobs == 1 and params.temperature == 0.01
    assert params.stop_token_ids == [3, 1] and params.logit_bias == {5: 100.0, 6: -100.0}
    assert params.output_kind is RequestOutputKind.DELTA and params.thinking_token_budget is None
    assert SamplingParams(temperature=1e-6).is_greedy and not params.is_greedy
    assert SamplingParams(logprob_token_ids=[4, 5]).num_logprobs == 2 and SamplingParams().num_logprobs is None
    assert SamplingParams.from_optional(temperature=None, top_k=5) == SamplingParams(top_k=5)
    params.logit_bias[7] = 1.0
    copy = params.clone()
    copy.stop.append("x")
    assert params.stop == ["END"] and copy.logit_bias == params.logit_bias


def test_extra_args_travel_with_whole_numbers_of_64_bits() -> None:
    params = SamplingParams(extra_args={"low": -(2**63), "high": 2**63 - 1, "deep": {"x": [1, "y"]}})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": -1},
        {"min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3},
        {"max_pattern_size": "x"},
    ],
    ids=str,
)
def test_repetition_detection_rules(fields: dict) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_detection"):
        RepetitionDetectionParams(**fields)


def nested(depth: int) -> dict[str, Any]:
    """A schema of this many objects inside one another."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def holding_itself() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["items"] = schema
    return schema


def shared_parts() -> dict[str, Any]:
    """Forty levels, but two to the power of forty values when it is written out."""
    part: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        part = {"anyOf": part, "oneOf": part}
    return part


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"json": {}, "json_object": True}, "exactly one of"),
        ({"choice": []}, "choice = [] must be a non-empty list"),
        ({"choice": ["a", 3]}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"regex": ""}, "regex = '' must be a non-empty str"),
        ({"regex": 3}, "regex"),
        ({"regex": "a\0b"}, "NUL"),
        ({"grammar": ""}, "grammar"),
        ({"json_object": False}, "json_object = False must be True"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "[1]"}, "must be a JSON object, not list"),
        ({"json": 3}, "json = 3 must be a JSON schema"),
        ({"json": "[" * 100_000}, "deeper than 64"),
        ({"json": nested(65)}, "deeper than 64"),
        ({"json": json.dumps(nested(65))}, "deeper than 64"),
        pytest.param({"json": holding_itself}, "deeper than 64", id="holding itself"),
        pytest.param({"json": shared_parts}, "more than 200000 values", id="shared parts"),
        ({"json": {"const": {1, 2}}}, "cannot be written as JSON"),
        ({"json": {"const": math.nan}}, "cannot be written as JSON"),
        ({"json": {"properties": {3: {}}}}, "key that is no string"),
        ({"json": {"enum": []}}, "empty enum"),
        ({"json": {"properties": {"a": {"anyOf": [{"type": "null"}, {"enum": []}]}}}}, "empty enum"),
        ({"json": {"$ref": "https://example.org/schema.json"}}, "never fetched"),
        ({"json": {"items": {"$ref": "file:///etc/passwd#/a"}}}, "'file:///etc/passwd#/a', which is never fetched"),
        ({"json": {"properties": {"a": {"$ref": "other.json"}}}}, "never fetched"),
        ({"json": {"$dynamicRef": "http://example.org#node"}}, "never fetched"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"regex": "a", "disable_additional_properties": True}, "disable_additional_properties"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_constraints_that_cannot_be_meant(fields: dict, words: str) -> None:
    made = {name: value() if callable(value) else value for name, value in fields.items()}
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**made)
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_structural_tags_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="structural_tag"):
        StructuredOutputsParams(structural_tag="{}")


@pytest.mark.parametrize(
    "schema",
    [
        nested(64),
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"$id": "https://example.org/a", "items": {"$ref": "https://example.org/a"}},
        {"properties": {"$ref": {"type": "string"}, "enum": {"type": "integer"}}},
        {"const": {"$ref": "https://example.org"}, "default": {"enum": []}},
        {"enum": [{"$ref": "https://example.org", "enum": []}]},
        {"enum": list(range(20_000))},
    ],
    ids=lambda value: str(value)[:60],
)
def test_schemas_that_only_look_wrong_pass(schema: dict) -> None:
    for form in (schema, json.dumps(schema)):
        params = StructuredOutputsParams(json=form)
        assert params.kind == "json" and params.schema == schema
    assert StructuredOutputsParams(json_object=True).schema == {"type": "object"}
