"""What the machine is: device, number format, threads. `auto` settings become facts here."""

import ctypes

import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.cpu_share import read_cpu_share
from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = [
    "has_tiles",
    "keep_freed_memory",
    "multiplies_bfloat16",
    "resolve_device",
    "resolve_dtype",
    "resolve_num_threads",
]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 * 2**20  # the most that glibc takes
_KEPT_AT_MOST = 512 * 2**20


def resolve_device(args: EngineArgs) -> torch.device:
    """The device of `args.device`; "auto" is CUDA where torch sees it, else the CPU."""
    if args.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        message = f"device = {args.device!r} is not a device of torch; use 'auto', 'cpu' or 'cuda'."
        raise InvalidRequestError(message, parameter="device", value=args.device) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequestError(
            "device = 'cuda', but torch sees no CUDA device; use device='cpu'.", parameter="device", value=args.device
        )
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedFeatureError(
            f"device = {args.device!r} is not built yet; use 'auto', 'cpu' or 'cuda'.", parameter="device"
        )
    return device


def resolve_dtype(args: EngineArgs, device: torch.device) -> torch.dtype:
    """The number format of weights and KV. "auto": bfloat16 where the hardware multiplies it fast, else float32."""
    if args.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether there are instructions for it. On CPUs: AMX, AVX512-BF16, Arm's BF16; 2.5 to 4 times float32's speed.

    Without them a product of 16 rows and more is slower than in float32 (1.2 times with AVX-512, 4 with AVX2). It is
    asked, not measured: on a busy machine a measurement would say otherwise, and the same seed give another text.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if hasattr(torch.cpu, "get_capabilities"):  # torch >= 2.11
        known = torch.cpu.get_capabilities()
        return any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_tiles() -> bool:
    """Whether the processor multiplies whole tiles of bfloat16 (AMX): large products are far faster by oneDNN then."""
    return torch.cpu._is_amx_tile_supported()


def resolve_num_threads(args: EngineArgs) -> int:
    """The most torch threads of the engine; "auto" is one per physical core that this process may use."""
    return read_cpu_share().most_threads if args.num_threads == "auto" else int(args.num_threads)


def keep_freed_memory() -> bool:
    """Give back what the load has freed, then let malloc keep what a step frees for the next one (glibc; elsewhere
    nothing happens and False comes back).

    By default activations of some MB go back to the system when they are freed, and are faulted in again page by page a
    moment later: a fifth of the time of a prefill.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc_trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):  # no glibc
        return False
    malloc_trim(0)  # rounding to 4 bits leaves half of what it took in malloc's hands
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST))
