"""A transformers model behind the one door that the model runner uses: token ids in, logits of chosen rows out."""

import inspect

import torch
from transformers import PreTrainedModel

from llmkernel.engine.worker.attention import AttentionContext
from llmkernel.engine.worker.models.registered_attention import active

__all__ = ["TransformersModel"]


class TransformersModel:
    """Runs a PreTrainedModel over one flat token axis, without a cache of transformers' own."""

    implementation = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def vocab_size(self) -> int:
        """Ids that the model can emit: rows of its output layer."""
        head = self._model.get_output_embeddings()
        return self.num_embeddings if head is None else head.weight.shape[0]

    @property
    def num_embeddings(self) -> int:
        """Ids that the model can read."""
        return self._model.get_input_embeddings().weight.shape[0]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """token_ids, positions [T]; rows: indices into T -> logits [len(rows), vocab_size]."""
        keep = {"logits_to_keep": rows} if self._selects_rows else {}
        with active(context):
            output = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **keep)
        return output.logits[0] if self._selects_rows else output.logits[0, rows]

    def reference_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab_size] of one sequence by transformers' own attention and masks."""
        with self.attending_with("eager"):
            return self._model(input_ids=token_ids[None], use_cache=False).logits[0]

    def attending_with(self, attn_implementation: str) -> "_AttentionSwitch":
        """Context manager: the model attends with this implementation."""
        return _AttentionSwitch(self._model, attn_implementation)


class _AttentionSwitch:
    def __init__(self, model: PreTrainedModel, attn_implementation: str) -> None:
        self._model = model
        self._wanted = attn_implementation
        self._before = model.config._attn_implementation

    def __enter__(self) -> None:
        self._model.set_attn_implementation(self._wanted)

    def __exit__(self, *exc_info: object) -> None:
        self._model.set_attn_implementation(self._before)
