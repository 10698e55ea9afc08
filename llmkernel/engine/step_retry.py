"""A step that raised is run again by halves, so that it costs the requests at fault, not their neighbours."""

import dataclasses
from collections.abc import Callable

from llmkernel.engine.executor import Executor
from llmkernel.engine.scheduler.output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from llmkernel.errors import LLMKernelError
from llmkernel.logger import init_logger

__all__ = ["MOST_RETRIES", "reason_of", "retry_by_halves"]

logger = init_logger(__name__)

MOST_RETRIES = 16
"""Runs of parts of one step: finds one request among 128, two among 32; whatever is untried then fails."""


def retry_by_halves(
    executor: Executor, step: SchedulerOutput, block_ids: Callable[[str], list[int]], error: Exception
) -> ModelRunnerOutput | None:
    """What `step` would have brought without the requests that make it raise; those have their exception in `errors`.

    None if nothing of it can be run. error: what the whole step raised. block_ids: all blocks of a request, as the step
    needs them. An executor that is gone raises out of here (check_health).

    A part of the step tells everything anew, whatever a run that raised has taken in: requests that are new in the step
    are finished and begun again, the others have their blocks replaced. The KV of a token is written to the same slot.
    """
    merged = ModelRunnerOutput({})
    done: set[str] = set()
    groups = _halves(list(step.num_scheduled_tokens), error)
    for _ in range(MOST_RETRIES):
        if not groups:
            break
        group, _ = groups.pop()
        try:
            output = executor.execute_model(_part(step, group, done, block_ids))
        except Exception as raised:  # noqa: BLE001 - kept: it is the failure of one request, or of a smaller group
            executor.check_health()
            if len(group) == 1:
                merged.errors[group[0]] = reason_of(raised)
            else:
                groups += _halves(group, raised)
        else:
            done.update(group)
            _merge(merged, output)
    merged.errors |= {req_id: reason_of(raised) for group, raised in groups for req_id in group}
    if not done:
        return None
    logger.warning("A step of %d requests went on without %s", len(step.num_scheduled_tokens), sorted(merged.errors))
    return merged


def _halves(group: list[str], error: Exception) -> list[tuple[list[str], Exception]]:
    """Two groups, the first to be tried last; none if there is nothing to divide."""
    if len(group) < 2:
        return []
    middle = len(group) // 2
    return [(group[middle:], error), (group[:middle], error)]


def _part(
    step: SchedulerOutput, group: list[str], done: set[str], block_ids: Callable[[str], list[int]]
) -> SchedulerOutput:
    """The step of these requests alone; of those in `done` nothing must be told again."""
    chosen = set(group)
    new = [data for data in step.scheduled_new_reqs if data.req_id in chosen]
    cached = step.scheduled_cached_reqs
    places = [index for index, req_id in enumerate(cached.req_ids) if req_id in chosen]
    known = [cached.req_ids[index] for index in places]
    tokens = {req_id: step.num_scheduled_tokens[req_id] for req_id in group}
    return dataclasses.replace(
        step,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=known,
            resumed_req_ids=set(known),
            new_block_ids=[block_ids(req_id) for req_id in known],
            num_computed_tokens=[cached.num_computed_tokens[index] for index in places],
            num_output_tokens=[cached.num_output_tokens[index] for index in places],
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids=(step.finished_req_ids - done) | {data.req_id for data in new},
        preempted_req_ids=(step.preempted_req_ids - done) | set(known),
    )


def _merge(merged: ModelRunnerOutput, output: ModelRunnerOutput) -> None:
    for field in dataclasses.fields(output):
        getattr(merged, field.name).update(getattr(output, field.name))


def reason_of(error: Exception) -> str:
    """What the client of a request that failed of `error` is told."""
    words = str(error) or "no message"
    return words if isinstance(error, LLMKernelError) else f"{type(error).__name__}: {words}"
