"""RunCard: a file in the run directory that says whose run it is, for when the engine itself cannot answer."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, replace

from llmkernel.protocol.private_file import write_private
from llmkernel.protocol.run_directory import RunDirectory

__all__ = ["CARD_NAME", "RunCard"]

CARD_NAME = "card"


@dataclass(frozen=True)
class RunCard:
    """pid: of the engine. owner_pid: of its owner, the last one if it has none. model: as asked for. started: seconds
    since 1970.

    Of an engine that is kept alive (keep_alive), for the kernel that comes back. kernel: whose identity it has. name:
    what that called the model. auto_restart: whether it started the engine anew when that died.
    """

    pid: int
    owner_pid: int
    model: str
    started: float
    kernel: str = ""
    name: str = ""
    auto_restart: bool = False

    def write(self, run: RunDirectory) -> None:
        """Readable for us alone, and whole whenever it is read."""
        fresh = run.file(f"{CARD_NAME}new")
        fresh.unlink(missing_ok=True)
        write_private(fresh, json.dumps(asdict(self)).encode())
        fresh.replace(run.file(CARD_NAME))

    def owned_by(self, pid: int) -> "RunCard":
        """The card of the same engine with another owner."""
        return replace(self, owner_pid=pid)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RunCard | None":
        """The card of the run directory `path`; None if there is none, or nothing that makes sense."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            with open(os.path.join(path, CARD_NAME), encoding="utf-8") as file:
                card = cls(**json.load(file))
            if all(isinstance(number, int) for number in (card.pid, card.owner_pid)):
                return card
        return None
