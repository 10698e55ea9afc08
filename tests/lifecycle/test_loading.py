"""A load that fails or is ended: why, in a line, and everything is given back."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.notebook.kernel import Kernel, running_kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    setup = "%load_ext llmkernel\nfrom llmkernel import Session"
    with running_kernel(tmp_path_factory.mktemp("loading"), setup, HF_HUB_OFFLINE="1") as made:
        yield made


def descriptors(kernel: Kernel) -> int:
    return psutil.Process(kernel.pid).num_fds()


def test_why_a_load_failed_can_be_read_afterwards(kernel: Kernel) -> None:
    cell = kernel.run("%llm load fake:fail_load=1 --name bad")
    assert cell.ename == "EngineStartupError"
    assert cell.traceback == (
        "EngineStartupError: The engine did not start: RuntimeError: The fake model was told to fail its load; "
        "leave fail_load out. %llm logs bad shows where."
    )
    for line in ("%llm logs bad", "%llm logs"):
        logs = kernel.run(line).stdout
        assert "The engine did not start." in logs and 'fake_executor.py", line' in logs
    kernel.run(
        "try: await Session.current.load('fake:fail_load=1', name='bad')\n"
        "except Exception as e: caught = e.remote_type, e.remote_traceback, e.log_tail"
    )
    kind, trace, log = kernel.value("caught")
    assert kind == "RuntimeError" and "fake_executor.py" in trace and "The engine did not start." in log


def test_mistakes_of_a_name_or_a_file_are_one_clear_line(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 50)
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"architectures": ["OddForCausalLM"], "model_type": "odd"}')
    for model in (tmp_path / "nowhere", tmp_path / "broken.gguf", tmp_path / "empty", tmp_path / "strange"):
        cell = kernel.run(f"%llm load {model} --name bad", timeout=40)
        (line,) = cell.traceback.splitlines()
        assert line.count("Error") == 1, line  # no class name of ours within the message
        assert str(model) in line or model.name in line
        assert kernel.value("list(Session.current.models)") == []


def test_interrupts_of_loads_in_a_row_give_everything_back(kernel: Kernel) -> None:
    def once() -> float:
        cell = kernel.run(
            "%llm load fake:load_ms=60000 --name slow",
            interrupt_when=lambda message: "weights" in message["content"].get("data", {}).get("text/plain", ""),
        )
        assert "the load of slow was ended" in cell.evalue
        return cell.seconds

    once()
    before = descriptors(kernel)
    children = psutil.Process(kernel.pid).children(recursive=True)
    assert max(once() for _ in range(5)) < 1
    deadline = time.monotonic() + 5
    while descriptors(kernel) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert descriptors(kernel) <= before
    assert psutil.Process(kernel.pid).children(recursive=True) == children


def test_unloading_in_every_way_gives_everything_back(kernel: Kernel) -> None:
    kernel.run("%llm load fake: --name one\n%generate --raw --max-tokens 3 hi\n%llm unload one")
    kernel.run("import gc, threading, os\nfrom llmkernel import AsyncLLM, LLM, EngineArgs")
    ways = [
        "Session.current.load('fake:', name='a'); await Session.current.unload('a')",
        "async with AsyncLLM(EngineArgs(model='fake:'), executor_class=FAKE) as x: pass",
        "with LLM('fake:', executor_class=FAKE, quiet=True) as x: pass",
        "x = AsyncLLM(EngineArgs(model='fake:'), executor_class=FAKE); await x.ready(); x = None; gc.collect()",
        "x = LLM('fake:', executor_class=FAKE, quiet=True); x = None; gc.collect()",
        "with Session() as s: await s.load('fake:')",
    ]
    kernel.run("FAKE = 'llmkernel.engine.fake_executor:FakeExecutor'")
    # the loop's own pool grows when two wait at once, and stays
    kernel.run("def threads(): return [one for one in threading.enumerate() if not one.name.startswith('asyncio_')]")
    counts = "(len(threads()), len(os.listdir('/proc/self/fd')))"
    for way in ways:
        assert kernel.run(way).status == "ok"  # what is loaded once stays: library handles
        before = kernel.value(counts)
        for _ in range(2):
            assert kernel.run(way).stdout == ""
        deadline = time.monotonic() + 5
        while kernel.value(counts) > before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert kernel.value(counts) <= before, way
        assert psutil.Process(kernel.pid).children(recursive=True) == []
    said = kernel.run("%llm load fake: --name one\n%llm unload one").stdout
    assert said.startswith("Unloaded one: ") and said.endswith(" MiB given back.\n")
