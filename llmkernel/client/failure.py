"""What is known about an engine's end, and the exceptions that say it: a fresh one for every waiter."""

import dataclasses

from llmkernel.client.hints import describe_exit, hint_for
from llmkernel.errors import EngineDeadError, EngineStartupError
from llmkernel.protocol.handshake import StartupFailed
from llmkernel.protocol.outputs import UtilityFailure

__all__ = ["EngineDeath", "StartupFailure"]

_SHOWN_LINES = 10


@dataclasses.dataclass(frozen=True)
class EngineDeath:
    """Why the engine is not there any more.

    by_owner: it was shut down from this side. restarted: to be started anew. exitcode: as Popen's; None if it is not
    known yet, or the engine is not our process. fault: the exception that ended it, if it said so. shared_owner: pid of
    the engine's owner, where we are only attached to it.
    """

    by_owner: bool = False
    exitcode: int | None = None
    fault: UtilityFailure | None = None
    log_tail: str = ""
    shared_owner: int | None = None
    restarted: bool = False

    def error(self) -> EngineDeadError:
        return EngineDeadError(
            self._message(),
            exitcode=self.exitcode,
            remote_traceback=self.fault.traceback if self.fault else "",
            log_tail=self.log_tail,
        )

    def _message(self) -> str:
        if self.restarted:
            return "The engine was restarted before this was finished; ask again."
        if self.by_owner and self.shared_owner is not None:
            return "It was shut down here; the engine that it shared goes on. Attach again."
        if self.by_owner:
            return "The engine was shut down; load the model again."
        if self.fault is not None:
            hint = hint_for(None, self.fault.type, self.fault.message)
            return _join(f"The engine died of {self.fault.type}: {self.fault.message}", hint, "Load the model again.")
        if self.shared_owner is not None:
            owner = self.shared_owner
            return f"The shared engine has ended (it ends with its owner, process {owner}); load the model again."
        if self.exitcode == 0:
            return "The engine was stopped from outside (llmkernel stop, or SIGTERM); load the model again."
        first = f"The engine died: its process {describe_exit(self.exitcode)}."
        message = _join(first, hint_for(self.exitcode, _last(self.log_tail)), "Load the model again.")
        return message + _quote_log(self.log_tail)


@dataclasses.dataclass(frozen=True)
class StartupFailure:
    """Why the engine did not become ready. stage: the last one that it reported. reported: its own exception.

    attached_to: pid of the engine that we wanted to share. refusal: why it would not have us.
    """

    stage: str = ""
    reported: StartupFailed | None = None
    exitcode: int | None = None
    log_tail: str = ""
    by_owner: bool = False
    attached_to: int | None = None
    refusal: str = ""

    def error(self) -> EngineStartupError:
        reported = self.reported
        return EngineStartupError(
            self._message(),
            remote_type=reported.type if reported else "",
            remote_traceback=reported.traceback if reported else "",
            log_tail=self.log_tail,
        )

    def _message(self) -> str:
        if self.attached_to is not None:
            return self._attach_message()
        if self.by_owner:
            return "The engine was shut down while it was loading; load the model again."
        if self.reported is not None:
            cause = self.reported.message or self.reported.type
            if self.reported.type in _OWN_ERRORS:
                return f"The engine did not start: {cause}"
            return _join(
                f"The engine did not start: {self.reported.type}: {cause}",
                hint_for(None, f"{self.reported.type}: {cause}"),
            )
        where = f" in stage '{self.stage}'" if self.stage else ""
        first = f"The engine did not start: its process {describe_exit(self.exitcode)}{where}."
        return _join(first, hint_for(self.exitcode, _last(self.log_tail))) + _quote_log(self.log_tail)

    def _attach_message(self) -> str:
        first = f"Could not attach to the engine (process {self.attached_to}):"
        if self.by_owner:
            return f"{first} it was given up here; attach again."
        if self.refusal:
            return f"{first} {self.refusal}"
        hint = hint_for(None, _last(self.log_tail)) or "Load the model again."
        return f"{first} it ended before it was ready. {hint}"


_OWN_ERRORS = frozenset({"EngineStartupError", "InvalidRequestError", "LLMKernelError", "UnsupportedFeatureError"})
"""Errors of ours, whose message says already what to change."""


def _join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def _last(log: str) -> str:
    return "\n".join(log.splitlines()[-_SHOWN_LINES:])


def _quote_log(log: str) -> str:
    return f"\nLast lines of its log:\n{_last(log)}" if log.strip() else ""
