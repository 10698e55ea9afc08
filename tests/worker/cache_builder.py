"""A process that builds a cache entry and can be held in the middle of it. Imports no torch: it must start fast."""

from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from llmkernel.engine.worker.model_cache import ModelCache

IDENTITY: dict[str, Any] = {"sha256": "abc"}


def write(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"x" * 1000)


def build_slowly(root: Path, started: Event, go_on: Event, built: Any) -> None:
    """Build entry "m"; `started` is set in the middle, where it waits for `go_on`."""

    def build(folder: Path) -> None:
        write(folder)
        started.set()
        go_on.wait(30)
        built.value += 1

    ModelCache(root).make("m", IDENTITY, build, needed=1000)
