"""The environment of the engine process: the kernel's, without what belongs to a notebook or a terminal."""

import os
from collections.abc import Mapping

__all__ = ["engine_environment"]

_NOTEBOOK_PREFIXES = ("JPY_", "PYDEVD_", "IPYTHON")
_NOTEBOOK_NAMES = frozenset(
    {"MPLBACKEND", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PAGER", "GIT_PAGER", "PYTHONSTARTUP", "PYTHONINSPECT"}
)
_FORCED = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
_DEFAULTS = {
    "GOMP_SPINCOUNT": "10000",  # cpu.md section 5: as fast as libgomp's default, and gives way to other programs
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def engine_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environment` (os.environ) as the engine should see it: what the user set for OpenMP and the Hub stays."""
    source = os.environ if environment is None else environment
    kept = {
        name: value
        for name, value in source.items()
        if name not in _NOTEBOOK_NAMES and not name.startswith(_NOTEBOOK_PREFIXES)
    }
    return _DEFAULTS | kept | _FORCED
