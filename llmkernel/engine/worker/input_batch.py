"""What the worker remembers of each request, and the flat batch that a step makes of them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from llmkernel.engine.scheduler.output import NewRequestData
from llmkernel.engine.worker.prompt_logprobs import PromptLogprobs
from llmkernel.engine.worker.scheduled_tokens import ScheduledTokens, attention_order

__all__ = ["InputBatch", "PromptRows", "RunningRequest", "SampledRun", "StepInputs"]


_NO_DRAFTS: Mapping[str, list[int]] = {}


class RunningRequest:
    """One request in the worker, from its first step until it is finished: all its tokens, and where its KV lies.

    token_ids: prompt, then output. output_token_ids: the output alone (the sampler's view). block_ids: int64, in order.
    prompt_logprobs: what is known of them, None where they are not asked for, or told.
    """

    __slots__ = (
        "_num_blocks",
        "_table",
        "num_computed",
        "num_prompt",
        "output_token_ids",
        "prompt_logprobs",
        "req_id",
        "token_ids",
    )

    def __init__(self, data: NewRequestData) -> None:
        self.req_id = data.req_id
        self.token_ids = list(data.prompt_token_ids)
        self.num_prompt = len(data.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed = data.num_computed_tokens
        self.prompt_logprobs: PromptLogprobs | None = None
        self._table = np.zeros(max(8, len(data.block_ids)), dtype=np.int64)
        self._num_blocks = 0
        self.add_blocks(data.block_ids)

    @property
    def block_ids(self) -> np.ndarray:
        return self._table[: self._num_blocks]

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        end = self._num_blocks + len(block_ids)
        if end > len(self._table):
            grown = np.zeros(max(end, 2 * len(self._table)), dtype=np.int64)
            grown[: self._num_blocks] = self._table[: self._num_blocks]
            self._table = grown
        self._table[self._num_blocks : end] = block_ids
        self._num_blocks = end

    def replace_blocks(self, block_ids: Sequence[int]) -> None:
        self._num_blocks = 0
        self.add_blocks(block_ids)

    def prompt_positions(self, first: int, last: int) -> range:
        """Of the tokens from first to last, which are computed now, those whose logits are about the prompt."""
        return range(first, min(last, self.num_prompt - 1) if self.prompt_logprobs is not None else first)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    def keep_output(self, count: int) -> None:
        """Drop output tokens beyond the first `count`: the scheduler did not take them."""
        if len(self.output_token_ids) > count:
            del self.output_token_ids[count:]
            del self.token_ids[self.num_prompt + count :]


@dataclasses.dataclass(frozen=True)
class SampledRun:
    """A request that is due a token, and one more for each of its drafts that proves right.

    Its rows of the logits are consecutive, from `row` on: after its last token, then after each draft.
    """

    request: RunningRequest
    drafts: list[int]
    row: int


@dataclasses.dataclass(frozen=True)
class PromptRows:
    """Consecutive rows of the logits, from `row` on: what the model says after the prompt tokens at `positions`."""

    request: RunningRequest
    positions: range
    row: int


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """A step, flat: its requests in attention_order. T tokens in all.

    token_ids, positions: int64 [T]. sampled: requests that get tokens, in the order of logits_rows (indices into T), of
    which they have the first num_sampled_rows. unfinished_blocks: blocks begun in this step and not filled by it.
    prompts: whose prompt logprobs this step has; the rows of their logits follow.
    """

    requests: list[RunningRequest]
    sequences: list[ScheduledTokens]
    token_ids: np.ndarray
    positions: np.ndarray
    sampled: list[SampledRun]
    num_sampled_rows: int
    logits_rows: np.ndarray
    unfinished_blocks: list[int]
    prompts: list[PromptRows]


class InputBatch:
    """The requests that the worker knows, by id, and their flat batch for a step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.requests: dict[str, RunningRequest] = {}

    def add(self, data: NewRequestData) -> RunningRequest:
        self.requests[data.req_id] = request = RunningRequest(data)
        return request

    def remove(self, req_id: str) -> bool:
        """Whether the request was known."""
        return self.requests.pop(req_id, None) is not None

    def make_inputs(
        self, num_scheduled_tokens: dict[str, int], drafts: Mapping[str, list[int]] = _NO_DRAFTS
    ) -> StepInputs:
        """The flat batch of these requests; one gets logits rows where its last known token and drafts are computed."""
        requests, sequences = [], []
        for req_id, count in num_scheduled_tokens.items():
            request = self.requests[req_id]
            requests.append(request)
            sequences.append(ScheduledTokens(count, request.num_computed, request.block_ids, request))
        scheduled = [(requests[place], sequences[place]) for place in attention_order(sequences)]
        tokens, positions, sampled, unfinished = [], [], [], []
        rows: list[int] = []
        prompts: list[tuple[RunningRequest, range]] = []
        prompt_rows: list[int] = []
        end = 0
        for request, sequence in scheduled:
            count, first, last = sequence.num_tokens, sequence.num_computed, sequence.context
            end += count
            drafted = drafts.get(request.req_id, [])
            tokens.extend(request.token_ids[first:last] + drafted)
            positions.append(np.arange(first, last))
            if last == len(request.token_ids) + len(drafted):
                sampled.append(SampledRun(request, drafted, len(rows)))
                rows.extend(range(end - 1 - len(drafted), end))
            if about_prompt := request.prompt_positions(first, last):
                prompts.append((request, about_prompt))
                prompt_rows.extend(range(end - count, end - count + len(about_prompt)))
            tail = last // self._block_size * self._block_size
            if first <= tail < last:
                unfinished.append(int(request.block_ids[tail // self._block_size]))
        return StepInputs(
            requests=[request for request, _ in scheduled],
            sequences=[sequence for _, sequence in scheduled],
            token_ids=np.array(tokens, dtype=np.int64),
            positions=np.concatenate(positions),
            sampled=sampled,
            num_sampled_rows=len(rows),
            logits_rows=np.array(rows + prompt_rows, dtype=np.int64),
            unfinished_blocks=unfinished,
            prompts=_numbered(prompts, len(rows)),
        )


def _numbered(prompts: list[tuple[RunningRequest, range]], first_row: int) -> list[PromptRows]:
    numbered = []
    for request, positions in prompts:
        numbered.append(PromptRows(request, positions, first_row))
        first_row += len(positions)
    return numbered
