"""AsyncLLM on a real engine process with the fake executor."""

import asyncio
import gc
import inspect
import os
import signal
import weakref
from typing import Any

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError, InvalidRequestError, UnsupportedFeatureError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.outputs import RequestOutput
from llmkernel.protocol.handshake import STAGES
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import LoRARequest
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import FAKE, answer, collect, fake_llm, free_blocks

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


@pytest.mark.row("A-064", "A-118")
def test_signatures_are_the_seeds() -> None:
    add = inspect.signature(AsyncLLM.add_request).parameters
    assert list(add)[1:] == [
        "request_id",
        "prompt",
        "params",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
    ]
    assert [parameter.default for parameter in add.values()][4:] == [None, None, None, None, 0, None]
    generate = list(inspect.signature(AsyncLLM.generate).parameters)
    assert generate[1:4] == ["prompt", "sampling_params", "request_id"]
    assert generate[4:8] == ["lora_request", "trace_headers", "priority", "data_parallel_rank"]


@pytest.mark.row("A-002", "A-097", "A-103", "A-113", "A-118", "A-119", "A-147")
async def test_a_stream_grows_from_the_first_token_to_the_finished_answer() -> None:
    async with fake_llm("step_ms=5") as llm:
        outputs = await collect(llm.generate("Hello", SamplingParams(max_tokens=12), request_id="mine"))
        texts = [output.text for output in outputs]
        expected = answer("Hello", 12)
        assert texts[-1] == expected
        assert len(texts) > 3, "it streams"
        assert all(expected.startswith(text) for text in texts)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        last = outputs[-1]
        assert (last.request_id, last.prompt, last.prompt_token_ids) == ("mine", "Hello", list(b"Hello"))
        assert last.outputs[0].finish_reason == "length"
        assert last.metrics is not None and last.metrics.num_generation_tokens == 12
        assert last.metrics.first_token_latency > 0
        free, total = await free_blocks(llm)
        assert free == total


async def test_it_is_made_in_a_moment_and_tells_the_stages_of_the_load() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    llm = AsyncLLM(EngineArgs(model="fake:load_ms=100"), executor_class=FAKE)
    assert loop.time() - started < 0.1
    assert llm.facts is None
    stages: list[str] = []
    llm.add_progress_callback(lambda progress: stages.append(progress.stage))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while llm.facts is None:
            ticks += 1
            await asyncio.sleep(0.01)

    facts, _ = await asyncio.gather(llm.ready(), tick())
    assert ticks > 3, "the loop turns while the model loads"
    assert llm.facts is facts and facts.max_model_len == 2048
    assert stages[0] == "spawned" and stages[-1] == "ready"
    assert [STAGES.index(stage) for stage in stages] == sorted(STAGES.index(stage) for stage in stages)
    llm.shutdown()


async def test_requests_wait_for_the_load_and_cancelling_one_does_not_end_it() -> None:
    llm = AsyncLLM(EngineArgs(model="fake:load_ms=300"), executor_class=FAKE)
    params = SamplingParams(max_tokens=4)
    waiting = [asyncio.create_task(collect(llm.generate(f"{number}", params))) for number in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert llm.facts is None, "the load goes on"
    for number in (1, 2):
        assert (await waiting[number])[-1].text == answer(f"{number}", 4)
    llm.shutdown()


async def test_a_request_can_be_aborted_while_the_model_loads() -> None:
    llm = AsyncLLM(EngineArgs(model="fake:load_ms=60000"), executor_class=FAKE)
    waiting = asyncio.create_task(collect(llm.generate("a", SamplingParams(), request_id="r")))
    soon = asyncio.create_task(collect(llm.generate("b", SamplingParams(), request_id="s")))
    await asyncio.sleep(0)
    await llm.abort("r")
    llm.abort_soon(["s"])
    for task, request_id in ((waiting, "r"), (soon, "s")):
        (output,) = await asyncio.wait_for(task, 5)
        assert (output.request_id, output.finished, output.outputs[0].finish_reason) == (request_id, True, "abort")
    llm.shutdown()


async def test_a_failed_load_says_why_to_everybody_who_waits() -> None:
    llm = AsyncLLM(EngineArgs(model="fake:fail_load=1"), executor_class=FAKE)
    waiting = asyncio.create_task(collect(llm.generate("a", SamplingParams())))
    with pytest.raises(EngineStartupError, match="fail its load"):
        await llm.ready()
    with pytest.raises(EngineStartupError, match="fail its load"):
        await waiting
    with pytest.raises((EngineStartupError, EngineDeadError)):
        await collect(llm.generate("a", SamplingParams()))
    llm.shutdown()


@pytest.mark.row("A-073")
async def test_a_request_is_registered_before_it_is_sent() -> None:
    async with fake_llm() as llm:
        order: list[str] = []
        register, send = llm.output_processor.add_request, llm.engine_core.add_request_async

        def registering(*args: Any) -> Any:
            order.append(f"register {args[0].request_id[:2]}")
            return register(*args)

        async def sending(request: Any) -> None:
            assert request.request_id in llm.output_processor.request_states
            order.append(f"send {request.request_id[:2]}")
            await send(request)

        llm.output_processor.add_request = registering  # type: ignore[method-assign]
        llm.engine_core.add_request_async = sending  # type: ignore[method-assign]
        await collect(llm.generate("a", SamplingParams(max_tokens=2), request_id="r"))
        assert order == ["register r-", "send r-"]
        order.clear()
        await collect(llm.generate("a", SamplingParams(max_tokens=2, n=2), request_id="r"))
        assert order == ["register 0_", "register 1_", "send 0_", "send 1_"]


@pytest.mark.row("A-064", "A-114", "A-115")
@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_add_request_hands_out_the_collector(kind: RequestOutputKind) -> None:
    async with fake_llm() as llm:
        collector = await llm.add_request("r", "abc", SamplingParams(max_tokens=6, output_kind=kind, seed=5))
        assert collector.request_id.startswith("r-")
        assert collector.sampling_params is not None and collector.sampling_params.seed == 5
        text, finished = "", False
        while not finished:
            output = await collector.get()
            text = text + output.text if kind == DELTA else output.text
            finished = output.finished
        assert text == answer("abc", 6)


async def _leave_by_break(llm: AsyncLLM) -> None:
    async for _ in llm.generate("a", SamplingParams(max_tokens=None)):
        break


async def _leave_by_aclose(llm: AsyncLLM) -> None:
    stream = llm.generate("a", SamplingParams(max_tokens=None, n=3))
    await anext(stream)
    await stream.aclose()


async def _leave_by_cancel(llm: AsyncLLM) -> None:
    task = asyncio.create_task(collect(llm.generate("a", SamplingParams(max_tokens=None))))
    await _until(lambda: llm.num_unfinished_requests == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _leave_by_exception(llm: AsyncLLM) -> None:
    stream = llm.generate("a", SamplingParams(max_tokens=None))
    await anext(stream)
    with pytest.raises(KeyError):
        await stream.athrow(KeyError("the consumer's"))


async def _leave_by_abort(llm: AsyncLLM) -> None:
    stream = llm.generate("a", SamplingParams(max_tokens=None, n=2, output_kind=FINAL_ONLY), request_id="r")
    reading = asyncio.create_task(collect(stream))
    await _until(lambda: llm.num_unfinished_requests == 2)
    await llm.abort("r")
    (output,) = await reading
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "abort"]


async def _leave_by_forgetting(llm: AsyncLLM) -> None:
    stream = llm.generate("a", SamplingParams(max_tokens=None))
    await anext(stream)
    del stream
    gc.collect()
    await _until(lambda: llm.num_unfinished_requests == 0)


@pytest.mark.parametrize(
    "leave",
    [
        _leave_by_break,
        _leave_by_aclose,
        _leave_by_cancel,
        _leave_by_exception,
        _leave_by_abort,
        _leave_by_forgetting,
    ],
)
async def test_leaving_early_gives_the_blocks_back(leave: Any) -> None:
    async with fake_llm("step_ms=2") as llm:
        await leave(llm)
        gc.collect()
        await _until(lambda: llm.num_unfinished_requests == 0)
        free, total = await free_blocks(llm)
        assert free == total
        assert (await collect(llm.generate("b", SamplingParams(max_tokens=3))))[-1].text == answer("b", 3)


async def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    async with fake_llm("step_ms=1") as llm:
        stop = answer("Hello", 9)[4:7]
        outputs = await collect(llm.generate("Hello", SamplingParams(max_tokens=None, stop=[stop])))
        last = outputs[-1].outputs[0]
        assert (last.text, last.finish_reason, last.stop_reason) == (answer("Hello", 4), "stop", stop)
        assert bytes(last.token_ids).decode() == answer("Hello", 7)
        free, total = await free_blocks(llm)
        assert free == total


async def test_the_end_token_is_not_in_the_text() -> None:
    async with fake_llm("echo=1") as llm:
        (output,) = await collect(llm.generate("Hello", SamplingParams(max_tokens=None, output_kind=FINAL_ONLY)))
        completion = output.outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Hello", "stop", None)
        assert completion.token_ids == [*b"Hello", 258]


async def test_chat_renders_with_the_models_template() -> None:
    async with fake_llm() as llm:
        messages = [{"role": "user", "content": "Hi"}]
        text, ids = await llm.render_chat(messages)
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        outputs = await collect(llm.chat(messages, SamplingParams(max_tokens=5)))
        assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == (text, ids)
        assert outputs[-1].text == answer(ids, 5)
        with pytest.raises(InvalidRequestError, match="non-empty list"):
            await collect(llm.chat([]))
        other = await collect(
            llm.chat(messages, SamplingParams(max_tokens=2), chat_template="{{ messages[0].content }}")
        )
        assert other[-1].prompt == "Hi"


async def test_a_long_text_is_tokenised_beside_the_loop() -> None:
    async with fake_llm("max_model_len=40000,num_blocks=4000") as llm:
        text = "long " * 3000
        outputs = await collect(llm.generate(text, SamplingParams(max_tokens=3)))
        assert outputs[-1].text == answer(text, 3)


BAD_REQUESTS: list[tuple[Any, Any, dict[str, Any], str]] = [
    ("", SamplingParams(), {}, "empty"),
    ("a" * 3000, SamplingParams(), {}, "3000 tokens"),
    ([5000], SamplingParams(), {}, "holds 5000"),
    ("a", PoolingParams(), {}, "Pooling"),
    ("a", {"max_tokens": 3}, {}, "must be SamplingParams, not dict"),
    ("a", SamplingParams(), {"data_parallel_rank": 2}, "data_parallel_rank"),
    ("a", SamplingParams(), {"lora_request": LoRARequest("name", 1)}, "lora_request"),
    (None, SamplingParams(), {}, "NoneType"),
]


@pytest.mark.row("A-065", "A-067", "A-071", "A-110")
async def test_bad_requests_are_refused_and_hurt_nobody() -> None:
    async with fake_llm("step_ms=2") as llm:
        neighbour = asyncio.create_task(collect(llm.generate("b", SamplingParams(max_tokens=100))))
        for prompt, params, options, words in BAD_REQUESTS:
            with pytest.raises(InvalidRequestError, match=words) as caught:
                await collect(llm.generate(prompt, params, **options))
            assert "\n" not in str(caught.value)
        assert (await neighbour)[-1].text == answer("b", 100)
        assert not llm.errored and llm.num_unfinished_requests == 0


async def test_a_request_that_fails_in_the_engine_ends_with_its_reason_alone() -> None:
    async with fake_llm("fail_token=88,step_ms=1") as llm:
        good, bad = await asyncio.gather(
            collect(llm.generate("good", SamplingParams(max_tokens=20))),
            collect(llm.generate("X", SamplingParams(max_tokens=20))),
        )
        assert good[-1].text == answer("good", 20)
        assert bad[-1].finished
        assert bad[-1].outputs[0].finish_reason == "error"
        assert "fail_token" in str(bad[-1].outputs[0].stop_reason)


@pytest.mark.row("A-072", "A-097")
async def test_when_the_engine_is_killed_every_stream_raises_and_keeps_its_text() -> None:
    async with fake_llm("step_ms=5") as llm:
        seen: dict[int, str] = dict.fromkeys(range(8), "")

        async def read(number: int) -> None:
            params = SamplingParams(max_tokens=None, output_kind=DELTA)
            async for output in llm.generate(f"{number}", params):
                seen[number] += output.text

        tasks = [asyncio.create_task(read(number)) for number in seen]
        await _until(lambda: all(seen.values()))
        os.kill(llm.engine_core.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        for number, error in enumerate(results):
            assert isinstance(error, EngineDeadError)
            assert error.exitcode == -signal.SIGKILL
            assert isinstance(error.partial, RequestOutput)
            assert error.partial.text.startswith(seen[number]) and seen[number]
        assert len({id(error) for error in results}) == 8
        assert llm.errored
        with pytest.raises(EngineDeadError):
            await llm.add_request("r", "a", SamplingParams())
        with pytest.raises(EngineDeadError):
            await llm.check_health()


async def test_shutdown_ends_the_streams_and_is_idempotent() -> None:
    llm = AsyncLLM(EngineArgs(model="fake:step_ms=5"), executor_class=FAKE)
    stream = llm.generate("a", SamplingParams(max_tokens=None, output_kind=DELTA))
    first = await anext(stream)
    given_back = await asyncio.to_thread(llm.shutdown)
    assert given_back > 0
    with pytest.raises(EngineDeadError, match="shut down") as caught:
        while True:
            await anext(stream)
    assert isinstance(caught.value.partial, RequestOutput)
    assert caught.value.partial.text.startswith(first.text)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await llm.add_request("r", "a", SamplingParams())


@pytest.mark.row("A-097")
async def test_a_forgotten_llm_is_collected_and_its_engine_ends() -> None:
    llm = AsyncLLM(EngineArgs(model="fake:step_ms=5"), executor_class=FAKE)
    await collect(llm.generate("a", SamplingParams(max_tokens=3)))
    reader = await llm.add_request("r", "a", SamplingParams(max_tokens=None))
    process = llm.engine_core.process  # type: ignore[attr-defined]
    handler = llm.output_handler
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert handler is not None
    with pytest.raises(asyncio.CancelledError):
        await handler
    with pytest.raises(EngineDeadError, match="gone"):
        while True:
            await reader.get()
    del handler
    await _until(lambda: gc.collect() is not None and process.exitcode is not None)


@pytest.mark.row("A-098")
async def test_a_large_message_is_processed_in_slices_that_let_the_loop_turn() -> None:
    async with fake_llm("step_ms=20,num_blocks=2000", max_num_seqs=300, max_num_batched_tokens=4096) as llm:
        sizes: list[int] = []
        process = llm.output_processor.process_outputs

        def processing(outputs: Any, *args: Any) -> Any:
            sizes.append(len(outputs))
            return process(outputs, *args)

        llm.output_processor.process_outputs = processing  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=4, output_kind=FINAL_ONLY)
        results = await asyncio.gather(*(collect(llm.generate(f"{number}", params)) for number in range(290)))
        assert [result[-1].text for result in results] == [answer(f"{number}", 4) for number in range(290)]
        assert max(sizes) == 128


@pytest.mark.row("A-101", "A-120")
async def test_scheduler_stats_and_utility_calls_are_at_hand() -> None:
    async with fake_llm() as llm:
        await collect(llm.generate("abc", SamplingParams(max_tokens=4)))
        stats = llm.get_scheduler_stats()
        assert stats is not None and stats.num_blocks == 255
        assert await llm.call_utility("get_supported_tasks") == ["generate"]
        assert await llm.collective_rpc("echo", args=(1, "a")) == [[1, "a"]]
        assert await llm.reset_prefix_cache() is True
        await llm.check_health()
        tok = await llm.get_tokenizer()
        assert tok is not None and tok.encode("a") == [97]
        with pytest.raises(UnsupportedFeatureError, match="encode"):
            llm.encode("a", PoolingParams())


async def _until(condition: Any) -> None:
    """Give the loop turns until the condition holds; pytest's time limit ends a wait that does not."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)
