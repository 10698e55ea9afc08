"""The proof that an architecture runs right with our attention: measured on the loaded model in warm-up, not assumed.

1. A short prompt goes through transformers' own attention: the reference.
2. The same prompt through ours, attending to what it gets (no cache): counts one call per layer, sees shapes,
   arguments and the pattern of each layer's mask, and must give the reference's logits.
3. The same prompt in chunks and single tokens through the paged pool: must give them again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from llmkernel.engine.worker.attention import LayerSpec, attend
from llmkernel.engine.worker.kv_store import KVStore
from llmkernel.engine.worker.models.architecture import refuse
from llmkernel.engine.worker.models.registered_attention import PROBE, MaskPattern, mask_pattern_of
from llmkernel.engine.worker.models.transformers_model import TransformersModel
from llmkernel.engine.worker.paged_attention import PagedAttention, ScheduledTokens
from llmkernel.errors import LLMKernelError

__all__ = ["PROMPT_TOKENS", "Probe"]

PROMPT_TOKENS = 8
_CHUNKS = (4, 2, 1, 1)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative distance of logits: rounding stays far below, attention that went wrong far above."""

_HARMLESS = {
    "cache_position",
    "dropout",
    "position_ids",
    "position_embeddings",
    "s_aux",
    "scaling",
    "sliding_window",  # the mask says it, layer by layer
    "softcap",
    "use_cache",
}


class Probe:
    """Runs the proof for one loaded model. After `inspect`, `layers` says what each attention module is."""

    def __init__(self, model: TransformersModel, config: PreTrainedConfig, device: torch.device) -> None:
        self._model = model
        self._config = config
        ids = torch.arange(PROMPT_TOKENS) * 7919 + 11
        self._prompt = (ids % model.num_embeddings).to(device)
        self._reference = torch.empty(0)
        self.layers: dict[torch.nn.Module, LayerSpec] = {}

    def inspect(self) -> Sequence[LayerSpec]:
        """Steps 1 and 2. Raises UnsupportedFeatureError with the architecture's name."""
        recorder = _Recorder(self._config)
        every_row = torch.arange(PROMPT_TOKENS, device=self._prompt.device)
        try:
            self._reference = self._model.reference_logits(self._prompt)
            with self._model.attending_with(PROBE):
                logits = self._model.forward(self._prompt, every_row, every_row, recorder)
        except LLMKernelError:
            raise
        except Exception as error:  # architectures fail in their own ways without their cache or masks
            raise refuse(self._config, f"a forward of its own raises {type(error).__name__}: {error}") from error
        expected = self._config.get_text_config().num_hidden_layers
        if len(recorder.layers) != expected:
            raise refuse(
                self._config, f"{len(recorder.layers)} of its {expected} layers called the attention that it was given"
            )
        self._compare(logits, "its attention does more than the arguments that it passes on")
        self.layers = recorder.layers
        return list(self.layers.values())

    def verify(self, store: KVStore) -> None:
        """Step 3, in a store of at least PROMPT_TOKENS tokens beside the null block."""
        blocks = np.arange(1, 1 + -(-PROMPT_TOKENS // store.block_size))
        logits, done = [], 0
        for size in _CHUNKS:
            part = torch.arange(done, done + size, device=self._prompt.device)
            tokens = [ScheduledTokens(size, done, blocks)]
            context = PagedAttention(
                store, self.layers, tokens, dtype=self._reference.dtype, device=self._prompt.device
            )
            rows = torch.arange(size, device=self._prompt.device)
            logits.append(self._model.forward(self._prompt[part], part, rows, context))
            if context.num_calls != len(self.layers):
                raise refuse(self._config, "not every layer attends in every step")
            done += size
        self._compare(torch.cat(logits), "in chunks it does not give what it gives in one piece")

    def _compare(self, logits: torch.Tensor, reason: str) -> None:
        want, got = self._reference.float(), logits.float()
        spread = (want - want.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
        distance = (got - want).norm(dim=-1) / spread
        # one row may jump in 16 bits where a router's choice is a near tie; a wrong attention moves nearly all of them
        worst = distance.max() if logits.dtype == torch.float32 else distance.median()
        if not worst <= _TOLERANCE[logits.dtype]:
            raise refuse(self._config, f"{reason} (logits differ by {worst:.2g})")


class _Recorder:
    """The AttentionContext that looks: attends within the tokens it is given and writes down who asked for what."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self.layers: dict[torch.nn.Module, LayerSpec] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        if module in self.layers:
            raise refuse(self._config, "a layer attends more than once")
        mask = asked.pop("attention_mask", None)
        self._check_arguments(module, asked)
        pattern = mask_pattern_of(mask)
        if not pattern.known:
            raise refuse(self._config, "its mask is neither causal nor a sliding window")
        layer = self._spec(query, key, value, pattern, asked)
        self.layers[module] = layer
        tokens = query.shape[2]
        seen = torch.arange(tokens, device=query.device)
        hidden = seen > seen[:, None]
        if layer.window is not None:
            hidden |= seen <= seen[:, None] - layer.window
        mask = torch.zeros(tokens, tokens, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
        return attend(query, key, value, layer, mask, sinks=asked.get("s_aux"))[0].transpose(0, 1)

    def _check_arguments(self, module: torch.nn.Module, asked: dict[str, Any]) -> None:
        for name, value in asked.items():
            harmless = name in _HARMLESS or name.startswith("output_") or value is None or value is False
            if not harmless and not (name == "is_causal" and value is True):
                raise refuse(self._config, f"its attention takes {name}, which is not built")
        if not getattr(module, "is_causal", True) or asked.get("is_causal") is False:
            raise refuse(self._config, "its attention looks ahead (it is not causal)")

    def _spec(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: MaskPattern, asked: dict[str, Any]
    ) -> LayerSpec:
        scaling = asked.get("scaling")
        return LayerSpec(
            index=len(self.layers),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            scaling=float(key.shape[3] ** -0.5 if scaling is None else scaling),
            window=pattern.window,
            softcap=asked.get("softcap"),
            has_sinks=asked.get("s_aux") is not None,
        )
