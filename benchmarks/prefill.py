"""Prefill speed of the engine: prompt tokens per second by number and length of prompts, as JSON on stdout.

    python benchmarks/prefill.py [--chunk 2048]

EngineCore in this process, no prefix shared, until every prompt of the cell has its first token.
"""

import json
import os
import statistics
import time

from benchmarks.core_requests import add_requests
from benchmarks.engine_options import engine_args, engine_parser
from benchmarks.machine import cpu_name
from llmkernel.engine.core import EngineCore
from llmkernel.engine.executor import UniProcExecutor

CELLS = [(1, 128), (1, 512), (1, 2048), (1, 8000), (8, 256), (32, 128)]
"""Prompts x tokens of each."""


def main() -> None:
    """Measure every cell some times and print one JSON object."""
    parser = engine_parser(__doc__)
    parser.add_argument("--chunk", default=2048, type=int, help="max_num_batched_tokens")
    parser.add_argument("--rounds", default=3, type=int)
    options = parser.parse_args()
    args = engine_args(options, max_num_batched_tokens=options.chunk, enable_prefix_caching=False)
    core = EngineCore(args, UniProcExecutor(), lambda *_: None)
    cells = {}
    for batch, context in CELLS:
        seconds = [measure(core, batch, context) for _ in range(options.rounds)]
        cells[f"{batch} x {context}"] = {
            "tokens_per_second": round(batch * context / statistics.median(seconds), 1),
            "seconds": round(statistics.median(seconds), 4),
        }
    report = {
        "benchmark": "prefill",
        "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
        "model": core.ready.model.name,
        "dtype": core.ready.model.dtype,
        "quantization": core.ready.model.quantization,
        "chunk": options.chunk,
        "cells": cells,
    }
    core.shutdown()
    print(json.dumps(report, indent=1))


def measure(core: EngineCore, batch: int, context: int) -> float:
    """Seconds from the first step to the first token of the last prompt."""
    add_requests(core, batch, context, 1)
    started = time.perf_counter()
    while core.has_requests():
        core.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
