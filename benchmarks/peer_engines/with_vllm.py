"""vLLM on the CPU: its LLM in eager mode (it compiles for about a minute otherwise), 2 GiB for its KV cache."""

import argparse
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm
from answers import serve
from stepping import SteppingEngine


def open_engine(options: argparse.Namespace) -> SteppingEngine:
    """Its threads are bound as vLLM chooses."""
    llm = vllm.LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
        max_num_seqs=256,
    )
    return SteppingEngine(
        llm.llm_engine,
        lambda tokens: vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        {"version": vllm.__version__, "enforce_eager": True, "dtype": options.dtype},
    )


if __name__ == "__main__":
    serve(open_engine)
