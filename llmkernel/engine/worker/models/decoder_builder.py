"""build_decoder: a FusedDecoder from a DecoderConfig and a Checkpoint, whatever that reads from."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from llmkernel.engine.worker.linear.linear import Linear, PlainLinear
from llmkernel.engine.worker.linear.scheme import DenseScheme, WeightScheme
from llmkernel.engine.worker.models.checkpoint import Checkpoint
from llmkernel.engine.worker.models.decoder_config import DecoderConfig
from llmkernel.engine.worker.models.fused_decoder import DecoderLayer, FusedDecoder
from llmkernel.engine.worker.models.heads import HeadNorms, Heads
from llmkernel.engine.worker.models.operations import Operations, RMSNorm, TorchOperations
from llmkernel.engine.worker.models.rotary import Rotary, interleaved
from llmkernel.errors import EngineStartupError

__all__ = ["BuiltDecoder", "build_decoder"]


@dataclasses.dataclass(frozen=True)
class BuiltDecoder:
    """weights_bytes: memory that the weights take, views of files not counted. kernels: kind of Linear -> its bytes."""

    model: FusedDecoder
    weights_bytes: int
    num_parameters: int
    kernels: dict[str, int]


def build_decoder(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    scheme: WeightScheme | None = None,
    operations: Operations | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BuiltDecoder:
    """Read, join, reorder, pack. progress: (layers done, layers). What is missing or misshapen raises."""
    build = _Build(config, checkpoint, dtype, device, scheme or DenseScheme())
    operations = operations or TorchOperations()
    build.check_names()
    layers = []
    for index in range(config.num_layers):
        layers.append(build.layer(index))
        progress(index + 1, config.num_layers)
    return build.finish(layers, operations)


class _Build:
    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        scheme: WeightScheme,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._scheme = scheme
        self._kernels: dict[str, int] = {}
        self._other_bytes = 0
        self._shapes = _shapes(config, "lm_head.weight" in checkpoint)
        self._specs = config.layers
        self._rotary = Rotary(config.rotary, device)
        in_head = interleaved(config.head_dim, config.rotary.size)
        turned = torch.arange(config.num_heads + config.num_kv_heads)[:, None] * config.head_dim + in_head
        unturned = torch.arange(turned.numel(), turned.numel() + config.num_kv_heads * config.head_dim)
        self._in_head = in_head
        self._qkv_order = torch.cat((turned.flatten(), unturned))

    def check_names(self) -> None:
        """Every tensor is there and has its shape, before any is read."""
        source = self._checkpoint.source
        missing = [name for name in self._shapes if name not in self._checkpoint]
        if missing:
            raise EngineStartupError(
                f"Cannot load {source}: its weights lack {len(missing)} tensors (the first is {missing[0]}); "
                "config.json and weights do not belong together: get both again."
            )
        if any(self._checkpoint.shape(name) != shape for name, shape in self._shapes.items()):
            raise EngineStartupError(
                f"Cannot load {source}: its weights do not have the shapes that config.json says; get both again."
            )

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{part}_proj" for part in (("qkv",) if config.joined else "qkv")]
        gate_up = [f"{prefix}.mlp.{part}_proj" for part in (("gate_up",) if config.joined else ("gate", "up"))]
        norms = self._head_norms(f"{prefix}.self_attn") if config.head_norms else None
        return DecoderLayer(
            heads=Heads(self._specs[index], self._rotary, norms),
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._linear(qkv, bias=config.qkv_bias, order=self._qkv_order),
            out=self._linear([f"{prefix}.self_attn.o_proj"], bias=config.out_bias),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self._linear(gate_up, bias=config.mlp_bias),
            down=self._linear([f"{prefix}.mlp.down_proj"], bias=config.mlp_bias),
        )

    def finish(self, layers: list[DecoderLayer], operations: Operations) -> BuiltDecoder:
        config, checkpoint = self._config, self._checkpoint
        own_head = "lm_head.weight" in checkpoint
        name = "lm_head.weight" if own_head else "model.embed_tokens.weight"
        head = self._count(self._scheme.head(name, lambda: self._tensor(name)))
        if not own_head and isinstance(head, PlainLinear):
            embedding = head.weight
        elif self._device.type == "cpu":
            embedding = checkpoint.mapped("model.embed_tokens.weight")
        else:
            embedding = self._tensor("model.embed_tokens.weight")
            self._other_bytes += embedding.nbytes
        model = FusedDecoder(
            embedding,
            layers,
            self._norm("model.norm", scale=1 / config.logits_scaling),
            head,
            self._rotary,
            operations,
            dtype=self._dtype,
            vocab_size=checkpoint.shape(name)[0],
            embedding_multiplier=config.embedding_multiplier,
            residual_multiplier=config.residual_multiplier,
        )
        parameters = sum(torch.Size(shape).numel() for shape in self._shapes.values())
        return BuiltDecoder(model, sum(self._kernels.values()) + self._other_bytes, parameters, dict(self._kernels))

    def _linear(self, names: Sequence[str], *, bias: bool, order: torch.Tensor | None = None) -> Linear:
        weights = [f"{name}.weight" for name in names]
        offset = self._joined([f"{name}.bias" for name in names], order) if bias else None
        return self._count(self._scheme.linear(weights, order, lambda: self._joined(weights, order), offset))

    def _count(self, linear: Linear) -> Linear:
        self._kernels[linear.kind] = self._kernels.get(linear.kind, 0) + linear.nbytes
        return linear

    def _joined(self, names: Sequence[str], order: torch.Tensor | None) -> torch.Tensor:
        parts = [self._checkpoint.read(name).to(self._dtype) for name in names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (whole if order is None else whole.index_select(0, order.to(whole.device))).to(self._device)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.read(name).to(self._device, self._dtype)

    def _norm(self, name: str, scale: float = 1.0) -> RMSNorm:
        weight = self._tensor(f"{name}.weight").float()
        self._other_bytes += weight.nbytes
        return RMSNorm(weight * scale, self._config.eps, self._dtype)

    def _head_norms(self, prefix: str) -> HeadNorms:
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        query, key = (
            self._tensor(f"{prefix}.{name}_norm.weight").float()[self._in_head.to(self._device)] for name in "qk"
        )
        weight = torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1)))
        self._other_bytes += weight.nbytes
        return HeadNorms(weight, self._config.eps)


def _shapes(config: DecoderConfig, has_head: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor that is needed, by transformers' names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    if config.joined:
        parts = {
            "self_attn.qkv_proj": (queries + 2 * keys, hidden, config.qkv_bias),
            "self_attn.o_proj": parts["self_attn.o_proj"],
            "mlp.gate_up_proj": (2 * inner, hidden, config.mlp_bias),
            "mlp.down_proj": parts["mlp.down_proj"],
        }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if has_head or not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for name, (rows, columns, biased) in parts.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.head_norms:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
