"""Attachment: our place at an engine that somebody else started and owns."""

import contextlib
import os
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path

from llmkernel.client.control_client import ControlClient, EngineStuckError
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.protocol.control import Attach
from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.run_folder import check_private

__all__ = ["Attachment", "RunningEngine"]

CONTROL_WAIT = 5.0
DETACH_TIMEOUT = 0.5


@dataclass(frozen=True)
class RunningEngine:
    """An engine process that somebody of this user started. run_path: its run directory."""

    run_path: Path
    pid: int
    owner_pid: int

    @property
    def control_address(self) -> str:
        """Where its control channel is. A port is known once the process is up: waits CONTROL_WAIT for that at most."""
        if self.key is None:
            return f"ipc://{self.run_path / 'ctl'}"
        deadline = time.monotonic() + CONTROL_WAIT
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                return (self.run_path / "ctladdr").read_text("ascii")
            time.sleep(0.01)  # nothing tells of a file that appears
        raise EngineStuckError.after(CONTROL_WAIT)

    @property
    def key(self) -> CurveKey | None:
        """The key of the run; None where the sockets are files."""
        with contextlib.suppress(FileNotFoundError):
            return CurveKey.parse((self.run_path / "key").read_bytes())
        return None

    @property
    def has_control(self) -> bool:
        """The control channel is there."""
        return (self.run_path / "ctl").exists() or (self.run_path / "ctladdr").exists()

    def control(self) -> ControlClient:
        """A client of its control channel; use `with`."""
        return ControlClient(self.control_address, self.key)

    @property
    def log_path(self) -> Path:
        return self.run_path / "log"


class Attachment:
    """Two addresses, in the engine's run directory where they are files; they are bound before the engine is asked, and
    said by `bound`. Then a client_index.

    adopts: we want to own it, in the place of an owner that is gone; `owns` says whether we do.
    RunDirectoryError if the run directory is not private to us, FileNotFoundError if it is gone.
    """

    def __init__(self, engine: RunningEngine, *, adopts: bool = False) -> None:
        check_private(engine.run_path)
        name = secrets.token_hex(3)
        self.adopts = adopts
        self.engine = replace(engine, owner_pid=os.getpid()) if adopts else engine
        self.key = engine.key
        self.input_address = f"ipc://{engine.run_path / f'i{name}'}" if self.key is None else "tcp://127.0.0.1:*"
        self.output_address = f"ipc://{engine.run_path / f'o{name}'}" if self.key is None else "tcp://127.0.0.1:*"
        self.client_index: int | None = None
        self.failure = ""
        self._asked = False

    @property
    def owns(self) -> bool:
        """The engine is ours, to be ended by us."""
        return self.adopts and self.client_index is not None

    def bound(self, input_address: str, output_address: str) -> None:
        """Where the two really are."""
        self.input_address, self.output_address = input_address, output_address

    def question(self) -> Attach:
        """What to ask the engine; asked again, it has the same answer."""
        self._asked = True
        return Attach(self.input_address, self.output_address, os.getpid(), self.adopts)

    def detach(self) -> None:
        """Leave, if we are there; our requests end. An engine that is gone or does not answer needs no farewell."""
        if not self._asked or not self.engine.has_control:
            return
        with contextlib.suppress(EngineDeadError, InvalidRequestError), self.engine.control() as control:
            if self.client_index is None:  # the answer has not reached us
                self.client_index = control.attach(self.question(), DETACH_TIMEOUT).client_index
            control.detach(self.client_index, DETACH_TIMEOUT)
