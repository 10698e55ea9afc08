"""Which architectures run: what is refused by name, in one sentence, and that the proof would notice a wrong one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel
from transformers.models.stablelm.modeling_stablelm import StableLmForCausalLM

from llmkernel.engine.worker.kv_store import PagedKVStore
from llmkernel.engine.worker.models.architecture import cache_row_estimate, check_architecture, context_limit
from llmkernel.engine.worker.models.probe import Probe
from llmkernel.engine.worker.models.registered_attention import ATTENTION
from llmkernel.engine.worker.models.transformers_model import TransformersModel
from llmkernel.errors import UnsupportedFeatureError
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun

CPU = torch.device("cpu")
_NEXT = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2, "head_dim": 8}

REFUSED_BY_CONFIG: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": (
        "bloom",
        {"n_layer": 2, "n_head": 4},
        "BloomForCausalLM cannot run here: its attention cannot be replaced",
    ),
    "mamba": ("mamba", {}, "MambaForCausalLM cannot run here: it has linear_attention layers"),
    "falcon": ("falcon", {}, "FalconForCausalLM cannot run here: its attention cannot be replaced"),
    "stablelm": ("stablelm", {}, "StableLmForCausalLM cannot run here: its attention cannot be replaced"),
    "t5": ("t5", {}, "t5 cannot run here: it has an encoder and a decoder"),
    "bart": ("bart", {}, "BartForCausalLM cannot run here: it has an encoder and a decoder"),
    "whisper": ("whisper", {}, "WhisperForCausalLM cannot run here: it has an encoder and a decoder"),
    "gemma 3 with pictures": ("gemma3", {}, "it is more than a text model .vision_config"),
    "qwen2-vl": ("qwen2_vl", {}, "qwen2_vl cannot run here: it is more than a text model .vision_config"),
    "moshi": ("moshi", {}, "MoshiForCausalLM cannot run here: it is more than a text model .audio_encoder_config"),
    "qwen3-next": ("qwen3_next", _NEXT, "Qwen3NextForCausalLM cannot run here: it has linear_attention layers"),
    "llama4": ("llama4_text", {}, "Llama4ForCausalLM cannot run here: it has chunked_attention layers"),
    "clip": ("clip_text_model", {}, "clip_text_model cannot run here: transformers knows no text-generating model"),
}


@pytest.mark.parametrize("which", REFUSED_BY_CONFIG)
def test_refused_before_weights_are_read(which: str) -> None:
    model_type, options, sentence = REFUSED_BY_CONFIG[which]
    config = AutoConfig.for_model(model_type, **options)
    with pytest.raises(UnsupportedFeatureError, match=sentence) as refusal:
        check_architecture(config)
    assert str(refusal.value).endswith(
        "Load a decoder-only text model such as Llama, Qwen, Gemma, Mistral, Phi, SmolLM or GPT-2."
    )
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model_type", ["bloom", "mamba"])
def test_refused_at_load(model_type: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build(model_type, n_layer=2, n_head=4), tmp_path / model_type)
    with pytest.raises(UnsupportedFeatureError, match=f"{model_type.title()}ForCausalLM cannot run here"):
        EngineRun(folder)


def prove(model: PreTrainedModel, proof_block: int = 4) -> Probe:
    """The proof as a load runs it."""
    model.set_attn_implementation(ATTENTION)
    with torch.inference_mode():
        probe = Probe(TransformersModel(model), model.config, CPU)
        layers = probe.inspect()
        blocks = 1 + -(-8 // proof_block)
        store = PagedKVStore(layers, num_blocks=blocks, block_size=proof_block, dtype=torch.float32, device=CPU)
        probe.verify(store)
    return probe


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_families_are_proved_and_measured(family: str) -> None:
    model_type, options = tiny_models.FAMILIES[family]
    model = tiny_models.build(model_type, **options)
    layers = list(prove(model).layers.values())
    assert [layer.index for layer in layers] == list(range(model.config.num_hidden_layers))
    assert sum(layer.row_size for layer in layers) == cache_row_estimate(model.config)


def test_what_the_probe_reads_of_gemma_2() -> None:
    model_type, options = tiny_models.FAMILIES["gemma2"]
    layers = list(prove(tiny_models.build(model_type, **options)).layers.values())
    assert [layer.window for layer in layers] == [20, None, 20, None]
    assert {layer.softcap for layer in layers} == {50.0}
    assert {layer.scaling for layer in layers} == {24**-0.5}


def test_what_the_probe_reads_of_latent_attention() -> None:
    model_type, options = tiny_models.FAMILIES["deepseek-v3-mla"]
    layer = next(iter(prove(tiny_models.build(model_type, **options)).layers.values()))
    assert (layer.num_kv_heads, layer.key_size, layer.value_size) == (4, 24, 12)


@pytest.mark.parametrize("window", [100, 4096])
def test_windows_longer_than_the_proof_are_seen_too(window: int) -> None:
    layers = prove(tiny_models.build("mistral", sliding_window=window)).layers.values()
    assert {layer.window for layer in layers} == {window}


def refusal_of(model: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedFeatureError) as refusal:
        prove(model)
    assert type(model).__name__ in str(refusal.value)
    return str(refusal.value)


def test_an_attention_that_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLOOM ignores the registered attention without an error, whatever it declares."""
    monkeypatch.setattr(BloomForCausalLM, "_supports_attention_backend", True)
    model = tiny_models.build("bloom", n_layer=2, n_head=4)
    check_architecture(model.config)
    assert "0 of its 4 layers called the attention" in refusal_of(model)


def test_an_attention_that_works_but_is_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """StableLM drops keyword arguments; the context does not travel in them, so it could run."""
    monkeypatch.setattr(StableLmForCausalLM, "_supports_attention_backend", True)
    model = tiny_models.build("stablelm")
    check_architecture(model.config)
    assert len(prove(model).layers) == 4


def test_attention_called_twice() -> None:
    assert "a layer attends more than once" in refusal_of(tiny_models.build("diffllama"))


def test_a_mask_of_the_architectures_own() -> None:
    assert "neither causal nor a sliding window" in refusal_of(tiny_models.build("doge"))


def test_a_model_that_looks_ahead() -> None:
    model = tiny_models.build("gemma3_text", head_dim=16, use_bidirectional_attention=True, sliding_window=20)
    assert "its attention looks ahead" in refusal_of(model)


def test_an_argument_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention,
        "forward",
        lambda self, *args, **kwargs: original(self, *args, **kwargs, position_bias=torch.ones(1)),
    )
    assert "its attention takes position_bias, which is not built" in refusal_of(tiny_models.build("llama"))


def test_scores_that_only_its_own_attention_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that keeps its soft cap to itself gives other logits than its own attention does."""
    original = Gemma2Attention.forward

    def forward(self: Gemma2Attention, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation != "eager":
            self.attn_logit_softcapping = None
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Gemma2Attention, "forward", forward)
    model = tiny_models.build("gemma2", head_dim=16, attn_logit_softcapping=1.0)
    assert "does more than the arguments that it passes on" in refusal_of(model)


def test_positions_that_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that counts positions by itself is right in one piece and wrong in chunks."""
    original = LlamaModel.forward
    monkeypatch.setattr(
        LlamaModel, "forward", lambda self, *args, **kwargs: original(self, *args, **(kwargs | {"position_ids": None}))
    )
    assert "in chunks it does not give what it gives in one piece" in refusal_of(tiny_models.build("llama"))


def test_a_forward_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any, **kwargs: Any) -> None:
        raise TypeError("no cache, no forward")

    monkeypatch.setattr(LlamaModel, "forward", forward)
    assert "a forward of its own raises TypeError: no cache, no forward" in refusal_of(tiny_models.build("llama"))


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **options}


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 4096),
        ({"rope_parameters": rope("linear", factor=4.0)}, 4096),
        ({"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=1024)}, 4096),
        ({"rope_parameters": rope("dynamic", factor=4.0, original_max_position_embeddings=1024)}, 1024),
        (
            {
                "rope_parameters": rope(
                    "longrope",
                    factor=4.0,
                    original_max_position_embeddings=1024,
                    short_factor=[1.0] * 4,
                    long_factor=[2.0] * 4,
                )
            },
            1024,
        ),
    ],
)
def test_context_ends_where_positions_would_depend_on_neighbours(options: dict[str, Any], limit: int) -> None:
    config = AutoConfig.for_model(
        "llama", max_position_embeddings=4096, hidden_size=32, num_attention_heads=4, **options
    )
    found, note = context_limit(config)
    assert found == limit
    assert (note is not None) == (limit < 4096)
