"""ThreadGovernor: how many torch threads each step runs with, so that other programs on the machine cost little.

Two threads on a core and a half are slower than one on one core: every parallel operation waits for the one that does
not run. Figures: spec cpu.md section 5, `python -m benchmarks.busy_machine`. The other half of it is GOMP_SPINCOUNT in
the engine's environment (client/environment.py), which keeps a wrong guess cheap until it is mended.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from llmkernel.engine.worker.cpu_share import CpuShare
from llmkernel.engine.worker.load_rule import LoadRule
from llmkernel.engine.worker.other_load import OtherLoad, find_counter
from llmkernel.engine.worker.step_time_rule import StepTimeRule

__all__ = ["ThreadGovernor", "ThreadRule", "thread_rules"]


class ThreadRule(Protocol):
    """One reason to use fewer threads than there are."""

    def threads(self, now: float) -> int:
        """For the step that begins at `now` (time.monotonic())."""
        ...

    def took(self, threads: int, tokens: int, seconds: float) -> None:
        """The step ran with `threads`, of `tokens` tokens, in so many seconds."""
        ...


def thread_rules(share: CpuShare, root: Path = Path("/")) -> list[ThreadRule]:
    """/proc/stat where it speaks of our processors; a cgroup's account beside step times; else step times alone."""
    rules: list[ThreadRule] = []
    counter = find_counter(share, root)
    if counter is not None:
        rules.append(LoadRule(share, OtherLoad(counter), time.monotonic()))
    if counter is None or share.group is not None:  # neighbours outside of the group are not in its account
        rules.append(StepTimeRule(share.most_threads))
    return rules


class ThreadGovernor:
    """Sets the number of threads before each step: the least that a rule says. Without rules it stays `most`.

    set_threads: torch.set_num_threads, called in the thread that steps, the only one with a pool of OpenMP's.
    """

    def __init__(self, most: int, rules: Sequence[ThreadRule], set_threads: Callable[[int], None]) -> None:
        self.num_threads = most
        self._most = most
        self._rules = rules
        self._set_threads = set_threads
        self._began = 0.0

    def begin_step(self) -> None:
        """Before a step."""
        if not self._rules:
            return
        self._began = time.monotonic()
        wanted = min(self._most, *(rule.threads(self._began) for rule in self._rules))
        if wanted != self.num_threads:
            self._set_threads(wanted)
            self.num_threads = wanted

    def end_step(self, tokens: int) -> None:
        """After it; it computed `tokens` tokens."""
        if self._rules:
            seconds = time.monotonic() - self._began
            for rule in self._rules:
                rule.took(self.num_threads, tokens, seconds)
