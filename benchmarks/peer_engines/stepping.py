"""The cells on an engine with vLLM's LLMEngine interface: llmkernel's own, and vLLM's."""

import itertools
import time
from collections.abc import Callable
from typing import Any

__all__ = ["SteppingEngine"]

_SLACK = 1024
"""Tokens asked for beyond those that are counted: whose prompt is read first decodes on until the last one is done."""

_ids = itertools.count()


class SteppingEngine:
    """`make_params(tokens)` builds greedy SamplingParams that give exactly that many tokens, cumulative outputs."""

    def __init__(self, engine: Any, make_params: Callable[[int], Any], facts: dict[str, Any]) -> None:
        self.engine = engine
        self.make_params = make_params
        self.facts = facts

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int]]:
        """See answers.PeerEngine."""
        started = time.perf_counter()
        counts = {}
        asked = self.make_params(tokens if tokens == 1 else tokens + _SLACK)
        for prompt in prompts:
            request_id = f"peer-{next(_ids)}"
            counts[request_id] = 0
            self.engine.add_request(request_id, {"prompt_token_ids": prompt}, asked)
        moments: list[tuple[float, int]] = []
        while len(moments) < tokens:
            outputs = self.engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                counts[output.request_id] = len(output.outputs[0].token_ids)
            moments += [(now, sum(counts.values()))] * (min(counts.values()) - len(moments))
        self.engine.abort_request([request_id for request_id, count in counts.items() if count < tokens + _SLACK])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return moments
