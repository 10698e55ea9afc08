"""fingerprint: which weights exactly were loaded, said in one line that can be compared."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from llmkernel.engine.worker.default_model import SHORT_NAMES
from llmkernel.engine.worker.model_files import ModelFiles

__all__ = ["fingerprint"]

_ENDS = 2**20
"""Bytes that are read at each end of a file: its header, with the tensors' names, and the last weights."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def fingerprint(files: ModelFiles) -> str:
    """ "commit HEX" of a snapshot from the Hub, "sha256 HEX" of the default model's file, else "sha256-of-ends HEX".

    The last is over each weights file's name, size, first and last MiB: it takes milliseconds, where a hash of
    everything would take as long as the load.
    """
    if files.folder.parent.name == "snapshots" and _COMMIT.fullmatch(files.folder.name):
        return f"commit {files.folder.name}"
    if files.name in SHORT_NAMES:
        return f"sha256 {SHORT_NAMES[files.name].gguf_sha256}"
    weights = [files.gguf] if files.gguf is not None else sorted(files.folder.glob("*.safetensors"))
    return f"sha256-of-ends {_hash_ends(weights or sorted(files.folder.glob('*.bin')))}"


def _hash_ends(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            if size > _ENDS:
                file.seek(max(_ENDS, size - _ENDS))
                digest.update(file.read(_ENDS))
    return digest.hexdigest()
