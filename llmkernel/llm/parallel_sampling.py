"""ParentRequest: n answers to one prompt are n requests of the engine (engine.md B.10)."""

import copy

from llmkernel.llm.outputs import CompletionOutput
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams

__all__ = ["ParentRequest"]


class ParentRequest:
    """Makes the n children of a request and puts their answers together.

    Child i has the id "{i}_{parent id}", n = 1 and the seed of the parent + i. Streaming kinds pass each child's
    output on with its index; FINAL_ONLY waits for all of them. request_id: internal; external_req_id: the user's.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        assert params is not None
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.sampling_params: SamplingParams = params
        self.children = [self._child(request, index) for index in range(params.n)]
        self.child_requests = {child.request_id for child in self.children}
        self.aggregated: list[CompletionOutput] = []

    @property
    def n(self) -> int:
        return self.sampling_params.n

    @property
    def finished(self) -> bool:
        return not self.child_requests

    def take_output(self, child_id: str, completion: CompletionOutput) -> list[CompletionOutput]:
        """What can be passed on now that this child has said something; [] while answers are collected."""
        if completion.finished:
            self.child_requests.discard(child_id)
        if self.sampling_params.output_kind != RequestOutputKind.FINAL_ONLY:
            return [completion]
        self.aggregated.append(completion)
        return sorted(self.aggregated, key=lambda answer: answer.index) if self.finished else []

    def _child(self, request: EngineCoreRequest, index: int) -> EngineCoreRequest:
        child = copy.copy(request)
        child.request_id = f"{index}_{request.request_id}"
        params = child.sampling_params = copy.copy(self.sampling_params)
        params.n = 1
        if params.seed is not None:
            params.seed = (params.seed + index) % (MAX_SEED + 1)
        return child
