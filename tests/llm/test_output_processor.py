"""OutputProcessor: what the engine sends becomes each request's own stream."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.errors import EngineDeadError, RequestFailedError
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.outputs import RequestOutput
from llmkernel.llm.parallel_sampling import ParentRequest
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.stats import IterationStats
from llmkernel.protocol.outputs import EngineCoreEvent, EngineCoreEventType, FinishReason
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from llmkernel.protocol.stats import PrefillStats, SchedulerStats
from tests.llm.outputs_of_an_engine import fake_tokenizer, logprobs, output, request

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


def _processor(**options: object) -> OutputProcessor:
    return OutputProcessor(fake_tokenizer(), **options)  # type: ignore[arg-type]


def _add(
    processor: OutputProcessor, request_id: str, *, queued: bool = True, **params: object
) -> RequestOutputCollector:
    """Register a request, and its children where n > 1."""
    made = request(request_id, SamplingParams(**{"max_tokens": 99, **params}))  # type: ignore[arg-type]
    queue = RequestOutputCollector(made.sampling_params.output_kind, request_id)  # type: ignore[union-attr]
    _register(processor, made, queue if queued else None)
    return queue


def _register(
    processor: OutputProcessor, made: EngineCoreRequest, queue: RequestOutputCollector | None
) -> ParentRequest | None:
    assert made.sampling_params is not None
    if made.sampling_params.n == 1:
        processor.add_request(made, "A", None, 0, queue)
        return None
    parent = ParentRequest(made)
    for index, child in enumerate(parent.children):
        processor.add_request(child, "A", parent, index, queue)
    return parent


@pytest.mark.row("A-103", "A-104", "A-106", "A-109", "A-113", "A-116", "A-162")
def test_each_requests_output_goes_to_its_own_queue_in_order() -> None:
    processor = _processor()
    first, second = _add(processor, "a-1", output_kind=DELTA), _add(processor, "b-1", output_kind=DELTA)
    result = processor.process_outputs([output("a-1", "xy"), output("unknown", "zz"), output("b-1", "12")])
    assert result.request_outputs == [] and result.reqs_to_abort == []
    got = first.get_nowait()
    assert got is not None
    assert (got.request_id, got.prompt, got.prompt_token_ids, got.finished) == ("a", "A", [65], False)
    assert (got.outputs[0].text, got.outputs[0].token_ids) == ("xy", [120, 121])
    processor.process_outputs([output("b-1", "3", FinishReason.LENGTH)])
    got = second.get_nowait()
    assert got is not None
    assert (got.outputs[0].text, got.outputs[0].finish_reason, got.finished) == ("123", "length", True)
    assert list(processor.request_states) == ["a-1"]


@pytest.mark.row("A-104")
def test_an_internal_id_that_is_running_is_refused_and_external_ids_may_repeat() -> None:
    processor = _processor()
    _add(processor, "a-1")
    with pytest.raises(ValueError, match="already running"):
        _add(processor, "a-1")
    _add(processor, "a-2")
    assert sorted(processor.abort_requests(["a"])) == ["a-1", "a-2"]


@pytest.mark.row("A-107", "A-108")
def test_a_stop_string_ends_the_request_here_and_tells_the_engine() -> None:
    processor = _processor()
    queue = _add(processor, "a-1", stop=["lo"])
    result = processor.process_outputs([output("a-1", "hel")])
    assert result.reqs_to_abort == []
    result = processor.process_outputs([output("a-1", "lo world")])
    assert result.reqs_to_abort == ["a-1"]
    got = queue.get_nowait()
    assert got is not None
    answer = got.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason, got.finished) == ("hel", "stop", "lo", True)
    assert bytes(answer.token_ids) == b"hello"
    assert processor.process_outputs([output("a-1", "late")]).reqs_to_abort == []
    assert not queue.has_item


def test_the_engine_is_not_told_to_abort_what_it_has_ended_itself() -> None:
    processor = _processor()
    _add(processor, "a-1", stop=["lo"])
    assert processor.process_outputs([output("a-1", "hello", FinishReason.LENGTH)]).reqs_to_abort == []


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 4), interval=st.sampled_from([1, 2, 7]), include=st.booleans())
@pytest.mark.row("A-105", "A-114", "A-115", "A-117", "A-149")
def test_the_three_kinds_say_the_same(seed: int, n: int, interval: int, include: bool) -> None:
    """Random texts, steps, reads, stop strings that lie across tokens."""
    chance = random.Random(seed)
    texts = ["".join(chance.choice("ab é\n") for _ in range(chance.randint(1, 30))) for _ in range(n)]
    stops = [chance.choice(["ab", "b a", "é\n", "aab", "zz"]) for _ in range(chance.randint(0, 2))]
    results = {}
    for kind in (DELTA, CUMULATIVE, FINAL_ONLY):
        chance = random.Random(seed)
        results[kind] = _play(kind, texts, stops, interval, include, chance)
    assert results[DELTA] == results[CUMULATIVE] == results[FINAL_ONLY]
    for index, text in enumerate(texts):
        shown, reason, ids = results[DELTA][index]
        assert text.startswith(shown)
        assert reason in ("stop", "length")
        assert text.encode().startswith(bytes(ids))


def _play(
    kind: RequestOutputKind, texts: list[str], stops: list[str], interval: int, include: bool, chance: random.Random
) -> dict[int, tuple[str, str | None, list[int]]]:
    processor = _processor(stream_interval=interval)
    params = SamplingParams(
        n=len(texts),
        output_kind=kind,
        max_tokens=None,
        stop=stops or None,
        include_stop_str_in_output=include,
        seed=1,
    )
    queue = RequestOutputCollector(kind)
    made = request("r-1", params)
    parent = _register(processor, made, queue)
    ids = [child.request_id for child in parent.children] if parent else ["r-1"]
    left = {request_id: list(text.encode()) for request_id, text in zip(ids, texts, strict=True)}
    seen: dict[int, tuple[str, str | None, list[int]]] = {}
    ends = 0

    def take() -> None:
        nonlocal ends
        got = queue.get_nowait()
        if got is None:
            return
        ends += got.finished
        for answer in got.outputs:
            text, _, tokens = seen.get(answer.index, ("", None, [])) if kind == DELTA else ("", None, [])
            seen[answer.index] = (text + answer.text, answer.finish_reason, tokens + answer.token_ids)

    while left:
        request_id = chance.choice(sorted(left))
        count = chance.randint(1, 3)
        step, left[request_id] = left[request_id][:count], left[request_id][count:]
        done = not left[request_id]
        if done:
            del left[request_id]
        processor.process_outputs([output(request_id, step, FinishReason.LENGTH if done else None)])
        if chance.random() < 0.5:
            take()
    take()
    assert ends == 1, "every stream ends exactly once"
    assert not processor.request_states
    return seen


@pytest.mark.row("A-117", "A-149")
def test_children_of_n_have_ids_seeds_and_one_queue() -> None:
    made = request("r-1", SamplingParams(n=3, seed=40, max_tokens=5))
    parent = ParentRequest(made)
    assert [child.request_id for child in parent.children] == ["0_r-1", "1_r-1", "2_r-1"]
    children = [child.sampling_params for child in parent.children]
    assert [(params.n, params.seed) for params in children if params] == [(1, 40), (1, 41), (1, 42)]
    assert made.sampling_params is not None and made.sampling_params.n == 3
    processor = _processor()
    queue = _add(processor, "q-1", n=2, output_kind=FINAL_ONLY)
    processor.process_outputs([output("1_q-1", "b", FinishReason.LENGTH)])
    assert not queue.has_item, "FINAL_ONLY waits for all"
    processor.process_outputs([output("0_q-1", "a", FinishReason.STOP)])
    got = queue.get_nowait()
    assert got is not None and got.finished
    assert [answer.index for answer in got.outputs] == [0, 1]


@pytest.mark.row("A-117")
@pytest.mark.parametrize("by", [["q"], ["q-1"]])
def test_aborting_a_parent_aborts_its_children(by: list[str]) -> None:
    processor = _processor()
    queue = _add(processor, "q-1", n=3, output_kind=FINAL_ONLY)
    processor.process_outputs([output("0_q-1", "abc"), output("1_q-1", "d", FinishReason.LENGTH)])
    assert sorted(processor.abort_requests(by, internal=by == ["q-1"])) == ["0_q-1", "2_q-1"]
    got = queue.get_nowait()
    assert got is not None and got.finished
    answers = [(answer.index, answer.text, answer.finish_reason) for answer in got.outputs]
    assert answers == [(0, "abc", "abort"), (1, "d", "length"), (2, "", "abort")]
    assert processor.abort_requests(by) == []


def test_an_abort_delivers_what_was_held_back() -> None:
    processor = _processor()
    queue = _add(processor, "a-1", stop=["world"], output_kind=DELTA)
    processor.process_outputs([output("a-1", "hello wor")])
    first = queue.get_nowait()
    assert first is not None and first.text == "hello "
    processor.abort_requests(["a-1"], internal=True)
    last = queue.get_nowait()
    assert last is not None and last.finished
    assert (last.text, last.outputs[0].finish_reason) == ("wor", "abort")


def test_stream_interval_emits_the_first_token_then_every_k_and_the_last() -> None:
    processor = _processor(stream_interval=2)
    queue = _add(processor, "a-1", output_kind=DELTA, stream_interval=3)
    shown = []
    for position, letter in enumerate("abcdefg"):
        processor.process_outputs([output("a-1", letter, FinishReason.LENGTH if position == 6 else None)])
        got = queue.get_nowait()
        shown.append(got.text if got is not None else None)
    assert shown == ["a", None, None, "bcd", None, None, "efg"]


def test_a_fault_in_one_request_fails_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    processor = _processor()
    bad, good = _add(processor, "bad-1"), _add(processor, "good-1", output_kind=DELTA)
    processor.process_outputs([output("bad-1", "ab"), output("good-1", "x")])
    result = processor.process_outputs([output("bad-1", ["no token id"]), output("good-1", "y")])  # type: ignore[list-item]
    assert result.reqs_to_abort == ["bad-1"]
    first = bad.get_nowait()
    assert first is not None and first.text == "ab"
    with pytest.raises(RequestFailedError, match="bad") as caught:
        bad.get_nowait()
    assert isinstance(caught.value.partial, RequestOutput) and caught.value.partial.text == "ab"
    got = good.get_nowait()
    assert got is not None and got.text == "xy"


def test_a_fault_without_a_queue_is_an_output_with_finish_reason_error() -> None:
    processor = _processor()
    _add(processor, "bad-1", queued=False)
    result = processor.process_outputs([output("bad-1", ["no token id"])])  # type: ignore[list-item]
    assert [(got.finished, got.outputs[0].finish_reason) for got in result.request_outputs] == [(True, "error")]


def test_the_engines_error_is_the_last_output_with_its_reason() -> None:
    processor = _processor()
    queue = _add(processor, "a-1")
    processor.process_outputs([output("a-1", "", FinishReason.ERROR, stop_reason="the reason")])
    got = queue.get_nowait()
    assert got is not None and got.finished
    assert (got.outputs[0].finish_reason, got.outputs[0].stop_reason) == ("error", "the reason")


@pytest.mark.row("A-072")
def test_an_engines_death_reaches_every_queue_with_the_text_so_far() -> None:
    processor = _processor()
    single, many = _add(processor, "a-1", output_kind=FINAL_ONLY), _add(processor, "b-1", n=2, output_kind=FINAL_ONLY)
    processor.process_outputs(
        [output("a-1", "abc"), output("0_b-1", "done", FinishReason.LENGTH), output("1_b-1", "half")]
    )
    processor.propagate_error(EngineDeadError("gone", exitcode=-9))
    errors = []
    for queue in (single, many):
        with pytest.raises(EngineDeadError, match="gone") as caught:
            queue.get_nowait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert errors[0].exitcode == -9
    texts = [[answer.text for answer in error.partial.outputs] for error in errors]  # type: ignore[attr-defined]
    assert texts == [["abc"], ["done", "half"]]
    assert not processor.has_unfinished_requests()


def test_requests_without_a_queue_are_returned() -> None:
    processor = _processor()
    _add(processor, "a-1", queued=False)
    result = processor.process_outputs([output("a-1", "x")])
    assert [got.text for got in result.request_outputs] == ["x"]


def test_logprobs_are_dicts_by_id_with_the_chosen_token_first_and_trimmed_with_the_ids() -> None:
    processor = _processor()
    queue = _add(processor, "a-1", logprobs=2, stop=["b"])
    processor.process_outputs([output("a-1", "abc", new_logprobs=logprobs(b"abc", 2))])
    got = queue.get_nowait()
    assert got is not None
    answer = got.outputs[0]
    assert answer.token_ids == [97, 98]
    assert answer.logprobs is not None and len(answer.logprobs) == 2
    assert list(answer.logprobs[0]) == [97, 98, 99]
    first = answer.logprobs[0][97]
    assert (first.logprob, first.rank, first.decoded_token) == (-1.0, 1, "a")
    assert answer.cumulative_logprob == -2.0


def test_logprobs_of_part_of_a_character_stand_with_its_last_token() -> None:
    processor = _processor()
    queue = _add(processor, "a-1", logprobs=0)
    for byte in "x€".encode():
        processor.process_outputs([output("a-1", [byte], new_logprobs=logprobs([byte], 0))])
    got = queue.get_nowait()
    assert got is not None and got.outputs[0].logprobs is not None
    assert [next(iter(entry.values())).decoded_token for entry in got.outputs[0].logprobs] == ["x", "", "", "€"]
    spelled = [next(iter(entry.values())).token_bytes for entry in got.outputs[0].logprobs]
    assert spelled == [b"x", b"\xe2", b"\x82", b"\xac"]


@pytest.mark.row("A-099", "A-100", "A-101", "A-102", "A-112", "A-120", "A-148", "A-161")
def test_statistics_of_a_request_and_of_the_iterations() -> None:
    processor = _processor()
    queue = _add(processor, "a-1", max_tokens=7)
    queued = EngineCoreEvent(EngineCoreEventType.QUEUED, 10.0)
    scheduled = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 10.5)
    preempted = EngineCoreEvent(EngineCoreEventType.PREEMPTED, 12.0)
    stats = IterationStats(iteration_timestamp=100.0)
    prefill = PrefillStats(num_prompt_tokens=8, num_cached_tokens=6, num_computed_tokens=2)
    processor.process_outputs([output("a-1", "a", events=[queued, scheduled], prefill_stats=prefill)], 11.0, stats)
    assert stats.num_generation_tokens == 1
    assert stats.time_to_first_tokens_iter == [100.0]
    assert (stats.prompt_token_stats.total, stats.prompt_token_stats.cached) == (8, 6)
    stats = IterationStats(iteration_timestamp=103.0)
    processor.process_outputs([output("a-1", "bc", FinishReason.LENGTH, events=[preempted])], 13.0, stats)
    assert stats.inter_token_latencies_iter == [1.0]
    assert stats.num_preempted_reqs == 1
    (finished,) = stats.finished_requests
    assert (finished.finish_reason, finished.e2e_latency, finished.queued_time) == (FinishReason.LENGTH, 103.0, 0.5)
    assert (finished.prefill_time, finished.decode_time, finished.mean_time_per_output_token) == (0.5, 2.0, 1.0)
    assert (finished.num_generation_tokens, finished.max_tokens_param) == (3, 7)
    got = queue.get_nowait()
    assert got is not None and got.metrics is not None
    metrics = got.metrics
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.inter_token_latency) == (0.5, 100.0, 1.0)
    assert (metrics.tokens_per_second, metrics.num_preemptions, got.num_cached_tokens) == (1.0, 1, 6)
    processor.update_scheduler_stats(SchedulerStats(num_running_reqs=3))
    processor.update_scheduler_stats(None)
    assert processor.scheduler_stats is not None and processor.scheduler_stats.num_running_reqs == 3


def test_without_log_stats_there_are_no_metrics() -> None:
    processor = _processor(log_stats=False)
    queue = _add(processor, "a-1")
    processor.process_outputs([output("a-1", "x")])
    got = queue.get_nowait()
    assert got is not None and got.metrics is None


@pytest.mark.row("A-109", "A-111")
def test_kv_transfer_params_of_the_engine_reach_the_last_output_and_pooling_fails_alone() -> None:
    processor = _processor()
    queue, pooled = _add(processor, "a-1"), _add(processor, "p-1")
    processor.process_outputs([output("a-1", "x", FinishReason.LENGTH, kv_transfer_params={"block": 3})])
    got = queue.get_nowait()
    assert got is not None and got.kv_transfer_params == {"block": 3}
    processor.process_outputs([output("p-1", "", pooling_output=np.zeros(2))])
    with pytest.raises(RequestFailedError, match="Pooling"):
        pooled.get_nowait()
