"""Stuck and slow are told apart, and the streams of a stuck engine can be stopped (design D4)."""

import asyncio
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, GenerationInterrupted
from llmkernel.llm import engine_watch
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.engine_watch import EngineHealth
from llmkernel.llm.llm import LLM
from llmkernel.llm.llm_engine import LLMEngine
from llmkernel.protocol.control import Pong
from llmkernel.protocol.handshake import Progress
from llmkernel.protocol.sampling_params import SamplingParams
from tests.llm.engines import FAKE, answer, collect, fake_llm

LONG = SamplingParams(max_tokens=None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions in a fifth of the time."""
    for name in ("QUIET", "INTERVAL", "SLOW_STEP", "STUCK_AFTER", "_LEAST_WAIT"):
        monkeypatch.setattr(engine_watch, name, getattr(engine_watch, name) / 5)


def engine_pid(llm: AsyncLLM) -> int:
    assert llm.facts is not None
    return llm.facts.pid


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def health_of(llm: AsyncLLM) -> "asyncio.Queue[EngineHealth]":
    found: asyncio.Queue[EngineHealth] = asyncio.Queue()
    llm.add_health_callback(found.put_nowait)
    return found


async def test_a_stopped_engine_is_stuck_in_time_its_streams_can_be_ended_and_it_may_come_back() -> None:
    async with fake_llm("step_ms=5,max_model_len=4000,num_blocks=3000") as llm:
        changes = health_of(llm)
        streams = [llm.generate(f"{number}", LONG, request_id=f"r{number}") for number in range(8)]
        firsts = [await anext(stream) for stream in streams]
        call = asyncio.create_task(llm.call_utility("pause_scheduler", "wait"))
        await llm.call_utility("is_sleeping")
        with stopped(engine_pid(llm)):
            started = time.monotonic()
            health = await asyncio.wait_for(changes.get(), 10)
            assert time.monotonic() - started < 6
            assert health.state == "stuck" == llm.health.state
            assert "no answer for 5 s" in str(health)
            assert not llm.errored and not call.done()
            await llm.abort("r0")  # ends at once, whatever the engine does
            ended = (await asyncio.wait_for(collect(streams[0]), 0.1))[-1]
            assert ended.outputs[0].finish_reason == "abort"
            assert ended.text.startswith(firsts[0].text)
        async with asyncio.timeout(10):  # it may be slow at first: the step in which it was stopped has taken long
            while (await changes.get()).state != "ok":
                pass
        assert llm.health.state == "ok"
        later = await anext(streams[1])  # and goes on where it was
        assert answer("1", 3000).startswith(later.text)
        for stream in streams[1:]:
            await stream.aclose()
        assert await call is None


async def test_a_long_step_is_slow_and_not_stuck(quick: None) -> None:
    async with fake_llm("step_ms=1600") as llm:
        changes = health_of(llm)
        reading = asyncio.create_task(collect(llm.generate("a", SamplingParams(max_tokens=1))))
        first = await asyncio.wait_for(changes.get(), 5)
        assert first.state == "slow" and 0.2 <= first.seconds < 1.6
        assert str(first) == f"step running for {first.seconds:.0f} s"
        assert llm.health.state == "slow"
        assert (await reading)[-1].finished
        assert llm.health == EngineHealth("ok")
        assert [changes.get_nowait().state for _ in range(changes.qsize())] == ["ok"]


async def test_nobody_asks_while_nobody_waits(quick: None) -> None:
    async with fake_llm() as llm:
        await collect(llm.generate("a", SamplingParams(max_tokens=3)))
        watching = [task for task in asyncio.all_tasks() if task.get_name() == "llmkernel-engine-watch"]
        assert len(watching) == 1
        await asyncio.wait(watching, timeout=5)  # it looks once more, and ends
        assert watching[0].done()
        with stopped(engine_pid(llm)):
            assert llm.health.state == "ok"
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "llmkernel-engine-watch"]


async def test_a_loop_that_stood_still_does_not_call_the_engine_stuck(quick: None) -> None:
    async with fake_llm("step_ms=400") as llm:
        changes, watch, asked = health_of(llm), llm._own.watch, asyncio.Event()
        ping = watch._ping

        async def pinging(timeout: float) -> Pong:  # noqa: ASYNC109 - as the watch calls it
            asked.set()
            return await ping(timeout)

        watch._ping = pinging
        stream = llm.generate("a", LONG)
        reading = asyncio.ensure_future(anext(stream))
        await asked.wait()
        os.kill(engine_pid(llm), signal.SIGSTOP)
        time.sleep(1.5)  # noqa: ASYNC251 - a cell that blocks the loop, longer than any answer may take
        os.kill(engine_pid(llm), signal.SIGCONT)
        await reading
        await stream.aclose()
        assert "stuck" not in [changes.get_nowait().state for _ in range(changes.qsize())]


async def test_a_stuck_engine_that_is_killed_is_dead() -> None:
    async with fake_llm("step_ms=5") as llm:
        stream = llm.generate("a", LONG)
        await anext(stream)
        with stopped(engine_pid(llm)):
            os.kill(engine_pid(llm), signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await collect(stream)
        assert llm.health.state == "ok"  # there is nothing to be asked


@pytest.mark.parametrize("waiting_for", ["answers", pytest.param("utility", marks=pytest.mark.slow)])
def test_a_blocking_call_says_that_the_engine_is_stuck_and_can_be_interrupted(
    waiting_for: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM("fake:step_ms=5,max_model_len=4000,num_blocks=3000", executor_class=FAKE) as llm:
        changes: queue.Queue[EngineHealth] = queue.Queue()
        llm.llm_engine.add_health_callback(changes.put)
        assert llm.generate("before", SamplingParams(max_tokens=3))[0].text == answer("before", 3)
        engine = llm.llm_engine.facts.pid
        os.kill(engine, signal.SIGSTOP)
        started = time.monotonic()
        told: list[tuple[EngineHealth, float]] = []

        def interrupt_when_stuck() -> None:
            told.append((changes.get(timeout=10), time.monotonic() - started))
            if waiting_for == "answers":
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            else:
                os.kill(engine, signal.SIGCONT)

        user = threading.Thread(target=interrupt_when_stuck)
        user.start()
        if waiting_for == "answers":
            with pytest.raises(GenerationInterrupted):
                llm.generate([f"{number}" for number in range(8)], LONG)
            os.kill(engine, signal.SIGCONT)
        else:
            assert llm.llm_engine.call_utility("is_sleeping") is False
        user.join()
        ((health, seconds),) = told
        assert health.state == "stuck" and seconds < 6
        assert llm.generate("after", SamplingParams(max_tokens=3))[0].text == answer("after", 3)
    assert "llmkernel: the engine is stuck: no answer for 5 s; Ctrl-C ends this call" in capfd.readouterr().err


def test_a_blocking_call_asks_only_in_silence(quick: None) -> None:
    with LLM("fake:step_ms=1600", executor_class=FAKE, quiet=True) as llm:
        changes: queue.Queue[EngineHealth] = queue.Queue()
        llm.llm_engine.add_health_callback(changes.put)
        assert llm.generate("a", SamplingParams(max_tokens=1))[0].finished
        assert [changes.get(timeout=5).state for _ in range(2)] == ["slow", "ok"] and changes.empty()
        for thread in threading.enumerate():
            if thread.name == "llmkernel-engine-watch":
                thread.join(5)  # it goes when nobody waits
                assert not thread.is_alive()


class StoppedLoad:
    """Stops the engine when its weights come, and lets it go on once that is told; `states`: what was told."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self._engine: psutil.Process | None = None

    def on_progress(self, progress: Progress) -> None:
        if progress.stage == "weights" and self._engine is None:
            (self._engine,) = psutil.Process().children()
            self._engine.suspend()

    def on_health(self, health: EngineHealth) -> None:
        self.states.append(health.state)
        if health.state == "stuck":
            assert self._engine is not None
            self._engine.resume()


def test_a_blocking_load_that_gets_stuck_is_told(quick: None) -> None:
    load, args = StoppedLoad(), EngineArgs(model="fake:load_ms=500")
    with LLMEngine(args, executor_class=FAKE, on_progress=load.on_progress, on_health=load.on_health) as engine:
        assert engine.facts.pid
    assert load.states[:2] == ["stuck", "ok"]


async def test_a_load_that_gets_stuck_is_told_to_its_loop(quick: None) -> None:
    load = StoppedLoad()
    llm = AsyncLLM(EngineArgs(model="fake:load_ms=500"), executor_class=FAKE)
    try:
        llm.add_progress_callback(load.on_progress)
        llm.add_health_callback(load.on_health)
        await llm.ready()
        assert llm.health.state == "ok"
        await collect(llm.generate("a", SamplingParams(max_tokens=3)))
    finally:
        llm.shutdown()
    assert load.states[:2] == ["stuck", "ok"]
