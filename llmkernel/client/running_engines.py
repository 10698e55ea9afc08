"""The engines of this user that run on this machine, found by their run directories."""

import os
from collections.abc import Iterator
from pathlib import Path

from llmkernel.client.attachment import RunningEngine
from llmkernel.errors import InvalidRequestError
from llmkernel.protocol.run_card import RunCard
from llmkernel.protocol.run_directory import live_runs

__all__ = ["find_engine", "running_engines"]


def running_engines(base: str | os.PathLike[str] | None = None) -> list[RunningEngine]:
    """Oldest first. base: the folder of their run directories; None = wherever an engine of ours may have made one."""
    found = list(_cards(base))
    return [engine for _, engine in sorted(found, key=lambda pair: pair[0])]


def find_engine(pid: int) -> RunningEngine:
    """The engine with this pid; InvalidRequestError if there is none."""
    engines = running_engines()
    for engine in engines:
        if engine.pid == pid:
            return engine
    known = ", ".join(str(engine.pid) for engine in engines) or "none runs"
    raise InvalidRequestError(f"{pid} is no engine of yours ({known}); see `llmkernel ps`.", parameter="pid", value=pid)


def _cards(base: str | os.PathLike[str] | None) -> Iterator[tuple[float, RunningEngine]]:
    for path in live_runs(base):
        card = RunCard.read(path)
        if card is not None:
            yield card.started, RunningEngine(Path(path), card.pid, card.owner_pid)
