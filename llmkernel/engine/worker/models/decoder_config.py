"""DecoderConfig: the family "RMSNorm, grouped-query attention with RoPE, gated MLP", read from config.json alone.

Llama (and SmolLM), Mistral, Qwen2, Qwen3, Granite, Phi-3. What the fused decoder does not do exactly as transformers'
class of that model_type does it is NotFused, with the reason; such models run through transformers.
"""

import dataclasses
from typing import Any

from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.models.rotary import SCALINGS, RotaryConfig

__all__ = ["MODEL_TYPES", "DecoderConfig", "NotFused", "read_decoder_config"]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "granite", "phi3")

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_SCALING_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_DEFAULT_THETA = 10000.0


class NotFused(Exception):
    """This model is not for the fused decoder. str: why, as the end of a sentence."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the fused decoder is built from. windows: per layer, tokens that a query sees, None = all before it.

    joined: q, k, v and gate, up are stored as one tensor each (Phi-3). out_bias: of the attention's output.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    eps: float
    rotary: RotaryConfig
    tied: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    joined: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_scaling: float = 1.0
    logits_scaling: float = 1.0

    @property
    def layers(self) -> list[LayerSpec]:
        """The attention of each layer."""
        return [
            LayerSpec(
                index=index,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                key_size=self.head_dim,
                value_size=self.head_dim,
                scaling=self.attention_scaling,
                window=window,
            )
            for index, window in enumerate(self.windows)
        ]


def read_decoder_config(content: dict[str, Any]) -> DecoderConfig:
    """From the object in config.json, of any age of transformers. NotFused where it is another kind of model."""
    kind = content.get("model_type")
    if kind not in MODEL_TYPES:
        raise NotFused(f"the fused decoder is built for {', '.join(MODEL_TYPES)}, not for {kind}")
    lacking = [name for name in _NEEDED if not isinstance(content.get(name), int | float)]
    if kind == "mistral":  # its class has other defaults than "none" for these
        lacking += [name for name in ("num_key_value_heads", "sliding_window") if name not in content]
    if kind == "qwen3":
        lacking += [name for name in ("head_dim", "num_key_value_heads") if name not in content]
    if lacking:
        raise NotFused(f"its config.json leaves out {', '.join(lacking)}")
    if content.get("hidden_act", "silu") not in ("silu", "swish"):
        raise NotFused(f"its activation is {content['hidden_act']}")
    heads = int(content["num_attention_heads"])
    kv_heads = int(content.get("num_key_value_heads") or heads)
    head_dim = int(content.get("head_dim") or content["hidden_size"] // heads)
    if heads % kv_heads:
        raise NotFused(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    biased = bool(content.get("attention_bias")) and kind in ("llama", "qwen3", "granite")
    granite = kind == "granite"
    return DecoderConfig(
        architecture=(content.get("architectures") or [kind])[0],
        model_type=kind,
        vocab_size=int(content["vocab_size"]),
        hidden_size=int(content["hidden_size"]),
        intermediate_size=int(content["intermediate_size"]),
        num_layers=int(content["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=int(content["max_position_embeddings"]),
        eps=float(content["rms_norm_eps"]),
        rotary=_rotary(content, kind, head_dim),
        tied=bool(content.get("tie_word_embeddings", False)),
        windows=_windows(content, kind),
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased,
        mlp_bias=bool(content.get("mlp_bias")) and kind in ("llama", "granite"),
        head_norms=kind == "qwen3",
        joined=kind == "phi3",
        embedding_multiplier=float(content.get("embedding_multiplier", 1.0)) if granite else 1.0,
        residual_multiplier=float(content.get("residual_multiplier", 1.0)) if granite else 1.0,
        attention_scaling=float(content.get("attention_multiplier", 1.0)) if granite else head_dim**-0.5,
        logits_scaling=float(content.get("logits_scaling", 1.0)) if granite else 1.0,
    )


def _rotary(content: dict[str, Any], model_type: str, head_dim: int) -> RotaryConfig:
    """rope_theta and rope_scaling of older files, rope_parameters of newer ones."""
    given = dict(content.get("rope_scaling") or content.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise NotFused("its layers have different rotary embeddings")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in SCALINGS:
        raise NotFused(f"its rotary embedding is of type {kind}")
    lacking = [name for name in _SCALING_NEEDS.get(kind, ()) if name not in given]
    if lacking:
        raise NotFused(f"its rotary scaling leaves out {', '.join(lacking)}")
    max_position = int(content["max_position_embeddings"])
    if "original_max_position_embeddings" in content:
        given["original_max_position_embeddings"] = content["original_max_position_embeddings"]
    given.setdefault("original_max_position_embeddings", max_position)
    part = given.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if part != 1.0 and model_type != "phi3":
        raise NotFused(f"transformers' {model_type} does not turn a part of each head")
    theta = given.get("rope_theta") or content.get("rope_theta") or _DEFAULT_THETA
    size = int(head_dim * part)
    if size % 2 or head_dim % 2:
        raise NotFused("the size of its heads is odd")
    return RotaryConfig(size, float(theta), max_position, kind, given)


def _windows(content: dict[str, Any], kind: str) -> tuple[int | None, ...]:
    count, window = int(content["num_hidden_layers"]), content.get("sliding_window")
    if kind in ("mistral", "phi3"):
        return (window,) * count
    if kind not in ("qwen2", "qwen3"):
        return (None,) * count
    if not content.get("use_sliding_window"):
        window = None
    types = content.get("layer_types")
    if types is None:
        first = content.get("max_window_layers", 28)
        return tuple(window if index >= first else None for index in range(count))
    if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
        raise NotFused("its layer_types are not full and sliding attention only")
    if "sliding_attention" in types and window is None:
        raise NotFused("it has sliding layers without a window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
