import pytest

from llmkernel.engine.request import Request, RequestStatus
from llmkernel.engine.scheduler.stop import check_stop
from llmkernel.protocol.sampling_params import RepetitionDetectionParams, SamplingParams

EOS, STOP = 9, 7
STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
RUNNING = RequestStatus.RUNNING


def after(tokens: list[int], *, eos: int | None = EOS, max_model_len: int = 100, **params) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams(**params), eos_token_id=eos)
    request.status = RequestStatus.RUNNING
    for index, token_id in enumerate(tokens, 1):
        request.append_output_token(token_id)
        if check_stop(request, max_model_len):
            assert index == len(tokens), f"stopped too early, after {index}"
    return request


@pytest.mark.parametrize(
    ("tokens", "options", "status", "stop_reason"),
    [
        ([5, EOS], {}, STOPPED, None),
        ([5, EOS], {"eos": None}, RequestStatus.RUNNING, None),
        ([STOP], {"stop_token_ids": [STOP]}, STOPPED, STOP),
        ([5, 6], {"stop_token_ids": [STOP]}, RequestStatus.RUNNING, None),
        ([EOS], {"stop_token_ids": [EOS]}, STOPPED, None),
        ([5, EOS], {"max_tokens": 2}, STOPPED, None),
        ([5, STOP], {"max_tokens": 2, "stop_token_ids": [STOP]}, STOPPED, STOP),
        ([5, 6], {"max_tokens": 2}, LENGTH, None),
        ([5, 6], {"max_tokens": None, "max_model_len": 5}, LENGTH, None),
        ([5], {"max_tokens": None, "max_model_len": 5}, RequestStatus.RUNNING, None),
        ([5, EOS, EOS], {"min_tokens": 2}, STOPPED, None),
        ([EOS], {"min_tokens": 1}, RequestStatus.RUNNING, None),
        ([STOP, STOP], {"min_tokens": 1, "stop_token_ids": [STOP]}, STOPPED, STOP),
        ([5, 6], {"min_tokens": 9, "max_tokens": 9, "max_model_len": 5}, LENGTH, None),
    ],
    ids=[
        "eos", "ignore eos", "stop id", "no stop id", "eos before stop id", "eos before length",
        "stop id before length", "max_tokens", "max_model_len", "below max_model_len", "eos after min_tokens",
        "eos below min_tokens", "stop id below min_tokens", "max_model_len below min_tokens",
    ],
)  # fmt: skip
def test_rules_in_their_order(tokens: list[int], options: dict, status: RequestStatus, stop_reason: int | None) -> None:
    request = after(tokens, **options)
    assert (request.status, request.stop_reason) == (status, stop_reason)


@pytest.mark.parametrize(
    ("tokens", "pattern", "ends"),
    [
        ([5, 6, 5, 6], {"max_pattern_size": 2}, True),
        ([5, 6, 5, 6], {"max_pattern_size": 1}, False),
        ([5, 5], {"max_pattern_size": 3}, True),
        ([5, 6, 6], {"max_pattern_size": 3, "min_pattern_size": 2}, False),
        ([4, 5, 6, 5, 6, 5, 6], {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}, True),
        ([1, 2, 3], {"max_pattern_size": 3}, False),
        ([5, 5, 5, 5], {"max_pattern_size": 0}, False),
    ],
    ids=str,
)
def test_a_pattern_that_repeats_ends_the_answer(tokens: list[int], pattern: dict, ends: bool) -> None:
    request = after(tokens, max_tokens=50, repetition_detection=RepetitionDetectionParams(**pattern))
    found = (request.status, request.stop_reason)
    assert found == ((RequestStatus.FINISHED_REPETITION, "repetition_detected") if ends else (RUNNING, None))
    assert str(request.status.finish_reason) == ("repetition" if ends else "None")


def test_a_pattern_counts_after_min_tokens_only() -> None:
    wanted = RepetitionDetectionParams(max_pattern_size=1)
    request = after([5, 5, 5, 5], max_tokens=50, min_tokens=3, repetition_detection=wanted)
    assert request.status is RequestStatus.FINISHED_REPETITION
