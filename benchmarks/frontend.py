"""What the front end costs per token, as JSON.

`path`: EngineCoreOutputs encoded, decoded, processed and taken by their readers, without a socket, with the text of
--model's tokenizer; beside vLLM's where its interpreter is given. `process`: of that, EngineCoreOutputs as they were
decoded to the RequestOutput in the hands of the reader (OutputProcessor and collectors), tokens that are bytes.
`stream`: ADD to text through a real engine process whose fake model takes no time, so this is everything but the
model: scheduler, wire, detokenizer, asyncio, with a message for every step (which tokens that come this fast have only
when they are asked to: stream_interval=1). `add`: one request of 64 prompt tokens from the call to the socket.

    python benchmarks/frontend.py [--streams 1 64 256] [--tokens 200] [--kind cumulative|delta]
    python benchmarks/frontend.py --peer vllm=/envs/vllm/bin/python
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import time

import msgspec

from benchmarks.frontend_path import PEERS, measure_path
from benchmarks.peer_process import add_peer_option, end_in_order
from llmkernel.config import EngineArgs
from llmkernel.engine.fake_tokenizer import fake_tokenizer_facts
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.stats import IterationStats
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.outputs import EngineCoreOutput, EngineCoreOutputs
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams

FAKE = "llmkernel.engine.fake_executor:FakeExecutor"
TEXT = b"the quick brown fox jumps over the lazy dog "


def _request(number: int, kind: RequestOutputKind, tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=f"{number}-0",
        prompt_token_ids=list(TEXT),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=tokens, output_kind=kind, seed=1),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=str(number),
    )


def measure_process(streams: int, tokens: int, kind: RequestOutputKind) -> float:
    """CPU microseconds per token; every step brings one token for each stream, and each reader takes it at once."""
    processor = OutputProcessor(Tokenizer.from_facts(fake_tokenizer_facts()))
    collectors = []
    for number in range(streams):
        request = _request(number, kind, tokens)
        collector = RequestOutputCollector(kind, request.request_id)
        processor.add_request(request, "prompt", None, 0, collector)
        collectors.append(collector)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(EngineCoreOutputs)
    steps = []
    for step in range(tokens):
        token_id = TEXT[step % len(TEXT)]
        outputs = [EngineCoreOutput(f"{number}-0", [token_id]) for number in range(streams)]
        steps.append(decoder.decode(encoder.encode(EngineCoreOutputs(outputs=outputs))))
    started = time.process_time()
    for message in steps:
        processor.process_outputs(message.outputs, message.timestamp, IterationStats())
        for collector in collectors:
            collector.get_nowait()
    return (time.process_time() - started) / (streams * tokens) * 1e6


async def measure_stream(streams: int, tokens: int, kind: RequestOutputKind, step_ms: float) -> dict[str, float]:
    """Wall and CPU microseconds of this process per token, and the time to the first text of each stream."""
    blocks = streams * (tokens + 80) // 16 + 64
    model = f"fake:step_ms={step_ms},num_blocks={blocks},verify=0,max_model_len={tokens + 200}"
    args = EngineArgs(model=model, max_num_seqs=max(streams, 1), max_num_batched_tokens=8192)
    first: list[float] = []
    async with AsyncLLM(args, executor_class=FAKE) as llm:

        async def read(number: int) -> int:
            begun = time.perf_counter()
            params = SamplingParams(max_tokens=tokens, output_kind=kind, stream_interval=1)
            count = 0
            async for _ in llm.generate(list(TEXT), params, request_id=str(number)):
                if not count:
                    first.append(time.perf_counter() - begun)
                count += 1
            return count

        await read(-1)
        first.clear()
        cpu, wall = _cpu_seconds(), time.perf_counter()
        yields = await asyncio.gather(*(read(number) for number in range(streams)))
        wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    count = streams * tokens
    return {
        "wall_us_per_token": round(wall / count * 1e6, 2),
        "frontend_cpu_us_per_token": round(cpu / count * 1e6, 2),
        "tokens_per_s": round(count / wall),
        "first_text_ms_median": round(statistics.median(first) * 1e3, 2),
        "outputs_per_token": round(sum(yields) / count, 3),
    }


async def measure_add() -> float:
    """Microseconds from add_request to the request being sent; the median of 500."""
    async with AsyncLLM(EngineArgs(model="fake:num_blocks=4096"), executor_class=FAKE) as llm:
        spent = []
        params = SamplingParams(max_tokens=1)
        for number in range(500):
            begun = time.perf_counter()
            collector = await llm.add_request(str(number), list(range(64)), params)
            spent.append(time.perf_counter() - begun)
            while not (await collector.get()).finished:
                pass
        return statistics.median(spent) * 1e6


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--kind", choices=["cumulative", "delta"], default="delta")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer `path` takes")
    add_peer_option(parser, PEERS)
    options = parser.parse_args()
    end_in_order()
    kind = RequestOutputKind[options.kind.upper()]
    result = {
        "benchmark": "frontend",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "kind": options.kind,
        "tokens_per_stream": options.tokens,
        "step_ms": options.step_ms,
        "add_us": round(asyncio.run(measure_add()), 1),
        "process_cpu_us_per_token": {},
        "stream": {},
    }
    for streams in options.streams:
        result["process_cpu_us_per_token"][streams] = round(measure_process(streams, options.tokens, kind), 2)
        result["stream"][streams] = asyncio.run(measure_stream(streams, options.tokens, kind, options.step_ms))
    result["path"] = measure_path(dict(options.peer), options.model, options.streams, options.tokens, kind.name)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
