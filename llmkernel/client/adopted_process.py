"""AdoptedProcess: the process of an engine that was kept alive and is ours now, though we did not start it."""

import contextlib
import os

from llmkernel.client.attached_process import AttachedProcess
from llmkernel.client.attachment import Attachment
from llmkernel.errors import EngineDeadError, InvalidRequestError

__all__ = ["AdoptedProcess"]


class AdoptedProcess(AttachedProcess):
    """As AttachedProcess, and `shutdown` ends the process once the attachment has made it ours.

    The system tells its exit code to nobody but its parent, so there is none.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._owner_pid = os.getpid()
        super().__init__(attachment.engine.pid, attachment.engine.log_path)

    def shutdown(self, timeout: float = 5.0) -> int:
        """Ask the process to leave, then SIGTERM, then SIGKILL. Idempotent. Returns the bytes of memory it held."""
        if os.getpid() != self._owner_pid:
            return 0
        held = 0
        if self._attachment.owns and not self.exited:
            held = self.memory()
            self._end(self._ask_to_leave, self._handle.terminate, self._handle.kill, timeout)
        super().shutdown()
        return held

    def _ask_to_leave(self, timeout: float) -> None:
        with contextlib.suppress(EngineDeadError, InvalidRequestError), self._attachment.engine.control() as control:
            control.shutdown(timeout)
