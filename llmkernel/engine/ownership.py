"""Ownership: whose engine this is, and how long it stays when it is nobody's (keep_alive, design D3)."""

import time

from llmkernel.config import LONGEST_LEASE
from llmkernel.engine.system_alarm import set_alarm

__all__ = ["STARTER", "Ownership"]

STARTER = 0
"""client_index of the process that started the engine; nobody who attaches has it."""

ALARM_GRACE = 5
"""Seconds after the end of a lease in which the engine may leave by itself."""


class Ownership:
    """The owner, and the lease that runs while there is none. Belongs to the control thread.

    pid: of the owner, or of the last one. client_index: its place. keep_alive: seconds of a lease, by a clock that
    nobody sets; None for an engine that ends with its owner, as its own guards see to it.

    The system's alarm stands behind a lease that runs: it ends the process even if no Python code can run any more.
    """

    def __init__(self, pid: int, keep_alive: float | None = None) -> None:
        self.pid = pid
        self.client_index = STARTER
        self.keep_alive = keep_alive
        self._expires: float | None = None

    @property
    def vacant(self) -> bool:
        """The owner is gone, and a lease runs."""
        return self._expires is not None

    @property
    def lease_left(self) -> float | None:
        """Seconds until the lease is over, 0 then; None while there is an owner."""
        return None if self._expires is None else max(0.0, self._expires - time.monotonic())

    def begin_lease(self) -> None:
        """The owner is gone."""
        assert self.keep_alive is not None
        self._expires = time.monotonic() + self.keep_alive
        set_alarm(self.keep_alive + ALARM_GRACE)

    def take(self, client_index: int, pid: int) -> None:
        """There is an owner again."""
        self.client_index, self.pid = client_index, pid
        self._expires = None
        set_alarm(0)

    def check_vacant(self) -> None:
        """ValueError, with the reason, where nobody can become the owner."""
        self._check_kept()
        if not self.vacant:
            raise ValueError(f"It has an owner, process {self.pid}.")

    def change_lease(self, seconds: float) -> None:
        """Its length from now on, also of one that runs. ValueError where there is none, or for no such length."""
        self._check_kept()
        if not 0 <= seconds <= LONGEST_LEASE:
            raise ValueError(f"seconds = {seconds} must be from 0 to {LONGEST_LEASE}.")
        self.keep_alive = seconds
        if self.vacant:
            self.begin_lease()

    def _check_kept(self) -> None:
        if self.keep_alive is None:
            raise ValueError("This engine is not kept alive; it ends with its owner.")
