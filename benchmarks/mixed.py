"""Prompts that arrive while others decode, as JSON on stdout.

    python benchmarks/mixed.py [--rate 2] [--requests 60]

`stall`: eight streams run; then a prompt of 4,000 tokens is admitted. Inter-token latencies of the eight before it came
and until its first token, and their ratio; `long_prompt_seconds` is what the long prompt waits for its first token.
`poisson`: requests with exponential gaps (`--rate` a second), prompts of 16 to 2,000 and answers of 8 to 256 tokens,
both spread evenly on a logarithmic scale: time to first token, inter-token latency, tokens per second of all.
"""

import asyncio
import json
import math
import os
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.engine_options import engine_args, engine_parser
from benchmarks.machine import cpu_name
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

LONG_PROMPT = 4000
STREAMS = 8
WARM_TOKENS = 40


@dataclass
class Stream:
    """When a request was sent and when each of its tokens came."""

    sent: float
    moments: list[float] = field(default_factory=list)
    warm: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when WARM_TOKENS have come."""

    @property
    def first(self) -> float:
        """Seconds from sending to the first token."""
        return self.moments[0] - self.sent

    def gaps(self, begin: float = 0.0, end: float = math.inf) -> list[float]:
        """Inter-token latencies that ended between two moments."""
        return [b - a for a, b in zip(self.moments, self.moments[1:], strict=False) if begin <= b <= end]


async def run(llm: AsyncLLM, request_id: str, prompt: list[int], tokens: int, stream: Stream) -> None:
    """One request, its moments written into `stream`: every token told at once, so that gaps are those of steps."""
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, stream_interval=1
    )
    async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id=request_id):
        stream.moments.extend([time.perf_counter()] * len(output.outputs[0].token_ids))
        if len(stream.moments) >= WARM_TOKENS:
            stream.warm.set()


def percentiles(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    return {
        name: round(float(np.percentile(values, at)) * 1e3, 1)
        for name, at in (("median", 50), ("p95", 95), ("p99", 99), ("max", 100))
    }


async def measure_stall(llm: AsyncLLM, rng: np.random.Generator) -> dict[str, object]:
    """The eight streams decode 2 s alone, then beside the long prompt; they are stopped when it has its first token."""
    streams = [Stream(time.perf_counter()) for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(run(llm, f"short-{i}", rng.integers(1000, 40000, 128).tolist(), 4000, stream))
        for i, stream in enumerate(streams)
    ]
    await asyncio.gather(*(stream.warm.wait() for stream in streams))
    begin = time.perf_counter()
    await asyncio.sleep(2)
    sent = time.perf_counter()
    long = Stream(sent)
    await run(llm, "long", rng.integers(1000, 40000, LONG_PROMPT).tolist(), 1, long)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    before = [gap for stream in streams for gap in stream.gaps(begin, sent)]
    beside = [gap for stream in streams for gap in stream.gaps(sent, long.moments[0])]
    return {
        "streams": STREAMS,
        "long_prompt": LONG_PROMPT,
        "long_prompt_seconds": round(long.first, 3),
        "before_ms": percentiles(before),
        "beside_ms": percentiles(beside),
        "ratio_of_means": round(float(np.mean(beside) / np.mean(before)), 2),
        "ratio_of_medians": round(float(np.median(beside) / np.median(before)), 2),
        "ratio_of_p95": round(float(np.percentile(beside, 95) / np.percentile(before, 95)), 2),
    }


async def measure_poisson(llm: AsyncLLM, rng: np.random.Generator, rate: float, requests: int) -> dict[str, object]:
    """All arrivals are drawn beforehand: the same load in every run."""
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    prompts = np.exp(rng.uniform(np.log(16), np.log(2000), requests)).astype(int)
    answers = np.exp(rng.uniform(np.log(8), np.log(256), requests)).astype(int)
    started = time.perf_counter()
    streams, tasks = [], []
    for number in range(requests):
        await asyncio.sleep(max(0.0, started + arrivals[number] - time.perf_counter()))
        stream = Stream(time.perf_counter())
        prompt = rng.integers(1000, 40000, prompts[number]).tolist()
        streams.append(stream)
        tasks.append(asyncio.create_task(run(llm, f"arrival-{number}", prompt, int(answers[number]), stream)))
    await asyncio.gather(*tasks)
    seconds = max(stream.moments[-1] for stream in streams) - started
    return {
        "requests": requests,
        "rate": rate,
        "prompt_tokens": int(prompts.sum()),
        "answer_tokens": int(answers.sum()),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(float(answers.sum() + prompts.sum()) / seconds, 1),
        "first_token_ms": percentiles([stream.first for stream in streams]),
        "inter_token_ms": percentiles([gap for stream in streams for gap in stream.gaps()]),
    }


async def main() -> None:
    """Measure both and print one JSON object."""
    parser = engine_parser(__doc__)
    parser.add_argument("--rate", default=2.0, type=float, help="arrivals per second")
    parser.add_argument("--requests", default=60, type=int)
    options = parser.parse_args()
    async with AsyncLLM(engine_args(options, enable_prefix_caching=False)) as llm:
        facts = await llm.ready()
        report = {
            "benchmark": "mixed",
            "cpu": cpu_name(),
            "load_average": os.getloadavg()[0],
            "model": facts.model.name,
            "dtype": facts.model.dtype,
            "quantization": facts.model.quantization,
            "stall": await measure_stall(llm, np.random.default_rng(0)),
            "poisson": await measure_poisson(llm, np.random.default_rng(1), options.rate, options.requests),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
