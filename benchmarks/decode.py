"""Decode speed of the engine: ms per step and tokens per second at several batch sizes, as JSON on stdout.

    python benchmarks/decode.py                          EngineCore in this process
    python benchmarks/decode.py --peer-transformers      and transformers' generate() on the same weights
    python benchmarks/decode.py --through-async          and AsyncLLM: engine process, sockets, detokenizing,
                                                         in turns with the engine alone

All requests of a batch have prompts of --context random tokens that share no prefix, and are sampled greedily. A step
is counted when every request of the batch decodes in it. Peers are timed as generate(1 + N) minus generate(1), over N.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from typing import Any

from benchmarks.core_requests import add_requests, random_prompts
from benchmarks.engine_options import engine_args, engine_parser
from benchmarks.machine import cpu_name
from llmkernel.config import EngineArgs
from llmkernel.engine.core import EngineCore
from llmkernel.engine.executor import UniProcExecutor
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

FORGET = 1.2
"""Seconds between two engines' turns: a thread governor that was idle for a second begins with all threads. Before that
it takes what the other engine used for the load of a neighbour, and steps with fewer.
"""


def main() -> None:
    """Measure what was asked for and print one JSON object."""
    options = parse_options()
    args = engine_args(options, max_num_seqs=256)
    core = EngineCore(args, UniProcExecutor(), lambda *_: None)
    facts = core.ready
    report: dict[str, Any] = {
        "benchmark": "decode",
        "model": facts.model.name,
        "dtype": facts.model.dtype,
        "implementation": facts.model.implementation,
        "notes": facts.model.notes,
        "weights_bytes": facts.model.weights_bytes,
        "context": options.context,
        "new_tokens": options.tokens,
        "num_threads": facts.num_threads,
        "cpu": cpu_name(),
        "load_average": os.getloadavg()[0],
        "load_seconds": {stage: round(seconds, 3) for stage, seconds in facts.load_timings.items()},
        "engine_core": {},
    }
    for batch in options.batches:
        report["engine_core"][batch] = measure_core(core, batch, options.context, options.tokens)
    if options.through_async:
        report["async_llm"] = asyncio.run(measure_async(args, options, core))
    core.shutdown()
    if options.peer_transformers:
        report["transformers_generate"] = measure_transformers(options, facts.model.dtype, facts.num_threads)
    print(json.dumps(report, indent=1))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = engine_parser(__doc__)
    parser.add_argument("--batches", default="1,4,16,64", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--context", default=128, type=int, help="tokens of each prompt")
    parser.add_argument("--tokens", default=32, type=int, help="tokens generated per request and counted")
    parser.add_argument("--peer-transformers", action="store_true")
    parser.add_argument("--through-async", action="store_true")
    parser.add_argument("--rounds", default=3, type=int, help="of --through-async, each beside the engine alone")
    return parser.parse_args()


def summary(batch: int, steps: list[float]) -> dict[str, float]:
    """Figures of one batch size from the seconds of its steps."""
    median = statistics.median(steps)
    return {
        "step_ms_median": round(median * 1e3, 2),
        "step_ms_min": round(min(steps) * 1e3, 2),
        "step_ms_mean": round(statistics.mean(steps) * 1e3, 2),
        "tokens_per_second": round(batch / median, 1),
        "steps": len(steps),
    }


def measure_core(core: EngineCore, batch: int, context: int, tokens: int) -> dict[str, float]:
    """EngineCore.step() alone: schedule, forward, sample, update."""
    add_requests(core, batch, context, tokens + 64)
    steps: list[float] = []
    while len(steps) < tokens + 2:
        started = time.perf_counter()
        outputs = core.step()
        seconds = time.perf_counter() - started
        if sum(len(one.new_token_ids) for out in outputs.values() for one in out.outputs) == batch:
            steps.append(seconds)
    core.abort_requests([f"{batch}-{index}" for index in range(batch)])
    while core.has_requests():
        core.step()
    core.call_utility("reset_prefix_cache")
    return summary(batch, steps[2:])  # the first counted steps may hold the last prefill


def measure_transformers(options: argparse.Namespace, dtype: str, num_threads: int) -> dict[int, dict[str, float]]:
    """transformers' generate() with its own cache and SDPA, as a user would call it."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmkernel.engine.worker.model_source import resolve_model

    torch.set_num_threads(num_threads)
    folder = resolve_model(EngineArgs(model=options.model), lambda *_: None).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def seconds(ids: Any, tokens: int) -> float:
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    results = {}
    for batch in options.batches:
        ids = torch.tensor(random_prompts(batch, options.context, model.config.vocab_size))
        seconds(ids, 2)
        first = min(seconds(ids, 1) for _ in range(2))
        whole = min(seconds(ids, 1 + options.tokens) for _ in range(2))
        results[batch] = summary(batch, [(whole - first) / options.tokens])
    return results


async def measure_async(args: EngineArgs, options: argparse.Namespace, core: EngineCore) -> dict[int, dict[str, float]]:
    """AsyncLLM, in turns with `core`: from the first token that all requests have to the last, as their readers see it.

    of_engine_core: its mean step over that of AsyncLLM, the median of the rounds.
    """
    from llmkernel.llm.async_llm import AsyncLLM

    llm = AsyncLLM(args)
    facts = await llm.ready()
    params = SamplingParams(
        temperature=0, max_tokens=options.tokens + 1, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def one(request_id: str, prompt: list[int], times: list[float]) -> None:
        async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id=request_id):
            times.extend([time.perf_counter()] * len(output.outputs[0].token_ids))

    async def step_ms(batch: int) -> float:
        prompts = random_prompts(batch, options.context, facts.model.vocab_size)
        times: list[list[float]] = [[] for _ in prompts]
        await asyncio.gather(*(one(f"{batch}-{i}", prompt, times[i]) for i, prompt in enumerate(prompts)))
        begun, ended = max(stamps[0] for stamps in times), max(stamps[-1] for stamps in times)
        counted = sum(sum(stamp > begun for stamp in stamps) for stamps in times)
        await llm.reset_prefix_cache()
        return (ended - begun) / (counted / batch) * 1e3

    results = {}
    for batch in options.batches:
        ours, shares = [], []
        for _ in range(options.rounds):
            await asyncio.sleep(FORGET)
            bare = measure_core(core, batch, options.context, options.tokens)["step_ms_mean"]
            await asyncio.sleep(FORGET)
            ours.append(await step_ms(batch))
            shares.append(bare / ours[-1])
        step = statistics.median(ours)
        results[batch] = {
            "tokens_per_second": round(batch / step * 1e3, 1),
            "step_ms_mean": round(step, 2),
            "of_engine_core": round(statistics.median(shares), 3),
        }
    llm.shutdown()
    return results


if __name__ == "__main__":
    main()
