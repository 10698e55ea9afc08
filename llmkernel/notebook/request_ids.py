"""The ids of requests that people see: "g3", "g3.2" (its second prompt), "1_g3.2" (the second answer to that)."""

import re

__all__ = ["generation_id", "shown_id"]

_SHOWN = re.compile(r"(?:\d+_)?(g\d+)(?:\.\d+)?")


def shown_id(engine_id: str) -> str:
    """Of the engine's "g3-1f2e", or "1_g3-1f2e"."""
    return engine_id.rpartition("-")[0]


def generation_id(id: str) -> str:
    """The generation that a shown id belongs to: "g3". Anything else stays as it is."""
    found = _SHOWN.fullmatch(id)
    return found[1] if found else id
