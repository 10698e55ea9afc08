"""PauseControl: pausing and resuming the scheduler (engine.md B.13)."""

from concurrent.futures import Future

from llmkernel.engine.request import RequestStatus
from llmkernel.engine.scheduler.admission_gate import PauseState
from llmkernel.engine.scheduler.scheduler import Scheduler
from llmkernel.errors import InvalidRequestError, LLMKernelError

__all__ = ["PauseControl"]

MODES = ("abort", "wait", "keep")


class PauseControl:
    """Owns the promises of pauses that are not complete yet.

    A pause is complete when nothing that it waits for runs, and what that had to say has left the engine: the reply
    follows the last outputs in the same stream.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._promises: list[tuple[Future[None], bool]] = []

    @property
    def is_paused(self) -> bool:
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Let nothing new run. mode "abort": live requests end now; "wait": those that have begun run to their end;
        "keep": all are frozen as they are. clear_cache: forget cached prefixes when the pause is complete; requests
        that were kept are then computed again after `resume`. Returns a Future unless the pause is complete at once.
        """
        if mode not in MODES:
            raise InvalidRequestError(
                f"mode = {mode!r} must be one of {', '.join(MODES)}.", parameter="mode", value=mode
            )
        scheduler = self._scheduler
        scheduler.pause_state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        if mode == "abort":
            scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        if self._is_idle():
            self._complete(clear_cache)
            return None
        promise: Future[None] = Future()
        self._promises.append((promise, clear_cache))
        return promise

    def resume(self) -> None:
        """Schedule again. Pauses that are still waited for end with an error."""
        self._scheduler.pause_state = PauseState.UNPAUSED
        self._fail_promises("The scheduler was resumed before the pause was complete; pause it again.")

    @property
    def has_settled(self) -> bool:
        """There are promises, and they can be kept now."""
        return bool(self._promises) and self._is_idle()

    def settle(self) -> None:
        """Keep the promises that can be kept. Call it when everything said so far has been handed on."""
        if not self.has_settled:
            return
        promises, self._promises = self._promises, []
        for promise, clear_cache in promises:
            self._complete(clear_cache)
            promise.set_result(None)

    def shutdown(self) -> None:
        self._fail_promises("The engine was shut down before the pause was complete.")

    def _is_idle(self) -> bool:
        scheduler = self._scheduler
        if scheduler.outbox:
            return False
        frozen = scheduler.pause_state is PauseState.PAUSED_ALL
        return frozen or not (scheduler.has_begun_requests or scheduler.has_work())

    def _complete(self, clear_cache: bool) -> None:
        if clear_cache:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)

    def _fail_promises(self, message: str) -> None:
        promises, self._promises = self._promises, []
        for promise, _ in promises:
            promise.set_exception(LLMKernelError(message))
