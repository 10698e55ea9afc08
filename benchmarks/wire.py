"""The wire between a client and an engine that computes nothing: latency, messages and tokens per second, as JSON.

    python benchmarks/wire.py [--calls 2000] [--tokens 400] [--streams 1 16 64 256]

Round trip: a utility call, from the call to its result, by the async and by the sync client. Streams: N requests of
--tokens tokens each on a fake executor without delay; a message holds one step's tokens of all streams. CPU seconds are
those of the client's process, per token.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from llmkernel.client.async_mp_client import AsyncMPClient
from llmkernel.client.sync_mp_client import SyncMPClient
from llmkernel.config import EngineArgs
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams

FAKE_EXECUTOR = "llmkernel.engine.fake_executor:FakeExecutor"


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    options = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "wire", "cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    report |= asyncio.run(measure_async(options))
    report["round_trip_sync"] = measure_sync(options.calls)
    print(json.dumps(report, indent=1))


def engine_args(streams: int, tokens: int) -> EngineArgs:
    """A fake engine with room for `streams` requests of `tokens` tokens at once."""
    blocks = streams * (tokens // 16 + 2) + 1
    model = f"fake:verify=0,num_blocks={blocks},max_model_len={tokens + 64}"
    return EngineArgs(model=model, max_num_seqs=streams, enable_prefix_caching=False)


async def measure_async(options: argparse.Namespace) -> dict[str, Any]:
    """Round trips and streams of the async client."""
    client = AsyncMPClient(engine_args(max(options.streams), options.tokens), FAKE_EXECUTOR)
    try:
        started = time.perf_counter()
        await client.ready()
        ready = time.perf_counter() - started
        latencies = []
        for _ in range(options.calls):
            started = time.perf_counter()
            await client.call_utility_async("is_sleeping")
            latencies.append(time.perf_counter() - started)
        streams = {count: await measure_streams(client, count, options.tokens) for count in options.streams}
    finally:
        client.shutdown()
    return {"engine_ready_s": round(ready, 3), "round_trip_async": summary(latencies), "streams": streams}


async def measure_streams(client: AsyncMPClient, count: int, tokens: int) -> dict[str, Any]:
    """`count` requests of `tokens` tokens each, from the first ADD to the last output."""
    names = {f"{count}-{number}" for number in range(count)}
    messages = received = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for name in sorted(names):
        await client.add_request_async(
            EngineCoreRequest(name, [1], None, SamplingParams(max_tokens=tokens), None, time.time(), None, None, None)
        )
    while names:
        outputs = (await client.get_output_async()).outputs
        messages += 1
        received += sum(len(output.new_token_ids) for output in outputs)
        names -= {output.request_id for output in outputs if output.finished}
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "tokens_per_s": round(received / wall),
        "messages_per_s": round(messages / wall),
        "client_cpu_us_per_token": round(1e6 * cpu / received, 2),
        "client_cpu_us_per_message": round(1e6 * cpu / messages, 1),
    }


def measure_sync(calls: int) -> dict[str, float]:
    """Round trips of the sync client."""
    with SyncMPClient(EngineArgs(model="fake:"), FAKE_EXECUTOR) as client:
        client.ready()
        return summary([timed(lambda: client.call_utility("is_sleeping")) for _ in range(calls)])


def timed(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def summary(seconds: list[float]) -> dict[str, float]:
    """Microseconds, and calls per second."""
    ordered = sorted(seconds)
    return {
        "p50_us": round(1e6 * statistics.median(ordered), 1),
        "p99_us": round(1e6 * ordered[int(0.99 * len(ordered))], 1),
        "per_s": round(len(ordered) / sum(ordered)),
    }


if __name__ == "__main__":
    main()
