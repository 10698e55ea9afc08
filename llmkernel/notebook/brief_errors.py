"""An error of ours is one line in a notebook: what happened and what to change. Its type stays what it is."""

from typing import TypeVar

from llmkernel.errors import LLMKernelError
from llmkernel.notebook.plain_text import clean_text

__all__ = ["brief"]

Raised = TypeVar("Raised", bound=BaseException)


def brief(error: Raised) -> Raised:
    """`error`, which IPython then shows without a traceback if it is one of ours or an interrupt."""
    if isinstance(error, LLMKernelError | KeyboardInterrupt) and "_render_traceback_" not in vars(error):
        name = "KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        setattr(error, "_render_traceback_", lambda: [f"{name}: {clean_text(str(error))}"])  # noqa: B010 - IPython's protocol
    return error
