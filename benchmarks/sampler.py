"""What the sampler costs: ms per step as JSON, for some batches, vocabularies and ways to sample.

    python benchmarks/sampler.py [--dtype float32] [--threads 2] [--repeats 20] [--batches 1,16,64]

The logits fall with the logarithm of their rank, each row at its own rate: from as flat as SmolLM2-135M's flattest to
peaked. `beyond_64` is the share of rows whose 64 best tokens hold less than 0.95 of the mass (SmolLM2-135M on chats, at
temperature 1: 0.22). Each request has 300 tokens of prompt and output behind it.

The ways with a grammar follow a JSON schema in SmolLM2's tokens, each row from a place of its own; their time takes in
filling the masks and accepting the tokens (`grammar` tells these two together).
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.scheduler.output import GrammarMasks
from llmkernel.engine.structured.grammar import Grammar
from llmkernel.engine.structured.guidance_backend import GuidanceBackend
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.engine.worker.sampler import Sampler
from llmkernel.engine.worker.tokenizer_facts import read_tokenizer_facts
from llmkernel.protocol.sampling_params import SamplingParams, StructuredOutputsParams

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


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "number"},
        "kind": {"enum": ["small", "medium", "large"]},
    },
    "required": ["name", "tags", "size", "kind"],
    "additionalProperties": False,
}
GRAMMAR_WAYS: dict[str, dict[str, Any]] = {
    "grammar": {"temperature": 0.0},
    "grammar and top_p": {"temperature": 0.8, "top_p": 0.9},
}


class GrammarRows:
    """One grammar per row. Each starts after a different number of random tokens, and again when it is through."""

    def __init__(self, start: Grammar, rows: int) -> None:
        self._start = start
        self._words = np.zeros((rows, start.num_words), np.int32)
        self._rng = np.random.default_rng(0)
        self._grammars = [start.copy() for _ in range(rows)]
        for row in range(rows):
            for _ in range(int(self._rng.integers(1, 40))):
                self._grammars[row].fill_bitmask(self._words[row])
                bits = np.unpackbits(self._words[row].view(np.uint8), bitorder="little")
                self.accept(row, int(self._rng.choice(bits.nonzero()[0])))

    def masks(self, ids: list[str]) -> GrammarMasks:
        """What every row may say next."""
        for grammar, words in zip(self._grammars, self._words, strict=True):
            grammar.fill_bitmask(words)
        return GrammarMasks({req_id: row for row, req_id in enumerate(ids)}, self._words)

    def accept(self, row: int, token_id: int) -> None:
        """Go on by a token that its mask allows."""
        self._grammars[row].accept_tokens([token_id])
        if self._grammars[row].is_terminated:
            self._grammars[row] = self._start.copy()


def compile_schema(vocab_size: int) -> Grammar:
    files = resolve_model(EngineArgs(), lambda *_: None)
    backend = GuidanceBackend(read_tokenizer_facts(files, EngineArgs()), vocab_size, [2])
    return backend.compile(StructuredOutputsParams(json=SCHEMA))


def make_logits(rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Logit of rank r: minus slope * log(r) with noise; slopes are spread evenly, ranks are shuffled over the ids."""
    generator = torch.Generator().manual_seed(rows)
    ranks = torch.rand(rows, vocab_size, generator=generator).argsort(-1) + 1
    slopes = torch.linspace(1.3, 3.0, rows + 2)[1:-1].unsqueeze(-1)
    noise = torch.randn(rows, vocab_size, generator=generator) * 0.3
    return (12 - slopes * ranks.log() + noise).to(dtype)


def measure(
    way: dict[str, Any], logits: torch.Tensor, repeats: int, grammar: Grammar | None = None
) -> dict[str, float]:
    """Median and minimum, in ms, of sample() on these logits."""
    rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, torch.device("cpu"))
    ids = [str(row) for row in range(rows)]
    generator = torch.Generator().manual_seed(0)
    for row, req_id in enumerate(ids):
        prompt = torch.randint(vocab_size, (200,), generator=generator).tolist()
        sampler.add(req_id, SamplingParams(seed=row, max_tokens=None, **way), prompt, 2, None)
    outputs = [torch.randint(vocab_size, (100,), generator=generator).tolist() for _ in ids]
    bound = GrammarRows(grammar, rows) if grammar is not None else None
    times, of_grammar = [], []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        masks = bound.masks(ids) if bound is not None else None
        filled = time.perf_counter()
        drawn = sampler.sample(logits, ids, outputs, masks)
        sampled = time.perf_counter()
        if bound is not None:
            for row, token in enumerate(drawn.token_ids):
                bound.accept(row, token)
        end = time.perf_counter()
        times.append((end - start) * 1e3)
        of_grammar.append((filled - start + end - sampled) * 1e3)
        for output, token in zip(outputs, drawn.token_ids, strict=True):
            output.append(token)
    found = {"median": round(statistics.median(times[3:]), 3), "min": round(min(times[3:]), 3)}
    return found | ({"grammar": round(statistics.median(of_grammar[3:]), 3)} if bound is not None else {})


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
        grammar = compile_schema(vocab_size)
        for rows in map(int, options.batches.split(",")):
            logits = make_logits(rows, vocab_size, getattr(torch, options.dtype))
            mass = logits.float().softmax(-1).topk(64).values.sum(-1)
            facts = {"vocab_size": vocab_size, "rows": rows, "beyond_64": float((mass < 0.95).float().mean())}
            steps += [facts | {"way": name} | measure(way, logits, options.repeats) for name, way in WAYS.items()]
            for name, way in GRAMMAR_WAYS.items():
                steps.append(facts | {"way": name} | measure(way, logits, options.repeats, grammar))
    print(json.dumps({"unit": "ms per step", **vars(options), "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
