"""What a report says of the machine that it was measured on."""

import platform

__all__ = ["cpu_name"]


def cpu_name() -> str:
    """The CPU's name where /proc tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
