"""InputProcessor: what is filled in, and what is refused with which words."""

import logging
import time
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError
from llmkernel.llm.input_processor import InputProcessor
from llmkernel.llm.prompts import ChatPrompt, TokenizedPrompt
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import TokenizerFacts
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import EngineCoreRequest, LoRARequest
from llmkernel.protocol.sampling_params import SamplingParams
from tests.llm.outputs_of_an_engine import EOS, fake_tokenizer, ready_response
from tests.llm.tokenizers_on_the_spot import byte_level


def _processor(args: EngineArgs | None = None, tok: Tokenizer | None = None, **facts: Any) -> InputProcessor:
    return InputProcessor(args or EngineArgs(), ready_response(**facts), tok or fake_tokenizer())


def _made(processor: InputProcessor, prompt: Any = "abc", params: Any = None, **options: Any) -> EngineCoreRequest:
    return processor.process_inputs("r", processor.tokenize(prompt), params or SamplingParams(), **options)


@pytest.mark.row("A-046", "A-065", "A-066", "A-070", "A-162")
def test_the_request_is_complete_and_the_params_given_stay_as_they_were() -> None:
    processor = _processor(model_stop_token_ids=[300, EOS])
    params = SamplingParams(max_tokens=None, stop_token_ids=[7])
    before = time.time()
    made = _made(processor, params=params, priority=0)
    assert made.request_id.startswith("r-") and len(made.request_id) == 10
    assert (made.external_req_id, made.prompt_token_ids, made.eos_token_id) == ("r", [97, 98, 99], EOS)
    assert before <= made.arrival_time <= time.time()
    sent = made.sampling_params
    assert sent is not None
    assert (sent.max_tokens, sent.stop_token_ids) == (97, [7, 300])
    assert sent.seed is not None
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (None, None, [7])
    assert _made(processor, arrival_time=5.0).arrival_time == 5.0


def test_the_seed_is_the_requests_or_the_engines_or_fresh() -> None:
    seeds = {made.sampling_params.seed for _ in range(5) if (made := _made(_processor())).sampling_params}
    assert len(seeds) == 5
    engine = _processor(EngineArgs(seed=3))
    for params, seed in ((SamplingParams(), 3), (SamplingParams(seed=9), 9)):
        made = _made(engine, params=params)
        assert made.sampling_params is not None and made.sampling_params.seed == seed


def test_ignore_eos_leaves_only_the_users_stop_ids() -> None:
    made = _made(_processor(model_stop_token_ids=[300]), params=SamplingParams(ignore_eos=True, stop_token_ids=[7]))
    assert made.eos_token_id is None
    assert made.sampling_params is not None and made.sampling_params.stop_token_ids == [7]


def test_max_tokens_ends_at_the_context() -> None:
    made = _made(_processor(), "a" * 90, SamplingParams(max_tokens=50))
    assert made.sampling_params is not None and made.sampling_params.max_tokens == 10


@pytest.mark.row("A-155")
@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("hi", "hi", [104, 105]),
        ([1, 2], None, [1, 2]),
        (np.array([1, 2]).tolist(), None, [1, 2]),
        ([np.int64(4)], None, [4]),
        ({"prompt": "hi"}, "hi", [104, 105]),
        ({"prompt_token_ids": [1, 2]}, None, [1, 2]),
        ({"prompt": "shown", "prompt_token_ids": (1, 2)}, "shown", [1, 2]),
    ],
)
def test_every_form_of_prompt(prompt: Any, text: str | None, ids: list[int]) -> None:
    assert _processor().tokenize(prompt) == TokenizedPrompt(text, ids)


def test_a_cache_salt_travels() -> None:
    assert _made(_processor(), {"prompt": "a", "cache_salt": "mine"}).cache_salt == "mine"


@pytest.mark.row("A-068")
def test_tokenization_kwargs() -> None:
    tok = _tokenizer_that_adds_bos()
    processor = _processor(tok=tok)
    bos = tok.bos_token_id
    plain = processor.tokenize("hello", {"add_special_tokens": False}).token_ids
    assert processor.tokenize("hello").token_ids == [bos, *plain]
    assert processor.tokenize("hello", {"truncate_prompt_tokens": 1}).token_ids == plain[-1:]
    with pytest.raises(UnsupportedFeatureError, match="padding"):
        processor.tokenize("hello", {"padding": True})
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens = 0"):
        processor.tokenize("hello", {"truncate_prompt_tokens": 0})


def test_bos_is_never_doubled() -> None:
    tok = _tokenizer_that_adds_bos()
    tok.facts.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    tok.facts.special_tokens = {"bos_token": "<s>"}
    tok = Tokenizer(tok.backend, tok.facts)
    processor = _processor(tok=tok)
    expected = processor.tokenize("hello").token_ids
    assert processor.tokenize("<s>hello").token_ids == expected
    chat = processor.tokenize(ChatPrompt(messages=[{"role": "user", "content": "hello"}]))
    assert (chat.text, chat.token_ids) == ("<s>hello", expected)


def test_special_tokens_in_a_message_are_encoded_as_such_and_named() -> None:
    processor = _processor()
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    assert EOS in processor.tokenize(ChatPrompt(messages=messages)).token_ids[3:-3]
    assert processor.special_tokens_in(messages) == ["<|im_end|>"]


def test_bad_words_are_tokenised_as_they_stand_at_the_start_and_after_a_space() -> None:
    vocab = {letter: token_id for token_id, letter in enumerate(["h", "i", "Ġ", "Ġh", "Ġi", "hi"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "h"), ("Ġ", "i"), ("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    processor = _processor(tok=Tokenizer(backend, TokenizerFacts()))
    made = _made(processor, "h", SamplingParams(bad_words=["h", " i", "hi"]))
    assert made.bad_words_token_ids == [[0], [3], [1], [4], [5]], "' hi' has two tokens, and so no second form"
    with pytest.raises(InvalidRequestError, match="129 token sequences"):
        _made(_processor(), params=SamplingParams(bad_words=[str(number) for number in range(129)]))


@pytest.mark.parametrize(
    ("prompt", "params", "options", "words"),
    [
        ("", {}, {}, "empty"),
        ([], {}, {}, "empty"),
        ("a" * 100, {}, {}, "100 tokens.*takes 100.*shorten it to 99"),
        ([1, 512], {}, {}, "holds 512; ids of this model go from 0 to 511"),
        ([1, -1], {}, {}, "holds -1"),
        ([1, "2"], {}, {}, "must be integers"),
        (3.5, {}, {}, "not float"),
        (b"bytes", {}, {}, "not bytes"),
        ({"text": "a"}, {}, {}, r"\['text'\]"),
        ({"prompt": 3}, {}, {}, "not dict"),
        ({"prompt_embeds": [1.0]}, {}, {}, "prompt_embeds"),
        ("a", {"stop_token_ids": [600]}, {}, "stop_token_ids holds 600"),
        ("a", {"allowed_token_ids": [512]}, {}, "allowed_token_ids holds 512"),
        ("a", {"logit_bias": {900: 1.0}}, {}, "logit_bias holds 900"),
        ("a", {}, {"data_parallel_rank": 1}, "data_parallel_rank = 1 must be 0"),
    ],
)
@pytest.mark.row("A-071")
def test_refusals_say_what_to_change(prompt: Any, params: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        _made(_processor(), prompt, SamplingParams(**params), **options)
    assert "\n" not in str(caught.value)


def test_a_prompt_longer_than_the_kv_pool_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="KV cache holds 48"):
        _made(_processor(kv_cache_size_tokens=48), "a" * 60)


@pytest.mark.row("A-067", "A-110", "A-150")
def test_what_is_not_built_is_refused_by_name() -> None:
    processor = _processor()
    with pytest.raises(UnsupportedFeatureError, match="Pooling"):
        _made(processor, params=PoolingParams())
    with pytest.raises(UnsupportedFeatureError, match="lora_request"):
        _made(processor, lora_request=LoRARequest("name", 1))
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, not dict"):
        _made(processor, params={"temperature": 1})


@pytest.mark.row("A-069")
def test_trace_headers_are_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    processor = _processor()
    with caplog.at_level(logging.WARNING, "llmkernel"):
        for _ in range(3):
            assert _made(processor, trace_headers={"traceparent": "00-1-2-01"}).trace_headers is None
    assert [record.getMessage() for record in caplog.records] == ["trace_headers are dropped: tracing is off."]


@pytest.mark.row("A-070")
def test_priority_travels_and_its_uselessness_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "llmkernel"):
        assert _made(_processor(scheduling_policy="priority"), priority=-3).priority == -3
        assert not caplog.records
        _made(_processor(), priority=2)
    assert "scheduling_policy='priority'" in caplog.text


def test_a_base_model_explains_itself() -> None:
    facts = TokenizerFacts()
    processor = _processor(tok=Tokenizer(byte_level(), facts))
    with pytest.raises(InvalidRequestError, match=r"no chat template.*--raw.*--template") as caught:
        processor.tokenize(ChatPrompt(messages=[{"role": "user", "content": "a"}]))
    assert "\n" not in str(caught.value)
    given = ChatPrompt(messages=[{"role": "user", "content": "a"}], chat_template="[{{ messages[0].content }}]")
    assert processor.tokenize(given).text == "[a]"


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    processor = InputProcessor(EngineArgs(), ready_response(tokenizer=TokenizerFacts()), None)
    assert processor.tokenize([1, 2]).token_ids == [1, 2]
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        processor.tokenize("text")


def test_defaults_of_the_model() -> None:
    processor = _processor(model_generation_defaults={"temperature": 0.2, "top_p": 0.9, "transformers_version": "5"})
    params = processor.default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.9, 0)


def _tokenizer_that_adds_bos() -> Tokenizer:
    backend = byte_level()
    bos = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return Tokenizer(backend, TokenizerFacts(bos_token_id=bos))
