"""Why a request has no token yet, in words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmkernel.notebook.generation_row import GenerationRow

__all__ = ["wait_state"]


def wait_state(row: "GenerationRow") -> tuple[str, str]:
    """("queued" or "prefill", the reason or "") of a request that has brought no token."""
    slot = row.slot
    if slot.loading:
        return "queued", f"waiting for {slot.name} to load"
    stats = slot.llm.get_scheduler_stats() if slot.facts is not None else None
    if stats is None or not stats.num_waiting_reqs:
        return "prefill", ""
    head = stats.waiting_head
    if head is not None and _is_of(head.request_id, row.request_id):
        return "queued", head.reason
    return "queued", ""


def _is_of(engine_id: str, request_id: str) -> bool:
    """Whether the engine's id ("g3-1f2e", a child's "0_g3-1f2e") is that of the request "g3"."""
    return engine_id.rpartition("-")[0].removeprefix("0_") == request_id
