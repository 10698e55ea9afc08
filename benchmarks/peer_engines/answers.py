"""The loop of a peer's process: questions come in as JSON lines on stdin, answers go out as JSON lines on stdout.

Runs under each peer's own interpreter, so it imports the standard library only. What the peer prints itself goes to
stderr. The first line out is {"ready": facts}. An engine writes it after one token has been generated; then, for each
line {"prompts": [[id, ...], ...], "tokens": N}, one line {"moments": [[s, total], ...]}: the seconds from the start of
the cell to the moment when every prompt has its k-th token, k = 1 ... N, and the tokens that all of them have then.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1


class PeerEngine(Protocol):
    """What each script beside this one makes of its library."""

    facts: dict[str, Any]
    """Version and build, for the report."""

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int]]:
        """Generate exactly `tokens` tokens greedily for every prompt at once; the moments."""
        ...


def parse_options() -> argparse.Namespace:
    """What the conductor says to every peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder, or a GGUF file")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", default="auto", help="a number, or auto: the library's own choice")
    parser.add_argument("--max-model-len", type=int, default=8192)
    return parser.parse_args()


def serve(open_engine: Callable[[argparse.Namespace], PeerEngine]) -> None:
    """Open the engine, then answer cells until stdin ends."""

    def open_peer() -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
        engine = open_engine(parse_options())
        engine.run([[1, 2, 3, 4]], 1)
        return engine.facts, lambda cell: {"moments": engine.run(cell["prompts"], cell["tokens"])}

    answer_lines(open_peer)


def answer_lines(open_peer: Callable[[], tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]]) -> None:
    """`open_peer` gives the facts and what answers a question. Whoever asked is killed: so is this process, stopped or
    not (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints must not stand among the answers
    facts, answer = open_peer()
    print(json.dumps({"ready": facts}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)
