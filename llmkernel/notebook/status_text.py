"""What `%llm status` prints."""

from typing import TYPE_CHECKING

from llmkernel.config import format_bytes, format_seconds
from llmkernel.notebook.load_line import load_line, model_line
from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.request_ids import shown_id
from llmkernel.notebook.session import Session
from llmkernel.protocol.handshake import EngineCoreReadyResponse
from llmkernel.protocol.stats import SchedulerStats, SpecDecodingStats

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["status_text"]


def status_text(session: Session, *, verbose: bool = False) -> str:
    """Every model: what it is, what it does now, the memory it takes; verbose: and how its load went."""
    if not session.models:
        return "No model is loaded; %llm load MODEL loads one."
    return "\n".join(_model(slot, slot.name == session.default, verbose) for slot in session.models.values())


def _model(slot: "ModelSlot", is_default: bool, verbose: bool) -> str:
    if slot.state == "loading":
        return load_line(slot)
    head = f"{slot.name}{' (default)' if is_default else ''}: {slot.state}"
    if slot.state != "ready" or slot.facts is None:
        again = f"(%llm restart {slot.name} starts it again)"
        return f"{head} {again}: {slot.llm.dead_error}" if slot.state == "dead" else head
    lines = [f"{head}, {model_line(slot.facts)}"]
    stats = slot.llm.get_scheduler_stats()
    process = slot.process
    if process is not None:
        path = f"{slot.facts.model.implementation} path, {_threads(slot.facts, stats)}"
        lines.append(f"  engine process {process.pid}, {format_bytes(process.memory())}, {path}")
    if slot.args.lease is not None:
        lines.append(f"  {'re-attached, ' if slot.re_attached else ''}lease {format_seconds(slot.args.lease)}")
    if slot.llm.health.state != "ok":
        lines.append(f"  {slot.llm.health}")
    if stats is not None:
        usage = f"KV cache {stats.kv_cache_usage:.0%} used"
        lines.append(f"  {stats.num_running_reqs} running, {stats.num_waiting_reqs} waiting, {usage}")
        if stats.waiting_head is not None:
            lines.append(f"  {shown_id(stats.waiting_head.request_id)} waits: {stats.waiting_head.reason}")
        if stats.spec_decoding_stats is not None:
            lines.append(f"  speculation: {_drafts(stats.spec_decoding_stats)}")
    if verbose:
        lines += [f"  {line}" for line in (_stages(slot, slot.facts), *map(clean_text, slot.facts.model.notes))]
    return "\n".join(lines)


def _drafts(stats: SpecDecodingStats) -> str:
    drafted = stats.num_draft_tokens
    return f"{stats.acceptance_rate:.0%} of {drafted:,} drafted tokens accepted" if drafted else "no drafts yet"


def _threads(facts: EngineCoreReadyResponse, stats: SchedulerStats | None) -> str:
    """The threads of the last step, and why they are fewer than there could be."""
    most = facts.num_threads
    now = (stats.num_threads if stats is not None else 0) or most
    if now < most:
        return f"{now} of {most} threads: others use the processor"
    return f"{now} thread{'' if now == 1 else 's'}"


def _stages(slot: "ModelSlot", facts: EngineCoreReadyResponse) -> str:
    """Seconds of each stage of the load, by the engine's clock; what is left went into its process and sockets."""
    timings = facts.load_timings
    whole = slot.load_seconds or sum(timings.values())
    stages = {"process and handshake": max(0.0, whole - sum(timings.values())), **timings}
    return f"load {whole:.2f} s: " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items())
