"""The cache of models: an entry is whole or it is not there, whatever happens while it is built."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from llmkernel.config import EngineArgs
from llmkernel.engine.worker import model_cache
from llmkernel.engine.worker.model_cache import ModelCache, cache_root
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.errors import EngineStartupError
from tests.worker.cache_builder import IDENTITY, build_slowly, write
from tests.worker.tiny_gguf import families, random_model, write_gguf


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMKERNEL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("LLMKERNEL_CACHE")
    assert cache_root() == tmp_path / "xdg" / "llmkernel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "llmkernel"


def test_an_entry_is_built_once_and_found_again(cache: ModelCache) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        write(folder)

    assert cache.find("m", IDENTITY) is None
    first = cache.make("m", IDENTITY, build, needed=1000)
    second = cache.make("m", IDENTITY, build, needed=1000)
    assert first == second == cache.find("m", IDENTITY) == cache.root / "m"
    assert len(built) == 1
    assert (first / "model.bin").read_bytes() == b"x" * 1000


@pytest.mark.parametrize(
    "damage", ["shorter", "missing file", "no manifest", "broken manifest", "list", "other", "format"]
)
def test_a_stale_entry_is_never_used_and_is_replaced(damage: str, cache: ModelCache) -> None:
    folder = cache.make("m", IDENTITY, write, needed=1000)
    manifest = folder / "llmkernel.json"
    identity = dict(IDENTITY)
    if damage == "shorter":
        os.truncate(folder / "model.bin", 999)
    elif damage == "missing file":
        (folder / "model.bin").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text("{")
    elif damage == "list":
        manifest.write_text("[]")
    elif damage == "other":
        identity["sha256"] = "def"
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": -1}))
    (folder / "left-over").write_text("old")
    assert cache.find("m", identity) is None
    assert cache.make("m", identity, write, needed=1000) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["llmkernel.json", "model.bin"]
    assert cache.find("m", identity) == folder


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(1)])
def test_a_build_that_fails_leaves_nothing(error: BaseException, cache: ModelCache) -> None:
    def build(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(type(error)):
        cache.make("m", IDENTITY, build, needed=1000)
    assert _folders(cache.root) == []
    cache.make("m", IDENTITY, write, needed=1000)  # and the lock is free again


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_gives_one_line_and_leaves_nothing(code: int, cache: ModelCache) -> None:
    def build(folder: Path) -> None:
        write(folder)
        raise OSError(code, os.strerror(code))

    with pytest.raises(EngineStartupError) as caught:
        cache.make("m", IDENTITY, build, needed=3 * 2**20)
    message = str(caught.value)
    assert str(cache.root) in message
    assert "3.0 MiB needed" in message
    assert " free; free some, or set LLMKERNEL_CACHE" in message
    assert "\n" not in message
    assert _folders(cache.root) == []


def test_too_little_space_is_noticed_before_anything_is_written(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 * 2**30, 9 * 2**30, 2**30))
    with pytest.raises(EngineStartupError, match=r"2\.0 GiB needed, 1\.0 GiB free"):
        cache.make("m", IDENTITY, lambda folder: pytest.fail("was built"), needed=2 * 2**30)
    assert _folders(cache.root) == []


def test_a_full_disk_while_converting_gives_one_line_and_leaves_nothing(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real conversion on a file system that takes 20,000 bytes of weights and no more."""
    tiny = families()["llama"]
    write_gguf(tmp_path / "tiny.gguf", tiny, random_model(tiny))
    opened = Path.open

    def limited(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = opened(self, mode, *args, **kwargs)
        return _Limited(file) if self.name == "model.safetensors" and mode == "wb" else file

    monkeypatch.setattr(Path, "open", limited)
    with pytest.raises(EngineStartupError, match=r"Not enough disk space in .* needed, .* free; free some"):
        resolve_model(EngineArgs(model=str(tmp_path / "tiny.gguf")), lambda *_: None)
    assert _folders(own_cache) == []
    monkeypatch.undo()
    monkeypatch.setenv("LLMKERNEL_CACHE", str(own_cache))
    files = resolve_model(EngineArgs(model=str(tmp_path / "tiny.gguf")), lambda *_: None)
    assert (files.folder / "model.safetensors").exists()


class _Limited:
    """A file on a disk that is nearly full."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = 20_000

    def __enter__(self) -> "_Limited":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))


def test_a_file_where_the_cache_should_be_says_which_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(EngineStartupError, match="set LLMKERNEL_CACHE to a folder that you can write to"):
        ModelCache(tmp_path / "cache").make("m", IDENTITY, write, needed=1)


def test_two_processes_at_once_build_it_once(cache: ModelCache) -> None:
    context = multiprocessing.get_context("spawn")
    started, go_on, built = context.Event(), context.Event(), context.Value("i", 0)
    other = context.Process(target=build_slowly, args=(cache.root, started, go_on, built))
    other.start()
    assert started.wait(30)
    told = []

    def waiting() -> None:
        told.append("waiting")
        go_on.set()

    folder = cache.make("m", IDENTITY, lambda _: pytest.fail("was built twice"), needed=1000, waiting=waiting)
    other.join(30)
    assert (other.exitcode, built.value, told) == (0, 1, ["waiting"])
    assert cache.find("m", IDENTITY) == folder


def test_what_a_killed_process_left_is_removed(cache: ModelCache) -> None:
    context = multiprocessing.get_context("spawn")
    started, go_on, built = context.Event(), context.Event(), context.Value("i", 0)
    other = context.Process(target=build_slowly, args=(cache.root, started, go_on, built))
    other.start()
    assert started.wait(30)
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join(30)
    assert len(_folders(cache.root)) == 1  # half an entry, under a temporary name
    assert cache.find("m", IDENTITY) is None
    cache.make("m", IDENTITY, write, needed=1000)
    assert _folders(cache.root) == ["m"]


def test_threads_of_one_process_build_it_once(cache: ModelCache) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        write(folder)

    threads = [
        threading.Thread(target=cache.make, args=("m", IDENTITY, build), kwargs={"needed": 1000}) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_names_with_odd_characters_are_only_names(cache: ModelCache) -> None:
    cache.make("other", IDENTITY, write, needed=1)
    cache.make("[a-z]*", IDENTITY, write, needed=1)
    cache.make("[a-z]*", {"sha256": "new"}, write, needed=1)
    assert _folders(cache.root) == ["[a-z]*", "other"]


def test_the_format_is_part_of_every_manifest(cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.make("m", IDENTITY, write, needed=1)
    monkeypatch.setattr(model_cache, "FORMAT", model_cache.FORMAT + 1)
    assert cache.find("m", IDENTITY) is None
