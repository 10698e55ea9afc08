"""The engine dies, or stops, under a plain script: everybody who waits hears of it, and the text so far is there."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from llmkernel.engine.fake_executor import fake_answer
from tests.client.fake_engine import run_directories, wait_gone
from tests.lifecycle.test_kernel_death import wait_for
from tests.lifecycle.test_script_interrupt import EXECUTOR, Script

MODEL = "fake:step_ms=10,max_model_len=4000,num_blocks=3000"

BLOCKING = f"""
import time
from llmkernel import LLM, EngineDeadError, SamplingParams
from llmkernel.errors import GenerationInterrupted
llm = LLM({MODEL!r}, executor_class={EXECUTOR!r})
print("engine", llm.llm_engine.facts.pid, flush=True)
try:
    llm.generate([str(number) for number in range(8)], SamplingParams(max_tokens=3000))
except (EngineDeadError, GenerationInterrupted) as error:
    print("ended", time.monotonic(), type(error).__name__, flush=True)
    print("texts", *(output.outputs[0].text.replace(" ", "_") for output in error.partial), flush=True)
"""

ASYNC = f"""
import asyncio, time
from llmkernel import AsyncLLM, EngineArgs, SamplingParams
from llmkernel.errors import EngineDeadError

async def read(llm, number):
    async for output in llm.generate(str(number), SamplingParams(max_tokens=3000)):
        pass

async def main():
    llm = AsyncLLM(EngineArgs(model={MODEL!r}), executor_class={EXECUTOR!r})
    facts = await llm.ready()
    llm.add_health_callback(lambda health: print("health", health.state, time.monotonic(), flush=True))
    reading = [asyncio.create_task(read(llm, number)) for number in range(8)]
    while (await llm.get_stats())["num_running_reqs"] < 8:
        await asyncio.sleep(0.01)
    reading.append(asyncio.create_task(llm.call_utility("pause_scheduler", "wait")))
    await llm.call_utility("is_sleeping")  # behind the pause, which waits for the streams
    print("engine", facts.pid, flush=True)
    ended = await asyncio.gather(*reading, return_exceptions=True)
    print("ended", time.monotonic(), *{{type(error).__name__ for error in ended}}, flush=True)
    ended.pop()
    print("texts", *(error.partial.text.replace(" ", "_") for error in ended), flush=True)
    facts = await llm.restart()
    async for output in llm.generate("after", SamplingParams(max_tokens=5)):
        pass
    print("after", facts.pid, output.text.replace(" ", "_"), flush=True)

asyncio.run(main())
"""


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode().replace(" ", "_")


def assert_partial(texts: list[str]) -> None:
    assert len(texts) == 8
    for number, text in enumerate(texts):
        assert text and answer(str(number), 3000).startswith(text)


@pytest.mark.parametrize("code", [BLOCKING, ASYNC], ids=["LLM", "AsyncLLM"])
def test_sigkill(base: Path, tmp_path: Path, code: str) -> None:
    with Script(tmp_path, code) as script:
        engine = int(script.wait_for("engine"))
        wait_for(base, lambda status: status.running == 8 and status.step_counter > 10)
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        ended, kind = script.wait_for("ended").split()
        assert float(ended) - killed < 1 and kind == "EngineDeadError"
        assert_partial(script.wait_for("texts").split())
        if code == ASYNC:
            after, text = script.wait_for("after").split()
            assert int(after) != engine and text == answer("after", 5)
        _, err = script.popen.communicate(timeout=20)
        assert script.popen.returncode == 0 and err.count("\n") == (code == BLOCKING), err  # what memory it takes
    wait_gone(engine, 2)
    assert run_directories(base) == []


def test_sigstop_is_told_and_the_blocking_call_can_be_interrupted(base: Path, tmp_path: Path) -> None:
    with Script(tmp_path, BLOCKING) as script:
        engine = int(script.wait_for("engine"))
        wait_for(base, lambda status: status.running == 8 and status.step_counter > 10)
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        assert script.popen.stderr is not None
        assert "takes" in script.popen.stderr.readline()
        assert "the engine is stuck: no answer for" in script.popen.stderr.readline()
        assert time.monotonic() - stopped < 6
        script.popen.send_signal(signal.SIGINT)
        assert script.wait_for("ended").split()[1] == "GenerationInterrupted"
        assert_partial(script.wait_for("texts").split())
        assert script.popen.wait(20) == 0  # the end of the script ends an engine that does not answer
    wait_gone(engine, 2)
    assert run_directories(base) == []


@pytest.mark.slow
def test_sigstop_is_told_to_a_loop_and_a_restart_ends_it(base: Path, tmp_path: Path) -> None:
    with Script(tmp_path, ASYNC) as script:
        engine = int(script.wait_for("engine"))
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        state, told = script.wait_for("health").split()
        assert state == "stuck" and float(told) - stopped < 6
        os.kill(engine, signal.SIGKILL)
        assert script.wait_for("ended").split()[1] == "EngineDeadError"
        assert_partial(script.wait_for("texts").split())
        after, text = script.wait_for("after").split()
        assert int(after) != engine and text == answer("after", 5)
        script.popen.communicate(timeout=20)
        assert script.popen.returncode == 0
    assert not psutil.pid_exists(engine)
    assert run_directories(base) == []
