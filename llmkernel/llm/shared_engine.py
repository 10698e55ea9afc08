"""From what a user calls a running engine to where it is and what it was asked to be."""

from typing import Any

from llmkernel.client.attachment import RunningEngine
from llmkernel.client.running_engines import find_engine
from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError

__all__ = ["resolve_engine"]


def resolve_engine(engine: Any) -> tuple[RunningEngine, EngineArgs]:
    """engine: an AsyncLLM, LLM or LLMEngine, or the pid of an engine process of this user.

    EngineDeadError if it has ended.
    """
    if isinstance(engine, int) and not isinstance(engine, bool):
        found = find_engine(engine)
        with found.control() as control:
            described = control.status().engine_args
        if not described:
            raise InvalidRequestError(f"The engine {engine} has only just started; try again.", parameter="engine")
        return found, EngineArgs.from_options(**described)
    owner = getattr(engine, "llm_engine", engine)  # an LLM holds an LLMEngine
    if not hasattr(owner, "running_engine"):
        raise InvalidRequestError(
            f"engine = {type(engine).__name__} must be an AsyncLLM, an LLM, an LLMEngine, or an engine's pid.",
            parameter="engine",
        )
    if owner.errored:
        raise owner.dead_error
    running = owner.running_engine
    if running is None:
        raise InvalidRequestError("This engine lives in its own process only; it cannot be shared.", parameter="engine")
    return running, owner.args
