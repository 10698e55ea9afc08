"""`llmkernel ps | stop | logs`: the engines of this user, whoever started them."""
# ruff: noqa: T201 - printing is what a shell command does

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from llmkernel.client.attachment import RunningEngine
from llmkernel.client.running_engines import find_engine, running_engines, stop_engine
from llmkernel.config import format_bytes
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.notebook.load_line import stage_line
from llmkernel.notebook.plain_text import clean_text
from llmkernel.protocol.control import EngineStatus
from llmkernel.protocol.process_handle import ProcessHandle
from llmkernel.protocol.run_card import RunCard

__all__ = ["add_engine_verbs"]

ANSWER_SECONDS = 2.0
"""How long `ps` waits for an engine's answer before it calls it stuck."""

FOLLOW_SECONDS = 0.2
_HEADER = ("PID", "MODEL", "STATE", "MEMORY", "RUNNING", "WAITING", "CLIENTS", "UP", "OWNER")
_TAIL_BYTES = 2**20


def add_engine_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verbs to the parser; each sets `run`, a function of the parsed arguments that returns the exit code."""
    ps = verbs.add_parser("ps", help="list the engines that run", allow_abbrev=False)
    ps.set_defaults(run=_ps)
    stop = verbs.add_parser("stop", help="end engines", allow_abbrev=False)
    stop.add_argument("pids", metavar="PID", type=int, nargs="+", help="of an engine, as `llmkernel ps` lists it")
    stop.set_defaults(run=_stop)
    logs = verbs.add_parser("logs", help="what an engine wrote", allow_abbrev=False)
    logs.add_argument("pid", metavar="PID", type=int, nargs="?", help="of an engine; the only one, if left out")
    logs.add_argument("-n", "--lines", metavar="N", type=_count, default=50, help="the last N lines (50)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the engine ends")
    logs.set_defaults(run=_logs)


def _ps(_: argparse.Namespace) -> int:
    rows = [_row(engine) for engine in running_engines()]
    if not rows:
        print("No engine runs.")
        return 0
    _print_table([_HEADER, *rows])
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    for engine in [find_engine(pid) for pid in arguments.pids]:  # all of them are there, or none is stopped
        model = _model(engine)
        held = stop_engine(engine)
        print(f"{engine.pid} ({model}) ended, {format_bytes(held)} given back.")
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    engine = _only_engine() if arguments.pid is None else find_engine(arguments.pid)
    path = engine.log_path
    text, position = _tail(path, arguments.lines)
    _write(text)
    if arguments.follow:
        _follow(engine, path, position)
    return 0


def _row(engine: RunningEngine) -> tuple[str, ...]:
    try:
        if not engine.has_control:
            raise EngineDeadError
        with engine.control() as control:
            status = control.status(ANSWER_SECONDS)
    except EngineDeadError:
        state = "stuck" if engine.has_control else "starting"
        return (str(engine.pid), _model(engine), state, "", "", "", "", "", str(engine.owner_pid))
    return (
        str(status.pid),
        _model(engine),
        _state(status),
        format_bytes(status.memory),
        str(status.running),
        str(status.waiting),
        str(len(status.clients)),
        _duration(status.uptime),
        str(status.owner_pid) if status.lease_left is None else "gone",
    )


def _state(status: EngineStatus) -> str:
    if status.lease_left is not None:
        return f"kept alive for {_duration(status.lease_left)}"
    if status.state == "starting":
        return f"loading: {stage_line(status.stage)}"
    if status.step_age >= 1:
        return f"step running for {status.step_age:.0f} s"
    return status.state


def _model(engine: RunningEngine) -> str:
    card = RunCard.read(engine.run_path)
    return clean_text(card.model) if card is not None else "?"


def _only_engine() -> RunningEngine:
    engines = running_engines()
    if len(engines) != 1:
        known = ", ".join(str(engine.pid) for engine in engines)
        raise InvalidRequestError(f"Several engines run; name one of {known}." if known else "No engine runs.")
    return engines[0]


def _follow(engine: RunningEngine, path: Path, position: int) -> None:
    """Write what is added to the log until the process has ended."""
    try:
        handle = ProcessHandle(engine.pid)
    except ProcessLookupError:
        return
    with handle, path.open("rb") as log:
        ended = False
        while not ended:
            ended = handle.wait(FOLLOW_SECONDS)  # nothing tells of a file that grows
            size = os.fstat(log.fileno()).st_size
            log.seek(position if size >= position else 0)  # its older half was dropped
            _write(log.read().decode("utf-8", "replace"))
            position = log.tell()


def _tail(path: Path, lines: int) -> tuple[str, int]:
    """The last lines, and where they end."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _TAIL_BYTES))
        found = log.read().decode("utf-8", "replace").splitlines(keepends=True)
        return "".join(found[-lines:]) if lines else "", log.tell()


def _write(text: str) -> None:
    if text:
        print(clean_text(text) if sys.stdout.isatty() else text, end="", flush=True)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number
