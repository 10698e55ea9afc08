"""`llmkernel` from a shell."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from llmkernel import cli
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.engine.worker.model_cache import ModelCache

COMMAND = [sys.executable, "-m", "llmkernel"]


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


def llmkernel(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=60)


def test_the_answer_goes_to_stdout_and_nothing_else_does() -> None:
    done = llmkernel("generate", "hello", "-m", "fake:", "--raw", "--max-tokens", "12", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, answer("hello", 12) + "\n", "")
    done = llmkernel("generate", "-", "-m", "fake:echo=1", "--raw", stdin="from\x1bstdin\n")
    assert (done.returncode, done.stdout) == (0, "from\x1bstdin\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "", "-m", "fake:"), 2, "llmkernel: The prompt is empty; write one."),
        (("generate", "hi", "-m", "fake:", "--max-tokens", "0"), 2, "llmkernel: max_tokens = 0 must be"),
        (("generate", "hi", "-m", "fake:fail_load=1"), 1, "llmkernel: The engine did not start:"),
        (("generate", "hi!", "-m", "fake:fail_token=33"), 1, "llmkernel: The request failed in the engine"),
        (("stop", "1"), 2, "llmkernel: 1 is no engine of yours"),
        (("logs", "1"), 2, "llmkernel: 1 is no engine of yours"),
    ],
)
def test_mistakes_are_one_line_on_stderr(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = llmkernel(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


@pytest.mark.row("A-144")
def test_interrupt_keeps_what_was_written_and_ends_the_engine() -> None:
    arguments = ["generate", "hello", "-m", "fake:step_ms=10", "--raw", "--max-tokens", "2000"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        start = os.read(process.stdout.fileno(), 64)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        rest, errors = process.communicate(timeout=10)
        assert time.monotonic() - sent < 3
    assert process.returncode == 130 and errors.decode() == "\ninterrupted\n"
    assert start and answer("hello", 2000).startswith((start + rest).decode())


def test_a_reader_that_leaves_is_no_error() -> None:
    arguments = ["generate", "hello", "-m", "fake:step_ms=2", "--raw", "--max-tokens", "500"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(3)
        process.stdout.close()
        assert process.wait(timeout=20) == 1
        assert process.stderr.read() == b""


def test_a_terminal_sees_the_load_and_no_control_characters() -> None:
    arguments = ["-m", "llmkernel", "generate", "a\x1b[31mb", "-m", "fake:echo=1,load_ms=100", "--raw"]
    terminal = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=20)
    terminal.expect_exact("weights")
    terminal.expect_exact("a\u241b[31mb\r\n")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_models_lists_short_names_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMKERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cli.main(["models"]) == 0
    empty = capsys.readouterr().out
    assert "smollm2" in empty and "(default)" in empty and "Nothing converted yet" in empty
    entry = tmp_path / "mine"
    entry.mkdir()
    (entry / "llmkernel.json").write_text("{}")
    (entry / "model.safetensors").write_bytes(bytes(2048))
    assert cli.main(["models"]) == 0
    assert "mine" in capsys.readouterr().out


def test_models_rm_removes_one_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMKERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cache = ModelCache()
    for name in ("one-0123", "two-4567"):
        identity = {"path": f"/files/{name}.gguf"}
        cache.make(name, identity, lambda folder: (folder / "weights").write_bytes(bytes(2048)) and None, needed=0)
    (tmp_path / "not-ours").mkdir()
    assert cli.main(["models"]) == 0
    assert "/files/one-0123.gguf (which is gone)" in capsys.readouterr().out
    assert cli.main(["models", "rm", "one-0123"]) == 0
    assert "one-0123 removed, 2.1 KiB given back." in capsys.readouterr().out
    assert [entry.name for entry in cache.entries()] == ["two-4567"]
    for name in ("two", "not-ours", "..", "one-0123"):
        assert cli.main(["models", "rm", name]) == 2
        assert f"holds no {name!r}; " in capsys.readouterr().err
    assert (tmp_path / "not-ours").exists() and (tmp_path / "two-4567").exists()
