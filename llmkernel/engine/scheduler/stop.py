"""When a request has said enough (engine.md C.3)."""

from llmkernel.engine.request import Request, RequestStatus

__all__ = ["check_stop"]


def check_stop(request: Request, max_model_len: int) -> bool:
    """Look at the request after a new token; True if it is finished, its status and stop_reason are then set.

    In order: the end token, a stop token (stop_reason is its id), the length limits. The first `min_tokens` tokens
    never end the text by what they are: the sampler masks stop tokens there, and one that comes nevertheless is text.
    """
    token_id = request.all_token_ids[-1]
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
    return False
