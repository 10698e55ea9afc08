"""GenerationMetrics: what a generation took."""

import dataclasses
from collections.abc import Iterable

from llmkernel.llm.outputs import RequestOutput

__all__ = ["GenerationMetrics"]


@dataclasses.dataclass(frozen=True)
class GenerationMetrics:
    """Tokens are sums over all requests. Times are seconds; None where nothing was measured.

    queue_time, time_to_first_token: the longest of the requests. inter_token_latency: mean. tokens_per_second: of all
    requests together, from the first token to the last.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    queue_time: float | None = None
    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    tokens_per_second: float | None = None

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput | None]) -> "GenerationMetrics":
        known = [output for output in outputs if output is not None]
        tokens = sum(len(answer.token_ids) for output in known for answer in output.outputs)
        stats = [output.metrics for output in known if output.metrics is not None and output.metrics.first_token_ts]
        sums = cls(
            prompt_tokens=sum(len(output.prompt_token_ids or ()) for output in known),
            cached_tokens=sum(output.num_cached_tokens or 0 for output in known),
            generation_tokens=tokens,
            preemptions=sum(one.num_preemptions for one in stats),
        )
        if not stats:
            return sums
        span = max(one.last_token_ts for one in stats) - min(one.first_token_ts for one in stats)
        gaps = [one.inter_token_latency for one in stats if one.num_generation_tokens > 1]
        return dataclasses.replace(
            sums,
            queue_time=max(one.queue_time for one in stats),
            time_to_first_token=max(one.time_to_first_token for one in stats),
            inter_token_latency=sum(gaps) / len(gaps) if gaps else None,
            tokens_per_second=(tokens - len(stats)) / span if span > 0 and tokens > len(stats) else None,
        )
