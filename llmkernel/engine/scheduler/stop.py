"""When a request has said enough (engine.md C.3)."""

from llmkernel.engine.request import Request, RequestStatus
from llmkernel.protocol.sampling_params import RepetitionDetectionParams

__all__ = ["check_stop"]


def check_stop(request: Request, max_model_len: int) -> bool:
    """Look at the request after a new token; True if it is finished, its status and stop_reason are then set.

    In order: the end of its grammar, the end token, a stop token (stop_reason is its id), the length limits, a pattern
    that repeats. The first `min_tokens` tokens never end the text by what they are: the sampler masks stop tokens
    there, and one that comes nevertheless is text. Only a grammar that is through ends it at any length.
    """
    token_id = request.all_token_ids[-1]
    if request.structured is not None and not _follow_grammar(request, token_id):
        return True
    if request.num_output_tokens > request.min_tokens:
        if token_id == request.eos_token_id:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if token_id in request.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token_id
            return True
    too_long = request.max_tokens is not None and request.num_output_tokens >= request.max_tokens
    if too_long or request.num_tokens >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    wanted = request.sampling_params.repetition_detection
    if wanted is not None and request.num_output_tokens > request.min_tokens and _repeats(request, wanted):
        request.status = RequestStatus.FINISHED_REPETITION
        request.stop_reason = "repetition_detected"
        return True
    return False


def _follow_grammar(request: Request, token_id: int) -> bool:
    """Go on in the request's grammar; False if the request is finished by that."""
    structured = request.structured
    assert structured is not None
    if not structured.accept(token_id):
        request.status = RequestStatus.FINISHED_ERROR
        request.stop_reason = structured.error
        return False
    if structured.is_terminated:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = token_id if token_id in request.stop_token_ids else None
        return False
    return True


def _repeats(request: Request, wanted: RepetitionDetectionParams) -> bool:
    """The output ends in a pattern of one of the wanted sizes, wanted.min_count times in a row."""
    tokens, output = request.all_token_ids, request.num_output_tokens
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        span = size * wanted.min_count
        if span > output:
            return False
        tail = tokens[-span:]
        if tail[size:] == tail[:-size]:
            return True
    return False
