"""FusedLoad: a model straight from config.json and safetensors into the fused decoder. Imports no transformers."""

from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from llmkernel.config import EngineArgs, format_bytes
from llmkernel.engine.executor_facts import ReportProgress
from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.compiled.kernels import CompiledKernels, compile_kernels
from llmkernel.engine.worker.compiled.products import KernelError
from llmkernel.engine.worker.linear.scheme import WeightScheme
from llmkernel.engine.worker.memory import available_memory, weight_files
from llmkernel.engine.worker.model_files import ModelFiles, read_json
from llmkernel.engine.worker.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from llmkernel.engine.worker.models.decoder_builder import BuiltDecoder, build_decoder
from llmkernel.engine.worker.models.decoder_config import NotFused, read_decoder_config
from llmkernel.engine.worker.models.runnable import MakeStore, Runnable
from llmkernel.engine.worker.models.weight_choice import choose_scheme
from llmkernel.engine.worker.paged_attention import PagedAttention, ScheduledTokens
from llmkernel.errors import EngineStartupError

__all__ = ["FusedLoad"]

_COPIES = 2
"""Measured: SmolLM2's 54 MiB of embedding take 109 to 135 MiB more while they are packed."""

_PROMPT_TOKENS = 8
_CHUNKS = (4, 2, 1, 1)
_PROOF_BLOCK = 4
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class FusedLoad:
    """Reads the configuration at once (NotFused if it is not for the fused decoder), the weights in `load`."""

    def __init__(self, files: ModelFiles, args: EngineArgs, dtype: torch.dtype, device: torch.device) -> None:
        content = read_json(files.folder / "config.json")
        _check_plain(content, args)
        self.config = read_decoder_config(content)
        self.limit = self.config.max_position
        self.note: str | None = None
        self._weights = weight_files(files.folder)
        if not self._weights:
            raise NotFused("its weights are not safetensors")
        self._checkpoint: Checkpoint = SafetensorsCheckpoint(self._weights, files.source)
        if "model.embed_tokens.weight" not in self._checkpoint:
            raise NotFused("its tensors have other names")
        self._files = files
        self._dtype = dtype
        self._device = device
        self._kernels, self._kernel_note = self._compile(args)
        self._choice = choose_scheme(
            files, args, self.config, dtype, device, available_memory(), compiled=self._kernels is not None
        )

    @property
    def row_size(self) -> int:
        """Numbers that one token keeps in the cache, all layers together."""
        return sum(layer.row_size for layer in self.config.layers)

    @property
    def weights_estimate(self) -> int:
        """Bytes that the weights will take."""
        return self._choice.bytes_estimate(self.config, self._dtype.itemsize)

    @property
    def load_copies(self) -> int:
        """Bytes that the load takes beside the weights: in 16 bits the largest matrix, as read and being packed."""
        item = self._dtype.itemsize
        return _COPIES * self.config.vocab_size * self.config.hidden_size * item if item < 4 else 0

    def load(self, report: ReportProgress) -> Runnable:
        """The model, its weights read. Progress is stage "weights", in layers."""
        kernels, note = self._kernels, self._kernel_note
        try:
            built, scheme = self._build(report, kernels)
        except KernelError as error:  # rare: others were compiled before, or kept
            kernels, note = None, f"No compiled kernels, decoding is slower: {error}"
            built, scheme = self._build(report, None)
        kept = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in built.kernels.items())
        notes = [
            *self._choice.notes(self._files, scheme, self.config, self._dtype.itemsize),
            f"Weights: {kept}.",
            note,
        ]
        layers: dict[Hashable, LayerSpec] = {layer.index: layer for layer in self.config.layers}
        return Runnable(
            model=built.model,
            layers=layers,
            architecture=self.config.architecture,
            weights_bytes=built.weights_bytes,
            num_parameters=built.num_parameters,
            notes=notes,
            prove=lambda make_store: self._prove(built, layers, make_store, kernels),
            kernels=kernels,
        )

    def _build(self, report: ReportProgress, kernels: CompiledKernels | None) -> tuple[BuiltDecoder, WeightScheme]:
        name = self._files.name
        with ExitStack() as stack:
            scheme = self._choice.scheme(self._files, stack, None if kernels is None else kernels.products)
            built = build_decoder(
                self.config,
                self._checkpoint,
                dtype=self._dtype,
                device=self._device,
                scheme=scheme,
                operations=kernels,
                progress=lambda done, total: report("weights", done, total, name),
            )
        return built, scheme

    def _compile(self, args: EngineArgs) -> tuple[CompiledKernels | None, str]:
        if args.enforce_eager:
            return None, "No compiled kernels, as asked (enforce_eager)."
        return compile_kernels(self.config.layers, self._dtype, self._device)

    def _prove(
        self,
        built: BuiltDecoder,
        layers: dict[Hashable, LayerSpec],
        make_store: MakeStore,
        kernels: CompiledKernels | None,
    ) -> None:
        """A prompt in one piece and in chunks and single tokens must give the same; it also warms the kernels up."""
        ids = (torch.arange(_PROMPT_TOKENS) * 7919 + 11) % built.model.num_embeddings
        blocks = np.arange(1, 1 + -(-_PROMPT_TOKENS // _PROOF_BLOCK))
        store = make_store(1 + len(blocks), _PROOF_BLOCK)

        def run(done: int, size: int) -> torch.Tensor:
            part = torch.arange(done, done + size, device=self._device)
            tokens = [ScheduledTokens(size, done, blocks)]
            context = PagedAttention(store, layers, tokens, dtype=self._dtype, device=self._device, kernels=kernels)
            rows = torch.arange(size, device=self._device)
            return built.model.forward(ids.to(self._device)[part], part, rows, context).float()

        whole = run(0, _PROMPT_TOKENS)
        starts = np.cumsum((0, *_CHUNKS[:-1])).tolist()
        pieces = torch.cat([run(start, size) for start, size in zip(starts, _CHUNKS, strict=True)])
        if not (whole.isfinite().all() and pieces.isfinite().all()):
            raise EngineStartupError(
                f"Cannot load {self._files.source}: its logits hold NaN or infinity; check its weights, or use dtype "
                "float32."
            )
        spread = (whole - whole.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
        distance = (pieces - whole).norm(dim=-1) / spread
        # in 16 bits one row may jump where pieces run on other kernels; a wrong attention moves nearly all of them
        worst = distance.max() if self._dtype == torch.float32 else distance.median()
        if worst > _TOLERANCE[self._dtype]:
            raise EngineStartupError(
                f"Cannot run {self._files.source} fused: in chunks its logits differ by {worst:.2g}; "
                "load it with implementation='transformers', and report it."
            )


def _check_plain(content: dict[str, Any], args: EngineArgs) -> None:
    if content.get("quantization_config"):
        raise NotFused("its weights are quantized in a way of their own")
    if args.trust_remote_code and content.get("auto_map"):
        raise NotFused("its own code runs it")
