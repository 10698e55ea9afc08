"""Journal: finished answers in a file of the user's own, for when the page or the kernel that asked is gone (D7)."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkernel.logger import init_logger
from llmkernel.notebook.final_bundle import final_bundle
from llmkernel.protocol.file_lock import take_behind
from llmkernel.protocol.private_file import open_private, read_at

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation

__all__ = ["Journal", "JournalEntry", "journal_path"]

logger = init_logger(__name__)

LIMIT = 8 * 2**20
"""Bytes of the file; above it the older half goes."""


def journal_path() -> Path | None:
    """LLMKERNEL_JOURNAL (a file; "off" = none), else llmkernel/journal.jsonl where the user's programs keep state."""
    named = os.environ.get("LLMKERNEL_JOURNAL")
    if named is not None:
        return None if named.lower() in ("", "off", "0", "none") else Path(named)
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "llmkernel" / "journal.jsonl"


@dataclass(frozen=True)
class JournalEntry:
    """A generation that has ended. notebook: whose it was. time: seconds since 1970. data, metadata: as displayed."""

    id: str
    notebook: str
    time: float
    model: str
    data: dict[str, Any]
    metadata: dict[str, Any]

    def show(self) -> None:
        """Display it, wherever this is called."""
        from IPython.display import publish_display_data  # lazy: a script has no use for it

        publish_display_data(self.data, self.metadata)


class Journal:
    """Appends entries as JSON, one to a line, to a file of mode 0600 that other kernels write to as well.

    notebook: tells this notebook's entries from others'. What cannot be written is lost here and nowhere else; the log
    says so, once. path: None = nothing is kept.
    """

    def __init__(self, path: Path | None, notebook: str) -> None:
        self.path = path
        self.notebook = notebook
        self._failed = False

    def add(self, generation: "Generation") -> None:
        """Keep a generation that has ended; one without a word is not worth it."""
        if self.path is None or not any(generation.texts):
            return
        data, metadata = final_bundle(generation)
        entry = JournalEntry(generation.id, self.notebook, time.time(), generation.model, data, metadata)
        try:
            self._append(json.dumps(vars(entry), ensure_ascii=False, default=str).encode("utf-8", "replace"))
        except (OSError, ValueError) as error:
            if not self._failed:
                self._failed = True
                logger.warning("Answers cannot be kept in %s: %s", self.path, error)

    def find(self, id: str | None = None) -> JournalEntry | None:
        """The newest entry called `id` (None: whatever it is called) of this notebook, else of any with an `id`."""
        found: JournalEntry | None = None
        for entry in self._entries():
            own = entry.notebook == self.notebook
            if own if id is None else entry.id == id and (own or found is None or found.notebook != self.notebook):
                found = entry
        return found

    def _append(self, line: bytes) -> None:
        assert self.path is not None
        if len(line) > LIMIT // 2:
            raise ValueError(f"an answer of {len(line)} bytes is too long")
        with self._locked() as file:
            size = file.seek(0, os.SEEK_END)
            if size and read_at(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line  # whoever wrote last was cut short
            file.write(line + b"\n")
            file.flush()
            if size + len(line) > LIMIT:
                self._drop_older_half(file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Any]:
        """The file, opened to append, as long as nobody else writes it."""
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            with open(open_private(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "r+b") as file:
                take_behind(file.fileno())
                if _is_at(file.fileno(), self.path):
                    yield file
                    return

    def _drop_older_half(self, file: Any) -> None:
        assert self.path is not None
        file.seek(-LIMIT // 2, os.SEEK_END)
        _, _, kept = file.read().partition(b"\n")
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as shorter:
                shorter.write(kept)
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)

    def _entries(self) -> Iterator[JournalEntry]:
        """What can be read, oldest first; a line that was cut short is passed over."""
        if self.path is None:
            return
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError):
                    entry = JournalEntry(**json.loads(line))
                    if isinstance(entry.data, dict) and isinstance(entry.metadata, dict):
                        yield entry


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
