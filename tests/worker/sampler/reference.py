"""A second sampler, in NumPy float64 and Python integers, written from the description and not from the code."""

import dataclasses

import numpy as np
import torch

from llmkernel.protocol.sampling_params import SamplingParams

MASK = 2**64 - 1


@dataclasses.dataclass
class Case:
    """One row: a request, what it has generated, and what the model says next (float64 of whatever the type holds)."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    eos: int | None
    bad_words: list[list[int]]
    logits: np.ndarray
    grammar: np.ndarray | None = None
    """bool [vocab]: what the grammar allows."""


@dataclasses.dataclass
class Distribution:
    """probabilities: float64 [vocab]; all 0 if nothing is allowed. gap: how near a cut is to falling elsewhere."""

    probabilities: np.ndarray
    gap: float


def splitmix64(key: int) -> int:
    z = (key + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """Output `position` of the stream that starts at the mixed seed."""
    state = (splitmix64(seed) + position * 0x9E3779B97F4A7C15) & MASK
    return (splitmix64(state) >> 11) / 2**53


def adjusted_logits(case: Case) -> np.ndarray:
    """Bias, penalties, hard masks."""
    params, logits = case.params, case.logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*case.prompt, *case.output} if params.repetition_penalty != 1 else ():
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token in set(case.output):
        logits[token] -= params.frequency_penalty * case.output.count(token) + params.presence_penalty
    forbidden = np.zeros(len(logits), bool)
    if params.allowed_token_ids is not None:
        forbidden = ~np.isin(np.arange(len(logits)), params.allowed_token_ids)
    for word in case.bad_words:
        if len(word) <= len(case.output) + 1 and case.output[len(case.output) - len(word) + 1 :] == word[:-1]:
            forbidden[word[-1]] = True
    if case.grammar is not None:
        forbidden |= ~case.grammar
    if len(case.output) < params.min_tokens:
        held = forbidden.copy()
        held[[*(params.stop_token_ids or []), *([] if case.eos is None else [case.eos])]] = True
        if case.grammar is None or np.isfinite(logits[~held]).any():  # else the grammar may end before its time
            forbidden = held
    logits[forbidden] = -np.inf
    return logits


def distribution(case: Case) -> Distribution:
    """What the next token is drawn from; for greedy, all on the first best token."""
    params, logits = case.params, adjusted_logits(case)
    if np.all(np.isneginf(logits)):
        return Distribution(np.zeros(len(logits)), np.inf)
    if params.temperature == 0:
        best = np.zeros(len(logits))
        best[np.argmax(logits)] = 1
        top = np.sort(logits)[-2:]
        return Distribution(best, float(top[-1] - top[0]) or np.inf)
    gaps = [np.inf]
    weights = np.exp((logits - logits.max()) / params.temperature)
    if params.min_p:
        gaps.append(np.abs(weights - params.min_p).min())
        logits = np.where(weights < params.min_p, -np.inf, logits)
    if 0 < params.top_k < len(logits):
        kth = np.sort(logits)[-params.top_k]
        if np.isfinite(kth):
            gaps.append(_nearest(logits, kth))
            logits = np.where(logits < kth, -np.inf, logits)
    probabilities = np.exp((logits - logits.max()) / params.temperature)
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        order = np.lexsort((np.arange(len(logits)), -logits))
        edges = np.cumsum(probabilities[order])
        kept = np.searchsorted(edges, params.top_p) + 1
        gaps += [np.abs(edges - params.top_p).min(), _nearest(logits, logits[order[min(kept, len(order)) - 1]])]
        probabilities[order[kept:]] = 0
        probabilities /= probabilities.sum()
    return Distribution(probabilities, float(min(gaps)))


def draw(found: Distribution, u: float) -> tuple[int, float]:
    """The token of the uniform by inverse CDF in order of ids, and how near the draw is to another one."""
    edges = np.cumsum(found.probabilities)
    return int(np.searchsorted(edges, u * edges[-1], side="right")), min(found.gap, float(np.abs(edges - u).min()))


def as_float64(logits: torch.Tensor) -> np.ndarray:
    return logits.to(torch.float64).numpy()


def _nearest(values: np.ndarray, value: float) -> float:
    """Distance of `value` to the nearest other one; equal ones are told apart by rule, not by chance."""
    others = values[(values != value) & np.isfinite(values)]
    return float(np.abs(others - value).min()) if len(others) else np.inf
