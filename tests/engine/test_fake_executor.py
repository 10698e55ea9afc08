"""The fake model: what it answers, and that it catches a scheduler that is wrong."""

import dataclasses

import pytest
from tokenizers import Tokenizer

from llmkernel.config import EngineArgs
from llmkernel.engine.executor import resolve_executor_class
from llmkernel.engine.fake_executor import FakeExecutor, FakeSettings, fake_answer, fake_next_token
from llmkernel.engine.fake_kv import FakeStepError
from llmkernel.engine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from llmkernel.errors import InvalidRequestError
from llmkernel.protocol.sampling_params import SamplingParams
from tests.engine.harness import EOS, Engine

PROMPT = [1, 2, 3, 4, 5]


def started(settings: str = "num_blocks=8,block_size=4") -> FakeExecutor:
    executor = FakeExecutor()
    executor.start(EngineArgs(model=f"fake:{settings}"), lambda *progress: None)
    return executor


def new(request_id: str = "a", *, blocks: tuple[int, ...] = (1, 2), computed: int = 0) -> NewRequestData:
    return NewRequestData(request_id, PROMPT, SamplingParams(), list(blocks), computed)


def step(*requests: NewRequestData, counts: dict[str, int] | None = None, **rest) -> SchedulerOutput:
    counts = {item.req_id: len(PROMPT) - item.num_computed_tokens for item in requests} if counts is None else counts
    cached = rest.pop("cached", CachedRequestData())
    return SchedulerOutput(
        list(requests), cached, counts, sum(counts.values()), rest.get("finished", set()), rest.get("preempted", set())
    )


def decode(request_id: str = "a", blocks: tuple[int, ...] = (), computed: int = 5, outputs: int = 1, resumed=False):
    return CachedRequestData([request_id], {request_id} if resumed else set(), [list(blocks)], [computed], [outputs])


def test_it_is_found_by_its_path() -> None:
    assert resolve_executor_class("llmkernel.engine.fake_executor:FakeExecutor") is FakeExecutor


def test_the_next_token_is_what_the_docstring_says() -> None:
    assert fake_next_token([10]) == 97 + (31 * 10 + 7 * 1) % 27
    mix = 31 * 5 + 17 * 4 + 7 * 3
    assert fake_next_token([9, 4, 5]) == 97 + mix % 27
    assert fake_next_token([9, 4, 5], eos_every=mix) == EOS
    assert set(fake_answer([1], 200)) <= {32, *range(97, 123)}


def test_settings_are_in_the_name() -> None:
    settings = FakeSettings.parse("fake:step_ms=0.5, num_blocks=9,fail_token=7")
    assert settings == dataclasses.replace(FakeSettings(), step_ms=0.5, num_blocks=9, fail_token=7)
    assert FakeSettings.parse("fake") == FakeSettings.parse("smollm2") == FakeSettings()


@pytest.mark.parametrize(
    ("name", "words"),
    [("fake:stepms=5", "'stepms=5' is no setting"), ("fake:num_blocks=x", "NAME=NUMBER"), ("fake:vocab_size=5", "259")],
)
def test_a_wrong_setting_is_refused(name: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        FakeSettings.parse(name)


def test_engine_args_win() -> None:
    facts = FakeExecutor().start(EngineArgs(model="fake", block_size=8, max_model_len=99), lambda *progress: None)
    assert (facts.block_size, facts.max_model_len) == (8, 99)


@pytest.mark.parametrize("text", ["Hello, world", "héllo 日本 🎉", " \n\t<|im_end|>x", "\x00\x7f\u0301", ""])
def test_any_text_round_trips_through_its_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_str(Engine().core.ready.tokenizer.json)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|><|im_end|>").ids == [257, EOS]
    if "<|" not in text:
        assert ids == list(text.encode())


def test_it_can_echo() -> None:
    engine = Engine("echo=1")
    engine.add("a", list("Grüße!".encode()), max_tokens=100)
    engine.run()
    assert bytes(engine.tokens("a")[:-1]).decode() == "Grüße!"
    assert engine.tokens("a")[-1] == EOS


def test_right_steps_pass() -> None:
    executor = started()
    first = executor.execute_model(step(new(), new("b", blocks=(3, 4))))
    assert first.sampled_token_ids == {"a": fake_answer(PROMPT, 1), "b": fake_answer(PROMPT, 1)}
    second = executor.execute_model(step(counts={"a": 1}, cached=decode(), finished={"b"}))
    assert second.sampled_token_ids == {"a": fake_answer(PROMPT, 2)[1:]}
    hit = executor.execute_model(step(new("c", blocks=(1, 5), computed=4)))
    assert hit.sampled_token_ids == {"c": fake_answer(PROMPT, 1)}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: step(new("x", blocks=(6, 7), computed=4)), "block 0 does not hold the KV"),
        (lambda: step(new("x", blocks=(1, 3), computed=5)), "nothing of it is left"),
        (lambda: step(new("x", blocks=(5,))), "has 1 blocks, block 1 is needed"),
        (lambda: step(new("x", blocks=(0, 5))), "block id 0 is outside"),
        (lambda: step(new("x", blocks=(5, 8))), "block id 8 is outside"),
        (lambda: step(new("a")), "never said to be finished"),
        (lambda: step(counts={"x": 1}, cached=decode("x")), "unknown or finished"),
        (lambda: step(counts={"a": 1}, cached=decode(), finished={"a"}), "unknown or finished"),
        (lambda: step(counts={"a": 1}, cached=decode(outputs=2)), "1 output tokens, not 2"),
        (lambda: step(counts={"a": 2}, cached=decode()), "2 tokens scheduled"),
        (lambda: step(counts={"a": 1}, cached=decode(blocks=(3, 4), resumed=True)), "block 0 does not hold the KV"),
        (lambda: step(counts={"a": 1}, cached=decode(), preempted={"a"}), "has 0 blocks"),
        (lambda: step(new("x", blocks=(1, 5)), counts={"x": 0}), "0 tokens scheduled"),
    ],
)
def test_wrong_steps_are_caught(wrong, words: str) -> None:
    executor = started()
    executor.execute_model(step(new()))
    with pytest.raises(FakeStepError, match=words):
        executor.execute_model(wrong())


def test_a_block_that_somebody_else_wrote_is_caught() -> None:
    executor = started()
    executor.execute_model(step(new()))
    other = NewRequestData("b", [9] * 5, SamplingParams(), [1, 3], 0)
    executor.execute_model(step(other))
    with pytest.raises(FakeStepError, match="a: block 0 does not hold"):
        executor.execute_model(step(counts={"a": 1}, cached=decode()))


def test_reading_what_the_same_step_writes_is_caught() -> None:
    with pytest.raises(FakeStepError, match="b: block 0 does not hold"):
        started().execute_model(step(new(), new("b", blocks=(1, 3), computed=4)))
