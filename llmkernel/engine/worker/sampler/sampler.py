"""Sampler: the tokens of a step from its logits, each row by the parameters of its own request."""

import dataclasses
import random

import torch

from llmkernel.engine.worker.sampler.chunks import chunk_maxima, pad_rows
from llmkernel.engine.worker.sampler.draws import uniforms
from llmkernel.engine.worker.sampler.greedy import pick_greedy
from llmkernel.engine.worker.sampler.logprobs import gather_logprobs
from llmkernel.engine.worker.sampler.masks import add_bias, forbid, keep_only
from llmkernel.engine.worker.sampler.penalties import PenaltyRow, apply_penalties
from llmkernel.engine.worker.sampler.request_state import RequestState
from llmkernel.engine.worker.sampler.truncation import draw_tokens
from llmkernel.protocol.outputs import LogprobsLists
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["Sampler", "SamplerOutput"]

_NOT_FINITE = "The model's logits hold NaN or infinity at output position {}; the weights or the dtype are at fault."
_OVERFLOW = "A penalty made a logit infinite at output position {}; use a repetition_penalty nearer to 1."
_NOTHING_LEFT = (
    "No token is allowed at output position {}: allowed_token_ids, bad_words and min_tokens leave none; allow more."
)


@dataclasses.dataclass
class SamplerOutput:
    """What a step drew. token_ids: one per row, -1 for a failed one. logprobs, errors: by request id, where there are any."""

    token_ids: list[int]
    logprobs: dict[str, LogprobsLists] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)


class Sampler:
    """Keeps what it must know of each request between add() and remove(); sample() is a function of that and its inputs.

    default_seed: seed of requests that name none; None = a fresh one for each.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, default_seed: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._default_seed = default_seed
        self._requests: dict[str, RequestState] = {}
        self._fresh = random.SystemRandom()

    def add(
        self,
        req_id: str,
        params: SamplingParams,
        prompt_token_ids: list[int],
        eos_token_id: int | None,
        bad_words_token_ids: list[list[int]] | None,
    ) -> None:
        """Begin a request. Adding a known id again starts it afresh."""
        seed = params.seed if params.seed is not None else self._default_seed
        if seed is None:
            seed = self._fresh.getrandbits(63)
        self._requests[req_id] = RequestState(
            params, seed, self._vocab_size, self._device, prompt_token_ids, eos_token_id, bad_words_token_ids
        )

    def remove(self, req_id: str) -> None:
        """Forget a request; unknown ids are let pass."""
        self._requests.pop(req_id, None)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, req_ids: list[str], output_token_ids: list[list[int]]) -> SamplerOutput:
        """One token per row of `logits` [rows, vocab] (any float type, left as they are); row i belongs to req_ids[i].

        output_token_ids[i]: all tokens generated so far; their number is the position that the draw is keyed by.
        """
        states = [self._requests[req_id] for req_id in req_ids]
        output = SamplerOutput([-1] * len(req_ids))
        plain, worked = [], []
        for i, state in enumerate(states):
            if state.error is not None:
                output.errors[req_ids[i]] = state.error
            elif state.cut is None and not state.adjusts(output_token_ids[i]):
                plain.append(i)
            else:
                worked.append(i)
        batch = _Batch(logits, states, req_ids, output_token_ids, output)
        if plain:
            batch.pick_plain(plain)
        if worked:
            batch.work(worked)
        batch.collect_logprobs()
        return output


class _Batch:
    """One call of sample(): its inputs, and the output that it fills."""

    def __init__(
        self,
        logits: torch.Tensor,
        states: list[RequestState],
        req_ids: list[str],
        outputs: list[list[int]],
        result: SamplerOutput,
    ) -> None:
        self._logits, self._states, self._req_ids, self._outputs, self._result = (
            logits,
            states,
            req_ids,
            outputs,
            result,
        )

    def pick_plain(self, which: list[int]) -> None:
        """Greedy rows whose logits nothing changes: picked in their own type."""
        tokens, maxima = pick_greedy(self._select(which))
        self._settle(which, tokens, maxima, _NOT_FINITE)

    def work(self, which: list[int]) -> None:
        """Rows that need float32: adjusted, then picked or drawn."""
        rows = self._select(which)
        adjusted = [i for i in which if self._states[i].adjusts(self._outputs[i])]
        padded = pad_rows(rows, rows.new_empty((len(which), -(-rows.shape[1] // 64) * 64), dtype=torch.float32))
        maxima = chunk_maxima(padded)
        sound = self._check(which, maxima.amax(-1), _NOT_FINITE)
        if adjusted:
            self._adjust(padded, which)
            maxima = chunk_maxima(padded)
            best = maxima.amax(-1)
            sound &= self._check(which, best, _OVERFLOW)
        good = [n for n, ok in enumerate(sound.tolist()) if ok]
        greedy = [n for n in good if self._states[which[n]].cut is None]
        drawn = [n for n in good if self._states[which[n]].cut is not None]
        if greedy:
            self._store([which[n] for n in greedy], pick_greedy(padded[greedy])[0])
        if drawn:
            self._draw(padded, maxima, which, drawn)

    def _draw(self, padded: torch.Tensor, maxima: torch.Tensor, which: list[int], drawn: list[int]) -> None:
        if len(drawn) < len(which):
            padded, maxima = padded[drawn], maxima[drawn]
        chosen = [which[n] for n in drawn]
        keys = torch.tensor([self._states[i].key for i in chosen], dtype=torch.int64, device=padded.device)
        positions = torch.tensor([len(self._outputs[i]) for i in chosen], dtype=torch.int64, device=padded.device)
        cuts = [cut for i in chosen if (cut := self._states[i].cut) is not None]
        self._store(chosen, draw_tokens(padded, maxima, cuts, uniforms(keys, positions)))

    def _adjust(self, padded: torch.Tensor, which: list[int]) -> None:
        """Bias, penalties, then (custom processors' place) the hard masks (a grammar's place), so that masks win."""
        biases, penalties, banned = [], [], []
        for n, i in enumerate(which):
            state = self._states[i]
            if state.bias is not None:
                biases.append((n, *state.bias))
            if state.counts is not None:
                state.counts.update(self._outputs[i])
                penalties.append(PenaltyRow(n, state.counts, state.repetition, state.frequency, state.presence))
            if forbidden := state.banned(self._outputs[i]):
                banned.append((n, forbidden))
        if biases:
            add_bias(padded, biases)
        if penalties:
            apply_penalties(padded, penalties)
        for n, i in enumerate(which):
            if (allowed := self._states[i].allowed) is not None:
                keep_only(padded, n, allowed)
        if banned:
            forbid(padded, banned)

    def _check(self, which: list[int], best: torch.Tensor, reason: str) -> torch.Tensor:
        """Whether each row's maximum is finite; the requests of the others get the reason, the first one counts."""
        sound = best.isfinite()
        for n in (~sound).nonzero().flatten().tolist():
            i = which[n]
            text = _NOTHING_LEFT if best[n] == -torch.inf else reason
            self._result.errors.setdefault(self._req_ids[i], text.format(len(self._outputs[i])))
        return sound

    def _settle(self, which: list[int], tokens: torch.Tensor, best: torch.Tensor, reason: str) -> None:
        self._store(which, torch.where(self._check(which, best, reason), tokens, -1))

    def _store(self, which: list[int], tokens: torch.Tensor) -> None:
        for i, token in zip(which, tokens.tolist(), strict=True):
            self._result.token_ids[i] = token

    def _select(self, which: list[int]) -> torch.Tensor:
        return self._logits if len(which) == len(self._logits) else self._logits[which]

    def collect_logprobs(self) -> None:
        """Of the raw logits, for the rows that asked and got a token: the full vocabulary apart from the best few."""
        asked = [i for i, s in enumerate(self._states) if s.logprobs is not None and self._result.token_ids[i] >= 0]
        for group in (
            [i for i in asked if self._states[i].logprobs == -1],
            [i for i in asked if self._states[i].logprobs != -1],
        ):
            if not group:
                continue
            counts = [self._states[i].logprobs or 0 for i in group]
            chosen = torch.tensor([self._result.token_ids[i] for i in group], device=self._logits.device)
            lists = gather_logprobs(self._select(group), chosen, -1 if counts[0] == -1 else max(counts))
            for n, (i, count) in enumerate(zip(group, counts, strict=True)):
                width = lists.logprobs.shape[1] if count == -1 else min(count + 1, lists.logprobs.shape[1])
                self._result.logprobs[self._req_ids[i]] = LogprobsLists(
                    lists.logprob_token_ids[n : n + 1, :width].copy(),
                    lists.logprobs[n : n + 1, :width].copy(),
                    lists.sampled_token_ranks[n : n + 1].copy(),
                )
