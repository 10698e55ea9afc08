"""What other programs on the machine cost a step: 0, 1, 2 of them, by the way the number of threads is chosen, as JSON.

    python -m benchmarks.busy_machine [--policies governor 2 1 2-libgomp] [--batches 1] [--seconds 4]

    governor    num_threads="auto": looked at before each step (engine/worker/thread_governor.py)
    1, 2, ...   num_threads=N, with the engine's own OpenMP settings (client/environment.py)
    N-libgomp   num_threads=N, with libgomp's defaults: without GOMP_SPINCOUNT

Each policy runs in a process of its own: EngineCore, greedy decoding, context 128. The phases follow each other while
the requests go on, `--seconds` each: no competitor, one, two (processes that multiply numbers in Python, on no
processor in particular), and none again. Steps count from the moment the competitors run, so what the governor needs
to notice is in the figures: median, 99th percentile and the longest. threads: mean over the steps of the phase.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.core_requests import add_requests
from benchmarks.machine import cpu_name
from llmkernel.client.environment import engine_environment
from llmkernel.config import EngineArgs
from llmkernel.engine.core import EngineCore
from llmkernel.engine.executor import UniProcExecutor

PHASES = (0, 1, 2, 0)
"""Competitors of each phase."""

SETTLE = 2
"""Seconds without competitors before the first phase: kernels are chosen, the governor has looked around."""

_SPIN = """
import sys, time
x, until = 1, time.monotonic() + float(sys.argv[1])
print(flush=True)
while time.monotonic() < until:
    for _ in range(10000):
        x = x * 3 % 1000003
"""


def main() -> None:
    options = _parse()
    if options.one:
        print(json.dumps(_measure(options.one, options)))
        return
    report: dict[str, Any] = {
        "benchmark": "busy_machine",
        "model": options.model,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "context": options.context,
        "seconds_per_phase": options.seconds,
        "policies": {},
    }
    for policy in options.policies:
        environment = engine_environment()
        if policy.endswith("-libgomp"):
            environment.pop("GOMP_SPINCOUNT", None)
        arguments = [sys.executable, "-m", "benchmarks.busy_machine", *sys.argv[1:], "--one", policy]
        done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        report["policies"][policy] = json.loads(done.stdout)
    print(json.dumps(report, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto", choices=["auto", "none", "int8", "int4"])
    parser.add_argument("--policies", nargs="+", default=["governor", "2", "1", "2-libgomp"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(policy: str, options: argparse.Namespace) -> dict[str, Any]:
    threads: str | int = "auto" if policy == "governor" else int(policy.removesuffix("-libgomp"))
    args = EngineArgs(model=options.model, dtype=options.dtype, quantization=options.quantization, num_threads=threads)
    core = EngineCore(args, UniProcExecutor(), lambda *_: None)
    batches = {}
    for batch in options.batches:
        _begin(core, batch, options.context)
        _steps(core, SETTLE)
        batches[batch] = [_phase(core, competitors, options.seconds) for competitors in PHASES]
        core.abort_all_requests()
        while core.has_requests():
            core.step()
    core.shutdown()
    return {"spin_count": os.environ.get("GOMP_SPINCOUNT"), "batches": batches}


def _begin(core: EngineCore, batch: int, context: int) -> None:
    add_requests(core, batch, context, core.ready.max_model_len - context)
    while core.get_stats()["num_batched_tokens"] != batch:  # until all of them decode
        core.step()


def _phase(core: EngineCore, competitors: int, seconds: float) -> dict[str, Any]:
    with ExitStack() as stack:
        for _ in range(competitors):
            stack.enter_context(_competitor(seconds + 10))
        times, threads = _steps(core, seconds)
    ordered = sorted(times)
    return {
        "competitors": competitors,
        "step_ms_median": round(statistics.median(times) * 1e3, 2),
        "step_ms_p99": round(ordered[int(len(ordered) * 0.99)] * 1e3, 2),
        "step_ms_max": round(ordered[-1] * 1e3, 2),
        "step_ms_mean": round(statistics.mean(times) * 1e3, 2),
        "threads": round(statistics.mean(threads), 2),
        "steps": len(times),
    }


def _steps(core: EngineCore, seconds: float) -> tuple[list[float], list[int]]:
    """Seconds of each step, and its threads."""
    times: list[float] = []
    threads: list[int] = []
    until = time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        outputs = core.step()
        times.append(time.perf_counter() - started)
        threads += [out.scheduler_stats.num_threads for out in outputs.values() if out.scheduler_stats is not None]
    return times, threads


@contextmanager
def _competitor(seconds: float) -> Iterator[None]:
    """A process that takes all it can get, from the moment it runs; after so many seconds it ends by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SPIN, str(seconds)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main()
