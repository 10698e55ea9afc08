"""The figures of the README, one benchmark after the other: `python -m benchmarks` prints one JSON object.

    python -m benchmarks [NAME ...]    only these

Each runs in a process of its own. Look at `load_average` before you quote anything: the machine should be quiet.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

RUNS = {
    "load_ext": [],
    "startup": [],
    "decode": ["--peer-transformers", "--through-async"],
    "frontend": [],
    "wire": [],
    "scheduler": [],
    "sampler": [],
    "idle": [],
    "busy_machine": [],
    "speculation": ["--batches", "1,4"],
}
"""Benchmark -> its arguments."""


def main() -> None:
    names = sys.argv[1:] or list(RUNS)
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        sys.exit(f"Unknown benchmark {', '.join(unknown)}; there are {', '.join(RUNS)}.")
    report = {"machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        script = Path(__file__).with_name(f"{name}.py")
        done = subprocess.run([sys.executable, script, *RUNS[name]], stdout=subprocess.PIPE, text=True, check=True)
        report[name] = json.loads(done.stdout)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
