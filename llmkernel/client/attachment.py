"""Attachment: our place at an engine that somebody else started and owns."""

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from llmkernel.client.control_client import ControlClient
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.protocol.control import Attach
from llmkernel.protocol.run_directory import check_private

__all__ = ["Attachment", "RunningEngine"]

DETACH_TIMEOUT = 0.5


@dataclass(frozen=True)
class RunningEngine:
    """An engine process that somebody of this user started. run_path: its run directory."""

    run_path: Path
    pid: int
    owner_pid: int

    @property
    def control_address(self) -> str:
        return f"ipc://{self.run_path / 'ctl'}"

    @property
    def log_path(self) -> Path:
        return self.run_path / "log"


class Attachment:
    """Two addresses in the engine's run directory, to be bound before the engine is asked; then a client_index.

    RunDirectoryError if the run directory is not private to us, FileNotFoundError if it is gone.
    """

    def __init__(self, engine: RunningEngine) -> None:
        check_private(engine.run_path)
        name = secrets.token_hex(3)
        self.engine = engine
        self.input_address = f"ipc://{engine.run_path / f'i{name}'}"
        self.output_address = f"ipc://{engine.run_path / f'o{name}'}"
        self.client_index: int | None = None
        self.failure = ""
        self._asked = False

    def question(self) -> Attach:
        """What to ask the engine; asked again, it has the same answer."""
        self._asked = True
        return Attach(self.input_address, self.output_address, os.getpid())

    def detach(self) -> None:
        """Leave, if we are there; our requests end. An engine that is gone or does not answer needs no farewell."""
        if not self._asked or not Path(self.engine.run_path / "ctl").exists():
            return
        with (
            contextlib.suppress(EngineDeadError, InvalidRequestError),
            ControlClient(self.engine.control_address) as control,
        ):
            if self.client_index is None:  # the answer has not reached us
                self.client_index = control.attach(self.question(), DETACH_TIMEOUT)
            control.detach(self.client_index, DETACH_TIMEOUT)
