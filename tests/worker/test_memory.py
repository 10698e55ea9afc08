"""Sizes decided before a load: what the weights need, what the pool takes, what is refused with which numbers."""

import json
import struct
from pathlib import Path

import pytest

from llmkernel.config import EngineArgs
from llmkernel.engine.worker import memory
from llmkernel.engine.worker.memory import (
    KV_CACHE_USUAL,
    WORKING_SET,
    available_memory,
    plan_kv_cache,
    weight_files,
    weights_need,
)
from llmkernel.errors import InvalidRequestError

GIB = 2**30
MIB = 2**20


def plan(available: int = 64 * GIB, weights: int = GIB, row: int = 1024, limit: int = 8192, **options: object):
    args = EngineArgs.from_options("m", **options)
    return plan_kv_cache(args, name="m", max_position=limit, bytes_per_token=row, weights=weights, available=available)


def test_auto_pool_is_what_all_sequences_could_need() -> None:
    made = plan(max_num_seqs=4, max_model_len=100)
    assert (made.block_size, made.num_blocks) == (32, 1 + 4 * 4)  # 100 tokens are 4 blocks of 32; the null block
    assert made.num_bytes == 17 * 32 * 1024
    assert made.max_model_len == 100
    assert made.note is None


def test_auto_pool_stays_usual_where_more_would_fit() -> None:
    assert KV_CACHE_USUAL - MIB < plan(row=46080).num_bytes <= KV_CACHE_USUAL
    one_sequence = plan(row=MIB, limit=8192)  # 8 GiB for one sequence at full length, of 64
    assert one_sequence.num_bytes == (1 + 8192 // 32) * 32 * MIB
    assert one_sequence.max_model_len == 8192


def test_auto_pool_takes_a_quarter_of_what_is_left_and_says_what_that_means() -> None:
    made = plan(available=5 * GIB + WORKING_SET, weights=GIB, row=MIB, limit=8192)
    assert made.num_bytes == GIB
    assert made.max_model_len == GIB // MIB - 32
    assert "max_model_len is 992 and not 8192" in str(made.note)


def test_a_length_that_was_asked_for_may_take_more_than_a_quarter() -> None:
    made = plan(available=5 * GIB + WORKING_SET, weights=GIB, row=MIB, max_model_len=3000)
    assert made.max_model_len == 3000
    assert made.num_bytes >= 3000 * MIB
    with pytest.raises(InvalidRequestError, match=r"needs 4\.9 GiB for max_model_len = 5000, and 4\.0 GiB of 5\.2 GiB"):
        plan(available=5 * GIB + WORKING_SET, weights=GIB, row=MIB, max_model_len=5000)


def test_what_the_load_takes_beside_the_weights_must_fit_and_is_the_pools_afterwards() -> None:
    args = EngineArgs.from_options("m", max_model_len=100)
    asked = {"name": "m", "max_position": 8192, "bytes_per_token": 1024, "weights": GIB, "load_copies": GIB}
    enough = 2 * GIB + WORKING_SET
    assert plan_kv_cache(args, available=enough, **asked) == plan(available=enough, max_model_len=100)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"need 1\.0 GiB, 1\.0 GiB while they are packed, and 256"):
        plan_kv_cache(args, available=enough - 1, **asked)  # type: ignore[arg-type]


def test_a_pool_of_a_given_size() -> None:
    made = plan(kv_cache_memory="1MiB", block_size=16)
    assert made.num_blocks == 64
    assert made.max_model_len == 63 * 16


def test_a_pool_too_large_or_too_small_is_told_which_size_works() -> None:
    with pytest.raises(InvalidRequestError, match=r"needs 100\.0 GiB .* set it to 64256MiB at most, leave it out"):
        plan(kv_cache_memory="100GiB")
    assert plan(kv_cache_memory="64256MiB").num_bytes == 64256 * MIB
    with pytest.raises(
        InvalidRequestError, match=r"max_model_len = 1 needs 32\.0 KiB; set it to 32KiB at least, or leave"
    ):
        plan(kv_cache_memory=1000, block_size=16)
    assert plan(kv_cache_memory="32KiB", block_size=16).max_model_len == 16
    with pytest.raises(
        InvalidRequestError, match=r"needs 2\.0 MiB; set it to 2MiB at least, or a smaller max_model_len"
    ):
        plan(kv_cache_memory="1MiB", max_model_len=2000)
    assert plan(kv_cache_memory="2MiB", max_model_len=2000).max_model_len == 2000


def test_length_beyond_the_model() -> None:
    with pytest.raises(InvalidRequestError, match="knows positions up to 8192; set at most 8192"):
        plan(max_model_len=8193)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(InvalidRequestError, match=r"weights of m need 4\.0 GiB .* 4\.1 GiB of memory are available"):
        plan(available=4 * GIB + 100 * MIB, weights=4 * GIB)
    with pytest.raises(InvalidRequestError, match=r"a smaller model, or dtype='bfloat16'\.$"):
        plan(available=4 * GIB, weights=4 * GIB, dtype="float32")


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Headers only: the sizes are read without the data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_weights_need_counts_in_the_dtype_that_is_loaded(tmp_path: Path) -> None:
    tensors = {"a": ("BF16", [10, 10], 200), "b": ("F32", [5], 20), "ids": ("I64", [2], 16)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    files = weight_files(tmp_path)
    assert weights_need(files, 4) == 400 + 20 + 16
    assert weights_need(files, 2) == 200 + 10 + 16


def test_weight_files_follow_the_index(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"):
        write_safetensors(tmp_path / name, {"a": ("F16", [1], 2)})
    assert len(weight_files(tmp_path)) == 3
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert [path.name for path in weight_files(tmp_path)] == sorted(parts.values())


def test_available_memory_is_the_least_of_all_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP_V2", tmp_path)
    monkeypatch.setattr(memory, "_CGROUP_V1", tmp_path / "none")
    assert available_memory() == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 500000\n")
    assert available_memory() == 2_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() == 8000 * 1024
    monkeypatch.setenv(memory.MEMORY_LIMIT_VARIABLE, "1MiB")
    assert available_memory() == MIB
