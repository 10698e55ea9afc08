"""The line of the stat logger."""

import logging

import pytest

from llmkernel.llm.loggers import StatLogger
from llmkernel.llm.stats import IterationStats
from llmkernel.protocol.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats


@pytest.mark.row("A-120")
def test_a_line_is_written_when_it_is_due_and_counts_start_again(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = SchedulerStats(
        num_running_reqs=2, kv_cache_usage=0.25, prefix_cache_stats=PrefixCacheStats(queries=10, hits=4)
    )
    with caplog.at_level(logging.INFO, "llmkernel.stats"):
        patient = StatLogger(interval=3600)
        patient.record(scheduler, IterationStats(num_generation_tokens=5))
        assert not caplog.records
        eager = StatLogger(interval=0)
        eager.record(scheduler, IterationStats(num_generation_tokens=5))
        eager.record(SchedulerStats(), None)
    first, second = (record.getMessage() for record in caplog.records)
    assert "running 2" in first and "KV cache 25.0 %" in first and "hits 40.0 %" in first
    assert "generation 0.0 tok/s" in second


def test_drafts_have_a_line_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    drafts = SpecDecodingStats(num_drafts=4, num_draft_tokens=10, num_accepted_tokens=7)
    with caplog.at_level(logging.INFO, "llmkernel.stats"):
        StatLogger(interval=0).record(SchedulerStats(spec_decoding_stats=drafts), None)
    assert caplog.records[-1].getMessage() == ("speculation: 7 of 10 drafted tokens accepted since the start, 70.0 %")
