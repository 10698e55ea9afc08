"""32 streams for a minute, or ten: every answer is right, and memory stays flat on both sides."""

import asyncio
import json
import random
import sys
import time

import numpy as np
import psutil
import pytest

from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import answer, fake_llm

STREAMS = 32
REMEMBERED_WORDS = 10_000
"""What `tokenizers` keeps of a BPE model's words, and no more (0.7 KiB each here): it has them before we measure."""

SLOPES = {60: 16.0, 600: 1.0}
"""Seconds of a run -> KiB per second that the memory of a process may grow in its second half."""


@pytest.mark.timeout(700)
@pytest.mark.slow
@pytest.mark.parametrize(
    "seconds", [pytest.param(60, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.soak)]
)
async def test_memory_is_flat_under_32_streams(seconds: int) -> None:
    async with fake_llm("step_ms=10,num_blocks=1200,max_model_len=2000") as llm:
        assert llm.facts is not None
        tokenizer = await llm.get_tokenizer()
        assert tokenizer is not None
        for number in range(REMEMBERED_WORDS):
            tokenizer.encode(f"{number} {number / REMEMBERED_WORDS:.16f}")
        processes = {"kernel": psutil.Process(), "engine": psutil.Process(llm.facts.pid)}
        deadline = time.monotonic() + seconds
        memory: dict[str, list[int]] = {name: [] for name in processes}
        counts = [0, 0]
        streams = [asyncio.create_task(ask_until(llm, deadline, number, counts)) for number in range(STREAMS)]
        while time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            for name, process in processes.items():
                memory[name].append(process.memory_info().rss)
        await asyncio.gather(*streams)
        slopes = {name: slope(values[len(values) // 2 :]) for name, values in memory.items()}
        report = {"seconds": seconds, "finished": counts[0], "left_early": counts[1]} | {
            f"{name}_KiB_per_s": round(value, 2) for name, value in slopes.items()
        }
        print(json.dumps(report), file=sys.stderr)
        assert counts[0] > STREAMS
        assert all(value < SLOPES[seconds] for value in slopes.values()), report
        stats = await llm.get_stats()
        assert stats["num_running_reqs"] == stats["num_waiting_reqs"] == 0 and stats["kv_cache_usage"] == 0
        assert llm.num_unfinished_requests == 0


async def ask_until(llm: AsyncLLM, deadline: float, number: int, counts: list[int]) -> None:
    """One stream after the other; about one in eight is left in its middle. counts: finished, left."""
    chance = random.Random(number)
    while time.monotonic() < deadline:
        prompt, length = f"{number} {chance.random()}", chance.randrange(5, 200)
        leave_at = chance.randrange(1, length) if chance.random() < 0.125 else length + 1
        params = SamplingParams(max_tokens=length, output_kind=RequestOutputKind.DELTA)
        said = ""
        async for output in llm.generate(prompt, params):
            said += output.text
            if len(said) >= leave_at:
                break
        assert answer(prompt, length).startswith(said)
        counts[leave_at <= length] += 1


def slope(values: list[int]) -> float:
    """KiB per second of values that were taken twice a second."""
    return float(np.polyfit(np.arange(len(values)) / 2, np.array(values) / 1024, 1)[0])
