"""Every parameter out of range, of a wrong type or in a forbidden combination: one line in the cell and from the API,
before anything is sent; the engine stays as it was."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.session import Session
from tests.notebook.kernel import Kernel, running_kernel

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("-n 0", {"n": 0}, "n = 0 must be an integer from 1 to 16384"),
    ("-n 20000", {"n": 20000}, "n = 20000 must be an integer from 1 to 16384"),
    ("-n 2 -t 0", {"n": 2, "temperature": 0.0}, "n = 2 must be 1 when temperature is 0"),
    ("--presence-penalty 2.5", {"presence_penalty": 2.5}, "presence_penalty = 2.5 must be a number from -2 to 2"),
    ("--frequency-penalty -3", {"frequency_penalty": -3.0}, "frequency_penalty = -3.0 must be a number from -2 to 2"),
    ("--repetition-penalty 0", {"repetition_penalty": 0.0}, "repetition_penalty = 0.0 must be greater than 0"),
    (
        "--repetition-penalty inf",
        {"repetition_penalty": float("inf")},
        "repetition_penalty = inf must be a finite number",
    ),
    ("-t -1", {"temperature": -1.0}, "temperature = -1.0 must be a number from 0 to 2"),
    ("-t nan", {"temperature": float("nan")}, "temperature = nan must be a number from 0 to 2"),
    ("-p 0", {"top_p": 0.0}, "top_p = 0.0 must be in (0, 1]"),
    ("-p 1.1", {"top_p": 1.1}, "top_p = 1.1 must be in (0, 1]"),
    ("-k -2", {"top_k": -2}, "top_k = -2 must be an integer of at least 0"),
    ("--min-p 2", {"min_p": 2.0}, "min_p = 2.0 must be a number from 0 to 1"),
    ("--seed -5", {"seed": -5}, "seed = -5 must be an integer from 0"),
    ('--stop ""', {"stop": [""]}, "stop = [''] must be a list of non-empty strings"),
    ("--stop-token-id -1", {"stop_token_ids": [-1]}, "stop_token_ids = -1 must be an integer of at least 0"),
    ("--stop-token-id 900", {"stop_token_ids": [900]}, "stop_token_ids holds 900; ids of this model go from 0 to 511"),
    ("--max-tokens 0", {"max_tokens": 0}, "max_tokens = 0 must be an integer of at least 1"),
    ("--min-tokens -1", {"min_tokens": -1}, "min_tokens = -1 must be an integer of at least 0"),
    (
        "--min-tokens 9 --max-tokens 8",
        {"min_tokens": 9, "max_tokens": 8},
        "min_tokens = 9 must be at most max_tokens = 8",
    ),
    ("--logprobs 21", {"logprobs": 21}, "logprobs = 21 must be an integer from 0 to 20"),
    ("--logprobs -2", {"logprobs": -2}, "logprobs = -2 must be an integer from 0 to 20"),
    ("--prompt-logprobs 99", {"prompt_logprobs": 99}, "prompt_logprobs = 99 must be an integer from 0 to 20"),
    ("--stream-interval 0", {"stream_interval": 0}, "stream_interval = 0 must be an integer of at least 1"),
    ('--bad-word ""', {"bad_words": [""]}, "bad_words = [''] must be a list of non-empty strings"),
    ("--params bias", {"params": {"logit_bias": {900: 1}}}, "logit_bias holds 900; ids of this model go from 0 to 511"),
    ("--params allowed", {"params": {"allowed_token_ids": []}}, "allowed_token_ids = [] must be a non-empty list"),
    ("--params unbuilt", {"params": {"flat_logprobs": True}}, "flat_logprobs is not built"),
    ("--params typo", {"params": {"top_q": 1}}, "Unknown sampling parameter 'top_q'; did you mean top_"),
    ('--regex ""', {"regex": ""}, "regex = '' must be a non-empty str"),
    ('--regex "(a"', {"regex": "(a"}, "regex"),
    ("--choice a --json-object", {"choice": ["a"], "json_object": True}, "exclude each other; give one"),
    ("--json-schema empty", {"json_schema": {"enum": []}}, "The JSON schema has an empty enum"),
    ("--json-schema remote", {"json_schema": {"$ref": "https://example.org/a"}}, "never fetched; put it under $defs"),
    ("--json-schema never", {"json_schema": {"type": "string", "enum": [1]}}, ""),
    (
        "--template looping",
        {"template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"},
        "The chat template did not come to an end in time",
    ),
    ("--template raising", {"template": "{{ raise_exception('cats only') }}"}, "refused the messages: cats only;"),
    ("--template broken", {"template": "{% for %}"}, "The chat template has a syntax error in line 1"),
    ("--model nobody", {"model": "nobody"}, "No model is called 'nobody' (loaded: fake)"),
]

NAMES = """
bias, allowed = {"logit_bias": {900: 1}}, {"allowed_token_ids": []}
unbuilt, typo = {"flat_logprobs": True}, {"top_q": 1}
empty, remote, never = {"enum": []}, {"$ref": "https://example.org/a"}, {"type": "string", "enum": [1]}
raising = "{{ raise_exception('cats only') }}"
looping = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
broken = "{% for %}"
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("bad")
    with running_kernel(folder, "%load_ext llmkernel", "%llm load fake: --name fake", NAMES) as kernel:
        yield kernel


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    with Session() as session:
        await session.load("fake:", name="fake")
        yield session


def test_in_a_cell(kernel: Kernel) -> None:
    pid = kernel.value("get_ipython().magics_manager.registry['LLMMagics'].session.models['fake'].process.pid")
    for options, _, words in CASES:
        cell = kernel.run(f"%%generate {options}\nhello")
        assert cell.status == "error", options
        assert words in cell.evalue and "\n" not in cell.evalue, (options, cell.evalue)
        assert not any(answer["data"]["text/plain"] for answer in cell.answers), "nothing was sent"
    assert kernel.run("%generate --max-tokens 2 still there").status == "ok"
    assert pid == kernel.value("get_ipython().magics_manager.registry['LLMMagics'].session.models['fake'].process.pid")


async def test_from_the_api(session: Session) -> None:
    neighbour = session.generate("a neighbour", max_tokens=300)
    for _, options, words in CASES:
        with pytest.raises((InvalidRequestError, RuntimeError)) as caught:
            await session.generate("hello", **options)
        assert words in str(caught.value) and "\n" not in str(caught.value), (options, str(caught.value))
    assert (await neighbour).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("value", ["x", None, 1.5, [], True])
async def test_of_a_wrong_type(session: Session, value: Any) -> None:
    for name in ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "stream_interval", "stop_token_ids"):
        if value is None or (name == "stop_token_ids" and value == []) or (name == "logprobs" and value is True):
            continue  # "not given", "none of them", and vLLM's True for 1
        with pytest.raises(InvalidRequestError, match=f"^{name}") as caught:
            session.generate("hello", **{name: value})
        assert "must be" in str(caught.value)
