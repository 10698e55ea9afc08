"""convert: a GGUF file as a folder that transformers opens, made once and kept in our cache.

The weights are stored once, in float32: decoded 4-bit blocks (d * q + m) are exact in nothing smaller, and a load in
bfloat16 rounds each tensor while it reads it, so no second copy is needed. Mapping that file takes 0.15 s for SmolLM2,
decoding its blocks again 1 to 2 s. The 4-bit original stays where it is, for kernels that want its blocks.
"""

import json
import math
from pathlib import Path

import numpy as np

from llmkernel.engine.executor_facts import ReportProgress
from llmkernel.engine.worker.gguf_architectures import describe
from llmkernel.engine.worker.gguf_reader import GGUFFile
from llmkernel.engine.worker.gguf_tokenizer import write_tokenizer
from llmkernel.engine.worker.model_cache import ModelCache
from llmkernel.engine.worker.safetensors_writer import write_safetensors

__all__ = ["convert"]


def convert(path: Path, cache: ModelCache, name: str, identity: dict[str, object], report: ReportProgress) -> Path:
    """The converted folder of the GGUF file `path`, made now if the cache entry `name` is missing or stale.

    identity: what tells this file from another version of it. Progress is stage "convert", in tensors.
    """
    found = cache.find(name, identity)
    if found:
        return found
    with GGUFFile(path) as file:
        config, placements = describe(file)
        shapes = {target: placement.shape for target, placement in placements.items()}

        def read(target: str) -> np.ndarray:
            placement = placements[target]
            values = file.read(placement.source)
            return placement.decode(values) if placement.decode else values

        def build(folder: Path) -> None:
            detail = f"{path.name} ({file.quantization}) to float32, once"
            report("convert", 0, len(shapes), detail)
            write_tokenizer(file, folder)
            (folder / "quantization.txt").write_text(file.quantization)
            (folder / "config.json").write_text(json.dumps(config, indent=1))
            (folder / "generation_config.json").write_text(json.dumps(_generation_config(file), indent=1))
            written = write_safetensors(folder / "model.safetensors", shapes, read)
            for done, _ in enumerate(written, start=1):
                report("convert", done, len(shapes), detail)

        return cache.make(
            name,
            identity,
            build,
            needed=4 * sum(math.prod(shape) for shape in shapes.values()),
            waiting=lambda: report("convert", 0, 0, f"another engine converts {path.name}; waiting for it"),
        )


def _generation_config(file: GGUFFile) -> dict[str, object]:
    """End, start and padding ids; end of turn and end of message end an answer as well."""
    ids = {
        name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    return {
        "_from_model_config": True,
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
