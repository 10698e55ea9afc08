"""What a notebook tells of requests that bring no tokens: it asks the engine while somebody looks, and only then."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llmkernel.notebook.generation import Generation
from llmkernel.notebook.generation_table import generation_table
from llmkernel.notebook.request_trace import hops_of, trace_text
from llmkernel.notebook.row_feed import RowFeed
from llmkernel.notebook.session import Session
from llmkernel.notebook.status_text import status_text

SLOW_READER = "fake:step_ms=50,num_blocks=600,max_model_len=4096"
SMALL_POOL = "fake:step_ms=60,num_blocks=24,max_model_len=256"


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    with Session() as session:
        yield session


async def load(session: Session, model: str, **options: Any) -> None:
    await session.load(model, name="fake", **options)


async def seen(generation: Generation, wanted: Any) -> str:
    """The line of `%llm ps` for which `wanted` holds, looking again and again."""
    async with asyncio.timeout(20):
        while True:
            line = generation_table([generation])
            if wanted(line):
                return line
            await asyncio.sleep(0.02)


@pytest.mark.row("A-147")
async def test_a_long_prompt_shows_how_much_of_it_was_read(session: Session) -> None:
    await load(session, SLOW_READER, max_num_batched_tokens=64)
    generation = session.generate("x" * 1700, max_tokens=4, raw=True)
    line = await seen(generation, lambda line: re.search(r"prefill [1-9]", line))
    assert " / 1,700 tokens" in line
    (feed,) = RowFeed.of(generation)
    counters = feed.counters()
    assert (counters.state, counters.prompt_tokens) == ("prefill", 1700)
    text = trace_text(generation)
    assert "ADD sent" in text and "engine  now" in text and " / 1,700 tokens" in text
    await generation
    assert feed.look() is None and "done" in generation_table([generation])


async def test_a_request_that_waits_says_its_place_and_what_it_needs(session: Session) -> None:
    await load(session, SMALL_POOL)
    first = session.generate("a" * 176, max_tokens=79, raw=True)  # 12 of 23 blocks at least
    await seen(first, lambda line: "running" in line)
    second = session.generate(["b" * 200, "c" * 20], max_tokens=9, raw=True)
    line = await seen(second, lambda line: "needs" in line)
    assert "queued #1: waiting for KV: needs 13 blocks, " in line and " free (+1)" in line
    states = [feed.look() for feed in RowFeed.of(second)]
    assert [state.position for state in states if state is not None] == [1, 2]
    assert [str(state) for state in states][1] == "queued #2"
    assert "  g2.1 waits: needs 13 blocks, " in status_text(session)
    first.cancel()
    await second
    assert [feed.look() for feed in RowFeed.of(second)] == [None, None]


async def test_a_preempted_request_keeps_its_state_and_says_what_it_waits_for(session: Session) -> None:
    await load(session, "fake:step_ms=5,num_blocks=14,max_model_len=200")
    generation = session.generate(["a" * 60, "b" * 60], max_tokens=120, raw=True)
    feeds, notes = RowFeed.of(generation), []
    while not generation.done:
        counters = [feed.counters() for feed in feeds]
        notes += [(one.state, one.note) for one in counters if one.note and "preempted" in one.note]
        await asyncio.sleep(0.01)
    assert notes and {state for state, _ in notes} == {"decoding"}
    events = [hop.name for feed in feeds for hop in hops_of(feed)]
    assert events.count("preempted") == events.count("resumed") >= 1


async def test_who_does_not_look_asks_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    await load(session, SMALL_POOL)
    slot = session.models["fake"]
    asked = []
    ask = slot.llm.get_request_progress

    async def counted() -> Any:
        asked.append(1)
        return await ask()

    monkeypatch.setattr(slot.llm, "get_request_progress", counted)
    await session.generate("hello", max_tokens=5)
    assert asked == []
    running = session.generate("hello", max_tokens=12)
    await seen(running, lambda line: "running" in line)
    already = len(asked)
    for _ in range(50):
        generation_table([running])
    assert len(asked) == already, "one that brings tokens is told of by them"
    await running


async def test_an_engine_that_ends_leaves_the_watch_quiet(session: Session) -> None:
    await load(session, "fake:step_ms=50,num_blocks=24")
    generation = session.generate("a", max_tokens=400)
    slot = session.models["fake"]
    await seen(generation, lambda line: "running" in line)
    slot.queue.find("g1")
    await asyncio.to_thread(slot.llm.shutdown)
    await slot.queue.refresh(1.0)
    assert slot.queue.find("g1") is None
