"""What the sampler costs: ms per step as JSON, for some batches, vocabularies and ways to sample.

    python benchmarks/sampler.py [--dtype float32] [--threads 2] [--repeats 20] [--batches 1,16,64]

The logits fall with the logarithm of their rank, each row at its own rate: from as flat as SmolLM2-135M's flattest to
peaked. `beyond_64` is the share of rows whose 64 best tokens hold less than 0.95 of the mass (SmolLM2-135M on chats, at
temperature 1: 0.22). Each request has 300 tokens of prompt and output behind it.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch

from llmkernel.engine.worker.sampler import Sampler
from llmkernel.protocol.sampling_params import SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.95 at temperature 1": {"top_p": 0.95},
    "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


def make_logits(rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Logit of rank r: minus slope * log(r) with noise; slopes are spread evenly, ranks are shuffled over the ids."""
    generator = torch.Generator().manual_seed(rows)
    ranks = torch.rand(rows, vocab_size, generator=generator).argsort(-1) + 1
    slopes = torch.linspace(1.3, 3.0, rows + 2)[1:-1].unsqueeze(-1)
    noise = torch.randn(rows, vocab_size, generator=generator) * 0.3
    return (12 - slopes * ranks.log() + noise).to(dtype)


def measure(way: dict[str, Any], logits: torch.Tensor, repeats: int) -> dict[str, float]:
    """Median and minimum, in ms, of sample() on these logits."""
    rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, torch.device("cpu"))
    ids = [str(row) for row in range(rows)]
    generator = torch.Generator().manual_seed(0)
    for row, req_id in enumerate(ids):
        prompt = torch.randint(vocab_size, (200,), generator=generator).tolist()
        sampler.add(req_id, SamplingParams(seed=row, max_tokens=None, **way), prompt, 2, None)
    outputs = [torch.randint(vocab_size, (100,), generator=generator).tolist() for _ in ids]
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        drawn = sampler.sample(logits, ids, outputs)
        times.append((time.perf_counter() - start) * 1e3)
        for output, token in zip(outputs, drawn.token_ids, strict=True):
            output.append(token)
    return {"median": round(statistics.median(times[3:]), 3), "min": round(min(times[3:]), 3)}


def main() -> None:
    """Measure every combination and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--vocabularies", default="49152,151936")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps = []
    for vocab_size in map(int, options.vocabularies.split(",")):
        for rows in map(int, options.batches.split(",")):
            logits = make_logits(rows, vocab_size, getattr(torch, options.dtype))
            mass = logits.float().softmax(-1).topk(64).values.sum(-1)
            facts = {"vocab_size": vocab_size, "rows": rows, "beyond_64": float((mass < 0.95).float().mean())}
            steps += [facts | {"way": name} | measure(way, logits, options.repeats) for name, way in WAYS.items()]
    print(json.dumps({"unit": "ms per step", **vars(options), "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
