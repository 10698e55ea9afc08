"""From logits to tokens: one function per step, joined by `Sampler`.

A row goes through: logit_bias -> penalties -> hard masks (allowed_token_ids, bad_words, min_tokens) -> the argmax if
it is greedy, else temperature -> min_p -> top_k -> top_p -> a draw by inverse CDF. Logprobs are of the raw logits:
penalties, masks and temperature do not show in them. What is drawn depends on the row, its seed and its position alone.
"""

from llmkernel.engine.worker.sampler.sampler import Sampler, SamplerOutput

__all__ = ["Sampler", "SamplerOutput"]
