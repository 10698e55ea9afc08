"""RowFeed: what of one answer a live view has yet to see."""

import time
from typing import TYPE_CHECKING

from llmkernel.llm.outputs import CompletionOutput
from llmkernel.llm.stats import RequestStateStats
from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.token_views import token_view
from llmkernel.notebook.wait_state import WaitState
from llmkernel.notebook.widgets.messages import Counters, TokenView

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.generation_row import GenerationRow

__all__ = ["RowFeed"]

_ENDS = {"abort": "stopped", "error": "failed"}


class RowFeed:
    """Follows answer `index` of `row`. request_id: what stops this answer alone. wait: what kept it from bringing
    tokens when it was counted last, None if nothing did.
    """

    def __init__(self, row: "GenerationRow", index: int) -> None:
        self.row = row
        self.index = index
        self.request_id = f"{index}_{row.request_id}" if len(row.answers) > 1 else row.request_id
        self._text = 0
        self._views = 0
        self._state = ""
        self._first: tuple[float, int] | None = None
        self._ttft: float | None = None
        self.wait: WaitState | None = None

    def new(self) -> tuple[str, list[TokenView]]:
        """Text and tokens since the last call."""
        answer = self._answer()
        if answer is None:
            return "", []
        text = answer.text[self._text :] if len(answer.text) > self._text else ""
        self._text += len(text)
        views = [token_view(entries) for entries in (answer.logprobs or ())[self._views :]]
        self._views += len(views)
        return text, views

    @classmethod
    def of(cls, generation: "Generation") -> list["RowFeed"]:
        """One for every answer, in the order of the prompts."""
        return [cls(row, index) for row in generation.rows for index in range(len(row.answers))]

    @property
    def metrics(self) -> RequestStateStats | None:
        """Times and counts of this answer, once it was sent."""
        answer = self._answer()
        if answer is not None and answer.metrics is not None:
            return answer.metrics
        return next(iter(self.row.slot.llm.stats_of(self.request_id)), None)

    def look(self) -> WaitState | None:
        """What keeps it from bringing tokens now, None if nothing does."""
        state = self._state_of(self._answer())
        if state == "queued":
            return WaitState.of(self.row, self.request_id)
        return WaitState.of_begun(self.row, self.request_id) if state == "decoding" else None

    @property
    def state_changed(self) -> bool:
        return self._state_of(self._answer()) != self._state

    def counters(self) -> Counters:
        """How it stands."""
        answer = self._answer()
        self._state = self._state_of(answer)
        counters = Counters(state=self._state, tokens=len(answer.token_ids) if answer else 0, note="")
        self.wait = self.look()
        if self.wait is not None:
            counters.state = self.wait.state if self._state == "queued" else self._state
            counters.note = self.wait.note
            counters.prompt_tokens, counters.cached_tokens = self.wait.prompt_tokens, self.wait.cached_tokens
        if self.row.error is not None:
            counters.error = " ".join(clean_text(str(self.row.error)).split()) or type(self.row.error).__name__
        if answer is not None and self.row.output is not None:
            self._measure(counters, answer)
            counters.finish_reason = answer.finish_reason
            counters.prompt_tokens = len(self.row.output.prompt_token_ids or ())
            counters.cached_tokens = self.row.output.num_cached_tokens
        return counters

    def _answer(self) -> CompletionOutput | None:
        output = self.row.output
        if output is None:
            return None
        if len(output.outputs) > self.index and output.outputs[self.index].index == self.index:
            return output.outputs[self.index]
        return next((answer for answer in output.outputs if answer.index == self.index), None)

    def _state_of(self, answer: CompletionOutput | None) -> str:
        if self.row.error is not None:
            return "failed"
        if answer is not None and answer.finish_reason is not None:
            return _ENDS.get(answer.finish_reason, "done")
        if self.row.done:
            return "stopped"
        return "decoding" if answer is not None and answer.token_ids else "queued"

    def _measure(self, counters: Counters, answer: CompletionOutput) -> None:
        """The rate is of the time that this view has seen, so that it tells of now."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, len(answer.token_ids)
            self._ttft = answer.metrics.time_to_first_token if answer.metrics is not None else None
        counters.ttft = self._ttft
        since, tokens = self._first
        if answer.finish_reason is None and now - since > 0.2 and len(answer.token_ids) > tokens:
            counters.rate = (len(answer.token_ids) - tokens) / (now - since)
