"""The engine dies or gets stuck under a notebook: everybody hears of it, the text stays, %llm restart goes on."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from llmkernel.engine.fake_executor import fake_answer
from tests.notebook.kernel import Kernel, running_kernel

MODEL = "%llm load fake:step_ms=5,max_model_len=4000,num_blocks=3000 --name fake"
EIGHT = "%generate -b --raw -n 8 --max-tokens 3000 -o eight hello"
SLOT = "Session.current.models['fake']"
READ = f"""import asyncio, time
while min(map(len, eight.texts)) < 3: await asyncio.sleep(0.01)
call = asyncio.ensure_future({SLOT}.llm.call_utility('pause_scheduler', 'wait'))
await {SLOT}.llm.call_utility('is_sleeping')
"""
WAIT = """started = time.monotonic()
results = await asyncio.gather(eight, call, return_exceptions=True)
seconds = time.monotonic() - started
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    cells = ("%load_ext llmkernel\nfrom llmkernel import Session", MODEL)
    with running_kernel(tmp_path_factory.mktemp("death"), *cells) as kernel:
        yield kernel


def answer(count: int) -> str:
    return bytes(fake_answer(list(b"hello"), count)).decode()


def engine_pid(kernel: Kernel) -> int:
    return int(kernel.value(f"{SLOT}.process.pid"))


def assert_partial(kernel: Kernel) -> None:
    texts = kernel.value("eight.texts")
    assert len(texts) == 8 and all(len(text) >= 3 and answer(3000).startswith(text) for text in texts)


def assert_goes_on(kernel: Kernel, before: int) -> None:
    """As a new engine, in the objects that were there before."""
    after = kernel.run("%generate --raw --max-tokens 5 hello")
    assert after.answers[0]["data"]["text/plain"] == answer(5)
    assert kernel.value(f"({SLOT} is slot, {SLOT}.llm is llm)") == (True, True)
    assert engine_pid(kernel) != before and not psutil.pid_exists(before)


def test_killed_with_eight_streams_and_a_pending_call(kernel: Kernel) -> None:
    kernel.run(f"slot = {SLOT}; llm = slot.llm")
    asked = kernel.start(EIGHT)
    kernel.finish(asked)
    assert kernel.run(READ).status == "ok"
    pid = engine_pid(kernel)
    os.kill(pid, signal.SIGKILL)
    assert kernel.run(WAIT).status == "ok"
    assert kernel.value("seconds") < 1
    assert kernel.value("[type(one).__name__ for one in results]") == ["EngineDeadError"] * 2
    said = kernel.value("str(results[0])")
    assert "killed by SIGKILL" in said and "Load the model again." in said
    assert kernel.value("(results[0].exitcode, eight.state)") == (-9, "failed")
    assert_partial(kernel)
    shown = kernel.run("eight").answers[0]["data"]["text/plain"]
    assert answer(3) in shown and "SIGKILL" in shown
    status = kernel.run("%llm status").stdout
    assert "fake (default): dead (%llm restart fake starts it again): The engine died" in status
    late = kernel.run("%generate --raw hello")
    assert late.ename == "EngineDeadError" and late.traceback.count("Traceback") == 0
    cell = kernel.run("%llm restart")
    assert cell.status == "ok"
    assert cell.displays[0]["data"]["text/plain"].startswith("fake is ready (")
    assert_goes_on(kernel, pid)


def test_stuck_is_restarted_too(kernel: Kernel) -> None:
    kernel.run(f"slot = {SLOT}; llm = slot.llm")
    kernel.run(EIGHT)
    assert kernel.run(READ).status == "ok"
    pid = engine_pid(kernel)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    assert kernel.run("%llm restart fake").status == "ok"
    assert time.monotonic() - started < 6
    kernel.run(WAIT)
    assert kernel.value("[type(one).__name__ for one in results]") == ["EngineDeadError"] * 2
    assert kernel.value("str(results[0])") == "fake was restarted before this was finished; ask again."
    assert kernel.value("eight.state") == "failed"
    assert "restarted" in kernel.run("eight").answers[0]["data"]["text/plain"]
    assert_partial(kernel)
    assert_goes_on(kernel, pid)


@pytest.mark.slow
def test_a_stuck_engine_is_told_and_its_streams_can_be_stopped(kernel: Kernel) -> None:
    kernel.run(f"slot = {SLOT}; llm = slot.llm")
    kernel.run(EIGHT)
    assert kernel.run(READ).status == "ok"
    pid = engine_pid(kernel)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        while "stuck: no answer for" not in kernel.run("%llm status").stdout:
            assert time.monotonic() - stopped < 6
        cell = kernel.run("eight.cancel()\nawait eight")
        assert cell.status == "ok" and cell.seconds < 0.5
        assert kernel.value("(eight.state, call.done())") == ("cancelled", False)
        assert_partial(kernel)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert kernel.run("await call; await llm.call_utility('resume_scheduler')").status == "ok"
    after = kernel.run("%generate --raw --max-tokens 5 hello")
    assert after.answers[0]["data"]["text/plain"] == answer(5)
    assert engine_pid(kernel) == pid and "stuck" not in kernel.run("%llm status").stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_kills_and_restarts_in_a_row_leave_nothing(kernel: Kernel, times: int) -> None:
    """Each with eight streams and a pending call; counted within the kernel after the first one and after the last."""
    counted = (
        "(threading.active_count(), len(os.listdir('/proc/self/fd')), len(asyncio.all_tasks()),"
        " sum(type(one).__name__ == 'AsyncMPClient' for one in gc.get_objects()))"
    )
    kernel.run(f"import gc, os, threading\nslot = {SLOT}; llm = slot.llm")
    first: tuple[int, ...] = ()
    memory = []
    for cycle in range(times + 1):
        kernel.run(EIGHT)
        assert kernel.run(READ).status == "ok"
        os.kill(engine_pid(kernel), signal.SIGKILL)
        assert kernel.run(WAIT).status == "ok"
        assert kernel.value("seconds") < 1
        assert kernel.value("[type(one).__name__ for one in results]") == ["EngineDeadError"] * 2
        assert_partial(kernel)
        assert kernel.run("%llm restart").status == "ok"
        after = kernel.run("%generate --raw --max-tokens 5 hello")
        assert after.answers[0]["data"]["text/plain"] == answer(5)
        kernel.run("gc.collect()")
        first = first or kernel.value(counted)
        if cycle >= times // 2:
            memory.append(psutil.Process(kernel.pid).memory_info().rss)
    deadline = time.monotonic() + 5
    while any(now > then for now, then in zip(kernel.value(counted), first, strict=True)):
        assert time.monotonic() < deadline, (kernel.value(counted), first)
        kernel.run("gc.collect()")
    assert len(psutil.Process(kernel.pid).children()) == 1
    growth = (memory[-1] - memory[0]) / (len(memory) - 1) / 1024
    print(json.dumps({"restarts": times + 1, "left": first, "KiB_per_restart": round(growth, 1)}), file=sys.stderr)
    assert growth < (512 if times < 50 else 128)  # in a few cycles a step of malloc's weighs much


def test_interrupt_of_a_restart_ends_it(kernel: Kernel) -> None:
    kernel.run("%llm load fake:load_ms=700 --name slow")
    children = len(psutil.Process(kernel.pid).children(recursive=True))
    cell = kernel.run(
        "%llm restart slow",
        interrupt_when=lambda message: "weights" in message["content"].get("data", {}).get("text/plain", ""),
    )
    assert cell.ename == "KeyboardInterrupt" and "the load of slow was ended" in cell.evalue and cell.seconds < 1
    assert len(psutil.Process(kernel.pid).children(recursive=True)) == children - 1
    assert "No model is called 'slow'" in kernel.run("%llm restart slow").traceback
    kernel.run("Session.current.load('fake:load_ms=600', name='slow')")
    assert "slow is still loading" in kernel.run("%llm restart slow").traceback
    kernel.run("%llm unload slow")


def test_it_restarts_by_itself_if_it_was_told_to(kernel: Kernel) -> None:
    kernel.run("%llm load fake:step_ms=5,crash_token=33 --name phoenix --auto-restart")
    for _ in range(3):
        cell = kernel.run("%generate --raw --model phoenix bad!")
        assert cell.ename == "EngineDeadError" and "exit code 17" in cell.evalue
        after = kernel.run("%generate --raw --model phoenix --max-tokens 4 hello")  # waits for the engine
        assert after.answers[0]["data"]["text/plain"] == answer(4), after
    assert kernel.run("%generate --raw --model phoenix bad!").ename == "EngineDeadError"
    again = kernel.run("%generate --raw --model phoenix --max-tokens 4 hello")
    assert again.ename == "EngineDeadError"  # three times a minute are enough
    assert kernel.value("Session.current.models['phoenix'].llm.generation") == 3
    kernel.run("%llm restart phoenix")
    after = kernel.run("%generate --raw --model phoenix --max-tokens 4 hello")
    assert after.answers[0]["data"]["text/plain"] == answer(4)
    kernel.run("%llm unload phoenix")
