"""n-gram speculation against none: decoded tokens per second, in turns, as JSON on stdout.

    python benchmarks/speculation.py [--batches 1,4,16] [--drafts 5] [--dtype bfloat16 --quantization none]

`copying`: code and text to be repeated with a small change. `free`: stories and explanations, where hardly anything
repeats. Each batch is that many of these prompts at once, greedy, to their end token; the clock runs from the step
after the last prefill. Two engines of one model in this process; ratio: median over the rounds of with / without.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

from benchmarks.engine_options import engine_args, engine_parser
from benchmarks.machine import cpu_name
from llmkernel.engine.core import EngineCore
from llmkernel.engine.executor import UniProcExecutor
from llmkernel.llm.chat_template import ChatTemplate
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.stats import SpecDecodingStats

CODE = """
def total_price(items, discount):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        if price > 100:
            price = price * (1 - discount)
        total = total + price
    return total


def average_price(items, discount):
    count = 0
    for item in items:
        count = count + item["count"]
    if count == 0:
        return 0
    return total_price(items, discount) / count
"""

TEXT = """
The harbour of the small town had been quiet for years. In the spring of 1987 a shipping company from the north bought
the old warehouses, and within a few months three cranes stood at the water. The fishermen sold their boats or learnt to
drive trucks. The school got a second floor, the bakery a second oven, and on Saturdays the market reached down to the
lighthouse. When the company left again, twelve years later, it left the cranes behind, and they still stand there.
"""

PROMPTS = {
    "copying": [
        f"Repeat this code exactly, but rename total_price to sum_price:\n```python{CODE}```",
        f"Copy the following text word for word:\n{TEXT}",
        f"Correct the spelling of this text and write it out again:\n{TEXT}",
        f"Add a docstring to each function and print the whole code again:\n```python{CODE}```",
    ],
    "free": [
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Explain how a rainbow comes about.",
        "Give me some advice for a first journey to Japan.",
        "Why did the Roman empire decline?",
    ],
}


def main() -> None:
    """Measure what was asked for and print one JSON object."""
    options = parse_options()
    common = {"max_num_seqs": max(options.batches), "enable_prefix_caching": False}
    settings = {
        "method": "ngram",
        "num_speculative_tokens": options.drafts,
        "disable_by_batch_size": options.disable_by_batch_size,
    }
    engines = {
        "without": EngineCore(engine_args(options, **common), UniProcExecutor(), lambda *_: None),
        "with": EngineCore(engine_args(options, **common, speculative=settings), UniProcExecutor(), lambda *_: None),
    }
    facts = engines["with"].ready
    report: dict[str, Any] = {
        "benchmark": "speculation",
        "model": facts.model.name,
        "dtype": facts.model.dtype,
        "quantization": facts.model.quantization,
        "notes": facts.model.notes,
        "speculative": settings,
        "new_tokens": options.tokens,
        "num_threads": facts.num_threads,
        "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
    }
    for kind in options.kinds:
        report[kind] = {batch: compare(engines, kind, batch, options) for batch in options.batches}
    print(json.dumps(report, indent=1))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = engine_parser(__doc__)
    parser.add_argument("--kinds", default="copying,free", type=lambda text: text.split(","))
    parser.add_argument("--batches", default="1", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--drafts", default=5, type=int, help="num_speculative_tokens")
    parser.add_argument("--disable-by-batch-size", default=1000, type=int, help="1000: to see where it stops to pay")
    parser.add_argument("--tokens", default=128, type=int, help="most tokens of an answer")
    parser.add_argument("--rounds", default=2, type=int)
    return parser.parse_args()


def compare(engines: dict[str, EngineCore], kind: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One kind of prompts at one batch size, both engines in turns."""
    prompts = encode(engines["with"], PROMPTS[kind])
    starts = range(len(prompts)) if batch == 1 else range(1)
    rates: dict[str, list[float]] = {"with": [], "without": []}
    before = drafts_of(engines["with"])
    for turn in range(options.rounds):
        for start in starts:
            chosen = [prompts[(start + place) % len(prompts)] for place in range(batch)]
            for name in sorted(engines, reverse=bool((turn + start) % 2)):
                rates[name].append(measure(engines[name], chosen, options.tokens))
    after = drafts_of(engines["with"])
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    ratios = [one / other for one, other in zip(rates["with"], rates["without"], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "tokens_per_second": round(statistics.median(rates["with"]), 1),
        "tokens_per_second_without": round(statistics.median(rates["without"]), 1),
        "num_drafts": after.num_drafts - before.num_drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
    }


def encode(core: EngineCore, prompts: list[str]) -> list[list[int]]:
    """Each as a user's turn."""
    facts = core.ready.tokenizer
    assert facts.chat_template is not None
    tokenizer, template = Tokenizer.from_facts(facts), ChatTemplate(facts.chat_template, facts.special_tokens)
    texts = [template.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def drafts_of(core: EngineCore) -> SpecDecodingStats:
    """The totals until now."""
    stats = core.scheduler.make_stats(0.0).spec_decoding_stats
    assert stats is not None
    return stats


def measure(core: EngineCore, prompts: list[list[int]], tokens: int) -> float:
    """Decoded tokens per second of these prompts together."""
    for index, prompt in enumerate(prompts):
        request = EngineCoreRequest(
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=tokens),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            eos_token_id=core.ready.tokenizer.eos_token_id,
        )
        core.add_request(core.preprocess_add_request(request))
    waiting = len(prompts)
    while waiting:
        waiting -= sum(one.prefill_stats is not None for out in core.step().values() for one in out.outputs)
    decoded, started = 0, time.perf_counter()
    while core.has_unfinished_requests():
        decoded += sum(len(one.new_token_ids) for out in core.step().values() for one in out.outputs)
    seconds = time.perf_counter() - started
    while core.has_requests():
        core.step()
    return decoded / seconds


if __name__ == "__main__":
    main()
