"""The engine is started again in the same AsyncLLM; nothing of the earlier one reaches the later one."""

import asyncio
import gc
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.outputs import RequestOutput
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import answer, collect, fake_llm

FOUR = SamplingParams(max_tokens=4)
LONG = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)


def engine_pid(llm: AsyncLLM) -> int:
    assert llm.facts is not None
    return llm.facts.pid


async def until_eight_run(llm: AsyncLLM) -> None:
    while (await llm.get_stats())["num_running_reqs"] < 8:  # noqa: ASYNC110 - another process is waited for
        await asyncio.sleep(0.01)


async def read_to_the_error(llm: AsyncLLM, prompt: str) -> tuple[str, EngineDeadError]:
    said = ""
    with pytest.raises(EngineDeadError) as caught:
        async for output in llm.generate(prompt, LONG):
            said += output.text
    return said, caught.value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, None], ids=["killed", "stuck", "well"])
async def test_eight_streams_and_a_call_end_and_the_same_object_goes_on(number: signal.Signals | None) -> None:
    async with fake_llm("step_ms=5,max_model_len=4000,num_blocks=3000") as llm:
        streams = [asyncio.create_task(read_to_the_error(llm, f"{n}")) for n in range(8)]
        await until_eight_run(llm)
        call = asyncio.create_task(llm.call_utility("pause_scheduler", "wait"))
        await llm.call_utility("is_sleeping")
        pid, client = engine_pid(llm), llm.engine_core
        started = time.monotonic()
        if number is not None:
            os.kill(pid, number)
        if number is signal.SIGKILL:
            ended = await asyncio.gather(*streams, call, return_exceptions=True)
        else:
            restarting = asyncio.create_task(llm.restart(timeout=1.0))
            ended = await asyncio.gather(*streams, call, return_exceptions=True)
        assert time.monotonic() - started < 1
        assert isinstance(ended.pop(), EngineDeadError)
        for n, (said, error) in enumerate(ended):  # type: ignore[misc]
            assert isinstance(error.partial, RequestOutput)
            assert error.partial.text.startswith(said) and answer(f"{n}", 3000).startswith(error.partial.text)
            assert (error.exitcode == -signal.SIGKILL) == (number is signal.SIGKILL)
            assert ("restarted before this was finished" in str(error)) == (number is not signal.SIGKILL)
        facts = await (llm.restart() if number is signal.SIGKILL else restarting)
        assert (llm.generation, llm.errored, facts.pid) == (1, False, engine_pid(llm))
        assert facts.pid != pid and not psutil.pid_exists(pid) and llm.engine_core is not client
        assert (await collect(llm.generate("a", FOUR)))[-1].text == answer("a", 4)
        assert (await llm.get_stats())["num_free_blocks"] == facts.num_gpu_blocks - 1


async def test_two_restarts_at_once_are_one_each_and_a_shutdown_meanwhile_wins() -> None:
    async with fake_llm() as llm:
        first, second = await asyncio.gather(llm.restart(), llm.restart())
        assert first.pid == second.pid == engine_pid(llm) and llm.generation == 1
        restarting = asyncio.create_task(llm.restart())
        await asyncio.sleep(0)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await restarting
        assert llm.generation == 1 and llm.errored
        await llm.restart()  # for good is until somebody wants it again
        assert (await collect(llm.generate("a", FOUR)))[-1].text == answer("a", 4)


async def test_a_guest_of_an_engine_cannot_restart_it() -> None:
    async with fake_llm() as llm:
        async with AsyncLLM.attach(llm) as guest:
            with pytest.raises(InvalidRequestError, match="restart it where it was loaded"):
                await guest.restart()
        assert (await collect(llm.generate("a", FOUR)))[-1].finished


async def test_callbacks_are_called_after_a_restart_too() -> None:
    async with fake_llm("step_ms=3500") as llm:
        stages: list[str] = []
        states: list[str] = []
        llm.add_progress_callback(lambda progress: stages.append(progress.stage))
        llm.add_health_callback(lambda health: states.append(health.state))
        await llm.restart()
        assert stages[-1] == "ready" and "weights" in stages
        await collect(llm.generate("a", SamplingParams(max_tokens=1)))
        assert states == ["slow", "ok"]


@pytest.mark.parametrize("cycles", [10, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
async def test_kills_and_restarts_in_a_row_leave_nothing(cycles: int) -> None:
    """Threads, tasks, descriptors, processes: as many as after the first cycle; memory: a slope near zero."""
    process = psutil.Process()

    def count() -> tuple[int, int, int, int]:
        gc.collect()
        return (
            process.num_threads(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(process.children()),
            len(asyncio.all_tasks()),
        )

    async with fake_llm("step_ms=5") as llm:
        first: tuple[int, int, int, int] | None = None
        memory: list[int] = []
        for cycle in range(cycles + 1):
            streams = [asyncio.create_task(read_to_the_error(llm, f"{n}")) for n in range(8)]
            await until_eight_run(llm)
            os.kill(engine_pid(llm), signal.SIGKILL)
            started = time.monotonic()
            for said, error in await asyncio.gather(*streams):
                assert "SIGKILL" in str(error) and said is not None
            assert time.monotonic() - started < 1
            await llm.restart()
            assert (await collect(llm.generate("a", FOUR)))[-1].text == answer("a", 4)
            if first is None:
                first = count()
            if cycle >= cycles // 2:
                memory.append(process.memory_info().rss)
        async with asyncio.timeout(5):
            while count() != first:  # noqa: ASYNC110 - threads of the last cycle still end
                await asyncio.sleep(0.05)
        assert llm.generation == cycles + 1
        growth = (memory[-1] - memory[0]) / (len(memory) - 1)
        print(f"{growth / 1024:.1f} KiB per cycle", file=sys.stderr)
        assert growth < 256 * 1024
