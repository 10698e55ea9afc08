"""What `%load_ext llmkernel` costs a fresh Jupyter kernel, as JSON.

Each repeat starts a kernel, loads the extension and looks: seconds, memory that came with it, and whether torch or
transformers came in. `first_load_import_seconds`: what the first `%llm load` imports (numpy, zmq, tokenizers, jinja2).
`kernel_mib_after_a_generation`: the kernel's resident memory, with a fake model behind it.

    python benchmarks/load_ext.py [--repeats 5]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from typing import Any

from jupyter_client import KernelManager

PROMISED = 0.4
"""Seconds (design section 6)."""

MEASURE = """
import json, sys, time, psutil
_process = psutil.Process()
_before, _modules, _started = _process.memory_info().rss, set(sys.modules), time.perf_counter()
get_ipython().run_line_magic("load_ext", "llmkernel")
_seconds = time.perf_counter() - _started
_new = {name.partition(".")[0] for name in set(sys.modules) - _modules}
print(json.dumps({"seconds": _seconds, "mib": (_process.memory_info().rss - _before) / 2**20,
                  "brought": sorted(_new), "torch": bool({"torch", "transformers"} & set(sys.modules))}))
"""
LOAD = """
_started = time.perf_counter()
from llmkernel.llm.async_llm import AsyncLLM
print(json.dumps({"seconds": time.perf_counter() - _started}))
"""
GENERATE = """
%llm load fake: --name fake
%generate --quiet --max-tokens 100 hello
print(json.dumps({"mib": _process.memory_info().rss / 2**20,
                  "torch": bool({"torch", "transformers"} & set(sys.modules))}))
"""


def main() -> None:
    """Measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    runs = [_run() for _ in range(parser.parse_args().repeats)]
    seconds = [run["load_ext"]["seconds"] for run in runs]
    report = {
        "benchmark": "load_ext",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "promised_seconds": PROMISED,
        "seconds": {"median": round(statistics.median(seconds), 3), "all": [round(value, 3) for value in seconds]},
        "memory_mib": round(statistics.median(run["load_ext"]["mib"] for run in runs), 1),
        "brought": runs[0]["load_ext"]["brought"],
        "torch_or_transformers": any(run[part]["torch"] for run in runs for part in ("load_ext", "generate")),
        "first_load_import_seconds": round(statistics.median(run["first_load"]["seconds"] for run in runs), 3),
        "kernel_mib_after_a_generation": round(statistics.median(run["generate"]["mib"] for run in runs), 1),
    }
    print(json.dumps(report, indent=2))


def _run() -> dict[str, Any]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}, stderr=subprocess.DEVNULL)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        client.execute_interactive("1", output_hook=_ignore, timeout=60)  # the kernel's own first cell
        return {
            "load_ext": _printed(client, MEASURE),
            "first_load": _printed(client, LOAD),
            "generate": _printed(client, GENERATE),
        }
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


def _printed(client: Any, code: str) -> Any:
    """Run a cell; the JSON of the last line that it prints."""
    lines: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            lines.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=keep, timeout=60)
    if reply["content"]["status"] != "ok":
        sys.exit(f"The cell failed: {reply['content']}")
    return json.loads("".join(lines).splitlines()[-1])


def _ignore(_message: dict[str, Any]) -> None:
    """Nothing to keep."""


if __name__ == "__main__":
    main()
