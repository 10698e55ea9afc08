"""ProcessorSeat: runs one custom class over the rows of each step, and finds out whose fault it is when it raises."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmkernel.engine.worker.logits_processors.interface import BatchUpdate
from llmkernel.engine.worker.logits_processors.slots import SlotRequest, Slots
from llmkernel.errors import InvalidRequestError
from llmkernel.logger import init_logger
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["ProcessorSeat"]

logger = init_logger(__name__)


class ProcessorSeat:
    """Owns the objects of one class. name: of the class, for people. make: a new object of it."""

    def __init__(self, name: str, cls: type, make: Callable[[], Any]) -> None:
        self.name = name
        self._cls = cls
        self._make = make
        self._processor = make()
        self._slots = Slots()
        self.is_argmax_invariant = bool(self._processor.is_argmax_invariant())

    def validate(self, params: SamplingParams) -> None:
        """InvalidRequestError with what the class says, if it does not take these parameters."""
        check = getattr(self._cls, "validate_params", None)
        if check is None:
            return
        try:
            check(params)
        except Exception as error:  # user code: whatever it raises is the refusal
            raise InvalidRequestError(f"The logits processor {self.name} refuses the request: {error}") from error

    def run(self, logits: torch.Tensor, requests: Sequence[SlotRequest], *, apply: bool = True) -> dict[int, str]:
        """Change `logits` [requests, vocab] in place. Returns the positions that have failed, with the reason.

        apply False: only tell the processor how the batch has changed.
        """
        update, order = self._slots.arrange(requests)
        try:
            self._processor.update_state(update)
            if not apply:
                return {}
            logits[order] = self._apply(self._processor, logits[order])
        except Exception:  # user code
            logger.exception("The logits processor %s raised on a batch of %d.", self.name, len(requests))
            self._renew()
            return self._run_one_by_one(logits, requests) if apply else {}
        return {order[row]: self._reason(error) for row, error in self._take_errors(self._processor).items()}

    def _renew(self) -> None:
        """Begin again with a new object, which is told of every request. The old one stays if there cannot be one."""
        self._slots = Slots()
        try:
            self._processor = self._make()
        except Exception:
            logger.exception("The logits processor %s cannot be made again.", self.name)

    def _run_one_by_one(self, logits: torch.Tensor, requests: Sequence[SlotRequest]) -> dict[int, str]:
        """A new object for each request, so that those that work alone go on."""
        errors: dict[int, str] = {}
        for position, request in enumerate(requests):
            reason = self._run_alone(logits[position : position + 1], request)
            if reason is not None:
                errors[position] = reason
        return errors

    def _run_alone(self, row: torch.Tensor, request: SlotRequest) -> str | None:
        try:
            processor = self._make()
            processor.update_state(BatchUpdate(1, added=[request.added_at(0)]))
            row.copy_(self._apply(processor, row.clone()))
        except Exception as error:  # noqa: BLE001 - user code
            return self._reason(error)
        return next((self._reason(one) for one in self._take_errors(processor).values()), None)

    def _apply(self, processor: Any, logits: torch.Tensor) -> torch.Tensor:
        shape = logits.shape
        changed = processor.apply(logits)
        if not isinstance(changed, torch.Tensor) or changed.shape != shape:
            found = tuple(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
            raise TypeError(f"apply returned {found} in place of a tensor of {tuple(shape)}")
        return changed

    def _take_errors(self, processor: Any) -> dict[int, Exception]:
        take = getattr(processor, "take_errors", None)
        return take() if take is not None else {}

    def _reason(self, error: Exception) -> str:
        words = str(error) or "no message"
        return f"The logits processor {self.name} raised {type(error).__name__}: {words}."
