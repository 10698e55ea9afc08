"""The "auto" settings: device, number format and threads follow the machine."""

import ctypes
import sys

import pytest
import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.cpu_share import read_cpu_share
from llmkernel.engine.worker.hardware import (
    keep_freed_memory,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
)
from llmkernel.errors import InvalidRequestError, UnsupportedFeatureError

CPU = torch.device("cpu")


def test_threads_that_were_asked_for() -> None:
    assert resolve_num_threads(EngineArgs(num_threads=3)) == 3
    assert resolve_num_threads(EngineArgs()) == read_cpu_share().most_threads >= 1


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
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    assert resolve_dtype(EngineArgs(), CPU) is dtype
    assert resolve_dtype(EngineArgs(dtype="float16"), CPU) is torch.float16


@pytest.mark.parametrize("name", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
def test_an_older_torch_knows_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve_dtype(EngineArgs(), CPU) is torch.float32
    monkeypatch.setattr(torch.cpu, name, lambda: True)
    assert resolve_dtype(EngineArgs(), CPU) is torch.bfloat16


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
