"""The error families of llmkernel.

Four families, by what the reader can do about them: the request is wrong (change it), this request failed (others
go on), the engine did not start (the cause is in the message), the engine is dead (load it again).
"""

import itertools
import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "EngineDeadError",
    "EngineStartupError",
    "GenerationInterrupted",
    "InvalidRequestError",
    "LLMKernelError",
    "RequestFailedError",
    "UnsupportedFeatureError",
    "UtilityCallError",
    "WrongLoopError",
]


_HERE = str(Path(__file__).parent)


class LLMKernelError(Exception):
    """Base of every error that llmkernel raises on purpose.

    In a notebook it is shown as its message and the caller's line: a traceback through our code would bury them.
    """

    def _render_traceback_(self) -> list[str]:
        """IPython's protocol: the lines to show in place of the traceback."""
        lines = [f"{type(self).__name__}: {self}"]
        calls = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(self.__traceback__)]
        outside = list(itertools.takewhile(lambda call: not call[0].startswith(_HERE), calls))
        if outside:
            file, number = outside[-1]
            where = f"{Path(file).name}, line" if Path(file).is_file() else "line"  # a cell is no file
            lines.append(f"  {where} {number}: {linecache.getline(file, number).strip()}")
        return lines


class InvalidRequestError(LLMKernelError, ValueError):
    """The request, an option or a setting is wrong; nothing was sent.

    `parameter` names the field and `value` holds what was given, where there is one (vLLM: VLLMValidationError).
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class UnsupportedFeatureError(InvalidRequestError, NotImplementedError):
    """A parameter of vLLM's that exists here and is refused by name, until it is built."""


class RequestFailedError(LLMKernelError, RuntimeError):
    """One request failed in the engine; its neighbours go on.

    `request_id` names it. `partial` holds what had been generated, where there is something (a RequestOutput).
    """

    def __init__(self, message: str, *, request_id: str | None = None, partial: object = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.partial = partial


class UtilityCallError(RequestFailedError):
    """A utility call raised in the engine. `remote_type` and `remote_traceback` are the engine's, as text."""

    def __init__(self, message: str, *, remote_type: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class EngineStartupError(LLMKernelError, RuntimeError):
    """The engine process did not become ready.

    The message is the cause in a line or two, with a hint. `remote_type` is the class name of the child's exception
    ("" if it died without one), `remote_traceback` its traceback, `log_tail` the last lines of its log.
    """

    def __init__(self, message: str, *, remote_type: str = "", remote_traceback: str = "", log_tail: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback
        self.log_tail = log_tail


class EngineDeadError(LLMKernelError, RuntimeError):
    """The engine process is gone (or was shut down). `exitcode` is its exit code, negative for a signal (as Popen's).

    `partial` holds what the request that raises this had generated (a RequestOutput), where there is something.
    """

    def __init__(
        self,
        message: str = "The engine is not running; load the model again.",
        *,
        exitcode: int | None = None,
        remote_traceback: str = "",
        log_tail: str = "",
        partial: object = None,
    ) -> None:
        super().__init__(message)
        self.exitcode = exitcode
        self.remote_traceback = remote_traceback
        self.log_tail = log_tail
        self.partial = partial


class GenerationInterrupted(KeyboardInterrupt):
    """A blocking call was interrupted; its own requests were aborted, the engine goes on.

    `partial`: the RequestOutputs of the call in the order of its prompts, finished or not; None where nothing came.
    """

    def __init__(self, message: str = "Generation interrupted.", *, partial: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.partial = list(partial)


class WrongLoopError(InvalidRequestError, RuntimeError):
    """An async object was used from an event loop that is not its own."""
