"""transformers' generate(): its own cache and SDPA attention, prompts of one length in one batch."""

import argparse
import time
from typing import Any

import torch
import transformers
from answers import serve
from transformers import AutoModelForCausalLM, StoppingCriteria


class _Moments(StoppingCriteria):
    """Is asked after every token, and notes when."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.started = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(time.perf_counter() - self.started)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class TransformersEngine:
    """The module as from_pretrained gives it."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.threads != "auto":
            torch.set_num_threads(int(options.threads))
        dtype = getattr(torch, options.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        self.facts = {"version": transformers.__version__, "torch": torch.__version__, "dtype": options.dtype}

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int]]:
        """See answers.PeerEngine."""
        moments = _Moments()
        ids = torch.tensor(prompts)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            stopping_criteria=[moments],
        )
        return [(moment, len(prompts) * count) for count, moment in enumerate(moments.seen, 1)]


if __name__ == "__main__":
    serve(TransformersEngine)
