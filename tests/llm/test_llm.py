"""LLM and LLMEngine: blocking calls on a real engine process, and the engine in this process."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import (
    EngineDeadError,
    EngineStartupError,
    GenerationInterrupted,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from llmkernel.llm.llm import LLM
from llmkernel.llm.llm_engine import LLMEngine
from llmkernel.llm.outputs import RequestOutput
from llmkernel.protocol.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.llm.engines import FAKE, answer

FOUR = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("fake:step_ms=2,fail_token=88", executor_class=FAKE, quiet=True) as made:
        yield made


@pytest.fixture(scope="module", params=[True, False], ids=["process", "inproc"])
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    args = EngineArgs(model="fake:")
    with LLMEngine(args, executor_class=FAKE, multiprocess_mode=request.param) as made:
        yield made


def _unused_blocks(llm: LLM) -> int:
    stats = llm.llm_engine.call_utility("get_stats")
    return int(stats["num_blocks"] - stats["num_free_blocks"])


@pytest.mark.row("A-001", "A-113")
def test_the_engine_is_stepped_until_nothing_is_unfinished(engine: LLMEngine) -> None:
    for number in range(3):
        engine.add_request(f"{number}", f"p{number}", SamplingParams(max_tokens=5 + number))
    assert engine.get_num_unfinished_requests() == 3
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    assert [last[f"{number}"].text for number in range(3)] == [answer(f"p{number}", 5 + number) for number in range(3)]
    assert all(output.finished for output in last.values())
    assert engine.step() == [], "with nothing unfinished it does not wait"


@pytest.mark.row("A-001")
def test_the_engine_aborts_and_goes_on(engine: LLMEngine) -> None:
    engine.add_request("long", "a", SamplingParams(max_tokens=None))
    engine.add_request("short", "b", FOUR)
    engine.step()
    engine.abort_request(["long"])
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "short"
            last = output
    assert last is not None and last.text == answer("b", 4)
    stats = engine.call_utility("get_stats")
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert engine.reset_prefix_cache() is True
    engine.check_health()


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    params = [SamplingParams(max_tokens=20 - number) for number in range(20)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [output.text for output in outputs] == [answer(prompts[at], 20 - at) for at in range(20)]
    assert all(output.finished for output in outputs)


@pytest.mark.row("A-155")
def test_one_prompt_of_any_form_gives_a_list_of_one(llm: LLM) -> None:
    for prompt in ("ab", [97, 98], {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}):
        (output,) = llm.generate(prompt, FOUR)
        assert output.text == answer("ab", 4)
    assert [output.text for output in llm.generate([[97], [98]], FOUR)] == [answer("a", 4), answer("b", 4)]
    assert llm.generate([], FOUR) == []
    assert len(llm.generate("ab")[0].outputs[0].token_ids) == 16, "vLLM's default"


@pytest.mark.row("A-117")
def test_n_answers(llm: LLM) -> None:
    (output,) = llm.generate("ab", SamplingParams(max_tokens=4, n=3, seed=1))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Ho")]
    (one,) = llm.chat(chats[0], FOUR)
    assert one.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert one.text == answer(one.prompt_token_ids or [], 4)
    first, second = llm.chat(chats, FOUR)
    assert (first.prompt, first.text) == (one.prompt, one.text)
    assert second.prompt is not None and "Ho" in second.prompt


def test_a_request_that_fails_alone_is_an_answer_with_its_reason(llm: LLM) -> None:
    good, bad = llm.generate(["good", "X"], FOUR)
    assert good.text == answer("good", 4)
    assert (bad.outputs[0].finish_reason, "fail_token" in str(bad.outputs[0].stop_reason)) == ("error", True)


def test_a_refused_prompt_takes_the_whole_call_back(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["good", ""], SamplingParams(max_tokens=None))
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(InvalidRequestError, match="2 items for 1 prompts"):
        llm.generate("a", [FOUR, FOUR])
    with pytest.raises(InvalidRequestError, match="prompts must be"):
        llm.generate(3, FOUR)  # type: ignore[arg-type]
    assert _unused_blocks(llm) == 0


def test_what_is_not_built_is_refused_by_name(llm: LLM) -> None:
    for name in ("encode", "embed", "classify", "reward", "score"):
        with pytest.raises(UnsupportedFeatureError, match=name):
            getattr(llm, name)("a", BeamSearchParams(2, 4))
    with pytest.raises(UnsupportedFeatureError, match="use_tqdm"):
        llm.generate("a", use_tqdm=True)
    with pytest.raises(InvalidRequestError, match="did you mean 'dtype'"):
        LLM("fake:", dtyp="float32")


def test_stream_yields_deltas_of_all_prompts_as_they_come(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, output_kind=RequestOutputKind.DELTA)
    texts = {"0": "", "1": ""}
    turns = 0
    for output in llm.stream(["a", "b"], params):
        texts[output.request_id] += output.text
        turns += 1
    assert texts == {"0": answer("a", 10), "1": answer("b", 10)}
    assert turns > 4


def test_a_chat_streams_what_it_answers(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, output_kind=RequestOutputKind.DELTA)
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Ho")]
    texts = {"0": "", "1": ""}
    for output in llm.stream_chat(chats, params):
        texts[output.request_id] += output.text
    assert list(texts.values()) == [one.outputs[0].text for one in llm.chat(chats, SamplingParams(max_tokens=5))]
    (*_, last) = llm.stream_chat(chats[0], SamplingParams(max_tokens=2), chat_template="{{ messages[0].content }}!")
    assert last.prompt == "Hi!"


def test_leaving_a_stream_aborts_it_and_another_call_in_between_disturbs_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)
    text = ""
    for number, output in enumerate(llm.stream("a", params)):
        text += output.text
        if number == 2:
            assert llm.generate("b", FOUR)[0].text == answer("b", 4)
        if number == 5:
            break
    assert answer("a", 500).startswith(text)
    assert not llm.llm_engine.has_unfinished_requests()
    assert _unused_blocks(llm) == 0


def test_several_threads_get_their_own_answers(llm: LLM) -> None:
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        prompts = [f"{number}.{position}" for position in range(5)]
        results[number] = [output.text for output in llm.generate(prompts, SamplingParams(max_tokens=10 + number))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert results[number] == [answer(f"{number}.{position}", 10 + number) for position in range(5)]


@pytest.mark.row("A-144")
def test_an_interrupt_aborts_the_calls_own_requests_and_hands_over_what_there_is(llm: LLM) -> None:
    prompts = ["short", "long"]
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=None, ignore_eos=True)]
    steps = llm.llm_engine.step
    seen = 0

    def step_and_interrupt() -> list[RequestOutput]:
        nonlocal seen
        outputs = steps()
        seen += 1
        if seen == 6:
            signal.raise_signal(signal.SIGINT)
        return outputs

    llm.llm_engine.step = step_and_interrupt  # type: ignore[method-assign]
    try:
        with pytest.raises(GenerationInterrupted, match="1 of 2") as caught:
            llm.generate(prompts, params)
    finally:
        llm.llm_engine.step = steps  # type: ignore[method-assign]
    assert isinstance(caught.value, KeyboardInterrupt)
    short, long = caught.value.partial
    assert isinstance(short, RequestOutput) and isinstance(long, RequestOutput)
    assert (short.text, short.outputs[0].finish_reason) == (answer("short", 2), "length")
    assert long.text and answer("long", 100).startswith(long.text)
    assert long.outputs[0].finish_reason == "abort"
    outputs = llm.generate(["next"], FOUR)
    assert [output.text for output in outputs] == [answer("next", 4)], "nothing old comes back"
    assert _unused_blocks(llm) == 0


async def test_it_works_while_a_loop_is_running(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert llm.generate("a", FOUR)[0].text == answer("a", 4)


def test_it_says_in_a_line_what_memory_it_takes(capfd: pytest.CaptureFixture[str]) -> None:
    with LLM("fake:num_blocks=64", executor_class=FAKE) as made:
        pid = made.llm_engine.facts.pid
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and "8.0 KiB for 1008 tokens of KV cache" in err and str(pid) in err


def test_a_failed_load_raises_its_reason() -> None:
    with pytest.raises(EngineStartupError, match="fail its load"):
        LLM("fake:fail_load=1", executor_class=FAKE, quiet=True)


def test_a_dead_engine_raises_with_the_answers_so_far() -> None:
    with LLM("fake:step_ms=2", executor_class=FAKE, quiet=True) as made:
        stream = made.stream("a", SamplingParams(max_tokens=None))
        next(stream)
        os.kill(made.llm_engine.facts.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError) as caught:
            for _ in stream:
                pass
        assert isinstance(caught.value.partial, RequestOutput) and caught.value.partial.text
        with pytest.raises(EngineDeadError):
            made.generate("a", FOUR)


def test_a_crash_in_the_middle_of_a_call_hands_over_the_finished_answers() -> None:
    with LLM("fake:step_ms=2,crash_token=88", executor_class=FAKE, quiet=True, max_num_seqs=1) as made:
        with pytest.raises(EngineDeadError) as caught:
            made.generate(["first", "X"], FOUR)
        first, _ = caught.value.partial  # type: ignore[misc]
        assert first.text == answer("first", 4)


@pytest.mark.row("A-120")
def test_a_line_of_statistics_is_logged_while_it_works(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    logger = llm.llm_engine._stat_logger
    assert logger is not None
    interval, logger._interval = logger._interval, 0.0
    with caplog.at_level(logging.INFO, "llmkernel.stats"):
        llm.generate("a", FOUR)
    logger._interval = interval
    assert "running 1" in caplog.text
