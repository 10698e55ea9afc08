"""LoadSteps: what a bar shows of a load: its stages, which of them runs, how much of that is done."""

import time
from typing import TYPE_CHECKING

from llmkernel.notebook.load_line import load_line, stage_line
from llmkernel.notebook.widgets.messages import LoadState
from llmkernel.protocol.handshake import STAGES

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["LoadSteps"]

_STARTING, *_LOADING, _READY = STAGES
_NAMES = {_STARTING: "process"}
_NOT_ALWAYS = ("download", "convert")


class LoadSteps:
    """Follows the load of `slot`; call `take` at every step. A stage that is over stays over."""

    def __init__(self, slot: "ModelSlot", reason: str) -> None:
        self._slot = slot
        self._reason = reason
        self._seen: set[str] = set()
        self._newest = 0
        self.take()

    def take(self) -> None:
        """The slot has news."""
        progress = self._slot.progress
        if progress is not None and progress.stage in _LOADING:
            self._seen.add(progress.stage)
            self._newest = max(self._newest, STAGES.index(progress.stage))

    def state(self) -> LoadState:
        """How it stands."""
        slot = self._slot
        state = LoadState(slot.name, f"Loading {slot.name}{self._reason}", slot.state, "")
        if slot.state != "loading":
            state.words = load_line(slot, self._reason)
            return state
        progress = slot.progress
        stages = [stage for stage in STAGES if stage != _READY and (stage in self._seen or stage not in _NOT_ALWAYS)]
        state.words = stage_line(progress)
        state.stages = [_NAMES.get(stage, stage) for stage in stages]
        state.at = stages.index(STAGES[self._newest])
        if progress is not None and progress.total and progress.stage == STAGES[self._newest]:
            state.share = round(progress.done / progress.total, 3)
        state.seconds = round(time.monotonic() - slot.load_began, 1)
        return state
