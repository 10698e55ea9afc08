"""One AsyncLLM and several event loops: in a row, at once, ended in the middle (design D1)."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.outputs import RequestOutput
from llmkernel.protocol.control import EngineStatus
from llmkernel.protocol.sampling_params import SamplingParams
from tests.llm.engines import FAKE, answer, collect


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    """Made outside any loop."""
    with AsyncLLM(EngineArgs(model="fake:step_ms=1,num_blocks=600,max_model_len=4000"), executor_class=FAKE) as made:
        yield made


async def last_text(llm: AsyncLLM, prompt: str, count: int = 10) -> str:
    return (await collect(llm.generate(prompt, SamplingParams(max_tokens=count))))[-1].text


def status(llm: AsyncLLM) -> EngineStatus:
    assert llm.running_engine is not None
    with llm.running_engine.control() as control:
        return control.status()


def wait_until_idle(llm: AsyncLLM, clients: int) -> EngineStatus:
    """Ask until nothing runs and as many clients are there; each question waits for its answer."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = status(llm)
        if not any(client.unfinished for client in found.clients) and len(found.clients) == clients:
            return found
    raise AssertionError(f"never idle: {found}")


def test_asyncio_run_many_times_in_a_row(llm: AsyncLLM) -> None:
    for number in range(5):
        assert asyncio.run(last_text(llm, f"run {number}")) == answer(f"run {number}", 10)
        wait_until_idle(llm, 1)  # whoever was attached has left with its loop
    assert llm.num_unfinished_requests == 0
    assert llm.facts is not None and not llm.errored


def test_two_loops_at_once_each_get_their_own(llm: AsyncLLM) -> None:
    def run(name: str) -> list[str]:
        async def many() -> list[str]:
            return await asyncio.gather(*(last_text(llm, f"{name}{i}", 40) for i in range(8)))

        return asyncio.run(many())

    names = ["a", "b", "c", "d"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(run, names))
    for name, texts in zip(names, found, strict=True):
        assert texts == [answer(f"{name}{i}", 40) for i in range(8)]
    wait_until_idle(llm, 1)


async def test_a_cell_that_joins_a_thread_with_a_loop_of_its_own() -> None:
    """The engine has not even heard what to be, and the loop that would tell it stands still."""
    with AsyncLLM(EngineArgs(model="fake:load_ms=20"), executor_class=FAKE) as llm:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(last_text(llm, "joined"))))
        thread.start()
        thread.join(30)  # on the loop: nothing turns here meanwhile
        assert found == [answer("joined", 10)]
        assert await last_text(llm, "mine") == answer("mine", 10)


def test_a_loop_that_ends_takes_its_requests_with_it(llm: AsyncLLM) -> None:
    async def begin_and_leave() -> None:
        await llm.ready()
        for number in range(3):
            collector = await llm.add_request(f"r{number}", "long", SamplingParams(max_tokens=3000))
            await collector.get()

    asyncio.run(begin_and_leave())  # its client owns the engine
    wait_until_idle(llm, 1)
    asyncio.run(begin_and_leave())  # its client is attached
    wait_until_idle(llm, 1)
    assert llm.num_unfinished_requests == 0
    assert asyncio.run(last_text(llm, "next")) == answer("next", 10)


def test_a_loop_that_is_closed_without_a_word_is_noticed(llm: AsyncLLM) -> None:
    """Nobody cancels its tasks; its requests are aborted, and a guest is detached, all the same."""

    def begin_and_close() -> None:
        loop = asyncio.new_event_loop()

        async def begin() -> None:
            for number in range(3):
                collector = await llm.add_request(f"r{number}", "long", SamplingParams(max_tokens=3000))
                await collector.get()

        reading = loop.create_task(last_text(llm, "read", 3000))
        loop.run_until_complete(begin())
        assert {client.client_index: client.unfinished for client in status(llm).clients}.popitem()[1] == 4
        reading._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would complain, and rightly
        loop.close()

    begin_and_close()  # its client owns the engine
    wait_until_idle(llm, 1)
    begin_and_close()  # its client is attached
    wait_until_idle(llm, 1)
    assert llm.num_unfinished_requests == 0
    assert asyncio.run(last_text(llm, "third")) == answer("third", 10)
    wait_until_idle(llm, 1)


def test_a_first_loop_that_ends_while_the_model_loads() -> None:
    with AsyncLLM(EngineArgs(model="fake:load_ms=400"), executor_class=FAKE) as llm:

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(llm.ready(), 0.05)

        stages: list[str] = []
        llm.add_progress_callback(lambda progress: stages.append(progress.stage))
        asyncio.run(give_up())
        assert asyncio.run(last_text(llm, "second")) == answer("second", 10)
        assert stages[-1] == "ready"


def test_a_load_that_failed_is_told_on_every_loop() -> None:
    with AsyncLLM(EngineArgs(model="fake:fail_load=1"), executor_class=FAKE) as llm:
        for _ in range(3):
            with pytest.raises(EngineStartupError, match="fail_load"):
                asyncio.run(llm.ready())


def test_shutdown_ends_the_streams_of_every_loop() -> None:
    llm = AsyncLLM(EngineArgs(model="fake:step_ms=1,max_model_len=4000,num_blocks=600"), executor_class=FAKE)
    begun = threading.Barrier(3)
    ended: list[Exception] = []

    async def read() -> None:
        stream = llm.generate("x", SamplingParams(max_tokens=3900))
        await anext(stream)
        await asyncio.to_thread(begun.wait)
        try:
            async for _ in stream:
                pass
        except EngineDeadError as error:
            ended.append(error)

    threads = [threading.Thread(target=lambda: asyncio.run(read())) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    assert llm.shutdown() > 0
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(ended) == 2
    assert all(isinstance(error.partial, RequestOutput) for error in ended)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError):
        asyncio.run(last_text(llm, "late"))


def test_stop_from_any_thread_while_the_loop_is_blocked(llm: AsyncLLM) -> None:
    """The engine ends the request though the loop stands still; the stream ends as soon as it turns again."""
    blocked, stopped = threading.Event(), threading.Event()

    async def read() -> RequestOutput:
        stream = llm.generate("x", SamplingParams(max_tokens=3900), request_id="mine")
        await anext(stream)
        blocked.set()
        assert stopped.wait(10)  # a cell that blocks the loop
        return (await collect(stream))[-1]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: asyncio.run(read()))
        assert blocked.wait(10)
        assert status(llm).running == 1
        started = time.monotonic()
        llm.stop_requests(["unknown", "mine"])
        while status(llm).running:
            assert time.monotonic() - started < 5
        assert time.monotonic() - started < 0.5
        stopped.set()
        output = reading.result(10)
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert len(output.text) >= 1 and answer("x", 3900).startswith(output.text)
