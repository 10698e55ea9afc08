"""Each client of a shared engine hears where its own requests stand, and times their way by its own clock."""

import asyncio

import pytest

from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import collect, fake_llm


@pytest.mark.row("A-147")
async def test_guests_hear_of_their_own_requests_with_their_place_among_all() -> None:
    async with fake_llm("step_ms=20", max_num_seqs=1) as owner:
        guest = AsyncLLM.attach(owner)
        params = SamplingParams(max_tokens=40, output_kind=RequestOutputKind.DELTA)
        streams = []
        for llm, name in ((owner, "runs"), (owner, "mine"), (guest, "theirs")):
            collector = await llm.add_request(name, name, params)
            streams.append((llm, collector))
        async with asyncio.timeout(10):
            while not await owner.get_request_progress():
                pass  # each question is answered between two steps
            while not (told := await guest.get_request_progress()):
                pass
        assert [(one.request_id.rpartition("-")[0], one.position) for one in told] == [("theirs", 2)]
        (mine,) = await owner.get_request_progress()
        assert (mine.request_id.rpartition("-")[0], mine.position) == ("mine", 1)
        assert mine.reason == "1 request runs, the most at once (max_num_seqs)"
        (stats,) = guest.stats_of("theirs")
        assert stats.way.sent >= stats.way.submitted > 0 and not stats.way.received
        for llm, collector in streams:
            await llm.abort(collector.request_id, internal=True)
        assert await owner.get_request_progress() == []
        guest.shutdown()


async def test_the_times_of_a_way_are_in_order_and_end_with_the_request() -> None:
    async with fake_llm("step_ms=1") as llm:
        outputs = await collect(llm.generate("Hello", SamplingParams(max_tokens=3)))
        stats = outputs[-1].outputs[0].metrics
        assert stats is outputs[-1].metrics
        way = stats.way
        events = [event.timestamp for event in way.events]
        moments = [way.submitted, *events, stats.first_token_ts, way.pushed, way.received, way.decoded, way.ended]
        assert moments == sorted(moments) and way.clock_offset == 0.0
        assert llm.stats_of("Hello") == []
