"""Tasks that serve a loop for as long as it turns."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

__all__ = ["background_task"]


def background_task(coroutine: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
    """A task on the running loop that belongs to no one's cell: its context is empty.

    A loop that is closed over it, without cancelling what runs there, is no reason for asyncio to complain.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # what asyncio.gather does for its own
    return task
