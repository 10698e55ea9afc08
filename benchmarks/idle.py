"""What a notebook with a loaded model costs while nobody asks anything: CPU time and wake-ups of kernel and engine.

Beside them a kernel without llmkernel, to compare with. Promised: under 1 % of a core for both. Wake-ups are those of
the main threads.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from typing import Any

import psutil
from jupyter_client import KernelManager

PROMISED = 1.0
"""Percent of one core, kernel and engine together (design section 6)."""


def main() -> None:
    """Measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--model", default="fake:")
    options = parser.parse_args()
    bare = measure([], options.seconds)
    loaded = measure(
        ["%load_ext llmkernel", f"%llm load {options.model} --name m", "%generate --max-tokens 20 hello"],
        options.seconds,
    )
    report = {
        "benchmark": "idle",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "seconds": options.seconds,
        "model": options.model,
        "promised_percent": PROMISED,
        "bare_kernel": bare,
        "with_engine": loaded,
    }
    print(json.dumps(report, indent=2))


def measure(cells: list[str], seconds: float) -> dict[str, Any]:
    """A kernel that has run `cells`, for `seconds` of nothing; percent of one core."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}, stderr=subprocess.DEVNULL)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        for code in cells:
            reply = client.execute_interactive(code, output_hook=lambda _: None, timeout=120)
            assert reply["content"]["status"] == "ok", reply["content"]
        kernel = psutil.Process(manager.provisioner.pid)  # type: ignore[union-attr, attr-defined]
        engines = [child for child in kernel.children() if _is_engine(child)]
        processes = {"kernel": kernel, **({"engine": engines[0]} if engines else {})}
        time.sleep(2)  # the front end's last messages, the engine's watch
        before = {name: _spent(process) for name, process in processes.items()}
        time.sleep(seconds)
        after = {name: _spent(process) for name, process in processes.items()}
        shares = {f"{name}_percent": round(100 * (after[name][0] - before[name][0]) / seconds, 2) for name in processes}
        wakes = {f"{name}_wakes": after[name][1] - before[name][1] for name in processes}
        return {**shares, "percent": round(sum(shares.values()), 2), **wakes}
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


def _spent(process: psutil.Process) -> tuple[float, int]:
    return sum(process.cpu_times()[:2]), process.num_ctx_switches().voluntary


def _is_engine(process: psutil.Process) -> bool:
    return "llmkernel.engine" in process.cmdline()


if __name__ == "__main__":
    main()
