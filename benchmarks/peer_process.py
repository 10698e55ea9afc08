"""PeerProcess: a library under the interpreter of its own environment, measured in turns with others."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["OURS", "PEER_ENGINES", "PeerProcess", "add_peer_option", "end_in_order"]

OURS = "llmkernel"
"""The peer that is this library itself."""

PEER_ENGINES = Path(__file__).parent / "peer_engines"
"""The folder of the scripts."""

_END_OF_LOG = 4000
"""Characters of what a dead one printed that are shown."""


class PeerProcess:
    """One script of peer_engines/ (see answers.py). Starts at once; `wait_ready` returns its facts; `ask` one answer.

    It is stopped (SIGSTOP) whenever it was not asked anything: some libraries spin when they are idle. A process that
    ends without an answer ends this program, with the end of what it printed.
    """

    def __init__(self, name: str, python: str, script: str, arguments: list[str]) -> None:
        self.name = name
        self.start_seconds = 0.0
        """From the start of the process until it was ready; known then."""
        self._started = time.perf_counter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self._process = subprocess.Popen(
            [python, str(PEER_ENGINES / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def wait_ready(self) -> dict[str, Any]:
        """Until it says so: an engine does with its first token."""
        facts: dict[str, Any] = self._answer()["ready"]
        self.start_seconds = time.perf_counter() - self._started
        self._signal(signal.SIGSTOP)
        return facts

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """It runs until it has answered."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(question) + "\n")
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Its stdin ends; who does not go then is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the process and its children (our engine has a session of its own, and sleeps when it is idle)."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode("utf-8", "replace")[-_END_OF_LOG:]
            sys.exit(f"{said}\n{self.name} ended without an answer; above is the end of what it printed.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def add_peer_option(parser: argparse.ArgumentParser, names: list[str]) -> None:
    """`--peer NAME=PYTHON`, as often as there are peers: `options.peer` is a list of (name, interpreter)."""

    def peer(text: str) -> tuple[str, str]:
        name, _, python = text.partition("=")
        if name not in names or not python:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with NAME one of {', '.join(names)}")
        return name, python

    parser.add_argument("--peer", action="append", default=[], type=peer, metavar="NAME=PYTHON", help=", ".join(names))


def end_in_order() -> None:
    """From now on SIGTERM ends this program as SystemExit does, and so its peers, which may stand still."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
