"""What the scheduler decides in a step, and what the executor answers. In-process only; nothing here travels."""

import dataclasses

import numpy as np

from llmkernel.protocol.outputs import LogprobsLists
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["CachedRequestData", "GrammarMasks", "ModelRunnerOutput", "NewRequestData", "SchedulerOutput"]


@dataclasses.dataclass(slots=True)
class NewRequestData:
    """A request that runs for the first time, in full. The worker keeps it until it is finished.

    block_ids: KV blocks of the request in order. num_computed_tokens: tokens whose KV is there already (prefix cache).
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    eos_token_id: int | None = None
    bad_words_token_ids: list[list[int]] | None = None


@dataclasses.dataclass(slots=True)
class CachedRequestData:
    """What changed for requests that the worker knows; the lists are parallel.

    new_block_ids: appended to the request's blocks, or replacing them for ids in resumed_req_ids (after preemption:
    every token before num_computed_tokens is in the cache, the rest, prompt and output, is computed again).
    """

    req_ids: list[str] = dataclasses.field(default_factory=list)
    resumed_req_ids: set[str] = dataclasses.field(default_factory=set)
    new_block_ids: list[list[int]] = dataclasses.field(default_factory=list)
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)
    num_output_tokens: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class GrammarMasks:
    """What the grammars of this step's requests allow as the next token. Valid until the next step is scheduled.

    rows: request id -> row of `bitmask`, int32 [rows, words]: bit i % 32 of word i // 32 stands for token i. A request
    with drafts has a row more for each, in order: what may follow when the draft is accepted.
    errors: requests whose grammar has failed, with the reason; their rows allow nothing.
    """

    rows: dict[str, int]
    bitmask: np.ndarray
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def of(self, req_id: str, ahead: int = 0) -> np.ndarray | None:
        """The words of one request behind `ahead` of its drafts, None if it may say anything."""
        row = self.rows.get(req_id)
        return None if row is None else self.bitmask[row + ahead]


@dataclasses.dataclass(slots=True)
class SchedulerOutput:
    """One step: how many tokens of which request. Finished and preempted ids are told once, so that workers drop state.

    Take them in first: an id of theirs may be new or resumed in the same step. After a step that raised they are told
    again, and so they may name requests that the worker has never seen. A step may have no tokens, only such ids.
    Blocks read by a request (tokens before num_computed_tokens) were written in earlier steps, never in this one.
    scheduled_spec_decode_tokens: request id -> drafts, which are computed behind all of the request's tokens and count
    among its num_scheduled_tokens; they have blocks. The next step says how many were taken (num_computed_tokens).
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    grammar: GrammarMasks | None = None
    scheduled_spec_decode_tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class ModelRunnerOutput:
    """What a step computed.

    sampled_token_ids: request id -> new tokens; a request whose prefill is not through has no entry (or []). With
    drafts: those that are what it would have said, as far as they are, and one token more.
    logprobs: of the sampled tokens, for requests that asked. errors: requests that failed alone, with the reason.
    prompt_logprobs: of the prompt's tokens but the first, for requests that asked, with their first token.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, LogprobsLists] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobsLists] = dataclasses.field(default_factory=dict)
