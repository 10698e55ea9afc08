"""How the fused decoder keeps its matrices: what `quantization`, `dtype`, files, processor and memory come to."""

import dataclasses
from contextlib import ExitStack

import torch

from llmkernel.config import EngineArgs, format_bytes
from llmkernel.engine.worker.compiled.products import Products
from llmkernel.engine.worker.hardware import has_tiles, multiplies_bfloat16, resolve_dtype
from llmkernel.engine.worker.linear.int4_linear import int4_works
from llmkernel.engine.worker.linear.int8_linear import int8_works
from llmkernel.engine.worker.linear.scheme import (
    FEW_ROWS,
    NO_COPIES,
    Copies,
    DenseScheme,
    GroupScheme,
    Int8Scheme,
    WeightScheme,
)
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.models.decoder_config import DecoderConfig
from llmkernel.engine.worker.models.gguf_blocks import GGUFBlocks
from llmkernel.errors import UnsupportedFeatureError

__all__ = ["WeightChoice", "choose_scheme", "fused_dtype"]

_KEPT = {"Q4_0": 0.29, "Q4_1": 0.32, "Q8_0": 0.54}
"""Types of GGUF files whose blocks are kept, and the part of 16 bits that they take."""

_COPY_SHARE = 4
"""A dense copy beside weights of few bits may take one part in so many of the available memory."""

_PART = {"dense": 1.0, "int8": 0.54, "int4": 0.32}


@dataclasses.dataclass(frozen=True)
class WeightChoice:
    """kind: "dense", "int8", "int4" (asked for: what the file has otherwise is rounded), "kept" (the file's blocks).

    part: what the layers take, of their size as they would be dense.
    """

    kind: str
    part: float
    from_file: bool = False
    copies: Copies = NO_COPIES

    def bytes_estimate(self, config: DecoderConfig, item: int) -> int:
        """Bytes that the weights will take; the embedding stays in its file."""
        layers = self.part + (1 if self.copies.layers else 0)
        head = 1 + (_KEPT["Q8_0"] if self.copies.head else 0)
        return int(item * (_layer_numbers(config) * layers + config.vocab_size * config.hidden_size * head))

    def scheme(self, files: ModelFiles, stack: ExitStack, products: Products | None = None) -> WeightScheme:
        """The scheme, with the GGUF file open within `stack` where it is read. products: see WeightScheme."""
        if self.kind == "dense":
            return DenseScheme(products)
        if self.kind == "int8":
            return Int8Scheme(products)
        stored = stack.enter_context(GGUFBlocks(files.gguf)).find if self.from_file and files.gguf else lambda _: None
        return GroupScheme(stored, rounds=self.kind == "int4", copies=self.copies, products=products)

    def notes(self, files: ModelFiles, scheme: WeightScheme, config: DecoderConfig, item: int) -> list[str]:
        """What to say about it."""
        if isinstance(scheme, GroupScheme):
            said = [f"{files.quantization} blocks are kept as they are."] if self.from_file else []
            if scheme.rounded:
                said.append(f"{len(scheme.rounded)} weights were rounded to 4 bits.")
            if scheme.kept_dense:
                said.append(f"{len(scheme.kept_dense)} weights are stored otherwise and were decoded.")
            if self.copies.layers:
                extra = format_bytes(_layer_numbers(config) * item)
                without = "" if files.quantization == "Q8_0" else "; quantization='int4' does without"
                said.append(f"A copy in bfloat16 ({extra}) serves steps of more than {FEW_ROWS} tokens{without}.")
            return said
        if self.kind == "int8":
            return ["Weights of the layers were rounded to 8 bits."]
        return files.notes


def fused_dtype(files: ModelFiles, args: EngineArgs, device: torch.device) -> torch.dtype:
    """The number format of the fused decoder: as anywhere (hardware.resolve_dtype), but "auto" is bfloat16 for 4 bits.

    torch's 4-bit kernel takes bfloat16 only, and with AVX2 or AVX-512 it does without instructions for it: measured on
    SmolLM2 3 times as fast as float32 with one row, as fast or faster with 16, in a quarter of the memory.
    """
    dtype = resolve_dtype(args, device)
    if args.dtype != "auto" or device.type != "cpu":
        return dtype
    if args.quantization in ("int8", "int4"):  # asked for; choose_scheme refuses what cannot be
        return torch.bfloat16
    vectorised = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if args.quantization == "auto" and _holds_4_bits(files) and vectorised and int4_works():
        return torch.bfloat16
    return dtype


def choose_scheme(
    files: ModelFiles,
    args: EngineArgs,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    available: int,
    *,
    compiled: bool,
) -> WeightChoice:
    """`available`: bytes of memory. compiled: there are kernels. An explicit wish that cannot be met raises
    UnsupportedFeatureError."""
    wanted = args.quantization
    if wanted in ("int8", "int4"):
        works = int8_works if wanted == "int8" else int4_works
        if device.type != "cpu":
            raise _unsupported(wanted, f"is built for the CPU, not for {device.type}; use 'auto' or 'none'.")
        if dtype != torch.bfloat16:
            raise _unsupported(wanted, "needs bfloat16 activations; set dtype='bfloat16', or use 'auto' or 'none'.")
        if not compiled and not works():
            raise _unsupported(wanted, "needs a kernel that this torch does not have here; use 'auto' or 'none'.")
        if wanted == "int8" and compiled and files.gguf is not None and files.quantization == "Q8_0":
            return WeightChoice("kept", _KEPT["Q8_0"], from_file=True)  # they are 8 bits already
        return WeightChoice(wanted, _PART[wanted], from_file=wanted == "int4" and _holds_4_bits(files))
    kept = (_holds_4_bits(files) and int4_works()) or (compiled and files.quantization in _KEPT)
    if wanted == "none" or not kept or files.gguf is None or dtype != torch.bfloat16 or device.type != "cpu":
        return WeightChoice("dense", _PART["dense"])
    layers = head = False
    if multiplies_bfloat16(device):  # elsewhere few bits are the fastest at any number of rows
        item = dtype.itemsize * _COPY_SHARE
        layers = (not compiled or has_tiles()) and _layer_numbers(config) * item < available
        head = config.vocab_size * config.hidden_size * item < available
    return WeightChoice("kept", _KEPT[files.quantization], True, Copies(layers=layers, head=head))


def _holds_4_bits(files: ModelFiles) -> bool:
    """The file has blocks that torch's 4-bit kernel takes, too."""
    return files.gguf is not None and files.quantization in ("Q4_0", "Q4_1")


def _layer_numbers(config: DecoderConfig) -> int:
    """Weights in the matrices of all layers."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _unsupported(wanted: str, what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"quantization = {wanted!r} {what}", parameter="quantization", value=wanted)
