"""`llmkernel ps | stop | logs` from a shell, on engines of other processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from llmkernel import cli
from llmkernel.errors import EngineDeadError
from llmkernel.llm.llm import LLM
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.sampling_params import SamplingParams
from tests.llm.engines import FAKE, answer

COMMAND = [sys.executable, "-m", "llmkernel"]


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for run directories of this test alone."""
    with TemporaryDirectory(prefix="llmkernel-test-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("fake:step_ms=1", executor_class=FAKE, quiet=True) as made:
        yield made


def llmkernel(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def mine(llm: LLM) -> list[str]:
    """What `ps` says of this engine."""
    done = llmkernel("ps")
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["PID", "MODEL", "STATE", "MEMORY", "RUNNING", "WAITING", "CLIENTS", "UP", "OWNER"]
    return next(row.split() for row in rows if row.startswith(f"{llm.llm_engine.facts.pid} "))


def test_ps_tells_of_every_stage(llm: LLM) -> None:
    pid, model, state, *_, running, waiting, clients, _, owner = mine(llm)
    assert (pid, model, state) == (str(llm.llm_engine.facts.pid), "fake:step_ms=1", "running")
    assert (running, waiting, clients, owner) == ("0", "0", "1", str(os.getpid()))
    for _ in llm.stream("x", SamplingParams(max_tokens=None)):
        assert mine(llm)[5] == "1"
        break
    os.kill(llm.llm_engine.facts.pid, signal.SIGSTOP)
    try:
        assert mine(llm)[2] == "stuck"
    finally:
        os.kill(llm.llm_engine.facts.pid, signal.SIGCONT)


def test_a_run_without_an_engine_is_no_engine(base: Path) -> None:
    """Its process has not been started, or has just gone."""
    with RunDirectory(base), RunDirectory(base) as other:
        other.file("card").write_bytes(b"\xff{")
        assert str(base) not in llmkernel("ps").stdout
        assert llmkernel("logs", "1").returncode == 2


def test_stop_ends_the_engine_of_another_process(llm: LLM, base: Path) -> None:
    pid = llm.llm_engine.facts.pid
    done = llmkernel("stop", str(pid))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{pid} (fake:step_ms=1) ended, ") and done.stdout.endswith("MiB given back.\n")
    with pytest.raises(EngineDeadError, match=r"stopped from outside \(llmkernel stop"):
        llm.generate("a", SamplingParams(max_tokens=3))
    llm.shutdown()
    assert list(base.glob("llmk-*")) == []


def test_stop_ends_one_that_does_not_answer_and_one_that_loads() -> None:
    command = [sys.executable, "-m", "llmkernel", "generate", "x", "-m"]
    with subprocess.Popen([*command, "fake:load_ms=60000"], stderr=subprocess.PIPE, text=True) as loading:
        pid, *_ = wait_for_row("fake:load_ms=60000", "loading: weights")
        assert llmkernel("stop", pid).returncode == 0
        assert loading.stderr is not None and "The engine did not start" in loading.stderr.read()
    with LLM("fake:", executor_class=FAKE, quiet=True) as llm:
        pid = str(llm.llm_engine.facts.pid)
        os.kill(int(pid), signal.SIGSTOP)
        assert llmkernel("stop", pid).returncode == 0
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate("a")


def test_a_pid_that_is_no_engine_is_left_alone(llm: LLM) -> None:
    done = llmkernel("stop", str(llm.llm_engine.facts.pid), str(os.getpid()))
    assert done.returncode == 2
    assert f"{os.getpid()} is no engine of yours" in done.stderr
    assert llm.generate("a", SamplingParams(max_tokens=3))[0].text == answer("a", 3)


def test_a_card_that_names_another_process_is_not_believed(llm: LLM) -> None:
    run = llm.llm_engine.running_engine
    assert run is not None
    with subprocess.Popen(["sleep", "60"]) as other:
        card = run.run_path / "card"
        card.write_text(card.read_text().replace(str(run.pid), str(other.pid)))
        done = llmkernel("stop", str(other.pid))
        assert (done.returncode, other.poll()) == (2, None)
        assert f"{other.pid} is no engine any more" in done.stderr
        other.kill()


def test_logs_shows_the_last_lines_and_follows(llm: LLM) -> None:
    path = llm.llm_engine.running_engine.log_path  # type: ignore[union-attr]
    with path.open("a") as log:
        log.writelines(f"line {number}\n" for number in range(100))
    assert llmkernel("logs", str(llm.llm_engine.facts.pid), "-n", "2").stdout == "line 98\nline 99\n"
    following_it = [*COMMAND, "logs", str(llm.llm_engine.facts.pid), "-n", "1", "-f"]
    with subprocess.Popen(following_it, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "line 99\n"
        with path.open("a") as log:
            log.write("one more\n")
        assert following.stdout.readline() == "one more\n"
        llm.shutdown()
        following.communicate(timeout=10)
        assert following.returncode == 0


def test_with_one_engine_and_with_none(
    llm: LLM, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmkernel.protocol.run_directory._candidates", lambda: [base])  # other users' tests run too
    llm.llm_engine.running_engine.log_path.write_text("it says\n")  # type: ignore[union-attr]
    assert cli.main(["logs", "-n", "1"]) == 0
    assert capsys.readouterr().out == "it says\n"
    llm.shutdown()
    assert cli.main(["ps"]) == 0
    assert cli.main(["logs"]) == 2
    assert capsys.readouterr() == ("No engine runs.\n", "llmkernel: No engine runs.\n")


def wait_for_row(model: str, state: str) -> list[str]:
    for _ in range(100):  # each takes a process's time
        for row in llmkernel("ps").stdout.splitlines():
            if model in row and state in row:
                return row.split()
    raise AssertionError(f"{model} never {state}")
