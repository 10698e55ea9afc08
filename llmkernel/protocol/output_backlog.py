"""Outputs that wait for a slow receiver, merged per request, so that they take no more memory than what they say.

Both ends of the output socket use it: the engine while a client's socket is full, the client while nobody reads.
"""

import dataclasses
from collections import deque
from typing import Any

import msgspec
import numpy as np

from llmkernel.protocol.outputs import EngineCoreOutput, EngineCoreOutputs, LogprobsLists
from llmkernel.protocol.stats import PrefixCacheStats, SchedulerStats

__all__ = ["MergedOutputs", "OutputBacklog"]


class OutputBacklog:
    """A queue of EngineCoreOutputs (or exceptions) of at most `merge_above` entries; what comes then joins the newest.

    Order is kept: outputs that answer a utility call or speak of data-parallel waves, and exceptions, are never merged
    and nothing is merged across them. It has the methods of a deque that asyncio.Queue and queue.Queue need.
    """

    def __init__(self, merge_above: int = 0) -> None:
        self._merge_above = merge_above
        self._items: deque[Any] = deque()

    def append(self, item: Any) -> None:
        """Add EngineCoreOutputs or an exception."""
        if len(self._items) < max(self._merge_above, 1) or not _mergeable(item):
            self._items.append(item)
        elif isinstance(self._items[-1], MergedOutputs):
            self._items[-1].add(item)
        elif _mergeable(self._items[-1]):
            merged = MergedOutputs(self._items.pop())
            merged.add(item)
            self._items.append(merged)
        else:
            self._items.append(item)

    def popleft(self) -> Any:
        item = self._items.popleft()
        return item.build() if isinstance(item, MergedOutputs) else item

    def clear(self) -> None:
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)


@dataclasses.dataclass
class _Request:
    """One request's merged output; logprobs are joined when it is built, so that merging stays linear."""

    output: EngineCoreOutput
    logprobs: list[LogprobsLists] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[LogprobsLists] = dataclasses.field(default_factory=list)


class MergedOutputs:
    """Several EngineCoreOutputs as one: tokens and logprobs concatenated, events joined, the newest state."""

    def __init__(self, first: EngineCoreOutputs) -> None:
        self._requests: dict[str, _Request] = {}
        self._merged = EngineCoreOutputs(engine_index=first.engine_index, timestamp=first.timestamp)
        self.add(first)

    def add(self, outputs: EngineCoreOutputs) -> None:
        merged = self._merged
        merged.timestamp, merged.pushed = outputs.timestamp, outputs.pushed
        if outputs.scheduler_stats is not None:
            merged.scheduler_stats = _merge_stats(merged.scheduler_stats, outputs.scheduler_stats)
        if outputs.finished_requests:
            merged.finished_requests = (merged.finished_requests or set()) | outputs.finished_requests
        for output in outputs.outputs:
            self._add_output(output)

    def build(self) -> EngineCoreOutputs:
        """The merged message; this object is used up."""
        for request in self._requests.values():
            request.output.new_logprobs = _concatenate(request.logprobs)
            request.output.new_prompt_logprobs_tensors = _concatenate(request.prompt_logprobs)
        self._merged.outputs = [request.output for request in self._requests.values()]
        return self._merged

    def _add_output(self, new: EngineCoreOutput) -> None:
        request = self._requests.get(new.request_id)
        if request is None:
            request = _Request(EngineCoreOutput(new.request_id, []))
            self._requests[new.request_id] = request
        old = request.output
        old.new_token_ids.extend(new.new_token_ids)
        if new.new_logprobs is not None:
            request.logprobs.append(new.new_logprobs)
        if new.new_prompt_logprobs_tensors is not None:
            request.prompt_logprobs.append(new.new_prompt_logprobs_tensors)
        if new.events:
            old.events = (old.events or []) + new.events
        for name in _NEWEST:
            value = getattr(new, name)
            if value is not None:
                setattr(old, name, value)


_NEWEST = (
    "pooling_output", "finish_reason", "stop_reason", "kv_transfer_params", "ec_transfer_params", "trace_headers",
    "prefill_stats",
)  # fmt: skip


def _mergeable(item: object) -> bool:
    if isinstance(item, MergedOutputs):
        return True
    return (
        isinstance(item, EngineCoreOutputs)
        and item.utility_output is None
        and item.wave_complete is None
        and item.start_wave is None
    )


def _concatenate(parts: list[LogprobsLists]) -> LogprobsLists | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )


def _merge_stats(old: SchedulerStats | None, new: SchedulerStats) -> SchedulerStats:
    """The newest state, with what is counted per message summed."""
    if old is None:
        return new
    merged = msgspec.structs.replace(new, num_preempted=old.num_preempted + new.num_preempted)
    if old.prefix_cache_stats is not None:
        merged.prefix_cache_stats = _merge_cache_stats(old.prefix_cache_stats, new.prefix_cache_stats)
    return merged


def _merge_cache_stats(old: PrefixCacheStats, new: PrefixCacheStats | None) -> PrefixCacheStats:
    if new is None:
        return old
    if new.reset:
        return new  # what was counted before a reset is void
    counts = {
        name: getattr(old, name) + getattr(new, name) for name in PrefixCacheStats.__struct_fields__ if name != "reset"
    }
    return PrefixCacheStats(reset=old.reset, **counts)
