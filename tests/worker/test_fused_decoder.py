"""The fused decoder's own claims: built from files or from a module, what it refuses, bfloat16, kernels' fallbacks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.kv_store import PagedKVStore
from llmkernel.engine.worker.models.checkpoint import Checkpoint, ModuleCheckpoint, SafetensorsCheckpoint
from llmkernel.engine.worker.models.decoder_builder import build_decoder
from llmkernel.engine.worker.models.decoder_config import NotFused, read_decoder_config
from llmkernel.engine.worker.paged_attention import PagedAttention, ScheduledTokens
from llmkernel.engine.worker.worker import Worker
from llmkernel.errors import EngineStartupError, UnsupportedFeatureError
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


def logits_of(content: dict[str, Any], checkpoint: Checkpoint, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits [T, vocab] of one sequence in two chunks."""
    config = read_decoder_config(content)
    with torch.inference_mode():
        model = build_decoder(config, checkpoint, dtype=dtype, device=CPU).model
        store = PagedKVStore(config.layers, num_blocks=40, block_size=4, dtype=dtype, device=CPU)
        layers = {layer.index: layer for layer in config.layers}
        parts = []
        for start, stop in ((0, 9), (9, len(ids))):
            tokens = [ScheduledTokens(stop - start, start, np.arange(1, 39))]
            context = PagedAttention(store, layers, tokens, dtype=dtype, device=CPU)
            rows = torch.arange(stop - start)
            parts.append(model.forward(ids[start:stop], torch.arange(start, stop), rows, context))
        return torch.cat(parts)


@pytest.mark.parametrize("family", ["llama-tied-mqa", "qwen3", "phi3-partial", "granite"])
def test_from_a_module_and_from_files_alike(family: str, tmp_path: Path) -> None:
    model_type, options = tiny_models.FUSED_FAMILIES[family]
    model = tiny_models.build(model_type, **options)
    tiny_models.save(model, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    ids = torch.arange(40) * 7 % 96
    files = SafetensorsCheckpoint([tmp_path / "model.safetensors"], "files")
    from_files = logits_of(content, files, ids, torch.float32)
    from_module = logits_of(model.config.to_dict(), ModuleCheckpoint(model, "module"), ids, torch.float32)
    assert torch.equal(from_files, from_module)
    with torch.inference_mode():
        assert (from_files - model(ids[None]).logits[0]).abs().max() < 1e-4


def test_bfloat16_is_as_near_to_float32_as_transformers_own(tmp_path: Path) -> None:
    model = tiny_models.build("llama", hidden_size=64, num_attention_heads=4)
    tiny_models.save(model, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    ids = torch.arange(60) * 7 % 96
    files = SafetensorsCheckpoint([tmp_path / "model.safetensors"], "files")
    with torch.inference_mode():
        exact = model(ids[None]).logits[0]
        theirs = model.bfloat16()(ids[None]).logits[0].float()
    ours = logits_of(content, files, ids, torch.bfloat16).float()
    assert (ours - exact).norm() < 1.1 * (theirs - exact).norm()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma"}, "not for gemma"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"rms_norm_eps": None}, "leaves out rms_norm_eps"),
        ({"model_type": "mistral"}, "leaves out num_key_value_heads, sliding_window"),
        ({"num_key_value_heads": 3}, "not a multiple of 3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of type dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "leaves out factor"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "different rotary"),
        ({"partial_rotary_factor": 0.5}, "does not turn a part"),
        ({"head_dim": 7}, "odd"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "without a window"),
    ],
)
def test_what_is_not_for_it_goes_to_transformers(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotFused, match=reason):
        read_decoder_config({**LLAMA, **change})


def test_configurations_of_every_age() -> None:
    old = read_decoder_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = read_decoder_config(
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, "head_dim": 8}
    )
    assert (old.rotary.theta, old.rotary.kind, old.rotary.scaling["factor"]) == (5e5, "linear", 2.0)
    assert (new.rotary.theta, new.rotary.kind, new.head_dim) == (5e5, "linear", old.head_dim)
    assert read_decoder_config(LLAMA).rotary.theta == 1e4


def test_the_choice_is_told_and_can_be_overridden(tmp_path: Path) -> None:
    gemma = tiny_models.save_family("gemma", tmp_path / "gemma")
    with EngineRun(gemma) as run:
        assert run.core.ready.model.implementation == "transformers"
    with pytest.raises(UnsupportedFeatureError, match=r"implementation = 'fused': .* not for gemma; use 'auto'"):
        EngineRun(gemma, implementation="fused")
    llama = tiny_models.save_family("llama", tmp_path / "llama")
    for asked, got in (("auto", "fused"), ("fused", "fused"), ("transformers", "transformers")):
        with EngineRun(llama, implementation=asked) as run:
            assert run.core.ready.model.implementation == got


def test_a_fused_load_imports_no_transformers(tmp_path: Path) -> None:
    folder = tiny_models.save_family("llama", tmp_path / "llama")
    script = (
        "import sys\nfrom llmkernel.config import EngineArgs\nfrom llmkernel.engine.worker.worker import Worker\n"
        f"Worker(EngineArgs(model={str(folder)!r}, num_threads=1), lambda *_: None).start()\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_weights_that_do_not_belong_to_the_configuration(tmp_path: Path) -> None:
    folder = tiny_models.save_family("llama", tmp_path / "llama")
    content = json.loads((folder / "config.json").read_text())

    def fails(change: dict[str, Any], message: str) -> None:
        (folder / "config.json").write_text(json.dumps(content | change))
        with pytest.raises(EngineStartupError, match=message):
            Worker(EngineArgs(model=str(folder), num_threads=1), lambda *_: None).start()

    fails({"num_hidden_layers": 5}, r"lack 9 tensors \(the first is model.layers.4.self_attn.q_proj.weight\)")
    fails({"intermediate_size": 48}, "do not have the shapes")
    fails({"attention_bias": True}, "q_proj.bias")
    whole = (folder / "model.safetensors").read_bytes()
    for broken in (whole[:1000], whole[:-1], b"", b"\xff" * 64, whole.replace(b'"F32"', b'"F16"', 1)):
        (folder / "model.safetensors").write_bytes(broken)
        fails({}, "truncated or not a safetensors file")
