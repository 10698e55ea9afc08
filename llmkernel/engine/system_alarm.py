"""The system's alarm: it ends this process even if no Python code can run any more."""

import signal

__all__ = ["set_alarm"]


def set_alarm(seconds: float) -> None:
    """End us in that many seconds from now, in place of an alarm set before; 0: never. Nothing on Windows.

    It is the clock of alarm(), which parent_watch leaves to libc.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
