"""Which notebook this kernel belongs to, as far as a kernel knows."""

import os
import re
from pathlib import Path
from typing import Any

__all__ = ["notebook_name"]

_KERNEL_FILE = re.compile(r"kernel-([0-9A-Za-z-]+)\.json")


def notebook_name(shell: Any) -> str:
    """The same in a restarted kernel of the same notebook: the notebook's path if the server told it, else the kernel's
    id, which stands in its connection file's name. "" in a terminal.
    """
    if getattr(shell, "kernel", None) is None:
        return ""
    path = os.environ.get("JPY_SESSION_NAME")
    if path:
        return path
    found = _KERNEL_FILE.fullmatch(Path(getattr(shell.kernel.parent, "connection_file", "") or "").name)
    return found[1] if found else ""
