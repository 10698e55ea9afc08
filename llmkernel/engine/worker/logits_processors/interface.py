"""LogitsProcessor and BatchUpdate: what a custom class has to be, and what it is told of the batch."""

import abc
import dataclasses
import enum
from collections.abc import Sequence

import torch

from llmkernel.config import EngineArgs
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["AddedRequest", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"]


class MoveDirectionality(enum.Enum):
    """UNIDIRECTIONAL: the row moves to an empty index. SWAP: two rows change places."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


AddedRequest = tuple[int, SamplingParams, list[int], list[int]]
"""(row, parameters, prompt ids, output ids) of a request. The output is the live list: it grows by itself."""


@dataclasses.dataclass(frozen=True)
class BatchUpdate:
    """How the rows of the batch have changed since the last call. Process `removed`, then `added`, then `moved`.

    batch_size: rows from now on. removed: indices, descending; one that `added` names as well was replaced. moved:
    (from, to, direction), in order. A request that is preempted is removed, and added again when it is resumed.
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[AddedRequest] = ()
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class LogitsProcessor(abc.ABC):
    """Changes the logits of a whole batch, step by step. Deriving from this is not required, the methods are.

    All calls come from the engine's main thread. What raises fails the requests concerned; to find out which, a new
    object is made for every request of the batch, so a state must follow from what `added` says.
    """

    @classmethod  # noqa: B027 - there may be nothing to refuse
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise, with what to change, for a request that this cannot serve (it finds its arguments in extra_args)."""

    def __init__(self, args: EngineArgs, device: torch.device, is_pin_memory: bool) -> None:  # noqa: B027 - vLLM hands these in
        """vLLM's arguments in vLLM's places; args are EngineArgs here."""

    @abc.abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: float32 [batch_size, vocab]; changed in place or not, the result has the same shape."""

    @abc.abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True: the best token stays the best. Then greedy requests do without it, and it comes after temperature."""

    @abc.abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called once before each apply; None where no row has changed."""
