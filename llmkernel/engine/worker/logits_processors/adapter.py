"""AdapterLogitsProcessor: one function per request, made into a LogitsProcessor."""

import abc
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from llmkernel.engine.worker.logits_processors.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["AdapterLogitsProcessor", "RequestLogitsProcessor"]

RequestLogitsProcessor = Callable[..., torch.Tensor]
"""(output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits) -> logits, of one row [vocab]."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Derive from it and say which function a request gets. A function that raises fails its own request only."""

    def __init__(self, args: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(args, device, is_pin_memory)
        self._functions: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._errors: dict[int, Exception] = {}

    @abc.abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters; None if it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._functions.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._functions.pop(index, None)
            self._add(index, params, prompt, output)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._functions.pop(source, None), self._functions.pop(target, None)
            if moved is not None:
                self._functions[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._functions[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, function in self._functions.items():
            try:
                logits[index] = function(logits[index])
            except Exception as error:  # noqa: BLE001 - the request's own, told to it alone
                self._errors[index] = error
        return logits

    def take_errors(self) -> dict[int, Exception]:
        """Rows that have failed since the last call."""
        errors, self._errors = self._errors, {}
        return errors

    def _add(self, index: int, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
        try:
            function = self.new_req_logits_processor(params)
            if function is None:
                return
            wants_prompt = len(inspect.signature(function).parameters) == 3
        except Exception as error:  # noqa: BLE001 - the request's own, told to it alone
            self._errors[index] = error
            return
        known = (prompt, output) if wants_prompt else (output,)
        self._functions[index] = functools.partial(function, *known)
