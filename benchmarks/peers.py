"""This engine beside llama.cpp, vLLM and transformers: same weights, prompts and lengths, in turns, as ratios.

    python benchmarks/peers.py --peer llama.cpp=/envs/llama/bin/python --peer vllm=/envs/vllm/bin/python \\
                               --peer transformers=.venv/bin/python --into benchmarks/results/peers.json
    python benchmarks/peers.py --peer ... --into ... --groups bfloat16 --cells "decode 16 x *" --rounds 1

Every engine is a process of its own under the interpreter given for it (peer_engines/), kept for a whole group of
cells and stopped while another one is measured. In each round a cell is run by all of them, one after the other; a
ratio is that of one round, and the median of the rounds is reported. `decode` is the rate from the moment when every
request has its first token to its last one, `prefill` that of prompt tokens until then. With --into, what was measured
replaces the same figures in that file and leaves its others as they are (see PeerReport).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from benchmarks.machine import cpu_name
from benchmarks.peer_process import OURS, PeerProcess, add_peer_option, end_in_order
from benchmarks.peer_report import PeerReport
from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_source import resolve_model

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

    def chosen(self, patterns: list[str]) -> list[Cell]:
        """The cells that one of these names or patterns means."""
        return [cell for cell in self.cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]


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
            Cell("decode", 16, 4096, 16),
            Cell("prefill", 1, 2048, 1),
            Cell("prefill", 8, 256, 1),
        ),
    ),
)


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
    """Measure what was chosen with the peers that were given, and print one JSON object."""
    options = parse_options()
    end_in_order()
    peers = dict(options.peer)
    report = PeerReport(options.into, options.model)
    weights = find_weights(options.model, peers.get("llama.cpp"))
    for group in GROUPS:
        cells = group.chosen(options.cells)
        pythons = {name: peers[name] for name in group.peers if name in peers}
        if cells and pythons and group.name in options.groups:
            arguments = ["--model", weights[group.weights], "--threads", options.threads]
            measure_group(group.name, cells, pythons, arguments, options.rounds, report)
    print(json.dumps(report.content, indent=1))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peer_option(parser, [name for name in SCRIPTS if name != OURS])
    parser.add_argument("--model", default="smollm2", help="needs a GGUF file for llama.cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="auto")
    names = [group.name for group in GROUPS]
    parser.add_argument("--groups", nargs="+", default=names, choices=names)
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="CELL", help='names, or patterns: "decode 1 x *"')
    parser.add_argument("--into", type=Path, help="a report of this benchmark, made if there is none")
    options = parser.parse_args()
    if not options.peer:
        parser.error("give at least one --peer NAME=PYTHON")
    for pattern in options.cells:
        if not any(group.chosen([pattern]) for group in GROUPS if group.name in options.groups):
            there = dict.fromkeys(cell.name for group in GROUPS if group.name in options.groups for cell in group.cells)
            parser.error(f"no cell {pattern!r} in {', '.join(options.groups)}; there are: {'; '.join(there)}")
    return options


def find_weights(model: str, llama_cpp: str | None) -> dict[str, str]:
    """The folder and, for llama.cpp, the GGUF files of the model; one in Q4_0 is made with its own quantizer."""
    files = resolve_model(EngineArgs(model=model), lambda *_: None)
    weights = {"folder": str(files.folder)}
    if files.gguf is None or llama_cpp is None:
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
        subprocess.run([llama_cpp, "-c", code, str(files.gguf), str(q4_0)], check=True, capture_output=True)
    return weights | {"gguf_q4_0": str(q4_0)}


def measure_group(
    group: str, cells: list[Cell], pythons: dict[str, str], arguments: list[str], rounds: int, report: PeerReport
) -> None:
    """These cells, engine after engine in each round, into the report."""
    with ExitStack() as stack:
        engines = {}
        for name, python in ({OURS: sys.executable} | pythons).items():
            engine = stack.enter_context(PeerProcess(name, python, SCRIPTS[name], arguments))
            engines[engine] = engine.wait_ready()
        run = report.begin_run(cpu_name(), engines)
        for cell in cells:
            started = time.perf_counter()
            figures = report.add(run, group, cell.name, measure_cell(cell, list(engines), rounds))
            print(f"{group}, {cell.name}: {time.perf_counter() - started:.0f} s, {figures}", file=sys.stderr)


def measure_cell(cell: Cell, engines: list[PeerProcess], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each engine, round by round; every other round in the opposite order."""
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for number in range(rounds):
        question = {"prompts": random_prompts(cell, number), "tokens": cell.tokens}
        for engine in engines if number % 2 == 0 else engines[::-1]:
            with competitors(cell.busy):
                rates[engine.name].append(cell.rate(engine.ask(question)["moments"]))
    return rates


def random_prompts(cell: Cell, seed: int) -> list[list[int]]:
    """Prompts without a common prefix, the same ones for every engine, other ones in each round."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = rng.integers(VOCABULARY.start, VOCABULARY.stop, (cell.batch, cell.context)).tolist()
    return prompts


if __name__ == "__main__":
    main()
