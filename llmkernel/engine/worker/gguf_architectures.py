"""What a GGUF file says about its model, in transformers' words: the configuration, and where each tensor goes.

Families: llama (Llama, Mistral, SmolLM), qwen2, qwen3, gemma, gemma2, gemma3 (text). All others are refused by name.
Written here because transformers' own reader leaves out rope scaling, soft caps and query scales, and needs accelerate.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from llmkernel.engine.worker.gguf_reader import GGUFFile
from llmkernel.errors import EngineStartupError

__all__ = ["ARCHITECTURES", "Placement", "describe"]

Decode = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A tensor of the checkpoint: the GGUF tensor it comes from, its shape, what undoes llama.cpp's conversion."""

    source: str
    shape: tuple[int, ...]
    decode: Decode | None = None


@dataclasses.dataclass(frozen=True)
class _Family:
    model_type: str
    model_class: str
    extra: Callable[["_Metadata", dict[str, Any]], dict[str, Any]]
    gemma: bool = False  # norms are stored as 1 + w, embeddings are tied
    sandwich: bool = False  # norms after attention and MLP as well
    head_norms: bool = False
    interleaved: bool = False  # llama.cpp pairs neighbours in the rotary embedding, transformers pairs halves


class _Metadata:
    """The metadata under the architecture's prefix; a missing key is refused by name."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture

    def __call__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise _refuse(
                self.file, f"its header lacks {self.prefix}.{key}; get the file again, or another conversion."
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}", default)

    def count(self, key: str) -> int:
        """A positive integer; a list is a model whose layers differ, which transformers' class does not have."""
        value = self(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refuse(
                self.file, f"{self.prefix}.{key} is {str(value)[:60]}, not one positive number; use safetensors."
            )
        return value


def describe(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Placement]]:
    """(config.json of the model, checkpoint name -> Placement). A tensor too many or too few is refused by name."""
    parts = file.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise _refuse(file, f"it is one of {parts} parts; merge them (llama-gguf-split --merge), or use safetensors.")
    architecture = file.metadata.get("general.architecture")
    family = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise _refuse(
            file, f"GGUF architecture {architecture!r} is not supported (known: {known}); use its safetensors."
        )
    get = _Metadata(file, str(architecture))
    if get.get("expert_count", 0):
        raise _refuse(file, f"mixtures of experts ({architecture}) are not supported from GGUF; use its safetensors.")
    config = _config(family, get)
    placements = _placements(family, get, config)
    used = {placement.source for placement in placements.values()} | {"rope_freqs.weight"}
    unknown = [name for name in file.tensors if name not in used]
    if unknown:
        raise _refuse(file, f"tensor {unknown[0]!r} is not known for {architecture}; use the model's safetensors.")
    return config, placements


def _config(family: _Family, get: _Metadata) -> dict[str, Any]:
    heads, hidden = get.count("attention.head_count"), get.count("embedding_length")
    head_dim = get.get("attention.key_length") or get.get("rope.dimension_count") or hidden // heads
    if get.get("attention.value_length", head_dim) != head_dim or get.get("rope.dimension_count", head_dim) != head_dim:
        raise _refuse(get.file, "keys, values and rotary dimensions of different sizes; use the model's safetensors.")
    embedding = get.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _refuse(get.file, "it has no token_embd.weight: it is not a language model; give the model's own file.")
    config: dict[str, Any] = {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": get.count("feed_forward_length"),
        "num_hidden_layers": get.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.count("attention.head_count_kv") if get.get("attention.head_count_kv") else heads,
        "head_dim": head_dim,
        "max_position_embeddings": get.count("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(get),
        "tie_word_embeddings": "output.weight" not in get.file.tensors,
        "dtype": "float32",
    }
    for token in ("bos", "eos"):
        config[f"{token}_token_id"] = get.file.metadata.get(f"tokenizer.ggml.{token}_token_id")
    config["pad_token_id"] = get.file.metadata.get("tokenizer.ggml.padding_token_id")
    return config | family.extra(get, config)


def _rope(get: _Metadata) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get.get("rope.freq_base", 10000.0))}
    kind = get.get("rope.scaling.type", "none")
    factor = get.get("rope.scaling.factor", get.get("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in get.file.tensors:
        return rope | _llama3_scaling(get, rope["rope_theta"])
    if kind == "none" or factor in (0.0, 1.0):
        return rope
    rope |= {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = get.count("rope.scaling.original_context_length")
    elif kind != "linear":
        raise _refuse(
            get.file, f"rope scaling of type {kind!r} is not supported from GGUF; use the model's safetensors."
        )
    return rope


def _llama3_scaling(get: _Metadata, theta: float) -> dict[str, Any]:
    """Llama 3's scaling: the file holds a factor per frequency; the numbers that made them are found and proved."""
    given = get.file.read("rope_freqs.weight").astype(np.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": float(given.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": get.get("rope.scaling.original_context_length", 8192),
    }
    size = given.size * 2
    wavelength = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(given, expected, rtol=1e-4):
        raise _refuse(get.file, "its rope_freqs.weight is not Llama 3's scaling; use the model's safetensors.")
    return scaling


def _placements(family: _Family, get: _Metadata, config: dict[str, Any]) -> dict[str, Placement]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    norm: Decode | None = _minus_one if family.gemma else None
    swap = _rotary_halves if family.interleaved else (lambda _: None)
    layer = [
        ("attn_norm", "input_layernorm", (hidden,), norm),
        ("attn_q", "self_attn.q_proj", (heads * size, hidden), swap(heads)),
        ("attn_k", "self_attn.k_proj", (kv_heads * size, hidden), swap(kv_heads)),
        ("attn_v", "self_attn.v_proj", (kv_heads * size, hidden), None),
        ("attn_output", "self_attn.o_proj", (hidden, heads * size), None),
        ("ffn_norm", "pre_feedforward_layernorm" if family.sandwich else "post_attention_layernorm", (hidden,), norm),
        ("ffn_gate", "mlp.gate_proj", (inner, hidden), None),
        ("ffn_up", "mlp.up_proj", (inner, hidden), None),
        ("ffn_down", "mlp.down_proj", (hidden, inner), None),
    ]
    if family.sandwich:
        layer.append(("post_attention_norm", "post_attention_layernorm", (hidden,), norm))
        layer.append(("post_ffw_norm", "post_feedforward_layernorm", (hidden,), norm))
    if family.head_norms:
        layer.append(("attn_q_norm", "self_attn.q_norm", (size,), norm))
        layer.append(("attn_k_norm", "self_attn.k_norm", (size,), norm))
    placed = {
        "model.embed_tokens.weight": Placement("token_embd.weight", (config["vocab_size"], hidden)),
        "model.norm.weight": Placement("output_norm.weight", (hidden,), norm),
    }
    if not config["tie_word_embeddings"]:
        placed["lm_head.weight"] = Placement("output.weight", (config["vocab_size"], hidden))
    for index in range(config["num_hidden_layers"]):
        for source, target, shape, decode in layer:
            placed[f"model.layers.{index}.{target}.weight"] = Placement(f"blk.{index}.{source}.weight", shape, decode)
            if f"blk.{index}.{source}.bias" in get.file.tensors:
                bias = Placement(f"blk.{index}.{source}.bias", shape[:1], decode)
                placed[f"model.layers.{index}.{target}.bias"] = bias
    for placement in placed.values():
        found = get.file.tensors.get(placement.source)
        if found is None or found.shape != placement.shape:
            what = "lacks tensor" if found is None else f"has the shape {found.shape} at tensor"
            raise _refuse(get.file, f"it {what} {placement.source!r} of shape {placement.shape}; get the file again.")
    return placed


def _minus_one(weights: np.ndarray) -> np.ndarray:
    return weights - np.float32(1.0)


def _rotary_halves(heads: int) -> Decode:
    """Rows of each head from neighbours (x0 y0 x1 y1 ...) back to halves (x0 x1 ... y0 y1 ...)."""

    def decode(weights: np.ndarray) -> np.ndarray:
        paired = weights.reshape(heads, -1, 2, *weights.shape[1:])
        return paired.swapaxes(1, 2).reshape(weights.shape)

    return decode


def _llama(get: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in get.file.tensors
    return {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": "blk.0.ffn_up.bias" in get.file.tensors}


def _qwen2(get: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(get: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}


def _gemma(get: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _query_scale(config: dict[str, Any], layers_of_27b: int) -> int:
    """Gemma's 27B models scale queries by hidden / heads, the others by head_dim; the file does not say it."""
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return per_head if config["num_hidden_layers"] == layers_of_27b else config["head_dim"]


def _gemma2(get: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=46),
        "sliding_window": get.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": get.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get.get("final_logit_softcapping", 30.0),
    }


def _gemma3(get: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": float(get.get("rope.freq_base_swa", 10000.0))}
    window = get.get("attention.sliding_window", 1024)
    pattern = get.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        raise _refuse(
            get.file, "a sliding-window pattern given per layer is not supported; use the model's safetensors."
        )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=62),
        "sliding_window": window,
        "final_logit_softcapping": get.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "layer_types": [
            "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
            for index in range(config["num_hidden_layers"])
        ],
    }


ARCHITECTURES: dict[str, _Family] = {
    "llama": _Family("llama", "LlamaForCausalLM", _llama, interleaved=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", _qwen3, head_norms=True),
    "gemma": _Family("gemma", "GemmaForCausalLM", _gemma, gemma=True),
    "gemma2": _Family("gemma2", "Gemma2ForCausalLM", _gemma2, gemma=True, sandwich=True),
    "gemma3": _Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, gemma=True, sandwich=True, head_norms=True),
}
"""GGUF's general.architecture -> family."""


def _refuse(file: GGUFFile, reason: str) -> EngineStartupError:
    return EngineStartupError(f"Cannot load {file.path}: {reason}")
