"""Tiny random models of the families that GGUF files hold, and their files, written as llama.cpp's converter does."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

ALPHABET = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
BYTE_LEVEL = [*ALPHABET, "Ġt", "he", "Ġthe", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he"]
SENTENCEPIECE = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *"▁abcdefghijklmnopqrstuvwxyz.,!",
    *("th", "he", "▁t", "the", "▁the", "▁▁", "<end_of_turn>"),
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A family: its configuration, its name in GGUF files, and the metadata beyond what all have."""

    architecture: str
    config: PretrainedConfig
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    sentencepiece: bool = False

    @property
    def gemma(self) -> bool:
        return self.architecture.startswith("gemma")

    @property
    def sandwich(self) -> bool:
        return self.architecture in ("gemma2", "gemma3")


def families() -> dict[str, Tiny]:
    byte, piece = {"vocab_size": len(BYTE_LEVEL)}, {"vocab_size": len(SENTENCEPIECE), "head_dim": 32}
    return {
        "llama": Tiny("llama", LlamaConfig(**_SHAPE | byte, tie_word_embeddings=False)),
        "llama-2": Tiny("llama", LlamaConfig(**_SHAPE | piece), {"rope.dimension_count": 32}, sentencepiece=True),
        "llama-biased": Tiny("llama", LlamaConfig(**_SHAPE | byte, attention_bias=True, tie_word_embeddings=True)),
        "llama-3-rope": Tiny("llama", LlamaConfig(**_SHAPE | byte | {"rope_parameters": _LLAMA3_ROPE, "head_dim": 16})),
        "qwen2": Tiny("qwen2", Qwen2Config(**_SHAPE | byte, tie_word_embeddings=True)),
        "qwen3": Tiny("qwen3", Qwen3Config(**_SHAPE | byte, head_dim=32, tie_word_embeddings=False)),
        "gemma": Tiny("gemma", GemmaConfig(**_SHAPE | piece), sentencepiece=True),
        "gemma2": Tiny(
            "gemma2",
            Gemma2Config(**_SHAPE | piece, sliding_window=8, query_pre_attn_scalar=32),
            {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 8},
            sentencepiece=True,
        ),
        "gemma3": Tiny(
            "gemma3",
            Gemma3TextConfig(
                **_SHAPE | piece | {"rope_parameters": _GEMMA3_ROPE, "num_hidden_layers": 7},
                sliding_window=8,
                query_pre_attn_scalar=32,
            ),
            {"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            sentencepiece=True,
        ),
    }


def random_model(tiny: Tiny) -> PreTrainedModel:
    """The model with weights that matter: norms and biases too are random."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny.config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() == 1 else parameter.normal_(0.0, 0.15)
    return model


def write_gguf(
    path: Path, tiny: Tiny, model: PreTrainedModel, quantize: Type | None = None, head: Type | None = None
) -> None:
    """The model as a GGUF file; matrices as blocks of `quantize`, float32 without. head: of the output layer."""
    writer = gguf.GGUFWriter(path, tiny.architecture)
    add_metadata(writer, tiny)
    add_vocabulary(writer, tiny)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tiny.config.tie_word_embeddings:
            continue
        values = _as_llama_cpp(name, tensor.numpy(), tiny)
        source = gguf_name(name, tiny)
        kind = head if head is not None and name == "lm_head.weight" else quantize
        if kind is None or values.ndim == 1:
            writer.add_tensor(source, values)
        else:
            writer.add_tensor(source, gguf.quants.quantize(values, kind), raw_dtype=kind)
    if "rope_type" in tiny.config.rope_parameters and tiny.config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(tiny.config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str, tiny: Tiny) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, inner = stem.split(".", 3)
    if inner == "post_attention_layernorm":
        return f"blk.{index}.{'post_attention_norm' if tiny.sandwich else 'ffn_norm'}.{kind}"
    return f"blk.{index}.{_NAMES[inner]}.{kind}"


def add_metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    config, prefix = tiny.config, tiny.architecture
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in tiny.extra.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{prefix}.{key}", value)


def add_vocabulary(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    if tiny.sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(SENTENCEPIECE)
        writer.add_token_scores([-float(index) for index in range(len(SENTENCEPIECE))])
        kinds = [3, 3, 3, 2, *[6] * 256, *[1] * (len(SENTENCEPIECE) - 261), 3]
        ids = {"bos": 2, "eos": 1, "pad": 0, "unk": 3}
        writer.add_eot_token_id(len(SENTENCEPIECE) - 1)
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2" if tiny.architecture.startswith("qwen") else "llama-bpe")
        writer.add_token_list(BYTE_LEVEL)
        writer.add_token_merges(MERGES)
        kinds = [1] * (len(BYTE_LEVEL) - 3) + [3] * 3
        ids = {name: len(BYTE_LEVEL) + at for name, at in {"bos": -3, "eos": -1, "pad": -3}.items()}
        writer.add_add_bos_token(tiny.architecture == "llama")
    writer.add_token_types(kinds)
    writer.add_bos_token_id(ids["bos"])
    writer.add_eos_token_id(ids["eos"])
    writer.add_pad_token_id(ids["pad"])
    writer.add_chat_template(TEMPLATE)


def _as_llama_cpp(name: str, values: np.ndarray, tiny: Tiny) -> np.ndarray:
    if tiny.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = tiny.config.num_attention_heads if ".q_proj." in name else tiny.config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values + 1 if tiny.gemma and name.endswith("norm.weight") else values


def _llama3_factors(config: PretrainedConfig) -> np.ndarray:
    """As llama.cpp's converter writes them for Llama 3.1 and later."""
    rope = config.rope_parameters
    size, factors = config.head_dim, []
    for index in range(0, size, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / size)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            turns = rope["original_max_position_embeddings"] / wavelength
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
