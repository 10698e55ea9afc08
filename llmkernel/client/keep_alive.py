"""KeepAlive: what lets an engine outlive the kernel that owns it, and the next kernel find it (design D3)."""

from collections.abc import Callable
from dataclasses import dataclass

from llmkernel.config import EngineArgs
from llmkernel.errors import InvalidRequestError

__all__ = ["KeepAlive", "check_keep_alive"]


@dataclass(frozen=True)
class KeepAlive:
    """kernel: an identity that a kernel keeps when it is restarted. name: what it calls the model. auto_restart: see
    ModelSlot. restarting: asked when the interpreter ends: whether the kernel will come back.
    """

    kernel: str
    name: str
    auto_restart: bool
    restarting: Callable[[], bool]


def check_keep_alive(args: EngineArgs, keep: KeepAlive | None) -> None:
    """InvalidRequestError where an engine is to be kept alive and nobody would find it again."""
    if args.keep_alive is not None and keep is None:
        raise InvalidRequestError(
            "keep_alive is for %llm load in a Jupyter kernel, which finds its engine again when it is restarted; "
            "leave it out here.",
            parameter="keep_alive",
            value=args.keep_alive,
        )
