"""The way of a request, hop by hop, from the cell to the end, with real engines and made-up clocks."""

from collections.abc import AsyncIterator

import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.request_trace import MOST_SHOWN, hops_of, trace_text
from llmkernel.notebook.row_feed import RowFeed
from llmkernel.notebook.session import Session
from llmkernel.notebook.widgets.messages import Hop

FIRST_HOPS = [
    ("kernel", "submitted"),
    ("kernel", "ADD sent"),
    ("engine", "received"),
    ("engine", "queued"),
    ("engine", "scheduled"),
]
LAST_HOPS = [
    ("engine", "first token"),
    ("engine", "pushed"),
    ("kernel", "received"),
    ("kernel", "detokenized"),
    ("kernel", "finished"),
]


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    with Session() as session:
        await session.load("fake:step_ms=2,num_blocks=600,max_model_len=4096", max_num_batched_tokens=256, name="fake")
        yield session


def places(hops: list[Hop]) -> list[tuple[str, str]]:
    return [(hop.where, hop.name) for hop in hops]


@pytest.mark.row("A-147")
async def test_every_hop_of_a_request_in_order(session: Session) -> None:
    generation = await session.generate("x" * 600, max_tokens=20, raw=True)
    (feed,) = RowFeed.of(generation)
    hops = hops_of(feed)
    chunks = [("engine", "prefill")] * 2
    assert places(hops) == [*FIRST_HOPS, *chunks, *LAST_HOPS]
    times = [hop.at for hop in hops]
    assert times == sorted(times) and times[0] == 0.0
    details = {hop.name: hop.detail for hop in hops}
    assert details["prefill"] == "512 of 600 tokens"
    assert details["finished"].startswith("length, 20 tokens, ")
    again = await session.generate("x" * 600, max_tokens=1, raw=True)
    (feed,) = RowFeed.of(again)
    assert {hop.name: hop.detail for hop in hops_of(feed)}["scheduled"] == "prompt of 600 tokens, 592 of them cached"


async def test_every_answer_of_a_prompt_has_a_way_of_its_own(session: Session) -> None:
    generation = await session.generate(["a", "b"], n=2, max_tokens=3)
    text = trace_text(generation)
    heads = [line for line in text.splitlines() if line.startswith("Request")]
    assert heads == [f"Request {id}" for id in ("0_g1.1", "1_g1.1", "0_g1.2", "1_g1.2")]
    assert text.count("first token") == 4
    assert trace_text(generation, "1_g1.2").count("first token") == 1
    assert trace_text(generation, "g1.2").count("first token") == 2
    with pytest.raises(InvalidRequestError, match=r"g1 has no request 'g1\.9'"):
        trace_text(generation, "g1.9")


async def test_of_many_requests_the_first_ways_are_told_and_how_to_see_another(session: Session) -> None:
    generation = await session.generate([f"{number}" for number in range(MOST_SHOWN + 3)], max_tokens=1)
    text = trace_text(generation)
    assert text.count("Request ") == MOST_SHOWN
    assert text.endswith(f"3 more; name one, for example %llm trace g1.{MOST_SHOWN + 1}.")


async def test_the_wait_for_a_load_is_a_hop_of_its_own() -> None:
    with Session() as session:
        session.load("fake:load_ms=200", name="fake")
        generation = await session.generate("a", max_tokens=1)
        assert places(hops_of(RowFeed.of(generation)[0]))[:3] == [
            ("kernel", "submitted"),
            ("kernel", "model ready"),
            ("kernel", "ADD sent"),
        ]


async def test_a_stopped_request_ends_where_it_was_stopped(session: Session) -> None:
    generation = session.generate("a", max_tokens=3000)
    async for _ in generation:
        generation.cancel()
        break
    hops = hops_of(RowFeed.of(generation)[0])
    assert hops[-1].name == "finished" and hops[-1].detail.startswith("abort, ")


async def test_times_of_an_engine_with_another_clock_are_carried_over(session: Session) -> None:
    session.models["fake"].llm.output_processor.clock_offset = 1000.0
    generation = await session.generate("a", max_tokens=2)
    (feed,) = RowFeed.of(generation)
    way = feed.metrics.way
    way.clock_offset = 0.0
    straight = [hop.at for hop in hops_of(feed) if hop.where == "engine"]
    way.clock_offset = 1000.0
    carried = [hop.at for hop in hops_of(feed) if hop.where == "engine"]
    assert carried == pytest.approx([at + 1000.0 for at in straight])
    way.clock_offset = -1000.0
    times = [hop.at for hop in hops_of(feed)]
    assert times == sorted(times), "no hop before the one that caused it, whatever the clocks say"
