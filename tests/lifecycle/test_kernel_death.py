"""However a kernel ends, and whatever its engine is at: two seconds later there is no engine and no run directory."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmkernel.client.attachment import RunningEngine
from llmkernel.client.control_client import ControlClient
from llmkernel.client.running_engines import running_engines
from llmkernel.errors import EngineDeadError
from llmkernel.protocol.control import EngineStatus
from tests.client.fake_engine import wait_gone
from tests.notebook.kernel import Kernel, running_kernel

GONE = 2.0
"""Seconds after which nothing may be left."""

SHUTDOWN = 0.5
"""Seconds that the engine may add to a kernel's shutdown. In all 0.5 are promised on a quiet machine, where a kernel
takes 0.1 with an engine or without, 0.35 if that sits in a forward; a bare one takes more where others want the cores.
"""


@pytest.fixture(scope="module")
def bare_shutdown(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that the shutdown of a kernel without us takes."""
    with running_kernel(tmp_path_factory.mktemp("bare")) as kernel:
        return seconds_to_end(kernel, shutdown)


def seconds_to_end(kernel: Kernel, way: Callable[[Kernel], None]) -> float:
    owner = psutil.Process(kernel.pid)
    started = time.monotonic()
    way(kernel)
    gone, _ = psutil.wait_procs([owner], timeout=10)
    assert gone, "the kernel itself does not end"
    return time.monotonic() - started


def assert_nothing_is_left(engine: int, base: Path) -> None:
    ended = time.monotonic()
    wait_gone(engine, GONE)
    while list(base.glob("llmk-*")) and time.monotonic() < ended + GONE:
        time.sleep(0.01)
    assert list(base.glob("llmk-*")) == []


def status_of(engine: RunningEngine) -> EngineStatus | None:
    with contextlib.suppress(EngineDeadError), ControlClient(engine.control_address) as control:
        return control.status()
    return None


def wait_for(base: Path, reached: Callable[[EngineStatus], bool]) -> RunningEngine:
    """The only engine in `base`, once its status is what is waited for."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for engine in running_engines(base):
            status = status_of(engine) if (engine.run_path / "ctl").exists() else None
            if status is not None and reached(status):
                return engine
        time.sleep(0.01)
    raise AssertionError("The engine did not come that far.")


def loading(kernel: Kernel, base: Path) -> RunningEngine:
    kernel.start("%llm load fake:load_ms=60000")
    return wait_for(base, lambda status: status.stage is not None and status.stage.stage == "weights")


def idle(kernel: Kernel, base: Path) -> RunningEngine:
    assert kernel.run("%llm load fake:").status == "ok"
    return wait_for(base, lambda status: status.state == "running")


def prefill(kernel: Kernel, base: Path) -> RunningEngine:
    kernel.run("%llm load fake:step_ms=50,max_model_len=4000,num_blocks=300 --max-num-batched-tokens 16")
    kernel.start("%generate --raw " + "a" * 3000)
    return wait_for(base, lambda status: status.step_counter > 3)


def decode(kernel: Kernel, base: Path) -> RunningEngine:
    kernel.run("%llm load fake:step_ms=5,max_model_len=4000,num_blocks=3000")
    kernel.start("%generate --raw -n 8 --max-tokens 3000 hello")
    return wait_for(base, lambda status: status.step_counter > 10 and status.running == 8)


def forward(kernel: Kernel, base: Path) -> RunningEngine:
    kernel.run("%llm load fake:step_ms=30000")
    kernel.start("%generate --raw hello")
    return wait_for(base, lambda status: status.step_age > 0.1)


def end_the_cell(kernel: Kernel) -> None:
    """The one that runs; the cell after it is not run if it comes before the kernel has said so."""
    kernel.interrupt()
    kernel.client.wait_for_ready(timeout=10)


def sigkill(kernel: Kernel) -> None:
    os.kill(kernel.pid, signal.SIGKILL)


def restart(kernel: Kernel) -> None:
    kernel.restart()


def os_exit(kernel: Kernel) -> None:
    end_the_cell(kernel)
    kernel.start("import os; os._exit(3)")


def exit_cell(kernel: Kernel) -> None:
    end_the_cell(kernel)
    kernel.start("exit")


def shutdown(kernel: Kernel) -> None:
    kernel.client.shutdown()


STAGES = [loading, idle, prefill, decode, forward]
WAYS = [sigkill, restart, os_exit, exit_cell, shutdown]
SHORT = {(sigkill, loading), (sigkill, decode), (restart, prefill), (os_exit, idle), (exit_cell, decode)} | {
    (sigkill, forward), (shutdown, forward), (shutdown, idle)
}  # fmt: skip


def cases() -> Iterator[Any]:
    for way in WAYS:
        for stage in STAGES:
            marks = () if (way, stage) in SHORT else (pytest.mark.soak,)
            yield pytest.param(way, stage, marks=marks, id=f"{way.__name__}-{stage.__name__}")


@pytest.mark.parametrize(("way", "stage"), list(cases()))
def test_the_engine_goes_with_its_kernel(
    way: Callable[[Kernel], None],
    stage: Callable[[Kernel, Path], RunningEngine],
    base: Path,
    tmp_path: Path,
    bare_shutdown: float,
) -> None:
    with running_kernel(tmp_path, "%load_ext llmkernel") as kernel:
        engine = stage(kernel, base).pid
        seconds = seconds_to_end(kernel, way)
        assert_nothing_is_left(engine, base)
        assert way is not shutdown or seconds < bare_shutdown + SHUTDOWN


FORK = """import os, threading, time
def fork_beside_the_engine():
    while not any(thread.name == "llmkernel-engine-monitor" for thread in threading.enumerate()):
        time.sleep(0.005)  # a fork in the middle of Popen would hold its pipe, too, and Popen up
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
threading.Thread(target=fork_beside_the_engine).start()
"""


@pytest.mark.parametrize("stage", [*(pytest.param(one, marks=pytest.mark.soak) for one in STAGES[:-1]), forward])
def test_a_forked_sibling_of_the_kernel_that_holds_the_pipe(
    stage: Callable[[Kernel, Path], RunningEngine], base: Path, tmp_path: Path
) -> None:
    with running_kernel(tmp_path, "%load_ext llmkernel", FORK) as kernel:
        engine = stage(kernel, base).pid
        (sibling,) = (child for child in psutil.Process(kernel.pid).children() if child.pid != engine)
        try:
            sigkill(kernel)
            assert_nothing_is_left(engine, base)
            assert sibling.is_running()
        finally:
            sibling.kill()
