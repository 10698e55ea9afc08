"""Memory: what the machine has, what the weights need, how large the KV pool may be. Decided before anything is loaded.

All sizes in bytes. LLMKERNEL_MEMORY_LIMIT ("2GiB") is the most that the engine takes to be available; without it the
machine and the cgroup say.
"""

import dataclasses
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from llmkernel.config import EngineArgs, format_bytes, parse_bytes
from llmkernel.errors import InvalidRequestError

__all__ = [
    "MEMORY_LIMIT_VARIABLE",
    "KVPlan",
    "available_memory",
    "plan_kv_cache",
    "resident_memory",
    "weight_files",
    "weights_need",
]

MEMORY_LIMIT_VARIABLE = "LLMKERNEL_MEMORY_LIMIT"

WORKING_SET = 256 * 2**20
"""Kept free beside weights and KV: activations, logits, the libraries' own memory."""

KV_CACHE_USUAL = 2 * 2**30
"""The pool that "auto" makes where more would fit: 90,000 tokens of a 135M model, 16,000 of an 8B one."""

BLOCK_SIZE = 32
"""Tokens per block on a CPU: gathers are 5 to 18 % faster than with 16, prefixes are shared in steps of 32 tokens."""

AVAILABLE_SHARE = 4
"""An "auto" pool takes at most this part (one in four) of the memory that is left beside the weights."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


@dataclasses.dataclass(frozen=True)
class KVPlan:
    """The KV pool to make. num_blocks counts the null block; max_model_len is at most what the pool holds (tokens).

    dense_bytes: what decodes may take beside it to keep what they gather: as much again, if half of the rest allows.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    num_bytes: int
    dense_bytes: int = 0
    note: str | None = None


def available_memory() -> int:
    """Bytes that this process can still take without swapping: the least of machine, cgroup and the user's limit."""
    limits = [_machine_available(), _cgroup_available()]
    if os.environ.get(MEMORY_LIMIT_VARIABLE):
        limits.append(parse_bytes(os.environ[MEMORY_LIMIT_VARIABLE]))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else 2**62


def resident_memory() -> int:
    """Resident bytes of this process; 0 where /proc does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that belong to the model in `folder`: those of its index, where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()))
        return [folder / name for name in names if (folder / name).exists()]
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def weights_need(files: Iterable[Path], item_bytes: int) -> int:
    """Bytes that the tensors of these safetensors files take when loaded, `item_bytes` per floating-point number."""
    total = 0
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            stored = _ITEM_BYTES.get(tensor["dtype"])
            floating = "F" in tensor["dtype"] and stored is not None
            total += (end - begin) // stored * item_bytes if floating and stored else end - begin
    return total


def plan_kv_cache(
    args: EngineArgs,
    *,
    name: str,
    max_position: int,
    bytes_per_token: int,
    weights: int,
    available: int,
    load_copies: int = 0,
) -> KVPlan:
    """Size the KV pool. Refuses what does not fit.

    weights: bytes still to be loaded. load_copies: what that takes beside them, gone again before there is a pool.
    available: before all that.
    """
    if args.max_model_len is not None and args.max_model_len > max_position:
        raise InvalidRequestError(
            f"max_model_len = {args.max_model_len}, but {name} knows positions up to {max_position}; "
            f"set at most {max_position}.",
            parameter="max_model_len",
            value=args.max_model_len,
        )
    _check_weights_fit(args, name, weights, load_copies, available)
    length = args.max_model_len or max_position
    block_size = args.block_size or min(BLOCK_SIZE, length)
    block_bytes = block_size * bytes_per_token
    free = available - weights - WORKING_SET
    room = _pool_bytes(args, length=length, block_size=block_size, block_bytes=block_bytes, free=free)
    num_blocks = room // block_bytes
    holds = max(0, num_blocks - 1) * block_size
    least = args.max_model_len or 1
    if room > free or holds < least:
        needed = block_bytes * (1 + _blocks(least, block_size))
        raise InvalidRequestError(
            _pool_refusal(args, name, room=room, needed=needed, free=max(free, 0), available=available),
            parameter="kv_cache_memory",
            value=args.kv_cache_memory,
        )
    note = None
    if holds < length:
        note = f"The KV cache holds {holds} tokens, so max_model_len is {holds} and not {length}."
    num_bytes = num_blocks * block_bytes
    dense_bytes = max(0, min(num_bytes, (free - num_bytes) // 2))
    return KVPlan(num_blocks, block_size, min(length, holds), num_bytes, dense_bytes, note)


def _check_weights_fit(args: EngineArgs, name: str, need: int, load_copies: int, available: int) -> None:
    """Refuse weights that do not fit beside a working set, and beside what their load takes."""
    if need + load_copies + WORKING_SET > available:
        smaller = ", or dtype='bfloat16'" if args.dtype == "float32" else ""
        packing = f", {format_bytes(load_copies)} while they are packed," if load_copies else ""
        raise InvalidRequestError(
            f"The weights of {name} need {format_bytes(need)}{packing} and {format_bytes(WORKING_SET)} to work with; "
            f"{format_bytes(available)} of memory are available. Free memory, or choose a smaller model{smaller}.",
            parameter="model",
            value=name,
        )


def _pool_refusal(args: EngineArgs, name: str, *, room: int, needed: int, free: int, available: int) -> str:
    """Why there is no pool of `room` bytes: more than is `free`, or less than `needed`."""
    asked = args.kv_cache_memory
    length = args.max_model_len
    left = f"{format_bytes(free)} of {format_bytes(available)} of memory are left beside the weights"
    if asked == "auto":
        change = "set a smaller max_model_len, or free memory." if length else "free memory, or choose a smaller model."
        least = f" for max_model_len = {length}" if length else ""
        return f"The KV cache of {name} needs {format_bytes(needed)}{least}, and {left}; {change}"
    if room > free:
        most = f"set it to {_whole(free, up=False)} at most, leave it out, " if free >= needed else ""
        return (
            f"The KV cache of {name} needs {format_bytes(room)} (kv_cache_memory = {asked!r}), and {left}; "
            f"{most}or free memory."
        )
    smaller = ", or a smaller max_model_len" if length else ""
    return (
        f"kv_cache_memory = {asked!r} is too small for {name}: max_model_len = {length or 1} needs "
        f"{format_bytes(needed)}; set it to {_whole(needed, up=True)} at least{smaller}, or leave it out."
    )


def _whole(count: int, *, up: bool) -> str:
    """Bytes in whole units, to be typed: rounded to the side that works."""
    name, unit = ("MiB", 2**20) if count >= 2**20 else ("KiB", 2**10)
    return f"{-(-count // unit) if up else count // unit}{name}"


def _pool_bytes(args: EngineArgs, *, length: int, block_size: int, block_bytes: int, free: int) -> int:
    """Bytes of the pool: as asked for; or by need, where need is every sequence at full length, within measure."""
    if args.kv_cache_memory != "auto":
        return parse_bytes(args.kv_cache_memory)
    one_sequence = (1 + _blocks(length, block_size)) * block_bytes
    all_sequences = (1 + args.max_num_seqs * _blocks(length, block_size)) * block_bytes
    share = max(0, free) // AVAILABLE_SHARE
    if args.max_model_len is not None:  # asked for: it may take more than the usual share, not more than there is
        share = max(share, min(one_sequence, free))
    return min(all_sequences, share, max(one_sequence, KV_CACHE_USUAL))


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _machine_available() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _cgroup_available() -> int | None:
    """Room below the cgroup's limit; page cache that can be dropped counts as room."""
    for folder, limit_name, usage_name in (
        (_CGROUP_V2, "memory.max", "memory.current"),
        (_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = int((folder / limit_name).read_text())
            usage = int((folder / usage_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such cgroup version here, or "max": no limit
            continue
        return max(0, limit - usage + int(stat.get("inactive_file", 0)))
    return None
