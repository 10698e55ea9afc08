"""Python logging under `llmkernel.*`; nothing is printed unless the application configures a handler."""

import logging

__all__ = ["init_logger"]

logging.getLogger("llmkernel").addHandler(logging.NullHandler())


def init_logger(name: str) -> logging.Logger:
    """The logger of the module `name` (pass `__name__`)."""
    return logging.getLogger(name)
