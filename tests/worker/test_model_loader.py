"""Loading weights: the model of transformers, told in progress; broken files are told in one line."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_loader import LoadedModel, load_model
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.errors import LLMKernelError, UnsupportedFeatureError
from tests.worker.conftest import Reports
from tests.worker.tiny_gguf import families, random_model

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def original() -> PreTrainedModel:
    return random_model(families()["qwen2"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, original: PreTrainedModel) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    original.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def _load(folder: Path, reports: Reports | None = None, **options: Any) -> LoadedModel:
    args = EngineArgs(model=str(folder), **{"dtype": "float32", "device": "cpu"} | options)
    report = reports if reports is not None else Reports()
    return load_model(resolve_model(args, report), args, report, attn_implementation="eager")


def _refused(folder: Path, **options: Any) -> str:
    with pytest.raises(LLMKernelError) as caught:
        _load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def _change(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_the_model_is_the_saved_one_ready_to_run(folder: Path, original: PreTrainedModel, reports: Reports) -> None:
    loaded = _load(folder, reports)
    expected = original.state_dict()
    found = loaded.model.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.num_parameters == sum(parameter.numel() for parameter in original.parameters())
    assert loaded.weights_bytes >= 4 * loaded.num_parameters
    assert loaded.dtype == torch.float32
    assert loaded.config.model_type == "qwen2"
    assert loaded.config._attn_implementation == "eager"


def test_progress_counts_tensors_in_the_calling_thread(folder: Path) -> None:
    caller, told = threading.current_thread(), []

    def report(stage: str, done: int, total: int, detail: str) -> None:
        assert threading.current_thread() is caller
        told.append((stage, done, total))

    args = EngineArgs(model=str(folder), dtype="float32", device="cpu")
    load_model(resolve_model(args, report), args, report, attn_implementation="eager")
    assert {stage for stage, *_ in told} == {"weights"}
    assert told[0][1:] == (0, 0)
    counts = [done for _, done, total in told if total]
    assert counts == sorted(counts)
    assert counts[-1] == told[-1][2] > 20


def test_torch_keeps_its_threads_and_gets_no_new_ones(folder: Path) -> None:
    before = torch.get_num_threads(), os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"), threading.active_count()
    _load(folder)
    assert (torch.get_num_threads(), os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"), threading.active_count()) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_smaller_number_format_is_the_rounded_float32(dtype: str, folder: Path, original: PreTrainedModel) -> None:
    loaded = _load(folder, dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded.model.state_dict()[name], original.state_dict()[name].to(loaded.dtype))
    assert loaded.weights_bytes < 2.1 * loaded.num_parameters


def test_the_default_model_in_both_formats(smollm2_files: ModelFiles) -> None:
    args = {"device": "cpu"}
    exact = load_model(smollm2_files, EngineArgs(dtype="float32", **args), Reports(), attn_implementation="sdpa")
    small = load_model(smollm2_files, EngineArgs(dtype="bfloat16", **args), Reports(), attn_implementation="sdpa")
    assert exact.num_parameters == small.num_parameters == 134_515_008
    assert abs(exact.weights_bytes - 4 * exact.num_parameters) < 1000
    assert exact.generation_config["eos_token_id"] == 2
    for name, parameter in small.model.named_parameters():
        assert torch.equal(parameter, exact.model.get_parameter(name).to(torch.bfloat16)), name


def test_sharded_weights_load(tmp_path: Path, original: PreTrainedModel) -> None:
    original.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    found = _load(tmp_path / "sharded").model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.state_dict().items())


def test_the_generation_config_is_the_files_or_what_the_configuration_says(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert _load(folder).generation_config == {"temperature": 0.6, "eos_token_id": [1, 2]}
    (folder / "generation_config.json").unlink()
    _change(folder, eos_token_id=3, bos_token_id=None, pad_token_id=None)
    assert _load(folder).generation_config == {"eos_token_id": 3}


def test_a_broken_generation_config_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is not JSON" in _refused(folder)


@pytest.mark.parametrize("text", ["{", "", "\x00\x01", "[1]", '"qwen2"'])
def test_a_broken_configuration_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in _refused(folder)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "no_such_thing"}, "model_type 'no_such_thing'"),
        ({"model_type": None, "architectures": None}, "model_type None"),
        ({"hidden_size": "many"}, "config.json"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized with gptq, which is not supported"),
        ({"model_type": "t5"}, "is not a language model that generates text"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(changes: dict[str, Any], part: str, folder: Path) -> None:
    _change(folder, **changes)
    assert part in _refused(folder)


def test_code_of_the_model_runs_only_if_trusted(folder: Path) -> None:
    _change(folder, model_type="homemade", auto_map={"AutoConfig": "model.Config", "AutoModelForCausalLM": "model.M"})
    (folder / "model.py").write_text("raise SystemError('the code ran')")
    message = _refused(folder)
    assert "trust_remote_code=True if you trust it" in message
    assert "the code ran" not in message


@pytest.mark.parametrize("size", [0, 4, 8, 200, 5000, -1])
def test_truncated_weights_are_refused_by_file(size: int, folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, size if size >= 0 else weights.stat().st_size - 1)
    message = _refused(folder)
    assert f"Cannot load {weights}: it is truncated or not a safetensors file" in message
    assert "download or copy it again" in message


def test_foreign_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n" * 9
    )
    assert "not a safetensors file" in _refused(folder)


def test_missing_tensors_are_refused_by_name(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "lack 1 tensors (the first is model.layers.1.mlp.up_proj.weight)" in _refused(folder)


def test_tensors_of_another_shape_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(8, 64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "do not have the shapes that config.json says" in _refused(folder)


def test_pickled_weights_load_only_if_trusted(folder: Path, original: PreTrainedModel) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(original.state_dict(), folder / "pytorch_model.bin")
    assert "only pickled weights" in _refused(folder)
    found = _load(folder, trust_remote_code=True).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.state_dict().items())


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantization_at_load_is_refused_by_name(scheme: str, folder: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"quantization = '{scheme}' needs the fused decoder"):
        _load(folder, quantization=scheme)


def test_transformers_loads_what_we_load(folder: Path) -> None:
    ids = torch.arange(20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        assert torch.equal(_load(folder).model(ids).logits, theirs(ids).logits)
