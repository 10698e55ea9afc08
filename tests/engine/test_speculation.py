"""Drafts in the engine, on the fake model: the answers are those without them, in fewer steps; nothing is left over.

The fake executor checks that every KV slot that is read holds what was computed for the text, drafts included;
test_engine_properties plays with drafts at random.
"""

import dataclasses
from typing import Any

import pytest

from llmkernel.engine.fake_kv import FakeStepError
from llmkernel.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from tests.engine.harness import EOS, Engine, reference_answer
from tests.engine.test_structured_outputs import run as run_structured

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 8}
PROMPT = [1, 2, 3]
"""With an alphabet of three letters its answer repeats itself soon."""


def drafting(settings: str = "letters=3", **args: Any) -> Engine:
    return Engine(settings, **{"speculative": NGRAM, "num_blocks": 64} | args)


def answers(engine: Engine, **options: Any) -> list[list[int]]:
    """Of five requests at once."""
    for number in range(5):
        engine.add(f"r{number}", [*PROMPT, number], **{"max_tokens": 60} | options)
    run_structured(engine)
    engine.run()
    assert engine.is_empty()
    return [engine.tokens(f"r{number}") for number in range(5)]


def expected(**options: Any) -> list[list[int]]:
    return [reference_answer([*PROMPT, number], **{"max_tokens": 60, "letters": 3} | options)[0] for number in range(5)]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
        {"num_blocks": 24},
        {"num_blocks": 40, "enable_prefix_caching": False},
        {"stream_interval": 4},
        {"block_size": 1, "num_blocks": 200},
    ],
    ids=str,
)
def test_answers_are_those_without_drafts(limits: dict[str, Any]) -> None:
    engine = drafting(**limits)
    assert answers(engine) == expected()
    stats = engine.stats[-1].spec_decoding_stats
    assert stats.num_accepted_tokens > 20
    tokens_taken = sum(len(engine.tokens(f"r{number}")) for number in range(5))
    assert stats.num_draft_tokens <= sum(step.total_num_scheduled_tokens for step in engine.executor.steps)
    assert tokens_taken == 5 * 60


def test_fewer_steps_for_one_user() -> None:
    engine, plain = drafting(), drafting(speculative=None)
    for one in (engine, plain):
        one.add("a", PROMPT, max_tokens=200)
        one.run()
    assert engine.tokens("a") == plain.tokens("a")
    assert len(engine.executor.steps) * 2 < len(plain.executor.steps)
    assert plain.stats[-1].spec_decoding_stats is None


def test_right_drafts_may_be_rejected() -> None:
    assert answers(drafting("letters=3,reject_every=2")) == expected()


def test_stops_cut_a_run_of_accepted_tokens() -> None:
    whole = reference_answer(PROMPT, max_tokens=400, letters=3)[0]
    engine = drafting(num_blocks=200)
    for length in range(1, 60):
        engine.add("length", PROMPT, max_tokens=length)
        engine.run()
        assert engine.tokens("length") == whole[:length]
        assert engine.last("length").finish_reason is FinishReason.LENGTH
        engine.outputs.clear()


def test_the_context_ends_a_run() -> None:
    engine = drafting("letters=3,max_model_len=50")
    engine.add("a", PROMPT, max_tokens=400)
    engine.run()
    assert engine.tokens("a") == reference_answer(PROMPT, max_tokens=400, max_model_len=50, letters=3)[0]
    assert max(data.num_computed_tokens[0] for step in engine.executor.steps for data in [step.scheduled_cached_reqs] if
               data.req_ids) <= 48  # fmt: skip


@pytest.mark.parametrize("eos_every", [11, 23, 31])
def test_an_end_token_or_a_stop_token_in_a_run_is_the_last(eos_every: int) -> None:
    engine = drafting(f"letters=3,eos_every={eos_every}")
    found = answers(engine, min_tokens=12)
    assert found == expected(min_tokens=12, eos_every=eos_every)
    assert any(tokens[-1] == EOS for tokens in found)
    stop = engine.tokens("r0")[30] if len(engine.tokens("r0")) > 30 else found[-1][-1]
    stopped = drafting()
    assert answers(stopped, stop_token_ids=[stop], min_tokens=25) == expected(stop_token_ids=[stop], min_tokens=25)


def test_a_pattern_that_repeats_ends_it_where_it_would() -> None:
    wanted = RepetitionDetectionParams(max_pattern_size=8, min_pattern_size=1, min_count=3)
    with_drafts, without = (
        answers(drafting(speculative=speculative), max_tokens=300, repetition_detection=wanted)
        for speculative in (NGRAM, None)
    )
    assert with_drafts == without
    assert any(len(tokens) < 300 for tokens in with_drafts)


def test_logprobs_are_of_the_tokens_that_were_taken() -> None:
    engine = drafting("letters=3,eos_every=23")
    found = answers(engine, logprobs=2)
    for number, tokens in enumerate(found):
        parts = [output.new_logprobs for output in engine.outputs[f"r{number}"] if output.new_token_ids]
        assert [token for part in parts for token in part.logprob_token_ids[:, 0].tolist()] == tokens
        assert all(len(part.logprobs) == len(part.sampled_token_ranks) for part in parts)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(abc|ab){30}"},
        {"regex": "([ab]{2}c){1,40}"},
        {"json": {"type": "array", "items": {"enum": ["aa", "ab", "ba"]}, "minItems": 12}},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_blocks", [64, 20])
def test_grammars_hold_at_every_position(constraint: dict[str, Any], num_blocks: int) -> None:
    params = {"structured_outputs": StructuredOutputsParams(**constraint), "max_tokens": 60}
    with_drafts = drafting(num_blocks=num_blocks)
    without = drafting(num_blocks=num_blocks, speculative=None)
    assert answers(with_drafts, **params) == answers(without, **params)
    assert with_drafts.stats[-1].spec_decoding_stats.num_accepted_tokens > 20


def test_ignored_end_tokens_are_withheld_at_every_position() -> None:
    params = {"structured_outputs": StructuredOutputsParams(regex="(ab)+"), "ignore_eos": True, "eos_token_id": None}
    engine = drafting()
    engine.add("s", PROMPT, max_tokens=41, **params)
    run_structured(engine)
    assert bytes(engine.tokens("s")) == b"ab" * 20 + b"a"
    assert engine.stats[-1].spec_decoding_stats.num_accepted_tokens > 10


def test_drafts_take_only_what_is_left() -> None:
    """Nobody is preempted for a draft, and prompts have their share of the budget first."""
    plain, engine = (drafting(speculative=speculative, num_blocks=40) for speculative in (None, NGRAM))
    assert answers(engine, max_tokens=24) == answers(plain, max_tokens=24)
    preempted = [sum(stats.num_preempted for stats in one.stats) for one in (plain, engine)]
    assert preempted[1] <= preempted[0]
    narrow = drafting(max_num_batched_tokens=4)
    narrow.add("a", PROMPT, max_tokens=60)
    for _ in range(20):
        narrow.step()
    narrow.add("b", range(1, 20), max_tokens=2)
    narrow.step()
    assert narrow.last_step.num_scheduled_tokens == {"a": 1, "b": 3}
    narrow.run()


def test_a_large_batch_gets_none() -> None:
    engine = drafting(speculative=NGRAM | {"disable_by_batch_size": 4})
    assert answers(engine) == expected()
    busy = [step for step in engine.executor.steps if len(step.num_scheduled_tokens) > 4]
    assert len(busy) > 20 and not any(step.scheduled_spec_decode_tokens for step in busy)


def test_the_logits_of_drafts_have_a_bound() -> None:
    engine = drafting(speculative=NGRAM | {"num_speculative_tokens": 128}, num_blocks=500)
    assert answers(engine, max_tokens=300) == expected(max_tokens=300)
    drafted = [sum(map(len, step.scheduled_spec_decode_tokens.values())) for step in engine.executor.steps]
    assert 200 < max(drafted) <= 256


def test_drafts_that_promise_little_make_nobody_wait() -> None:
    engine = drafting()
    engine.add("copies", PROMPT, max_tokens=100)
    while not engine.executor.steps or not engine.last_step.scheduled_spec_decode_tokens:
        engine.step()
    for number in range(3):
        engine.add(f"new{number}", [50 + number], max_tokens=4)
    engine.step()
    drafted = []
    for average in (0.7, 0.8):  # for three others, three quarters of a token are due
        engine.core.scheduler.requests["copies"].drafting.pace.average = average
        engine.step()
        drafted.append(list(engine.last_step.scheduled_spec_decode_tokens))
    assert drafted == [[], ["copies"]]
    engine.run()
    assert engine.tokens("copies") == reference_answer(PROMPT, max_tokens=100, letters=3)[0]


def test_an_abort_and_a_preemption_forget_drafts() -> None:
    engine = drafting()
    engine.add("a", PROMPT, max_tokens=100)
    while not engine.executor.steps or not engine.last_step.scheduled_spec_decode_tokens:
        engine.step()
    told = engine.tokens("a")
    engine.core.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert not engine.last_step.scheduled_spec_decode_tokens and engine.last_step.preempted_req_ids == {"a"}
    assert engine.tokens("a")[: len(told)] == told
    while not engine.last_step.scheduled_spec_decode_tokens:
        engine.step()
    engine.core.aborts_queue.put(["a"])  # while the step with drafts runs
    while engine.core.has_unfinished_requests():
        engine.step()
    assert engine.last("a").finish_reason is FinishReason.ABORT
    assert engine.tokens("a") == reference_answer(PROMPT, max_tokens=100, letters=3)[0][: len(engine.tokens("a"))]
    engine.run()
    assert engine.is_empty()


def test_prefixes_are_cached_without_what_was_rejected() -> None:
    """The fake executor would find a block whose name promises another text than was computed in it."""
    engine = drafting("letters=3,reject_every=3", num_blocks=200)
    first = answers(engine)
    for number in range(5):
        engine.outputs.clear()
        engine.add("again", [*PROMPT, number, *first[number]], max_tokens=20)
        engine.run()
        whole = reference_answer([*PROMPT, number], max_tokens=80, letters=3)[0]
        assert engine.tokens("again") == whole[60:]
        stats = engine.outputs["again"][0].prefill_stats
        assert stats.num_cached_tokens == 60  # 63 have their KV, in blocks of 4


def test_a_step_that_raises_with_drafts_costs_the_one_at_fault() -> None:
    engine = drafting("letters=3,raise_token=9")
    for number in range(3):
        engine.add(f"r{number}", [*PROMPT, number], max_tokens=60)
    while not engine.executor.steps or not engine.last_step.scheduled_spec_decode_tokens:
        engine.step()
    engine.add("bad", [9], max_tokens=3)
    engine.run()
    assert engine.last("bad").finish_reason is FinishReason.ERROR
    assert [engine.tokens(f"r{number}") for number in range(3)] == expected()[:3]


def test_stats_are_totals_of_what_was_drafted_and_taken() -> None:
    engine = drafting()
    answers(engine)
    drafted = [drafts for step in engine.executor.steps for drafts in step.scheduled_spec_decode_tokens.values()]
    stats = engine.stats[-1].spec_decoding_stats
    assert (stats.num_drafts, stats.num_draft_tokens) == (len(drafted), sum(map(len, drafted)))
    assert stats.acceptance_rate == stats.num_accepted_tokens / stats.num_draft_tokens
    assert engine.core.call_utility("get_stats")["spec_decoding_stats"]["num_drafts"] == stats.num_drafts


def test_the_oracle_finds_drafts_without_their_slots() -> None:
    engine = drafting(speculative=None)
    engine.add("a", PROMPT, max_tokens=9)
    engine.step()
    execute = engine.executor.execute_model

    def with_a_draft(step: SchedulerOutput) -> ModelRunnerOutput:
        return execute(dataclasses.replace(step, scheduled_spec_decode_tokens={"a": [97]}))

    engine.core._executor.execute_model = with_a_draft
    engine.step()
    assert engine.last("a").stop_reason.startswith(FakeStepError.__name__)
