"""Tiny models with random weights, one per family, saved as transformers saves a model. Weights are large enough for
attention to matter: with the usual initialisation a wrong mask would hardly show in the logits."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 96
MAX_POSITION = 256

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": MAX_POSITION, "num_key_value_heads": None}
_MIXED_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}

_YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_GRANITE = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 4.0,
}

FUSED_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-mqa": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "granite": ("granite", _GRANITE),
    "phi3-partial": ("phi3", {"rope_parameters": _PARTIAL, "sliding_window": 40}),
}
"""What the fused decoder runs: each of its features once."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-mqa": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, **_MIXED_WINDOWS}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, **_MIXED_WINDOWS}),
    "gpt2": ("gpt2", _GPT2),
    "phi": ("phi", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt-oss-sinks": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek-v3-mla": (
        "deepseek_v3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def build(model_type: str, **options: Any) -> PreTrainedModel:
    """A model of transformers' `model_type` with random weights, the same ones every time."""
    settings = {name: value for name, value in (_COMMON | options).items() if value is not None or "token" in name}
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter.data)
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """The model with a tokenizer of VOCAB_SIZE words, as a folder that can be loaded."""
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def save_family(family: str, folder: Path) -> Path:
    model_type, options = (FAMILIES | FUSED_FAMILIES)[family]
    return save(build(model_type, **options), folder)


def save_fused_family(family: str, folder: Path) -> Path:
    """As save_family, with biases and norms of all values: a checkpoint's are not all zero or one."""
    model_type, options = FUSED_FAMILIES[family]
    model = build(model_type, **options)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, mean=float(name.endswith("norm.weight")), std=0.3)
    return save(model, folder)
