"""However a stream is left, the engine's running count and its KV blocks return to where they were."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from llmkernel.errors import RequestFailedError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.outputs import RequestOutput
from llmkernel.notebook.session import Session
from llmkernel.protocol.sampling_params import SamplingParams
from tests.llm.engines import answer, collect, fake_llm

BACK_WITHIN = 0.5
FAIL = 33  # "!": a prompt with it fails alone
LONG = SamplingParams(max_tokens=None)

Leave = Callable[[AsyncLLM], Awaitable[Any]]


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    settings = f"step_ms=2,fail_token={FAIL},max_model_len=4000,num_blocks=900"
    async with fake_llm(settings, enable_prefix_caching=False) as made:
        yield made


async def first_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return await anext(stream)


async def by_break(llm: AsyncLLM) -> None:
    async for _ in llm.generate("x", LONG):
        break
    gc.collect()


async def by_aclose(llm: AsyncLLM) -> None:
    stream = llm.generate("x", SamplingParams(max_tokens=None, n=3))
    await anext(stream)
    await stream.aclose()


async def by_del(llm: AsyncLLM) -> None:
    stream = llm.generate("x", LONG)
    await anext(stream)
    del stream
    gc.collect()


async def by_abort(llm: AsyncLLM) -> None:
    stream = llm.generate("x", LONG, request_id="mine")
    await anext(stream)
    await llm.abort("mine")
    assert (await collect(stream))[-1].outputs[0].finish_reason == "abort"


async def by_stop_from_a_thread(llm: AsyncLLM) -> None:
    stream = llm.generate("x", LONG, request_id="mine")
    await anext(stream)
    await asyncio.to_thread(llm.stop_requests, ["mine"])
    assert (await collect(stream))[-1].outputs[0].finish_reason == "abort"


async def by_cancelling_the_task(llm: AsyncLLM) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("x", LONG):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancelling_before_the_first_token(llm: AsyncLLM) -> None:
    tasks = [asyncio.create_task(first_of(llm.generate("x" * 3000, LONG))) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def by_gather_with_one_failure(llm: AsyncLLM) -> None:
    async def read(prompt: str) -> None:
        async for output in llm.generate(prompt, LONG):
            if output.outputs[0].finish_reason == "error":
                raise RequestFailedError(str(output.outputs[0].stop_reason))

    tasks = [asyncio.create_task(read(prompt)) for prompt in ("a", "b", "c!", "d")]
    with pytest.raises(RequestFailedError):
        await asyncio.gather(*tasks)
    for task in tasks:  # gather lets the others run on
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def by_task_group_with_one_failure(llm: AsyncLLM) -> None:
    async def read(prompt: str) -> None:
        async for output in llm.generate(prompt, LONG):
            if output.outputs[0].finish_reason == "error":
                raise RequestFailedError("one")

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for prompt in ("a", "b", "c!", "d"):
                group.create_task(read(prompt))


async def by_timeout(llm: AsyncLLM) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await collect(llm.generate("x", LONG))


async def by_an_exception_in_the_body(llm: AsyncLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        async with contextlib.aclosing(llm.generate("x", LONG)) as stream:
            async for _ in stream:
                raise ZeroDivisionError


WAYS: list[Leave] = [
    by_break,
    by_aclose,
    by_del,
    by_abort,
    by_stop_from_a_thread,
    by_cancelling_the_task,
    by_cancelling_before_the_first_token,
    by_gather_with_one_failure,
    by_task_group_with_one_failure,
    by_timeout,
    by_an_exception_in_the_body,
]


async def wait_for_baseline(llm: AsyncLLM) -> float:
    """Ask until nothing is left of any request, on either side; the seconds that it took."""
    started = time.monotonic()
    while True:
        stats = await llm.get_stats()
        running = stats["num_running_reqs"] + stats["num_waiting_reqs"]
        if not running and stats["num_free_blocks"] == stats["num_blocks"] and not llm.num_unfinished_requests:
            return time.monotonic() - started
        assert time.monotonic() - started < 5, stats


async def test_every_way_to_leave_a_stream(llm: AsyncLLM) -> None:
    for leave in WAYS * 3:
        await leave(llm)
        took = await wait_for_baseline(llm)
        assert took < BACK_WITHIN, leave.__name__
        text = (await collect(llm.generate("next", SamplingParams(max_tokens=5))))[-1].text
        assert text == answer("next", 5), leave.__name__


async def test_all_ways_at_once(llm: AsyncLLM) -> None:
    others = [llm.generate(f"{number}", SamplingParams(max_tokens=150)) for number in range(4)]
    reading = [asyncio.create_task(collect(stream)) for stream in others]
    ways = [leave for leave in WAYS if leave not in (by_abort, by_stop_from_a_thread)] + [by_abort]
    await asyncio.gather(*(leave(llm) for leave in ways))
    for number, outputs in enumerate(await asyncio.gather(*reading)):
        assert outputs[-1].text == answer(f"{number}", 150)
    await wait_for_baseline(llm)


async def test_a_generation_that_is_cancelled_or_stopped() -> None:
    with Session() as session:
        llm = await session.load("fake:step_ms=2,max_model_len=4000,num_blocks=900", enable_prefix_caching=False)
        for end in ("cancel", "stop"):
            generation = session.generate([f"{number}" for number in range(4)], max_tokens=3000, raw=True)
            async for _ in generation:
                break
            if end == "cancel":
                generation.cancel()
            else:
                await asyncio.to_thread(session.stop_requests, [row.request_id for row in generation.rows])
            await generation
            assert generation.state == "cancelled" and generation.text
            assert await wait_for_baseline(llm) < BACK_WITHIN
