"""The compiled kernels as functions: from the folder where they are kept, or built now."""

import contextlib
import functools
import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from llvmlite import binding

from llmkernel.engine.worker.compiled.arguments import MOST_ROWS
from llmkernel.engine.worker.compiled.machine import page_out, processor, target_machine
from llmkernel.engine.worker.compiled.team import Kernel
from llmkernel.engine.worker.model_cache import cache_root

__all__ = ["KernelLibrary", "open_library"]


@functools.cache
def open_library(element: str, head_size: int) -> "KernelLibrary":
    """The one of this process: code that was loaded stays. It is kept beside converted models."""
    return KernelLibrary(cache_root() / "compiled", element, head_size)


class KernelLibrary:
    """Owns the code: norm, gate, attention and products (by rows, from 1) of one number format and head size.

    folder: made if it is missing.
    """

    def __init__(self, folder: Path, element: str, head_size: int) -> None:
        code = _kept(folder / f"{element}-{head_size}-{_identity()}.o", element, head_size)
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.norm = self._kernel("norm")
        self.gate = self._kernel("gate")
        self.attention = self._kernel("attention")
        many = MOST_ROWS if element == "bfloat16" else 0
        self.products = [self._kernel(f"product_{rows}") for rows in range(1, many + 1)]
        page_out()

    def _kernel(self, name: str) -> Kernel:
        return Kernel(self._engine.get_function_address(name))


def _kept(path: Path, element: str, head_size: int) -> bytes:
    """The content of this file, or what it should be: a folder that cannot be written only costs the time again."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = build_code(element, head_size)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    return code


def build_code(element: str, head_size: int) -> bytes:
    """The object file, compiled now: 2 seconds."""
    from llmkernel.engine.worker.compiled.build import build  # imports numba: half of what a load would take longer

    return build(element, head_size)


def _identity() -> str:
    """Of all that the code depends on: what it is made from, with what, and for which processor."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for part in (version("numba"), version("llvmlite"), *processor()):
        digest.update(part.encode())
    return digest.hexdigest()[:16]
