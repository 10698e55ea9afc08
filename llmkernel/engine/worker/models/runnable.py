"""What the two implementations have in common: the model that the runner calls, and what its load tells."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch

from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.compiled.kernels import CompiledKernels
from llmkernel.engine.worker.kv_store import KVStore

__all__ = ["MakeStore", "Runnable", "RunnableModel"]

MakeStore = Callable[[int, int], KVStore]
"""(number of blocks, tokens per block) -> an empty store for the model's layers."""


class RunnableModel(Protocol):
    """implementation: its name for people. vocab_size: ids it can emit. num_embeddings: ids it can read."""

    implementation: str

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_embeddings(self) -> int: ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: Any
    ) -> torch.Tensor:
        """token_ids, positions [T]; rows: indices into T -> logits [len(rows), vocab_size]. context: PagedAttention."""
        ...


@dataclasses.dataclass(frozen=True)
class Runnable:
    """A loaded model. layers: its attention layers, by what it calls them. prove: runs it through a small store.

    kernels: what decodes attend with, None: torch's operations.
    """

    model: RunnableModel
    layers: Mapping[Hashable, LayerSpec]
    architecture: str
    weights_bytes: int
    num_parameters: int
    prove: Callable[[MakeStore], None]
    notes: list[str] = dataclasses.field(default_factory=list)
    kernels: CompiledKernels | None = None
