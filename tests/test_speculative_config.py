"""EngineArgs.speculative at the door: what it takes, and the one line for what it does not."""

from typing import Any

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError
from llmkernel.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ngram", SpeculativeConfig()),
        ({"method": "ngram"}, SpeculativeConfig()),
        ('{"method": "ngram", "num_speculative_tokens": 3}', SpeculativeConfig(num_speculative_tokens=3)),
        (
            {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5, "prompt_lookup_min": 3},
            SpeculativeConfig(num_speculative_tokens=7, prompt_lookup_max=5, prompt_lookup_min=3),
        ),
        ({"method": "ngram", "prompt_lookup_max": 1}, SpeculativeConfig(prompt_lookup_max=1, prompt_lookup_min=1)),
        ({"method": "ngram", "prompt_lookup_min": 6}, SpeculativeConfig(prompt_lookup_max=6, prompt_lookup_min=6)),
        ({"method": "ngram", "disable_by_batch_size": 2}, SpeculativeConfig(disable_by_batch_size=2)),
    ],
)
def test_what_is_taken(value: Any, expected: SpeculativeConfig) -> None:
    assert SpeculativeConfig.parse(EngineArgs.from_options("m", speculative=value).speculative) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ngrams", "'ngrams' is no method; use 'ngram'"),
        ("", "it names no method; use 'ngram'"),
        ({"num_speculative_tokens": 3}, "it names no method; use 'ngram'"),
        ({"method": "ngram", "num_spec_tokens": 3}, "'num_spec_tokens' .* did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens = 0 must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "must be a whole number of at least 1"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be a whole number of at least 1"),
        ({"method": "ngram", "num_speculative_tokens": 129}, "at most 128"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "is above prompt_lookup_max = 3; lower"),
        ("{method: ngram}", "is no JSON; write 'ngram', or a dict"),
    ],
    ids=str,
)
def test_what_is_refused(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        EngineArgs(speculative=value)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("speculative: ")


@pytest.mark.parametrize("method", ["eagle", "draft_model", "medusa", "suffix"])
def test_methods_of_vllm_that_are_not_built(method: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"the method '{method}' is not built; use 'ngram'"):
        EngineArgs(speculative={"method": method, "num_speculative_tokens": 2})


def test_it_is_off_by_default() -> None:
    assert EngineArgs().speculative is None
