"""The compiled kernels as functions: from the folder where they are kept, or built now."""

import contextlib
import functools
import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from llvmlite import binding

from llmkernel.engine.worker.compiled.machine import page_out, processor, target_machine
from llmkernel.engine.worker.compiled.team import Kernel
from llmkernel.engine.worker.model_cache import cache_root

__all__ = ["KernelLibrary", "Recipe", "decoder_recipe", "open_library", "product_recipe"]

Recipe = tuple[str, ...]
"""Which kernels: a kind and its details. Names the file, too."""


def decoder_recipe(element: str, head_size: int) -> Recipe:
    """norm, gate, attention and sequence. element: "bfloat16" or "float32"."""
    return "decoder", element, str(head_size)


def product_recipe(form: str) -> Recipe:
    """product, with weights of one of panels.FORMS."""
    return "product", form


@functools.cache
def open_library(recipe: Recipe) -> "KernelLibrary":
    """The one of this process: code that was loaded stays. It is kept beside converted models."""
    return KernelLibrary(cache_root() / "compiled", recipe)


class KernelLibrary:
    """Owns the code of a recipe's kernels. folder: made if it is missing."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        code = _kept(folder / f"{'-'.join(recipe)}-{_identity()}.o", recipe)
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        page_out()

    def kernel(self, name: str) -> Kernel:
        """One that the recipe has."""
        address = self._engine.get_function_address(name)
        if not address:
            raise KeyError(name)
        return Kernel(address)


def _kept(path: Path, recipe: Recipe) -> bytes:
    """The content of this file, or what it should be: a folder that cannot be written only costs the time again."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = build_code(recipe)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    return code


def build_code(recipe: Recipe) -> bytes:
    """The object file, compiled now."""
    from llmkernel.engine.worker.compiled.build import build  # imports numba: half of what a load would take longer

    return build(recipe)


@functools.cache
def _identity() -> str:
    """Of all that the code depends on: what it is made from, with what, and for which processor."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for part in (version("numba"), version("llvmlite"), *processor()):
        digest.update(part.encode())
    return digest.hexdigest()[:16]
