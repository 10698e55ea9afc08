"""llmkernel as a script would use it: LLMEngine, its engine process beside."""

import argparse

from answers import serve
from stepping import SteppingEngine

import llmkernel
from llmkernel import EngineArgs, LLMEngine, SamplingParams


def open_engine(options: argparse.Namespace) -> SteppingEngine:
    """A GGUF file keeps its 4-bit blocks; a folder is loaded in --dtype."""
    is_gguf = options.model.endswith(".gguf")
    args = EngineArgs(
        model=options.model,
        dtype="auto" if is_gguf else options.dtype,
        quantization="auto" if is_gguf else "none",
        num_threads="auto" if options.threads == "auto" else int(options.threads),
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
    )
    engine = LLMEngine(args)
    model = engine.facts.model
    facts = {"version": llmkernel.__version__, "implementation": model.implementation, "dtype": model.dtype}
    return SteppingEngine(
        engine,
        lambda tokens: SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        facts | {"quantization": model.quantization},
    )


if __name__ == "__main__":
    serve(open_engine)
