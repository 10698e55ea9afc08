"""Terminal IPython: text as it comes, Ctrl-C, and what does not advance there."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from llmkernel.engine.fake_executor import fake_answer

PROMPT = r"In \[\d+\]: "


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


@pytest.fixture
def ipython(tmp_path: Path) -> Iterator[pexpect.spawn]:
    environment = dict(os.environ, TERM="dumb", IPYTHONDIR=str(tmp_path), NO_COLOR="1")
    shell = pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        env=environment,
        encoding="utf-8",
        timeout=20,
        dimensions=(50, 200),
    )
    shell.expect(PROMPT)
    run(shell, "%load_ext llmkernel")
    yield shell
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.wait()
    shell.close()


def run(shell: pexpect.spawn, line: str) -> str:
    shell.sendline(line)
    shell.expect(PROMPT)
    return str(shell.before).replace("\r\n", "\n")


@pytest.mark.row("A-144")
def test_a_terminal_session(ipython: pexpect.spawn) -> None:
    loaded = run(ipython, "%llm load fake:step_ms=20 --name fake")
    assert "Loading fake ..." in loaded and "fake is ready (" in loaded
    run(ipython, "%llm config raw=on")
    said = run(ipython, "x = %generate --max-tokens 10 hello")
    assert said.count(answer("hello", 10)) == 1 and "raise it with --max-tokens" in said
    assert answer("hello", 10) in run(ipython, "x")
    said = run(ipython, "%generate --max-tokens 4 hello")
    assert said.count(answer("hello", 4)) == 1 and "<Generation g2: fake, done, 4 tokens>" in said

    ipython.sendline("%generate --max-tokens 2000 hello")
    ipython.expect_exact(answer("hello", 5))
    ipython.sendintr()
    ipython.expect_exact("KeyboardInterrupt: generation interrupted; partial text kept in `_`.", timeout=0.5)
    ipython.expect(PROMPT)
    assert "True" in run(ipython, "_.done and _.state == 'cancelled' and len(_.text) > 4")
    run(ipython, "from llmkernel import Session")
    assert "0" in run(ipython, "(await Session.current.models['fake'].llm.get_stats())['num_running_reqs']").split()

    said = run(ipython, "b = %generate -b --max-tokens 6 hello")
    assert "only advances while a cell awaits" in said
    assert answer("hello", 6) in run(ipython, "await b")


def test_the_terminal_gets_no_control_characters(ipython: pexpect.spawn) -> None:
    run(ipython, "%llm load fake:echo=1,step_ms=1 --name echo")
    run(ipython, "attack = ['a\\x1b]0;owned\\x07b\\x9bc']")
    said = run(ipython, "g = %generate --raw --prompts attack")
    assert "a\u241b]0;owned\u2407b\ufffdc" in said
