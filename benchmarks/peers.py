"""This engine beside llama.cpp, vLLM and transformers: same weights, prompts and lengths, in turns, as ratios.

    python benchmarks/peers.py --peer llama.cpp=/envs/llama/bin/python --peer vllm=/envs/vllm/bin/python \\
                               --peer transformers=.venv/bin/python

Every engine is a process of its own under the interpreter given for it (peer_engines/), kept for a whole group of
cells and stopped (SIGSTOP) while another one is measured: some spin when they are idle. In each round a cell is run
by all of them, one after the other; a ratio is that of one round, and the median of the rounds is reported. `decode`
is the rate from the moment when every request has its first token to its last one, `prefill` that of prompt tokens
until then, `start` the seconds from the start of the process to its first token, imports and loading included.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from decode import cpu_name

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_source import resolve_model

OURS = "llmkernel"
SCRIPTS = {
    OURS: "with_llmkernel.py",
    "llama.cpp": "with_llama_cpp.py",
    "vllm": "with_vllm.py",
    "transformers": "with_transformers.py",
}
VOCABULARY = range(1000, 40000)
"""Random prompts are made of these ids: no special ones."""


@dataclass(frozen=True)
class Cell:
    """`batch` prompts of `context` random tokens each, then `tokens` new ones; `busy`: processes that only spin."""

    measure: str
    batch: int
    context: int
    tokens: int
    busy: int = 0

    @property
    def name(self) -> str:
        """As it stands in the report."""
        beside = f", {self.busy} busy" if self.busy else ""
        return f"{self.measure} {self.batch} x {self.context}{beside}"

    def rate(self, moments: list[tuple[float, int]]) -> float:
        """Tokens per second: of the prompts, or of the answers after every one has its first token."""
        (first, begun), (last, done) = moments[0], moments[-1]
        if self.measure == "prefill":
            return self.batch * self.context / first
        return (done - begun) / (last - first)


@dataclass(frozen=True)
class Group:
    """Cells that are measured on the same weights with the same engines."""

    name: str
    weights: str
    peers: tuple[str, ...]
    cells: tuple[Cell, ...]


FOUR_BIT_CELLS = (
    Cell("decode", 1, 128, 128),
    Cell("decode", 1, 1024, 128),
    Cell("decode", 1, 3900, 128),
    Cell("prefill", 1, 512, 1),
    Cell("prefill", 1, 2048, 1),
    Cell("decode", 1, 128, 32, busy=1),
)
GROUPS = (
    Group("q4_1", "gguf", ("llama.cpp",), FOUR_BIT_CELLS),
    Group("q4_0", "gguf_q4_0", ("llama.cpp",), FOUR_BIT_CELLS[:1]),
    Group(
        "bfloat16",
        "folder",
        ("transformers", "vllm"),
        (
            Cell("decode", 1, 128, 128),
            Cell("decode", 16, 128, 128),
            Cell("decode", 64, 128, 128),
            Cell("decode", 16, 1024, 64),
            Cell("decode", 16, 4096, 32),
            Cell("prefill", 1, 2048, 1),
            Cell("prefill", 8, 256, 1),
        ),
    ),
)


class Peer:
    """One engine's process. Starts at once; `wait_ready` returns its facts; `run` answers one cell."""

    def __init__(self, name: str, python: str, model: str, options: argparse.Namespace) -> None:
        self.name = name
        self._started = time.perf_counter()
        script = Path(__file__).parent / "peer_engines" / SCRIPTS[name]
        command = [python, str(script), "--model", model, "--threads", options.threads]
        self._log = (options.logs / f"{name}.log").open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.start_seconds = 0.0

    def wait_ready(self) -> dict[str, Any]:
        """Until its first token; `start_seconds` says how long that took. It is stopped then."""
        facts: dict[str, Any] = self._answer()["ready"]
        self.start_seconds = time.perf_counter() - self._started
        self._signal(signal.SIGSTOP)
        return facts

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int]]:
        """See peer_engines/answers.py."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        moments: list[tuple[float, int]] = self._answer()["moments"]
        self._signal(signal.SIGSTOP)
        return moments

    def close(self) -> None:
        """Its stdin ends; who does not go then is killed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def __enter__(self) -> "Peer":
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
            sys.exit(f"{self.name} ended without an answer; its output: {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """So many processes that only compute, for as long as the block runs."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> None:
    """Measure the groups whose peers were given, and print one JSON object."""
    options = parse_options()
    report: dict[str, Any] = {
        "benchmark": "peers",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "model": options.model,
        "rounds": options.rounds,
        "groups": {},
    }
    weights = find_weights(options)
    for group in GROUPS:
        peers = [name for name in group.peers if name in options.peer]
        if peers and options.groups in ("all", group.name):
            report["groups"][group.name] = measure_group(group, peers, weights[group.weights], options)
    print(json.dumps(report, indent=1))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(SCRIPTS))
    parser.add_argument("--model", default="smollm2", help="needs a GGUF file for llama.cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--groups", default="all", choices=["all", *(group.name for group in GROUPS)])
    parser.add_argument("--cells", default="", help="only cells whose name contains this")
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder for what the engines print")
    options = parser.parse_args()
    options.peer = dict(one.split("=", 1) for one in options.peer)
    unknown = [name for name in options.peer if name not in SCRIPTS or name == OURS]
    if unknown or not options.peer:
        parser.error(f"--peer NAME=PYTHON with NAME one of {', '.join(name for name in SCRIPTS if name != OURS)}")
    return options


def find_weights(options: argparse.Namespace) -> dict[str, str]:
    """The folder and the GGUF files of the model; a Q4_0 file is made with llama.cpp's own quantizer."""
    files = resolve_model(EngineArgs(model=options.model), lambda *_: None)
    weights = {"folder": str(files.folder)}
    if files.gguf is None or "llama.cpp" not in options.peer:
        return weights
    weights["gguf"] = str(files.gguf)
    q4_0 = files.gguf.with_name(f"{files.gguf.stem}.requantized-Q4_0.gguf")
    if not q4_0.exists():
        code = (
            "import ctypes, llama_cpp, sys\n"
            "params = llama_cpp.llama_model_quantize_default_params()\n"
            "params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True\n"
            "sys.exit(llama_cpp.llama_model_quantize(*(p.encode() for p in sys.argv[1:]), ctypes.byref(params)))"
        )
        command = [options.peer["llama.cpp"], "-c", code, str(files.gguf), str(q4_0)]
        subprocess.run(command, check=True, capture_output=True)
    return weights | {"gguf_q4_0": str(q4_0)}


def measure_group(group: Group, peers: list[str], model: str, options: argparse.Namespace) -> dict[str, Any]:
    """All cells of one group, engine after engine in each round."""
    pythons = {OURS: sys.executable} | {name: options.peer[name] for name in peers}
    report: dict[str, Any] = {"facts": {}, "start_seconds": {}, "cells": {}}
    with ExitStack() as stack:
        engines = []
        for name, python in pythons.items():
            engine = stack.enter_context(Peer(name, python, model, options))
            report["facts"][name] = engine.wait_ready()
            report["start_seconds"][name] = round(engine.start_seconds, 2)
            engines.append(engine)
        for cell in group.cells:
            if options.cells in cell.name:
                report["cells"][cell.name] = measure_cell(cell, engines, options.rounds)
                print(group.name, cell.name, report["cells"][cell.name], file=sys.stderr)
    return report


def measure_cell(cell: Cell, engines: list[Peer], rounds: int) -> dict[str, Any]:
    """Tokens per second of each engine, and ours over each peer's: medians over the rounds."""
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for number in range(rounds):
        for engine in engines if number % 2 == 0 else reversed(engines):
            with competitors(cell.busy):
                rates[engine.name].append(cell.rate(engine.run(random_prompts(cell, number), cell.tokens)))
    ratios = {
        f"over {peer}": round(statistics.median(a / b for a, b in zip(rates[OURS], rates[peer], strict=True)), 2)
        for peer in rates
        if peer != OURS
    }
    return {name: round(statistics.median(values), 1) for name, values in rates.items()} | ratios


def random_prompts(cell: Cell, seed: int) -> list[list[int]]:
    """Prompts without a common prefix, the same ones for every engine, other ones in each round."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = rng.integers(VOCABULARY.start, VOCABULARY.stop, (cell.batch, cell.context)).tolist()
    return prompts


if __name__ == "__main__":
    main()
