"""The engines of this user that run on this machine, found by their run directories."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from llmkernel.client.attachment import RunningEngine
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.protocol.process_handle import ProcessHandle
from llmkernel.protocol.run_card import RunCard
from llmkernel.protocol.run_directory import live_runs

__all__ = ["find_engine", "running_engines", "stop_engine"]

ANSWER_SECONDS = 2.0
"""How long to wait for the engine's answer before it is sent signals."""

_SIGNAL_WAIT = 1.0


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


def stop_engine(engine: RunningEngine, timeout: float = 5.0) -> int:
    """End the engine, whoever owns it: ask it, then SIGTERM, then SIGKILL. Returns the bytes of memory that it held.

    timeout: seconds that it may take once it has answered. Nothing but this very process is ever sent a signal.
    """
    try:
        handle = ProcessHandle(engine.pid)
    except ProcessLookupError:
        return 0
    with handle:
        if not _is_engine(engine):
            raise InvalidRequestError(
                f"Process {engine.pid} is no engine any more; nothing was stopped.", parameter="pid"
            )
        held = _memory(engine.pid)
        with contextlib.suppress(EngineDeadError), engine.control() as control:
            control.shutdown(ANSWER_SECONDS)
            handle.wait(timeout)
        for end in (handle.terminate, handle.kill):
            if not handle.ended:
                end()
                handle.wait(_SIGNAL_WAIT)
        if not handle.ended:
            raise EngineDeadError(f"Engine process {engine.pid} does not end, not even by SIGKILL.")
        return held


def _is_engine(engine: RunningEngine) -> bool:
    """Asked after the process is held by a handle: then its pid is not another's."""
    import psutil  # lazy: 20 ms

    card = RunCard.read(engine.run_path)
    try:
        command = psutil.Process(engine.pid).cmdline()
    except psutil.Error:
        return False
    return card is not None and card.pid == engine.pid and str(engine.run_path) in command


def _memory(pid: int) -> int:
    import psutil  # lazy: 20 ms

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _cards(base: str | os.PathLike[str] | None) -> Iterator[tuple[float, RunningEngine]]:
    for path in live_runs(base):
        card = RunCard.read(path)
        if card is not None:
            yield card.started, RunningEngine(Path(path), card.pid, card.owner_pid)
