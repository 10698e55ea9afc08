"""ModelCache: our own folder of converted models and fetched files. An entry is whole, or it is not there.

Layout: ROOT/NAME/ (an entry, with llmkernel.json as its manifest), ROOT/NAME.lock, ROOT/NAME.tmp-XXXX/ (being written).
An entry is built in a temporary folder beside it, flushed, and renamed; a lock lets one process build while the others
wait and then use what it built. What a killed process left is removed by the next one that holds the lock.
"""

import contextlib
import dataclasses
import difflib
import errno
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from llmkernel.config import format_bytes
from llmkernel.errors import EngineStartupError, InvalidRequestError
from llmkernel.logger import init_logger

__all__ = ["FORMAT", "CacheEntry", "ModelCache", "cache_root"]

logger = init_logger(__name__)

FORMAT = 1
"""Version of what entries hold; another one is built again."""

_MANIFEST = "llmkernel.json"
_SPARE_BYTES = 16 * 2**20  # the small files, the file system's own needs


def cache_root() -> Path:
    """$LLMKERNEL_CACHE, else $XDG_CACHE_HOME/llmkernel, else ~/.cache/llmkernel."""
    if own := os.environ.get("LLMKERNEL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "llmkernel"


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache. num_bytes: what it takes on the disk. source: the file that it was converted from; None
    where that was fetched."""

    name: str
    num_bytes: int
    source: Path | None


class ModelCache:
    """The cache at `root`; any number of processes may use it at once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root()

    def find(self, name: str, identity: Mapping[str, Any]) -> Path | None:
        """The entry `name` if it is whole and was made from what `identity` says; no lock is taken."""
        folder = self.root / name
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            sizes = {file: (folder / file).stat().st_size for file in manifest["files"]}
        except (OSError, ValueError, TypeError, KeyError):
            return None
        whole = manifest["files"] == sizes and manifest["format"] == FORMAT and manifest["identity"] == dict(identity)
        return folder if whole else None

    def entries(self) -> list[CacheEntry]:
        """Everything that was built here and is not removed, by name."""
        return [_describe(manifest) for manifest in sorted(self.root.glob(f"*/{_MANIFEST}"))]

    def remove(self, name: str) -> int:
        """Take the entry `name` off the disk; the bytes that came back. InvalidRequestError if there is none.

        An engine that runs on it is not disturbed: what it has mapped stays until it ends.
        """
        found = {entry.name: entry for entry in self.entries()}
        if name not in found:
            near = difflib.get_close_matches(name, found, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(found) or 'nothing'}."
            raise InvalidRequestError(f"{self.root} holds no {name!r}; {hint}", parameter="name", value=name)
        try:
            with self._locked(name, lambda: None):
                self._sweep(name)
        except OSError as error:
            raise EngineStartupError(f"Cannot remove {self.root / name}: {error.strerror or error}.") from error
        return found[name].num_bytes

    def make(
        self,
        name: str,
        identity: Mapping[str, Any],
        build: Callable[[Path], None],
        *,
        needed: int,
        waiting: Callable[[], None] = lambda: None,
    ) -> Path:
        """The entry `name`, built by `build(empty folder)` if there is no whole one.

        needed: bytes that building takes, checked first. waiting: called once if another process builds it now.
        A full disk, or a folder that cannot be written, raises EngineStartupError; nothing half-written stays.
        """
        found = self.find(name, identity)
        if found:
            return found
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(name, waiting):
                found = self.find(name, identity)  # another process may have built it meanwhile
                return found or self._build(name, identity, build, needed)
        except OSError as error:
            raise _explain(error, self.root, needed) from error

    def _build(self, name: str, identity: Mapping[str, Any], build: Callable[[Path], None], needed: int) -> Path:
        self._sweep(name)
        if shutil.disk_usage(self.root).free < needed + _SPARE_BYTES:
            raise _no_space(self.root, needed)
        work = Path(tempfile.mkdtemp(prefix=f"{name}.tmp-", dir=self.root))
        try:
            build(work)
            files = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
            manifest = {"format": FORMAT, "identity": dict(identity), "files": files}
            (work / _MANIFEST).write_text(json.dumps(manifest, indent=1))
            for file in work.iterdir():
                _flush(file)
            _flush(work)
            work.chmod(0o755)  # mkdtemp's 0700 would keep a shared cache from others
            work.rename(self.root / name)
            _flush(self.root)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return self.root / name

    def _sweep(self, name: str) -> None:
        """Remove a stale entry and what killed builders left. Holding the lock, nobody else builds `name`."""
        for left in [self.root / name, *self.root.glob(f"{glob.escape(name)}.tmp-*")]:
            if left.exists():
                logger.info("Removing the cache entry %s", left)
                shutil.rmtree(left)

    @contextlib.contextmanager
    def _locked(self, name: str, waiting: Callable[[], None]) -> Iterator[None]:
        lock = filelock.FileLock(self.root / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            waiting()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _describe(manifest: Path) -> CacheEntry:
    folder = manifest.parent
    source = None
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        source = Path(json.loads(manifest.read_text())["identity"]["path"])
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return CacheEntry(folder.name, size, source)


def _flush(path: Path) -> None:
    """To the disk: after a power cut an entry is whole or missing, never whole by name only."""
    if os.name == "nt":  # neither folders nor files opened for reading can be flushed there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, folder: Path, needed: int) -> EngineStartupError:
    """One line for a write to `folder` that failed; `needed`: bytes in all."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(folder, needed)
    return EngineStartupError(
        f"Cannot write to {folder}: {error.strerror or error}; set LLMKERNEL_CACHE to a folder that you can write to."
    )


def _no_space(folder: Path, needed: int) -> EngineStartupError:
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    return EngineStartupError(
        f"Not enough disk space in {folder}: {format_bytes(needed)} needed, {format_bytes(free)} free; "
        "free some, or set LLMKERNEL_CACHE to a folder on a larger disk."
    )
