"""Precedence of settings: option, %llm config, generation_config, engine."""

import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.settings import Settings, sampling_params
from llmkernel.protocol.handshake import ModelFacts


def model(**defaults: object) -> ModelFacts:
    return ModelFacts(
        name="m", source="m", architecture="A", implementation="fake", dtype="none", device="none", vocab_size=9,
        max_position=9, generation_defaults=defaults,
    )  # fmt: skip


def test_option_over_config_over_model_over_engine() -> None:
    settings = Settings()
    assert sampling_params(settings.merged({})).temperature == 1.0
    assert sampling_params(settings.merged({}), model(temperature=0.6, top_p=0.9)).temperature == 0.6
    settings.configure({"temperature": 0.3})
    assert sampling_params(settings.merged({}), model(temperature=0.6, top_p=0.9)).temperature == 0.3
    params = sampling_params(settings.merged({"temperature": 0.1}), model(temperature=0.6, top_p=0.9))
    assert (params.temperature, params.top_p, params.max_tokens) == (0.1, 0.9, 512)


def test_what_the_model_says_beyond_sampling_is_left_out() -> None:
    params = sampling_params({}, model(repetition_penalty=1.1, max_new_tokens=5, do_sample=True, top_k=None))
    assert (params.repetition_penalty, params.max_tokens, params.top_k) == (1.1, 512, 0)


def test_a_setting_is_taken_back_and_a_wrong_one_changes_nothing() -> None:
    settings = Settings()
    settings.configure({"max-tokens": 7, "--seed": 3})
    assert settings == {"max_tokens": 7, "seed": 3}
    settings.configure({"seed": None})
    for wrong in ({"max_tokens": 0}, {"max_token": 5}, {"output": "x"}, {"temperature": 9.0}):
        with pytest.raises(InvalidRequestError):
            settings.configure(wrong)
    assert settings == {"max_tokens": 7}
    with pytest.raises(InvalidRequestError, match="did you mean max_tokens"):
        settings.merged({"max_token": 5})
