"""EngineProcess, the environment of the engine, its log, and the words for how it ended."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import zmq

from llmkernel.client.environment import engine_environment
from llmkernel.client.hints import describe_exit, hint_for
from llmkernel.client.process import EngineProcess
from llmkernel.engine.log_file import trim_log
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.transport import make_zmq_socket


def test_the_environment_of_a_notebook_stays_behind() -> None:
    kernel = {
        "JPY_PARENT_PID": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "FORCE_COLOR": "1",
        "CLICOLOR": "1",
        "PAGER": "cat",
        "PYDEVD_USE_FRAME_EVAL": "NO",
        "PATH": "/bin",
        "HF_HOME": "/models",
        "GOMP_SPINCOUNT": "7",
    }
    seen = engine_environment(kernel)
    assert seen["PATH"] == "/bin" and seen["HF_HOME"] == "/models"
    assert seen["GOMP_SPINCOUNT"] == "7"
    assert engine_environment({})["GOMP_SPINCOUNT"] == "10000"
    assert seen["PYTHONUNBUFFERED"] == seen["NO_COLOR"] == "1"
    assert not {"JPY_PARENT_PID", "MPLBACKEND", "FORCE_COLOR", "CLICOLOR", "PAGER", "PYDEVD_USE_FRAME_EVAL"} & set(seen)


def test_a_module_beside_the_notebook_does_not_shadow_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('imported the wrong random')")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported the wrong msgspec')")
    monkeypatch.chdir(tmp_path)
    with started() as (process, hello):
        assert hello, process.log_tail()


def test_a_process_that_ends_tells_everybody_once_and_keeps_its_log() -> None:
    told: list[EngineProcess] = []
    with started() as (process, hello):
        assert hello
        assert process.exitcode is None
        assert process.memory() > 2**20
        process.add_exit_callback(lambda _: 1 / 0)
        process.add_exit_callback(told.append)
        process.log_path.write_text("first\nlast words\n")
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(5)
    assert told == [process]
    process.add_exit_callback(told.append)
    assert told == [process, process]
    assert process.exitcode == -signal.SIGKILL
    assert process.log_tail() == "first\nlast words"
    assert process.log_tail(1) == "last words"
    assert process.memory() == 0
    assert process.shutdown() == 0


def test_shutdown_in_many_threads() -> None:
    with started() as (process, _):
        threads = [threading.Thread(target=process.shutdown) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert process.exitcode == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "was killed by SIGKILL"), (-99, "was killed by signal 99"), (3, "ended with exit code 3"), (None, "ended")],
)
def test_words_for_an_exit(code: int | None, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("ModuleNotFoundError: No module named 'sentencepiece'", f"{sys.executable} -m pip install sentencepiece"),
        ("No module named llmkernel", "Install llmkernel"),
        ("MemoryError: ", "Memory ran out"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory: you tried", "Memory ran out"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("GatedRepoError: 401 Client Error", "HF_TOKEN"),
        ("RepositoryNotFoundError: 404 Client Error", "model's name"),
        ("ConnectionError: Temporary failure in name resolution", "no way to the Hugging Face Hub"),
        ("SafetensorError: Error while deserializing header: HeaderTooLarge", "damaged"),
        ("ValueError: model type `new` but Transformers does not recognize this architecture", "-U transformers"),
        ("something else", ""),
    ],
)
def test_hints_for_the_usual_causes(text: str, hint: str) -> None:
    found = hint_for(1, text)
    assert (hint in found) if hint else found == ""


def test_a_signal_has_its_own_hint() -> None:
    assert "memory runs out" in hint_for(-9, "")
    assert "CPU lacks" in hint_for(-4)
    assert hint_for(-9, "MemoryError").startswith("Memory ran out")


def test_the_log_is_cut_to_its_newer_half(tmp_path: Path) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, b"".join(b"line %06d\n" % number for number in range(10_000)))
        assert not trim_log(descriptor, limit=2**20)
        assert trim_log(descriptor, limit=50_000)
        os.write(descriptor, b"the end\n")
    finally:
        os.close(descriptor)
    lines = path.read_text().splitlines()
    assert lines[0] == "[earlier lines were dropped]"
    assert lines[-2:] == ["line 009999", "the end"]
    assert path.stat().st_size <= 25_100
    numbers = [int(line.split()[1]) for line in lines[1:-1]]
    assert numbers == list(range(numbers[0], 10_000))


class started:
    """A bare engine process that waits for INIT; (process, its HELLO)."""

    def __enter__(self) -> tuple[EngineProcess, bool]:
        self.run = RunDirectory()
        self.ctx = zmq.Context()
        self.router = make_zmq_socket(self.ctx, self.run.address("hs"), zmq.ROUTER, linger=0)
        self.process = EngineProcess(self.run.address("hs"), self.run)
        return self.process, bool(self.router.poll(15_000))

    def __exit__(self, *_: object) -> None:
        self.process.shutdown()
        self.router.close()
        self.ctx.destroy(linger=0)
        self.run.close()
