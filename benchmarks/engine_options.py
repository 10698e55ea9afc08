"""The options of a command line that say which engine is measured."""

import argparse
from typing import Any

from llmkernel.config import EngineArgs

__all__ = ["engine_args", "engine_parser"]


def engine_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows the model, its number formats, its implementation and its threads; more may be added."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--implementation", default="auto", choices=["auto", "fused", "transformers"])
    parser.add_argument("--quantization", default="auto", choices=["auto", "none", "int8", "int4"])
    parser.add_argument("--threads", default="auto", type=lambda text: text if text == "auto" else int(text))
    return parser


def engine_args(options: argparse.Namespace, **more: Any) -> EngineArgs:
    """What was asked for on the command line, and what the benchmark itself sets."""
    return EngineArgs(
        model=options.model,
        dtype=options.dtype,
        implementation=options.implementation,
        quantization=options.quantization,
        num_threads=options.threads,
        **more,
    )
