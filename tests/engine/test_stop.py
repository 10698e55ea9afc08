import pytest

from llmkernel.engine.request import Request, RequestStatus
from llmkernel.engine.scheduler.stop import check_stop
from llmkernel.protocol.sampling_params import SamplingParams

EOS, STOP = 9, 7
STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


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
