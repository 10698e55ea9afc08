"""What the machine is: device, number format, threads. `auto` settings become facts here."""

import ctypes
import os
from pathlib import Path

import torch

from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["keep_freed_memory", "physical_cores", "resolve_device", "resolve_dtype", "resolve_num_threads"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 * 2**20  # the most that glibc takes
_KEPT_AT_MOST = 512 * 2**20

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


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
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_multiplies_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def resolve_num_threads(args: EngineArgs) -> int:
    """Torch threads of the engine; "auto" is one per physical core that this process may use."""
    return physical_cores() if args.num_threads == "auto" else int(args.num_threads)


def physical_cores() -> int:
    """Physical cores within the CPU affinity and the cgroup's quota, at least 1. Hyperthreads count once."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in usable}
    quota = _cgroup_quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def keep_freed_memory() -> bool:
    """Let malloc keep what a step frees for the next one (glibc; elsewhere nothing happens and False comes back).

    By default activations of some MB go back to the system when they are freed, and are faulted in again page by page a
    moment later: a fifth of the time of a prefill.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST))


def _cpu_multiplies_bfloat16() -> bool:
    """AMX, AVX512-BF16 or Arm's BF16 instructions: 2.5 to 4 times as fast as float32; without them it is slower."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch >= 2.11
    known = capabilities() if capabilities is not None else {}
    return any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _siblings(cpu: int) -> str:
    try:
        return (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_quota() -> float | None:
    """CPUs' worth of time that the cgroup may use; None without a limit."""
    try:
        if _CGROUP_V2_QUOTA.exists():
            quota, period = _CGROUP_V2_QUOTA.read_text().split()
        else:
            quota = (_CGROUP_V1 / "cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP_V1 / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
