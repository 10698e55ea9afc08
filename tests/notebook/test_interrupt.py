"""Interrupt ends this cell's requests and nothing else, at every stage, in less than half a second."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from llmkernel.engine.fake_executor import fake_answer
from tests.notebook.kernel import Cell, Kernel, running_kernel

LIMIT = 0.5
"""Seconds from Interrupt to the end of the cell (design section 6)."""

SOME = bytes(fake_answer(list(b"hello"), 3)).decode()
"""How the answer to "hello" begins."""

STAGES = [
    (
        "wait for the first token",
        "fake:step_ms=700 --name fake",
        "%generate --raw hello",
        "waiting for the first token",
    ),
    ("decode", "fake:step_ms=20 --name fake", "%generate --raw --max-tokens 2000 hello", SOME),
    ("many rows", "fake:step_ms=20 --name fake", "%generate --raw -n 8 --max-tokens 2000 hello", "[8]"),
]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(
        tmp_path_factory.mktemp("interrupt"), "%load_ext llmkernel\nfrom llmkernel import Session"
    ) as kernel:
        yield kernel


def shows(text: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a message shows `text` on screen."""

    def found(message: dict[str, Any]) -> bool:
        content = message["content"]
        return text in content.get("data", {}).get("text/plain", "") or text in content.get("text", "")

    return found


def assert_interrupted(cell: Cell) -> None:
    assert (cell.status, cell.ename) == ("error", "KeyboardInterrupt"), cell
    assert cell.seconds < LIMIT
    assert cell.traceback == f"KeyboardInterrupt: {cell.evalue}"


def engine_pid(kernel: Kernel, name: str = "fake") -> int:
    return int(kernel.value(f"Session.current.models[{name!r}].process.pid"))


@pytest.mark.row("A-144")
@pytest.mark.parametrize(("stage", "model", "code", "sign"), STAGES, ids=[stage for stage, *_ in STAGES])
def test_interrupt_at_any_stage(kernel: Kernel, stage: str, model: str, code: str, sign: str) -> None:
    kernel.run(f"%llm load {model}")
    pid = engine_pid(kernel)
    for _ in range(2):
        assert_interrupted(kernel.run(code, interrupt_when=shows(sign)))
        assert kernel.value("_.state") == "cancelled"
    assert engine_pid(kernel) == pid
    after = kernel.run("%generate --raw --max-tokens 1 hello")
    assert after.answers[0]["data"]["text/plain"] == SOME[:1]
    stats = kernel.run("print(await Session.current.models['fake'].llm.get_stats())").stdout
    assert "'num_running_reqs': 0" in stats and "'kv_cache_usage': 0.0" in stats
    kernel.run("%llm unload")


def test_what_was_said_is_kept(kernel: Kernel) -> None:
    kernel.run("%llm load fake:step_ms=20 --name fake")
    cell = kernel.run("%%generate --raw --max-tokens 2000 -o kept\nhello", interrupt_when=shows(SOME))
    assert_interrupted(cell)
    assert cell.evalue == "generation interrupted; partial text kept in `_`."
    (stored,) = cell.displays
    assert stored["metadata"]["llmkernel"]["finish_reason"] == "abort"
    text = kernel.value("_.text")
    assert text.startswith(SOME) and stored["data"]["text/plain"] == text == kernel.value("kept.text")


def test_interrupt_while_queued_leaves_the_others_alone(kernel: Kernel) -> None:
    kernel.run("%llm load fake:step_ms=10 --name narrow --max-num-seqs 1")
    kernel.run("%generate -b --raw --max-tokens 300 -o first hello")
    assert_interrupted(kernel.run("%generate --raw hello", interrupt_when=shows("waiting for the first token")))
    assert kernel.value("first.state") == "running"
    kernel.run("first.cancel()\n%llm unload narrow")


def test_interrupt_in_a_loop_and_under_time_and_capture(kernel: Kernel) -> None:
    cell = kernel.run("for i in range(9):\n    %generate --raw --max-tokens 2000 hello", interrupt_when=shows(SOME))
    assert_interrupted(cell)
    assert len(cell.displays) == 1
    cell = kernel.run("%%time\n%%generate --raw --max-tokens 2000\nhello", interrupt_when=shows(SOME))
    assert_interrupted(cell)
    assert "Wall time" in cell.stdout
    code = "%%capture --no-stdout held\nprint('started')\n%generate --raw --max-tokens 2000 hello"
    assert_interrupted(kernel.run(code, interrupt_when=shows("started")))


def test_interrupt_that_comes_before_the_cell_waits(kernel: Kernel) -> None:
    code = "print('started')\nimport time\ntime.sleep(0.3)\n%generate --raw --max-tokens 2000 hello"
    cell = kernel.run(code, interrupt_when=shows("started"))
    assert (cell.ename, cell.seconds < 0.3 + LIMIT) == ("KeyboardInterrupt", True)
    assert "'num_running_reqs': 0" in kernel.run("print(await Session.current.models['fake'].llm.get_stats())").stdout


def test_a_cell_that_swallows_the_interrupt_can_be_interrupted_again(kernel: Kernel) -> None:
    cell = kernel.run(
        "try:\n    %generate --raw --max-tokens 2000 hello\nexcept KeyboardInterrupt:\n    print('swallowed')\n"
        "import asyncio\nasync with asyncio.timeout(10):\n    await asyncio.sleep(0)\nprint('went on')",
        interrupt_when=shows(SOME),
    )
    assert cell.status == "ok" and cell.stdout == "swallowed\nwent on\n"


def test_a_time_limit_is_no_interrupt(kernel: Kernel) -> None:
    cell = kernel.run(
        "import asyncio\ntry:\n    async with asyncio.timeout(0.2):\n        %generate --raw --max-tokens 2000 hello\n"
        "except TimeoutError:\n    print('in time')"
    )
    assert cell.stdout == "in time\n"


def test_interrupt_of_a_load_ends_the_load(kernel: Kernel) -> None:
    children = set(psutil.Process(kernel.pid).children(recursive=True))
    cell = kernel.run("%llm load fake:load_ms=60000 --name slow", interrupt_when=shows("weights"), timeout=20)
    assert_interrupted(cell)
    assert "the load of slow was ended" in cell.evalue
    assert cell.displays[0]["data"]["text/plain"] == "Loading slow: ended."
    assert set(psutil.Process(kernel.pid).children(recursive=True)) <= children
    assert kernel.value("'slow' in Session.current.models") is False


def test_interrupt_of_a_wait_for_a_load_ends_the_wait(kernel: Kernel) -> None:
    cell = kernel.run(
        "before = set(Session.current.models)\nSession.current.load('fake:load_ms=1500', name='slow')\n"
        "%generate --raw --max-tokens 3 hello",
        interrupt_when=shows("waiting for slow to load"),
    )
    assert_interrupted(cell)
    assert cell.evalue == "this cell stopped waiting; the load of slow goes on (%llm unload slow ends it)."
    after = kernel.run("%generate --raw --max-tokens 3 hello")
    assert after.answers[0]["data"]["text/plain"] == SOME
    assert after.answers[0]["metadata"]["llmkernel"]["model"] == "slow"
    kernel.run("%llm unload slow")


def test_interrupt_of_an_idle_kernel_changes_nothing(kernel: Kernel) -> None:
    pid = engine_pid(kernel)
    kernel.run("%generate -b --raw --max-tokens 60 -o behind hello")
    kernel.interrupt()
    assert kernel.run("print((await behind).state)").stdout.endswith("done\n")
    assert engine_pid(kernel) == pid
