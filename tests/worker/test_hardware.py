"""The "auto" settings: device, number format and threads follow the machine."""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker import hardware
from llmkernel.engine.worker.hardware import (
    keep_freed_memory,
    physical_cores,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
)
from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight CPUs, two per core, no quota; all of them usable."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(hardware, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(hardware, "_CGROUP_V2_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(hardware, "_CGROUP_V1", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def test_threads_are_physical_cores_within_affinity_and_quota(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert physical_cores() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 1})
    assert physical_cores() == 2
    (machine / "cpu.max").write_text("max 100000\n")
    assert physical_cores() == 2
    (machine / "cpu.max").write_text("150000 100000\n")
    assert physical_cores() == 1
    (machine / "cpu.max").write_text("50000 100000\n")
    assert physical_cores() == 1


def test_old_cgroups_have_quotas_too(machine: Path) -> None:
    (machine / "cpu.cfs_quota_us").write_text("-1\n")
    (machine / "cpu.cfs_period_us").write_text("100000\n")
    assert physical_cores() == 4
    (machine / "cpu.cfs_quota_us").write_text("300000\n")
    assert physical_cores() == 3


def test_threads_that_were_asked_for(machine: Path) -> None:
    assert resolve_num_threads(EngineArgs(num_threads=3)) == 3
    assert resolve_num_threads(EngineArgs()) == 4


@pytest.mark.parametrize(
    ("has", "dtype"),
    [
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_is_bfloat16_where_it_is_fast(
    has: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert resolve_dtype(EngineArgs(), CPU) is dtype
    assert resolve_dtype(EngineArgs(dtype="float16"), CPU) is torch.float16


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineArgs()) == CPU
    assert resolve_device(EngineArgs(device="cpu")) == CPU
    with pytest.raises(InvalidRequestError, match="sees no CUDA device; use device='cpu'"):
        resolve_device(EngineArgs(device="cuda"))
    with pytest.raises(InvalidRequestError, match="'toaster' is not a device"):
        resolve_device(EngineArgs(device="toaster"))
    with pytest.raises(UnsupportedFeatureError, match="not built"):
        resolve_device(EngineArgs(device="meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(EngineArgs()).type == "cuda"


@pytest.mark.skipif(sys.platform != "linux", reason="malloc's settings are glibc's")
def test_malloc_takes_the_settings() -> None:
    assert keep_freed_memory()


def test_another_malloc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not keep_freed_memory()
