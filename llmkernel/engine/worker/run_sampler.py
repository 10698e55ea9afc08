"""sample_runs: the tokens of a step, where a request may get several: drafts are verified by drawing.

Every position is drawn from its own distribution with its own uniform, which depends on seed and position alone, and
its token stands. Where it is the draft, the logits behind the draft are those behind the token, so the next position is
drawn, too. So a text is what it would have been without drafts, greedy or drawn, and nothing has to be corrected.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from llmkernel.engine.scheduler.output import GrammarMasks
from llmkernel.engine.worker.input_batch import SampledRun
from llmkernel.engine.worker.sampler.sampler import Place, Sampler
from llmkernel.protocol.outputs import LogprobsLists

__all__ = ["RunsOutput", "sample_runs"]


@dataclasses.dataclass(slots=True)
class RunsOutput:
    """By request id. errors: requests that got no token, with the reason; a token further on fails in its own step."""

    token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    logprobs: dict[str, LogprobsLists] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)


def sample_runs(
    sampler: Sampler, logits: torch.Tensor, runs: Sequence[SampledRun], grammar: GrammarMasks | None
) -> RunsOutput:
    """Draw tokens from `logits` [rows, vocab] and append them to their requests.

    All rows of a request are drawn in one call, unless it looks back (penalties, bad_words, min_tokens, logits
    processors): then one in each round, which knows all tokens before it.
    """
    output = RunsOutput()
    going = [_Going(run) for run in runs]
    while going:
        places = [place for one in going for place in one.places(sampler, grammar)]
        rows = [row for one in going for row in one.rows]
        chosen = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        drawn = sampler.sample_places(chosen, places)
        first = 0
        still_going = []
        for one in going:
            here = range(first, first + len(one.rows))
            first = here.stop
            if one.take([drawn.token_ids[place] for place in here], [drawn.logprobs.get(place) for place in here]):
                still_going.append(one)
            elif one.taken:
                one.tell(output)
            else:
                output.errors[one.run.request.req_id] = drawn.errors[here.start]
        going = still_going
    return output


class _Going:
    """A run that is being drawn. rows: of the logits, those of this round."""

    def __init__(self, run: SampledRun) -> None:
        self.run = run
        self.rows = range(0)
        self.taken: list[int] = []
        self._logprobs: list[LogprobsLists] = []

    def places(self, sampler: Sampler, grammar: GrammarMasks | None) -> list[Place]:
        """Those of the next round."""
        request, done = self.run.request, len(self.taken)
        left = 1 + len(self.run.drafts) - done
        count = 1 if left > 1 and sampler.looks_back(request.req_id, request.output_token_ids) else left
        self.rows = range(self.run.row + done, self.run.row + done + count)
        return [
            Place(
                request.req_id,
                request.output_token_ids,
                ahead,
                grammar.of(request.req_id, done + ahead) if grammar is not None else None,
            )
            for ahead in range(count)
        ]

    def take(self, token_ids: list[int], logprobs: list[LogprobsLists | None]) -> bool:
        """Take what was drawn in this round, up to the first token that is not its draft. Whether there is more."""
        for token_id, lists in zip(token_ids, logprobs, strict=True):
            if token_id < 0:
                return False
            self.run.request.append(token_id)
            self.taken.append(token_id)
            if lists is not None:
                self._logprobs.append(lists)
            if self.run.drafts[len(self.taken) - 1 : len(self.taken)] != [token_id]:
                return False
        return True

    def tell(self, output: RunsOutput) -> None:
        req_id = self.run.request.req_id
        output.token_ids[req_id] = self.taken
        if len(self._logprobs) == 1:
            output.logprobs[req_id] = self._logprobs[0]
        elif self._logprobs:
            output.logprobs[req_id] = LogprobsLists(
                np.concatenate([one.logprob_token_ids for one in self._logprobs]),
                np.concatenate([one.logprobs for one in self._logprobs]),
                np.concatenate([one.sampled_token_ranks for one in self._logprobs]),
            )
