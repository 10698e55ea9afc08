"""generation_config.json: what a model says about sampling, and which ids end an answer."""

from pathlib import Path
from typing import Any

from llmkernel.engine.worker.model_files import read_json

__all__ = ["read_generation_config"]


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or the ids that config.json holds where there is none."""
    if (folder / "generation_config.json").exists():
        return read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    text = config.get("text_config") or {}
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: value for key in keys if (value := config.get(key, text.get(key))) is not None}
