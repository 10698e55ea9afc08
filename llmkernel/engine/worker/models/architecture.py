"""Which architectures are accepted, as far as the configuration tells; the rest is proved on the loaded model (probe).

Some architectures of transformers ignore a registered attention without an error, so nothing is accepted on trust.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmkernel.errors import UnsupportedFeatureError

__all__ = ["architecture_name", "cache_row_estimate", "check_architecture", "context_limit", "refuse"]

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_OTHER_MODALITIES = ("vision_config", "audio_config", "speech_config")
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_FALLBACK_LIMIT = 2048


def architecture_name(config: PreTrainedConfig) -> str:
    """The class that config.json names, else the one of its model type."""
    if config.architectures:
        return config.architectures[0]
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)


def refuse(config: PreTrainedConfig, reason: str) -> UnsupportedFeatureError:
    """The error for an architecture that cannot run here."""
    return UnsupportedFeatureError(
        f"{architecture_name(config)} cannot run here: {reason}. "
        "Load a decoder-only text model such as Llama, Qwen, Gemma, Mistral, Phi, SmolLM or GPT-2.",
        parameter="model",
        value=architecture_name(config),
    )


def check_architecture(config: PreTrainedConfig) -> None:
    """Refuse by name, before any weight is read, what the configuration alone rules out."""
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(config, "it has an encoder and a decoder")
    for part in sorted({*config.sub_configs, *_OTHER_MODALITIES} - {"text_config"}):
        if getattr(config, part, None) is not None:
            raise refuse(config, f"it is more than a text model ({part} in its configuration)")
    text = config.get_text_config()
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if other:
        raise refuse(config, f"it has {', '.join(other)} layers, and only full and sliding-window attention is built")
    if getattr(config, "auto_map", None) and "AutoModelForCausalLM" in config.auto_map:
        return  # its class comes with the checkpoint: the loader asks for trust_remote_code, the probe proves it
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refuse(config, "transformers knows no text-generating model of this type")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class._supports_attention_backend:
        raise refuse(config, "its attention cannot be replaced by one that reads a paged cache")


def context_limit(config: PreTrainedConfig) -> tuple[int, str | None]:
    """Tokens of context that the model knows, and a note where it is less than the model claims.

    Dynamic and long RoPE change all frequencies once *any* sequence of a batch is long, so each would depend on its
    neighbours: such models run within the length up to which nothing changes.
    """
    text = config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or _FALLBACK_LIMIT)
    rope = _rope_settings(text)
    lengths = [
        int(settings.get("original_max_position_embeddings") or limit)
        for settings in rope
        if settings.get("rope_type", settings.get("type")) in _BATCH_DEPENDENT_ROPE
    ]
    if lengths and min(lengths) < limit:
        return min(lengths), (
            f"Context is limited to {min(lengths)} of {limit} tokens: beyond, this RoPE depends on the whole batch."
        )
    return limit, None


def cache_row_estimate(config: PreTrainedConfig) -> int:
    """Numbers that one token keeps in the cache, all layers together, by the configuration; the probe measures them."""
    text = config.get_text_config()
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    return sum(_row_estimate(layer) for layer in layers)


def _row_estimate(layer: PreTrainedConfig) -> int:
    heads = layer.num_attention_heads
    kv_heads = 1 if getattr(layer, "multi_query", False) else getattr(layer, "num_key_value_heads", None) or heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    split_key = (getattr(layer, "qk_nope_head_dim", None) or 0) + (getattr(layer, "qk_rope_head_dim", None) or 0)
    value_size = getattr(layer, "v_head_dim", None) or size
    return int(kv_heads * ((split_key or size) + value_size))


def _rope_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters, one dict per layer type where they differ."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
