"""From logits to tokens: one function per step, joined by `Sampler`.

A row goes through: logit_bias -> penalties -> hard masks (allowed_token_ids, bad_words, min_tokens) -> argmax if greedy,
else temperature -> min_p -> top_k -> top_p -> a draw by inverse CDF. Logprobs are of the raw logits: temperature,
penalties and masks do not show in them. What is drawn depends on the row, the seed and the position alone.
"""

from llmkernel.engine.worker.sampler.sampler import Sampler, SamplerOutput

__all__ = ["Sampler", "SamplerOutput"]
