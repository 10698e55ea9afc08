"""ModelFiles: where a model lies on this disk, once its name is resolved; and reading its small JSON files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from llmkernel.errors import EngineStartupError

__all__ = ["ModelFiles", "read_json"]


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model on disk, ready to be loaded.

    name: as asked for. source: file, folder or Hub id with revision, for people. folder: what transformers'
    from_pretrained opens (config.json, *.safetensors, tokenizer.json ...). gguf: the 4-bit original that `folder` was
    converted from, None otherwise. quantization: of the original file ("Q4_1"), "none" for plain weights.
    notes: things worth saying once.
    """

    name: str
    source: str
    folder: Path
    gguf: Path | None = None
    quantization: str = "none"
    notes: list[str] = dataclasses.field(default_factory=list)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`; anything else raises EngineStartupError with one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineStartupError(f"Cannot read {path}: {error.strerror}; check the model's folder.") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise EngineStartupError(f"{path} is not JSON ({error}); download or copy it again.") from error
    if not isinstance(content, dict):
        raise EngineStartupError(f"{path} does not hold a JSON object; download or copy it again.")
    return content
