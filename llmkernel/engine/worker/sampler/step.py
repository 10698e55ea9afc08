"""One call of the sampler. Rows are grouped by what they need: a feature costs the rows that use it, and no others."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from llmkernel.engine.worker.logits_processors.seat import ProcessorSeat
from llmkernel.engine.worker.logits_processors.slots import SlotRequest
from llmkernel.engine.worker.sampler.adjustments import apply_biases, apply_masks, penalise
from llmkernel.engine.worker.sampler.chunks import Scratch, chunk_maxima, pad_rows
from llmkernel.engine.worker.sampler.draws import uniforms
from llmkernel.engine.worker.sampler.greedy import pick_best, pick_greedy
from llmkernel.engine.worker.sampler.logprobs import LogprobsMode, gather_logprobs
from llmkernel.engine.worker.sampler.row import Row
from llmkernel.engine.worker.sampler.truncation import draw_tokens, processed_logits
from llmkernel.protocol.outputs import LogprobsLists

__all__ = ["SamplerStep"]


class SamplerStep:
    """Draws a token for each row of `logits` [rows, vocab], which stay as they are.

    token_ids: by row, -1 for one that failed. errors: row -> the reason.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: list[Row],
        scratch: Scratch,
        mode: LogprobsMode,
        processors: Sequence[ProcessorSeat] = (),
    ) -> None:
        self.token_ids = [-1] * len(rows)
        self.errors = {row.index: row.state.error for row in rows if row.state.error is not None}
        self._logits = logits
        self._rows = rows
        self._scratch = scratch
        self._mode = mode
        self._processors = processors
        self._processed: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        rows = [row for row in self._rows if row.index not in self.errors]
        plain = [row for row in rows if row.is_plain and not self._processors]
        others = [row for row in rows if not row.is_plain or self._processors]
        if plain:
            tokens, best = pick_greedy(self._select(plain))
            sound = self._sound(plain, best)
            self._store([plain[n] for n in sound], _take(sound, tokens)[0])
        if others:
            self._run_padded(others)

    def logprobs(self) -> dict[int, LogprobsLists]:
        """Row -> logprobs, for the rows that ask for them and have a token."""
        asked = [row for row in self._rows if row.state.logprobs is not None and self.token_ids[row.index] >= 0]
        named = [row for row in asked if row.state.logprob_ids is not None]
        some = [row for row in asked if row.state.logprob_ids is None and row.state.logprobs != -1]
        everything = [row for row in asked if row.state.logprobs == -1]
        found = self._gather_logprobs(some) | self._gather_logprobs(everything)
        for row in named:
            found |= self._gather_logprobs([row])
        return found

    def _run_padded(self, rows: list[Row]) -> None:
        """Rows that are changed, or drawn, or both: in float32."""
        logits = self._select(rows)
        changes = any(row.is_changed for row in rows) or bool(self._processors)
        padded = pad_rows(logits, self._scratch, copy=changes and logits is self._logits)
        if changes:
            self._change(padded, rows)
        maxima = chunk_maxima(padded)
        sound = self._sound(rows, maxima.amax(-1))
        greedy = [n for n in sound if rows[n].is_greedy]
        drawn = [n for n in sound if not rows[n].is_greedy]
        if self._processors:
            self._process_scaled(padded, rows, drawn)
            maxima = chunk_maxima(padded)
            sound = self._sound(rows, maxima.amax(-1))
            greedy, drawn = ([n for n in some if n in sound] for some in (greedy, drawn))
        if self._mode.startswith("processed"):
            self._keep_processed([(rows[n], padded[n], maxima[n]) for n in sound])
        if greedy:
            self._store([rows[n] for n in greedy], pick_best(*_take(greedy, padded, maxima)))
        if drawn:
            self._draw([rows[n] for n in drawn], *_take(drawn, padded, maxima))

    def _change(self, padded: torch.Tensor, rows: list[Row]) -> None:
        apply_biases(padded, rows)
        self._process(padded, rows, argmax_invariant=False)
        penalise(padded, rows)
        masked = [n for n, row in enumerate(rows) if row.is_masked]
        if masked:
            # Looked at before the masks, which could hide a part of what is broken.
            self._sound([rows[n] for n in masked], chunk_maxima(*_take(masked, padded)).amax(-1))
            apply_masks(padded, rows)

    def _process(self, padded: torch.Tensor, rows: list[Row], *, argmax_invariant: bool, apply: bool = True) -> None:
        """Custom logits processors, in the order of their import paths."""
        requests = [SlotRequest(row.state, row.state.params, row.state.prompt_token_ids, row.output) for row in rows]
        logits = padded[:, : self._logits.shape[1]]
        for processor in self._processors:
            if processor.is_argmax_invariant == argmax_invariant:
                for n, reason in processor.run(logits, requests, apply=apply).items():
                    self.errors.setdefault(rows[n].index, reason)

    def _process_scaled(self, padded: torch.Tensor, rows: list[Row], drawn: list[int]) -> None:
        """Processors that do not change which token is best: after temperature, and of no use to greedy rows."""
        scaled = padded.clone() if drawn else padded
        for n in drawn:
            cut = rows[n].cut
            assert cut is not None
            scaled[n] *= cut.inverse_temperature
        self._process(scaled, rows, argmax_invariant=True, apply=bool(drawn))
        for n in drawn:
            padded[n] = scaled[n]
            rows[n].cut = dataclasses.replace(rows[n].cut, inverse_temperature=1.0)  # type: ignore[type-var]

    def _draw(self, rows: list[Row], padded: torch.Tensor, maxima: torch.Tensor) -> None:
        keys = torch.tensor([row.state.key for row in rows], device=padded.device)
        positions = torch.tensor([row.position for row in rows], device=padded.device)
        truncations = [row.cut for row in rows if row.cut is not None]
        self._store(rows, draw_tokens(padded, maxima, truncations, uniforms(keys, positions)))

    def _keep_processed(self, rows: list[tuple[Row, torch.Tensor, torch.Tensor]]) -> None:
        for row, logits, maxima in rows:
            if row.state.logprobs is not None:
                cut = row.cut
                self._processed[row.index] = logits if cut is None else processed_logits(logits, maxima, cut)

    def _gather_logprobs(self, rows: list[Row]) -> dict[int, LogprobsLists]:
        """Of these rows together; one that names the ids it wants comes alone."""
        if not rows:
            return {}
        counts = [row.state.logprobs or 0 for row in rows]
        chosen = torch.tensor([self.token_ids[row.index] for row in rows], device=self._logits.device)
        logits = self._select(rows)
        if self._processed:
            size = logits.shape[1]
            logits = torch.stack([self._processed.get(row.index, logits[n])[:size] for n, row in enumerate(rows)])
        normalise = self._mode.endswith("logprobs")
        lists = gather_logprobs(logits, chosen, max(counts), others=rows[0].state.logprob_ids, normalise=normalise)
        return {row.index: _one_position(lists, n, counts[n]) for n, row in enumerate(rows)}

    def _sound(self, rows: list[Row], best: torch.Tensor) -> list[int]:
        """The places of the rows that go on. best: their maxima; where one is not finite, the request fails here."""
        for row, value in zip(rows, best.tolist(), strict=True):
            if not math.isfinite(value) and row.index not in self.errors:
                self.errors[row.index] = self._reason(row, value)
        return [n for n, row in enumerate(rows) if row.index not in self.errors]

    def _reason(self, row: Row, best: float) -> str:
        if not self._logits[row.index].float().amax().isfinite():
            cause = "the model's logits hold NaN or infinity; check the weights, or load it with dtype float32"
        elif best == -math.inf:
            grammar = "the grammar of structured_outputs, " if row.grammar is not None else ""
            custom = "the logits processors, " if self._processors else ""
            cause = f"{grammar}{custom}allowed_token_ids, bad_words and min_tokens leave no token; allow more"
        elif row.state.penalties is None:
            cause = "a logits processor made a logit infinite or NaN; correct it"
        else:
            cause = "a penalty made a logit infinite; use a repetition_penalty nearer to 1"
        return f"No token could be drawn at output position {row.position}: {cause}."

    def _store(self, rows: list[Row], tokens: torch.Tensor) -> None:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self.token_ids[row.index] = token

    def _select(self, rows: list[Row]) -> torch.Tensor:
        return _take([row.index for row in rows], self._logits)[0]


def _take(which: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """These rows of each tensor; nothing is copied when it is all of them."""
    if len(which) == len(tensors[0]):
        return tensors
    index = torch.tensor(which, dtype=torch.int64, device=tensors[0].device)
    return tuple(tensor.index_select(0, index) for tensor in tensors)


def _one_position(lists: LogprobsLists, position: int, count: int) -> LogprobsLists:
    """One position with `count` alternatives (-1: all there are), in memory of its own."""
    width = None if count < 0 else count + 1
    here = slice(position, position + 1)
    return LogprobsLists(
        lists.logprob_token_ids[here, :width].copy(),
        lists.logprobs[here, :width].copy(),
        lists.sampled_token_ranks[here].copy(),
    )
