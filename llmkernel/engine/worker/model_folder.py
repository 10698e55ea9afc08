"""What a folder, or a repository's list of files, holds: the weights that would be loaded, and what is missing."""

import re
from collections.abc import Iterable
from pathlib import Path

from llmkernel.engine.worker.model_files import read_json
from llmkernel.errors import EngineStartupError

__all__ = ["Weights", "check_folder", "find_weights"]

_SAFETENSORS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PICKLED = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
_INDEX = "model.safetensors.index.json"


class Weights:
    """Weight files by kind, names only. kind: "safetensors", "gguf" or "bin"."""

    def __init__(self, kind: str, names: list[str]) -> None:
        self.kind = kind
        self.names = names


def find_weights(names: Iterable[str], where: str, trust: bool) -> Weights:
    """What would be loaded of the files `names` of `where`: safetensors, else one GGUF file, else (if trusted) .bin.

    A choice that only the user can make, pickled weights, and no weights at all raise EngineStartupError with one line.
    """
    names = sorted(names)
    config = "config.json" in names
    if config and (found := [name for name in names if _SAFETENSORS.fullmatch(name)]):
        return Weights("safetensors", found)
    gguf = [name for name in names if name.lower().endswith(".gguf") and "/" not in name]
    if len(gguf) == 1:
        return Weights("gguf", gguf)
    if gguf:
        listed = ", ".join(gguf[:8]) + (" ..." if len(gguf) > 8 else "")
        raise EngineStartupError(f"{where} holds {len(gguf)} GGUF files; name one, as {where}/FILE.gguf: {listed}.")
    if not config:
        if "adapter_config.json" in names:
            raise EngineStartupError(f"{where} is an adapter (LoRA), not a model; load the base model it was made for.")
        raise EngineStartupError(
            f"{where} is not a model: it has no config.json; give a model's folder or a .gguf file."
        )
    pickled = [name for name in names if _PICKLED.fullmatch(name)]
    if pickled and trust:
        return Weights("bin", pickled)
    if pickled:
        raise EngineStartupError(
            f"{where} has only pickled weights ({pickled[0]}), which can run code when they are read; "
            "use a safetensors version, or trust_remote_code=True if you trust it."
        )
    raise EngineStartupError(
        f"{where} has a config.json but no weights (model.safetensors); download the model again, weights included."
    )


def check_folder(folder: Path, trust: bool) -> Weights:
    """find_weights of a folder on this disk; with an index, every file that it names must be there."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise EngineStartupError(f"Cannot read {folder}: {error.strerror}; check the path.") from error
    weights = find_weights(names, str(folder), trust)
    if weights.kind == "safetensors" and _INDEX in names and "model.safetensors" not in names:
        index = read_json(folder / _INDEX).get("weight_map")
        wanted = set(index.values()) if isinstance(index, dict) else set()
        missing = sorted(str(name) for name in wanted if name not in names)
        if missing or not wanted:
            lacks = (
                f"{len(missing)} of its {len(wanted)} weight files (the first is {missing[0]})"
                if missing
                else "an index"
            )
            raise EngineStartupError(f"{folder} lacks {lacks}; download the model again.")
    return weights
