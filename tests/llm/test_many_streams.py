"""64 requests at once, of mixed length, parameters and kinds, with random aborts: every stream ends once, nothing is
lost."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import answer, fake_llm, free_blocks

DELTA = RequestOutputKind.DELTA
PROMPT = "The same prompt for all three kinds, of some length. "


@dataclass
class _Stream:
    """What one reader saw: text, ids and reason by index, and how often it heard that the stream is finished."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str | None] = field(default_factory=dict)
    ends: int = 0


async def _read(
    llm: AsyncLLM, prompt: str, params: SamplingParams, request_id: str, leave_after: int | None
) -> _Stream:
    seen = _Stream()
    outputs = 0
    stream = llm.generate(prompt, params, request_id=request_id)
    async for output in stream:
        outputs += 1
        seen.ends += output.finished
        for completion in output.outputs:
            at = completion.index
            old_text, old_ids = (
                (seen.texts.get(at, ""), seen.ids.get(at, [])) if params.output_kind == DELTA else ("", [])
            )
            seen.texts[at] = old_text + completion.text
            seen.ids[at] = old_ids + completion.token_ids
            seen.reasons[at] = completion.finish_reason
        if outputs == leave_after and not output.finished:
            await stream.aclose()
            break
    return seen


def _params(chance: random.Random, kind: RequestOutputKind) -> SamplingParams:
    expected = answer(PROMPT, 120)
    stops = [expected[at : at + chance.randint(1, 4)] for at in (chance.randint(1, 100) for _ in range(2))]
    return SamplingParams(
        n=chance.choice([1, 1, 2, 4]),
        max_tokens=chance.choice([1, 7, 40, 120]),
        min_tokens=chance.choice([0, 0, 1]),
        stop=stops if chance.random() < 0.5 else None,
        include_stop_str_in_output=chance.random() < 0.3,
        stream_interval=chance.choice([None, 1, 2, 7]),
        logprobs=chance.choice([None, None, 2]),
        output_kind=kind,
        seed=chance.randrange(1000),
    )


async def _chaos(llm: AsyncLLM, seed: int, count: int) -> None:
    """`count` trios of requests that differ in their output kind only, and as many others that are ended early."""
    chance = random.Random(seed)
    trios: list[list[asyncio.Task[_Stream]]] = []
    limits = []
    others: list[asyncio.Task[_Stream]] = []
    for number in range(count):
        prompt = PROMPT * chance.choice([1, 1, 2, 8]) if number % 3 else PROMPT
        trio_seed = chance.randrange(2**30)
        trio = []
        for kind in RequestOutputKind:
            params = _params(random.Random(trio_seed), kind)
            coroutine = _read(llm, prompt, params, f"{seed}.{number}.{kind}", None)
            trio.append(asyncio.create_task(coroutine))
        trios.append(trio)
        limits.append((prompt, params))
        long = SamplingParams(
            max_tokens=None, n=chance.choice([1, 3]), output_kind=chance.choice(list(RequestOutputKind))
        )
        leave_after = chance.choice([None, 1, 3]) if long.output_kind != RequestOutputKind.FINAL_ONLY else None
        others.append(asyncio.create_task(_read(llm, prompt, long, f"{seed}.o{number}", leave_after)))
    aborted = [number for number in range(count) if chance.random() < 0.5]
    for number in range(count):
        await asyncio.sleep(0)
        if number in aborted:
            await llm.abort(f"{seed}.o{number}")
        elif chance.random() < 0.5:
            others[number].cancel()
    streams = [await asyncio.gather(*trio) for trio in trios]
    await llm.abort([f"{seed}.o{number}" for number in range(count)])
    ended = await asyncio.gather(*others, return_exceptions=True)
    for trio_streams, (prompt, params) in zip(streams, limits, strict=True):
        _check_trio(trio_streams, prompt, params)
    for stream in ended:
        if isinstance(stream, _Stream):
            assert stream.ends in (0, 1)
        else:
            assert isinstance(stream, asyncio.CancelledError), stream


def _check_trio(streams: list[_Stream], prompt: str, params: SamplingParams) -> None:
    first = streams[0]
    for stream in streams:
        assert stream.ends == 1, "every stream ends exactly once"
        assert (stream.texts, stream.ids, stream.reasons) == (first.texts, first.ids, first.reasons)
    assert sorted(first.texts) == list(range(params.n))
    assert params.max_tokens is not None
    whole = answer(prompt, params.max_tokens)
    for index, text in first.texts.items():
        assert whole.startswith(text), "the fake model answers every seed alike"
        assert bytes(first.ids[index]).decode().startswith(text)
        if first.reasons[index] == "length":
            assert text == whole
        else:
            assert first.reasons[index] == "stop" and params.stop


@pytest.mark.row("A-002", "A-097", "A-114", "A-117", "A-149")
@pytest.mark.parametrize("settings", ["step_ms=1,num_blocks=2000", "num_blocks=120"], ids=["roomy", "preempting"])
async def test_64_streams_with_aborts(settings: str) -> None:
    async with fake_llm(settings, max_num_seqs=48, max_num_batched_tokens=512) as llm:
        for seed in range(2):
            await _chaos(llm, seed, 16)
        free, total = await free_blocks(llm)
        assert free == total, "all blocks come back"
        assert llm.num_unfinished_requests == 0


@pytest.mark.soak
async def test_many_rounds() -> None:
    async with fake_llm("num_blocks=300", max_num_seqs=64) as llm:
        for seed in range(60):
            await _chaos(llm, 1000 + seed, 16)
        free, total = await free_blocks(llm)
        assert free == total
