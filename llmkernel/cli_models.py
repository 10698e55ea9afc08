"""`llmkernel models` and `llmkernel models rm`: what can be loaded by name, and what the disk holds for it."""
# ruff: noqa: T201 - printing is what a shell command does

import argparse
from typing import TYPE_CHECKING

from llmkernel.config import DEFAULT_MODEL, format_bytes

if TYPE_CHECKING:
    from llmkernel.engine.worker.model_cache import CacheEntry

__all__ = ["add_model_verbs"]


def add_model_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the parser; it sets `run`, a function of the parsed arguments that returns the exit code."""
    models = verbs.add_parser("models", help="list short names and what is cached here", allow_abbrev=False)
    models.set_defaults(run=_models)
    more = models.add_subparsers(metavar="VERB")
    remove = more.add_parser("rm", help="remove converted models; a load makes them again", allow_abbrev=False)
    remove.add_argument("names", metavar="NAME", nargs="+", help="as `llmkernel models` lists it")
    remove.set_defaults(run=_remove)


def _models(_: argparse.Namespace) -> int:
    from llmkernel.engine.worker.default_model import SHORT_NAMES  # lazy: brings the download code
    from llmkernel.engine.worker.model_cache import ModelCache

    print("Short names")
    for name, known in SHORT_NAMES.items():
        print(f"  {name:20}{known.repo}{' (default)' if name == DEFAULT_MODEL else ''}")
    cache = ModelCache()
    entries = cache.entries()
    where = f"in {cache.root}"
    print(f"Converted, {where} (llmkernel models rm NAME)" if entries else f"Nothing converted yet, {where}")
    for entry in entries:
        print(f"  {entry.name:40}{format_bytes(entry.num_bytes):12}{_source(entry)}".rstrip())
    for repo, size in _hub_models():
        print(f"  {repo:40}{format_bytes(size):12}(Hugging Face cache)")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from llmkernel.engine.worker.model_cache import ModelCache  # lazy: see above

    cache = ModelCache()
    for name in arguments.names:
        print(f"{name} removed, {format_bytes(cache.remove(name))} given back.")
    return 0


def _source(entry: "CacheEntry") -> str:
    if entry.source is None:
        return ""
    return f"{entry.source}" if entry.source.exists() else f"{entry.source} (which is gone)"


def _hub_models() -> list[tuple[str, int]]:
    from huggingface_hub import scan_cache_dir  # lazy: half a second
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    return sorted((repo.repo_id, repo.size_on_disk) for repo in found.repos if repo.repo_type == "model")
