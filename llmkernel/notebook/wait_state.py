"""Why a request brings no tokens now, in words."""

import dataclasses
from typing import TYPE_CHECKING

from llmkernel.protocol.stats import RequestProgress

if TYPE_CHECKING:
    from llmkernel.notebook.generation_row import GenerationRow

__all__ = ["WaitState"]


@dataclasses.dataclass(frozen=True)
class WaitState:
    """state: "queued" or "prefill". note: the reason, or how far it is, "" if nothing is known. position: its place in
    the engine's queue, 1 = next; 0 = it does not wait there. prompt_tokens, cached_tokens: None until they are known.
    """

    state: str
    note: str = ""
    position: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def of(cls, row: "GenerationRow", request_id: str) -> "WaitState":
        """Of the request `request_id` of `row`, which has brought no token."""
        slot = row.slot
        if slot.loading:
            return cls("queued", f"waiting for {slot.name} to load")
        if (told := slot.queue.find(request_id)) is not None:
            return cls._told(told)
        stats = slot.llm.get_scheduler_stats() if slot.facts is not None else None
        return cls("queued" if stats is not None and stats.num_waiting_reqs else "prefill")

    def __str__(self) -> str:
        """ "queued #2: waiting for KV: needs 12 blocks, 9 free", "prefill 512 / 1,800 tokens" """
        if self.state == "prefill":
            return self.note or self.state
        place = f"queued #{self.position}" if self.position else self.state
        return f"{place}: {self.note}" if self.note else place

    @classmethod
    def of_begun(cls, row: "GenerationRow", request_id: str) -> "WaitState | None":
        """Of one that has brought tokens; None if nothing keeps it from bringing more."""
        stats = row.slot.llm.get_scheduler_stats()
        if stats is None or not stats.num_waiting_reqs:
            return None
        told = row.slot.queue.find(request_id)
        if told is None or not told.num_preemptions:
            return None
        state = cls._told(told)
        return dataclasses.replace(state, note=f"preempted, {state.note or 'waits again'}")

    @classmethod
    def _told(cls, told: RequestProgress) -> "WaitState":
        if not told.position:
            note = f"prefill {told.num_computed_tokens:,} / {told.num_tokens:,} tokens"
            return cls("prefill", note, 0, told.num_tokens, told.num_cached_tokens)
        reason = f"waiting for KV: {told.reason}" if told.reason.startswith("needs ") else told.reason
        return cls("queued", reason, told.position, told.num_tokens)
