"""CompiledKernels: a decoder's operations between its products, and the attention of decodes, compiled by numba.

The same work as models/operations.py and the torch side of PagedAttention, at a tenth of its time where rows are few:
there the dispatch of some 40 small operations costs more than they compute. Figures: ARCHITECTURE.md.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.compiled.arguments import (
    KEYS_AT_ONCE,
    SEGMENT,
    AttentionArguments,
    GateArguments,
    NormArguments,
)
from llmkernel.engine.worker.compiled.layer_sequence import LayerSequence
from llmkernel.engine.worker.compiled.products import Products
from llmkernel.engine.worker.compiled.team import Scratch, Team
from llmkernel.engine.worker.kv_store import KVStore, Lanes
from llmkernel.engine.worker.scheduled_tokens import ScheduledTokens, block_table
from llmkernel.logger import init_logger

if TYPE_CHECKING:
    from llmkernel.engine.worker.compiled.library import KernelLibrary
    from llmkernel.engine.worker.models.fused_decoder import DecoderLayer
    from llmkernel.engine.worker.models.heads import Heads
    from llmkernel.engine.worker.models.operations import RMSNorm

__all__ = ["CompiledAttention", "CompiledKernels", "compile_kernels"]

logger = init_logger(__name__)

_SHORT = 2**14
"""Numbers that a row kernel goes through in a few microseconds: sooner than a second thread is there."""

_FEW_KEYS = 1024
"""Products of a query token with keys, of all key heads, that take as little."""


def compile_kernels(
    layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> "tuple[CompiledKernels | None, str]":
    """Kernels for these layers, and a note; None where torch's operations have to do: another device or number format,
    layers that ask for more, a machine that numba does not compile for.

    Compiling takes 2 seconds, once per machine and version of this package: the code is kept beside converted models.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None, f"No compiled kernels: they are built for the CPU, in bfloat16 and float32, not for {device.type}."
    head_size = layers[0].key_size
    if any((layer.key_size, layer.value_size) != (head_size, head_size) for layer in layers) or head_size % 2:
        return None, "No compiled kernels: its heads are not all of one even size."
    if any(layer.softcap is not None or layer.has_sinks for layer in layers):
        return None, "No compiled kernels: its attention has soft caps or sinks."
    try:
        from llmkernel.engine.worker.compiled.library import decoder_recipe, open_library

        library = open_library(decoder_recipe("bfloat16" if dtype == torch.bfloat16 else "float32", head_size))
    except Exception as error:  # noqa: BLE001 - whatever keeps LLVM from it here: torch does the same work, slower
        logger.warning("No compiled kernels: %r", error)
        return None, f"No compiled kernels, decoding is slower: {type(error).__name__}: {error}"
    return CompiledKernels(library, layers, dtype), "Attention of decodes, norms and gates are compiled."


class CompiledKernels:
    """Owns the kernels and the memory that they write to: what a call returns is good until its next one.

    products: None in float32.
    """

    def __init__(self, library: "KernelLibrary", layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
        self.head_size = layers[0].key_size
        self.group = max(layer.num_heads // layer.num_kv_heads for layer in layers)
        self.team = Team()
        self.norm_kernel, self.gate_kernel = library.kernel("norm"), library.kernel("gate")
        self.attention_kernel, self.sequence_kernel = library.kernel("attention"), library.kernel("sequence")
        self.attention_arguments = AttentionArguments()
        self.scratch = Scratch()
        self._norm_arguments = NormArguments()
        self._gate_arguments = GateArguments()
        self._normed = _Rows(dtype)
        self._gated = _Rows(dtype)
        self.attended = _Rows(dtype)
        self.products = Products(self.team) if dtype == torch.bfloat16 else None

    def norm(self, norm: "RMSNorm", hidden: torch.Tensor, added: torch.Tensor | None, scale: float) -> torch.Tensor:
        """As Operations.norm."""
        rows, size = hidden.shape
        out, address = self._normed.get(rows, size)
        arguments = self._norm_arguments
        arguments.rows, arguments.size, arguments.hidden = rows, size, hidden.data_ptr()
        arguments.added = 0 if added is None else added.data_ptr()
        arguments.weight, arguments.out = norm.address, address
        arguments.eps, arguments.scale = norm.eps, scale
        self.team.run(self.norm_kernel, arguments, parts=rows, is_short=rows * size <= _SHORT)
        return out

    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        """As Operations.gate."""
        rows, size = joined.shape[0], joined.shape[1] // 2
        out, address = self._gated.get(rows, size)
        arguments = self._gate_arguments
        arguments.rows, arguments.size, arguments.joined, arguments.out = rows, size, joined.data_ptr(), address
        self.team.run(self.gate_kernel, arguments, parts=rows, is_short=rows * size <= _SHORT)
        return out

    def sequence(self, layers: "Sequence[DecoderLayer]", scale: float) -> LayerSequence | None:
        """As Operations.sequence."""
        return LayerSequence.of(self, layers, scale)

    def plan(self, store: KVStore, sequences: Sequence[ScheduledTokens]) -> "CompiledAttention | None":
        """The attention of a step's decodes and short chunks, the first rows of its token axis."""
        if store.block_size % KEYS_AT_ONCE or SEGMENT % store.block_size or store.lanes(0) is None:
            return None
        return CompiledAttention(self, store, sequences)


class CompiledAttention:
    """Decodes and short chunks of one step: the first `num_rows` rows. Reads and writes the pool where it lies.

    arguments: what the kernel is told of the step; those of a layer are set by `attend`.
    """

    def __init__(self, kernels: CompiledKernels, store: KVStore, sequences: Sequence[ScheduledTokens]) -> None:
        counts = [sequence.num_tokens for sequence in sequences]
        ends = [sequence.context for sequence in sequences]
        size = store.block_size
        self.num_rows = sum(counts)
        self._kernels = kernels
        self._store = store
        self._requests = np.array([np.cumsum([0, *counts[:-1]]), counts, ends])
        self._tables = block_table(sequences, [0] * len(sequences), -(-max(ends) // size), size)
        self._work = sum(end * count for end, count in zip(ends, counts, strict=True))
        self.arguments = arguments = kernels.attention_arguments
        arguments.requests = len(sequences)
        arguments.starts, arguments.counts, arguments.ends = (row.ctypes.data for row in self._requests)
        arguments.tables, arguments.table_size = self._tables.ctypes.data, self._tables.shape[1]
        arguments.block_size = size
        scratch_size = AttentionArguments.scratch_for(max(counts) * kernels.group, kernels.head_size)
        arguments.scratch, arguments.scratch_size = kernels.scratch.address(scratch_size), scratch_size

    def lanes(self, layer: int) -> Lanes:
        """Where the layer lies."""
        lanes = self._store.lanes(layer)
        assert lanes is not None  # CompiledKernels.plan has asked
        return lanes

    def attend(self, heads: "Heads", joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """joined [T, queries + row_size], unturned; rotation complex64 [T, 1, rotary / 2] -> [num_rows, H * D]."""
        layer, kernels, arguments = heads.layer, self._kernels, self.arguments
        out, address = kernels.attended.get(self.num_rows, layer.num_heads * layer.value_size)
        arguments.joined, arguments.angles = joined.data_ptr(), rotation.data_ptr()
        arguments.rotary = 2 * rotation.shape[-1]
        arguments.norms, arguments.eps = heads.norms_address, heads.norms_eps
        arguments.heads, arguments.kv_heads = layer.num_heads, layer.num_kv_heads
        arguments.pool, arguments.block_stride = self.lanes(layer.index)
        arguments.window = layer.window or 0
        arguments.out, arguments.scale = address, layer.scaling
        parts, is_short = arguments.requests * layer.num_heads, self._work * layer.num_kv_heads <= _FEW_KEYS
        kernels.team.run(kernels.attention_kernel, arguments, parts=parts, is_short=is_short)
        return out


class _Rows:
    """Memory for the rows that an operation returns, the same for all layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)
        self._shape = (0, 0)
        self._out = (self._memory, 0)

    def get(self, rows: int, size: int) -> tuple[torch.Tensor, int]:
        """[rows, size], and its address."""
        if self._shape != (rows, size):
            if self._memory.numel() < rows * size or self._memory.numel() > 16 * rows * size:
                self._memory = self._memory.new_empty(rows * size)
            self._out = self._memory[: rows * size].view(rows, size), self._memory.data_ptr()
            self._shape = rows, size
        return self._out
