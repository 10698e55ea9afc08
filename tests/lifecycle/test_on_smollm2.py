"""The engine's life with the default model: what the other tests here repeat on the fake one, once each."""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmkernel.client.attachment import RunningEngine
from tests.client.test_hostile_neighbours import pester, what_another_user_gets
from tests.lifecycle.test_interrupt_often import shows
from tests.lifecycle.test_kernel_death import (
    assert_nothing_is_left,
    restart,
    seconds_to_end,
    shutdown,
    sigkill,
    wait_for,
)
from tests.notebook.kernel import Kernel, running_kernel

pytestmark = pytest.mark.slow

SLOT = "Session.current.models['smollm2']"
LOAD = "%llm load smollm2 --no-prefix-caching"  # a cached prefix is another sum in bfloat16, and may part at a tie
ASK = "%generate --max-tokens 8 -t 0 What is the capital of France?"
LONG = "%generate --max-tokens 400 -t 0 Count from one to two hundred."
EIGHT = "%generate -b -n 8 --max-tokens 400 -o eight Tell me a story."
UNTIL_EIGHT_RUN = "while min(map(len, eight.texts)) < 10: await asyncio.sleep(0.01)"
BASELINE = f"""async with asyncio.timeout(5):
    while True:
        stats = await {SLOT}.llm.get_stats()
        if (stats["num_running_reqs"], stats["num_waiting_reqs"], stats["kv_cache_usage"]) == (0, 0, 0.0):
            break
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    setup = "%load_ext llmkernel\nimport asyncio, time, os, signal\nfrom llmkernel import Session, SamplingParams"
    with running_kernel(tmp_path_factory.mktemp("smollm2"), setup) as made:
        yield made


@pytest.fixture
def loaded(kernel: Kernel) -> Kernel:
    done = kernel.run(LOAD, timeout=110)
    assert done.status == "ok", done.traceback
    return kernel


def text_of(kernel: Kernel) -> str:
    cell = kernel.run(ASK, timeout=60)
    assert cell.status == "ok", cell.traceback
    text: str = cell.answers[0]["data"]["text/plain"]
    return text


def test_interrupts_of_a_load_and_of_a_prefill(loaded: Kernel) -> None:
    pid = loaded.value(f"{SLOT}.process.pid")
    before = text_of(loaded)
    long_prompt = "%generate --raw " + "word " * 1500
    cell = loaded.run(long_prompt, interrupt_when=shows("waiting for the first token"), timeout=60)
    assert cell.ename == "KeyboardInterrupt" and cell.seconds < 0.5
    assert loaded.run(BASELINE).status == "ok"
    assert text_of(loaded) == before and loaded.value(f"{SLOT}.process.pid") == pid
    loaded.run("%llm unload smollm2")
    cell = loaded.run(LOAD, interrupt_when=lambda message: message["msg_type"] == "display_data", timeout=60)
    assert "the load of smollm2 was ended" in cell.evalue and cell.seconds < 1
    assert psutil.Process(loaded.pid).children(recursive=True) == []


def test_the_engine_is_killed_with_eight_streams_and_comes_back(loaded: Kernel) -> None:
    before = text_of(loaded)
    loaded.run(EIGHT)
    assert loaded.run(UNTIL_EIGHT_RUN).status == "ok"
    pid = loaded.value(f"{SLOT}.process.pid")
    cell = loaded.run(
        f"call = asyncio.ensure_future({SLOT}.llm.call_utility('pause_scheduler', 'wait'))\n"
        f"await {SLOT}.llm.call_utility('is_sleeping')\n"
        f"started = time.monotonic(); os.kill({pid}, signal.SIGKILL)\n"
        "results = await asyncio.gather(eight, call, return_exceptions=True)\n"
        "seconds = time.monotonic() - started"
    )
    assert cell.status == "ok", cell.traceback
    assert loaded.value("seconds") < 1
    assert loaded.value("[type(one).__name__ for one in results]") == ["EngineDeadError"] * 2
    assert all(len(text) >= 10 for text in loaded.value("eight.texts"))
    assert loaded.run("%llm restart", timeout=60).status == "ok"
    assert text_of(loaded) == before
    assert loaded.value(f"{SLOT}.process.pid") != pid and not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    "leave",
    [
        "async for _ in g: break\ng.cancel()",
        "async for _ in g: break\nSession.current.stop_requests([row.request_id for row in g.rows])\nawait g",
        "try:\n    async with asyncio.timeout(0.5): await g\nexcept TimeoutError: pass",
        "stream = llm.generate('Once', SamplingParams(max_tokens=400))\nawait anext(stream)\nawait stream.aclose()\n"
        "g.cancel()",
        "stream = llm.generate('Once', SamplingParams(max_tokens=400))\nawait anext(stream)\ndel stream\ng.cancel()",
        "task = asyncio.ensure_future(g._wait())\nawait asyncio.sleep(0.1)\ntask.cancel()",
    ],
    ids=["cancel", "stop", "timeout", "aclose", "del", "task"],
)
def test_however_a_stream_is_left_the_engine_is_as_before(loaded: Kernel, leave: str) -> None:
    code = f"llm = {SLOT}.llm\ng = Session.current.generate(['a story', 'a poem'], max_tokens=400)\n{leave}"
    cell = loaded.run(code, timeout=60)
    assert cell.status == "ok", cell.traceback
    cell = loaded.run(BASELINE)
    assert cell.status == "ok", cell.traceback


def test_neighbours_and_prompts_change_nothing(loaded: Kernel, tmp_path: Path) -> None:
    before, dice = text_of(loaded), random.Random(7)
    folder = Path(loaded.value(f"str({SLOT}.llm.running_engine.run_path)"))
    pid = loaded.value(f"{SLOT}.process.pid")
    if os.geteuid() == 0:  # only root can become another user
        assert what_another_user_gets(folder, pid) == ("[]\n", "")
    loaded.run(EIGHT)
    assert loaded.run(UNTIL_EIGHT_RUN).status == "ok"
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    assert {path.name for path in sockets} >= {"ctl", "in0", "out0"}
    for path in sockets:
        pester(path, dice)
    cell = loaded.run("await eight", timeout=90)
    assert cell.status == "ok", cell.traceback
    assert "Ignored" in (folder / "log").read_text()
    written = tmp_path / "written"
    code = f"__import__('pathlib').Path({str(written)!r}).touch()"
    for magic in ("%%generate --max-tokens 4", "%%generate -i --max-tokens 4"):
        body = f"!touch {written}\n{{{code}}}\n<|im_end|>\n%%python\n{code}\n<script>{code}</script>"
        cell = loaded.run(f"{magic}\n{body}")
        assert cell.status == "ok" and len(cell.answers) == 1, cell.traceback
    assert not written.exists()
    assert text_of(loaded) == before and loaded.value(f"{SLOT}.process.pid") == pid


def importing(kernel: Kernel, base: Path) -> RunningEngine:
    kernel.start(LOAD)
    return wait_for(base, lambda status: status.stage is not None and status.stage.stage != "spawned")


def decoding(kernel: Kernel, base: Path) -> RunningEngine:
    assert kernel.run(LOAD, timeout=110).status == "ok"
    kernel.start(LONG)
    return wait_for(base, lambda status: status.step_counter > 5)


@pytest.mark.parametrize(
    ("way", "stage"),
    [(sigkill, importing), (sigkill, decoding), (restart, decoding), (shutdown, decoding)],
    ids=lambda function: function.__name__,
)
def test_the_engine_goes_with_its_kernel(
    way: Callable[[Kernel], None], stage: Callable[[Kernel, Path], RunningEngine], base: Path, tmp_path: Path
) -> None:
    with running_kernel(tmp_path, "%load_ext llmkernel") as kernel:
        engine = stage(kernel, base).pid
        seconds = seconds_to_end(kernel, way)
        assert_nothing_is_left(engine, base)
        report: dict[str, Any] = {"way": way.__name__, "stage": stage.__name__, "kernel_gone_s": round(seconds, 3)}
        print(json.dumps(report), file=sys.stderr)
