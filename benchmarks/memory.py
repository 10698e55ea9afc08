"""Peak memory of an engine, as JSON: a load, then a batch of prompts and answers, in this process.

    python -m benchmarks.memory [--dtype bfloat16] [--quantization none] [--batch 64] [--context 128] [--tokens 16]

Bytes. peak: the most that was resident (VmHWM), peak_of_load: until the model was ready. weights, kv_cache: as the
engine counts them; the pool commits pages as they are written, so kv_used is what counts. beside: peak - weights -
kv_used: the interpreter, torch, activations, what a load needs for a moment.
"""

import argparse
import json
from pathlib import Path

from benchmarks.core_requests import add_requests
from llmkernel.config import EngineArgs
from llmkernel.engine.core import EngineCore
from llmkernel.engine.executor import UniProcExecutor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none", choices=["auto", "none", "int8", "int4"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    args = EngineArgs(model=options.model, dtype=options.dtype, quantization=options.quantization)
    core = EngineCore(args, UniProcExecutor(), lambda *_: None)
    loaded = peak()
    add_requests(core, options.batch, options.context, options.tokens)
    usage = 0.0
    while core.has_requests():
        core.step()
        usage = max(usage, core.get_stats()["kv_cache_usage"])
    facts = core.ready
    used = round(usage * facts.kv_cache_bytes)
    whole = peak()
    report = {
        "benchmark": "memory",
        "model": facts.model.name,
        "dtype": facts.model.dtype,
        "quantization": options.quantization,
        "batch": options.batch,
        "context": options.context,
        "peak": whole,
        "peak_of_load": loaded,
        "weights": facts.model.weights_bytes,
        "kv_cache": facts.kv_cache_bytes,
        "kv_used": used,
        "beside": whole - facts.model.weights_bytes - used,
    }
    core.shutdown()
    print(json.dumps(report, indent=1))


def peak() -> int:
    """Bytes that were resident at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("This system does not tell peaks (VmHWM); run it on Linux.")


if __name__ == "__main__":
    main()
