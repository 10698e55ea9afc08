"""LayerSequence: all layers of a decoder as one list of kernels, run without Python in between.

With one row a layer is eight calls of a few microseconds each: to go through Python between them, and to gather the
threads anew for each, took a quarter of a 4-bit step.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from llmkernel.engine.worker.compiled.arguments import (
    Arguments,
    AttentionArguments,
    GateArguments,
    NormArguments,
    ProductArguments,
    SequenceArguments,
)
from llmkernel.engine.worker.compiled.call_table import CallTable
from llmkernel.engine.worker.compiled.products import PanelWeight
from llmkernel.engine.worker.compiled.team import Kernel, Scratch

if TYPE_CHECKING:
    from llmkernel.engine.worker.compiled.kernels import CompiledAttention, CompiledKernels
    from llmkernel.engine.worker.linear.linear import Linear
    from llmkernel.engine.worker.models.fused_decoder import DecoderLayer
    from llmkernel.engine.worker.models.heads import Heads
    from llmkernel.engine.worker.models.operations import RMSNorm

__all__ = ["LayerSequence"]

_MOST_ROWS = 128
"""Rows of a step up to which it is worth it: beyond them every call is long."""

_OF_THE_STEP = ("requests", "starts", "counts", "ends", "tables", "table_size", "block_size", "scratch", "scratch_size")
"""What attention is told alike in all layers of a step."""


class LayerSequence:
    """Owns the calls and the memory between them: what `run` returns is good until it is called again.

    most_rows: of a step that it takes.
    """

    def __init__(self, kernels: "CompiledKernels", layers: "Sequence[DecoderLayer]", scale: float) -> None:
        self.most_rows = min(_MOST_ROWS, *(linear.most_panel_rows for layer in layers for linear in layer.linears))
        self._team = kernels.team
        self._kernel = kernels.sequence_kernel
        self._layers = [layer.heads.layer.index for layer in layers]
        self._memory = calls = _LayerCalls(kernels, layers[0], self.most_rows, scale)
        self._product_scratch = Scratch()
        self._calls = CallTable([call for index, layer in enumerate(layers) for call in calls.of(layer, index == 0)])
        self._calls.set("thread_number", self._team.thread_number)
        self._arguments = SequenceArguments(calls=self._calls.address, count=len(self._calls), meet=self._team.meet)

    @classmethod
    def of(cls, kernels: "CompiledKernels", layers: "Sequence[DecoderLayer]", scale: float) -> "LayerSequence | None":
        """scale: of what each half of a layer adds. None where a product is not compiled, or threads cannot meet."""
        compiled = all(linear.panels is not None for layer in layers for linear in layer.linears)
        return cls(kernels, layers, scale) if compiled and kernels.team.meet else None

    def run(self, hidden: torch.Tensor, rotation: torch.Tensor, attention: "CompiledAttention") -> torch.Tensor:
        """hidden float32 [T, n], to which all but the last half of a layer is added; returns that half, [T, n].

        rotation complex64 [T, 1, rotary / 2]. T: all rows of the step, at most most_rows.
        """
        rows, threads, calls = hidden.shape[0], self._team.threads, self._calls
        calls.set("team", threads)
        calls.set("rows", rows)
        calls.set("hidden", hidden.data_ptr())
        size = self._memory.scratch_for(rows)
        calls.set("scratch", self._product_scratch.address(size), ProductArguments)
        calls.set("scratch_size", size, ProductArguments)
        calls.set("angles", rotation.data_ptr())
        calls.set("rotary", 2 * rotation.shape[-1])
        for name in _OF_THE_STEP:
            calls.set(name, getattr(attention.arguments, name), AttentionArguments)
        pools, strides = zip(*map(attention.lanes, self._layers), strict=True)
        calls.set("pool", pools)
        calls.set("block_stride", strides)
        self._team.run(self._kernel, self._arguments, parts=threads)
        return self._memory.added[:rows]


class _LayerCalls:
    """The calls of a layer, over memory that all layers share. like: one of them."""

    def __init__(self, kernels: "CompiledKernels", like: "DecoderLayer", rows: int, scale: float) -> None:
        def memory(size: int) -> torch.Tensor:
            return torch.empty(rows, size, dtype=torch.bfloat16, device="cpu")

        spec, inner = like.heads.layer, _panels(like.gate_up).outer // 2
        self.added = memory(_panels(like.down).outer)
        self._normed = memory(_panels(like.down).outer)
        self._joined = memory(_panels(like.qkv).outer)
        self._attended = memory(spec.num_heads * spec.value_size)
        self._gate_up, self._gated = memory(2 * inner), memory(inner)
        self._kernels = kernels
        self._scale = scale
        self._sizes: set[tuple[int, int, int]] = set()

    def of(self, layer: "DecoderLayer", is_first: bool) -> "Iterator[tuple[Kernel, Arguments]]":
        yield self._norm(layer.input_norm, 0 if is_first else self.added.data_ptr())
        yield self._product(_panels(layer.qkv), self._normed, self._joined)
        yield self._attention(layer.heads)
        yield self._product(_panels(layer.out), self._attended, self.added)
        yield self._norm(layer.mlp_norm, self.added.data_ptr())
        yield self._product(_panels(layer.gate_up), self._normed, self._gate_up)
        yield (
            self._kernels.gate_kernel,
            GateArguments(size=self._gated.shape[1], joined=self._gate_up.data_ptr(), out=self._gated.data_ptr()),
        )
        yield self._product(_panels(layer.down), self._gated, self.added)

    def scratch_for(self, rows: int) -> int:
        """Numbers of scratch that a thread needs for any of the products so far."""
        return max(ProductArguments.scratch_for(rows, *sizes) for sizes in self._sizes)

    def _norm(self, norm: "RMSNorm", added: int) -> "tuple[Kernel, Arguments]":
        return self._kernels.norm_kernel, NormArguments(
            size=self._normed.shape[1],
            added=added,
            weight=norm.address,
            out=self._normed.data_ptr(),
            eps=norm.eps,
            scale=self._scale,
        )

    def _product(self, panels: PanelWeight, x: torch.Tensor, out: torch.Tensor) -> "tuple[Kernel, Arguments]":
        self._sizes.add((panels.units, panels.widened, panels.opened))
        return panels.kernel, ProductArguments(
            units=panels.units,
            outer=panels.outer,
            x=x.data_ptr(),
            weights=panels.address,
            bias=panels.bias,
            out=out.data_ptr(),
        )

    def _attention(self, heads: "Heads") -> "tuple[Kernel, Arguments]":
        layer = heads.layer
        return self._kernels.attention_kernel, AttentionArguments(
            joined=self._joined.data_ptr(),
            norms=heads.norms_address,
            eps=heads.norms_eps,
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            window=layer.window or 0,
            out=self._attended.data_ptr(),
            scale=layer.scaling,
        )


def _panels(linear: "Linear") -> PanelWeight:
    assert linear.panels is not None  # LayerSequence.of has asked
    return linear.panels
