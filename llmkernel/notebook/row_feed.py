"""RowFeed: what of one answer a live view has yet to see."""

import time
from typing import TYPE_CHECKING

from llmkernel.llm.outputs import CompletionOutput
from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.token_views import token_view
from llmkernel.notebook.wait_state import wait_state
from llmkernel.notebook.widgets.messages import Counters, TokenView

if TYPE_CHECKING:
    from llmkernel.notebook.generation_row import GenerationRow

__all__ = ["RowFeed"]

_ENDS = {"abort": "stopped", "error": "failed"}


class RowFeed:
    """Follows answer `index` of `row`. request_id: what stops this answer alone."""

    def __init__(self, row: "GenerationRow", index: int) -> None:
        self.row = row
        self.index = index
        self.request_id = f"{index}_{row.request_id}" if len(row.answers) > 1 else row.request_id
        self._text = 0
        self._views = 0
        self._state = ""
        self._first: tuple[float, int] | None = None
        self._ttft: float | None = None

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

    @property
    def state_changed(self) -> bool:
        return self._state_of(self._answer()) != self._state

    def counters(self) -> Counters:
        """How it stands."""
        answer = self._answer()
        self._state = self._state_of(answer)
        counters = Counters(state=self._state, tokens=len(answer.token_ids) if answer else 0, note="")
        if self._state == "queued":
            counters.state, counters.note = wait_state(self.row)
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
        """Rates by this view's own clock: the metrics of a request with n answers are those of the newest."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, len(answer.token_ids)
            stats = self.row.output.metrics if self.row.output else None
            self._ttft = stats.time_to_first_token if stats is not None else None
        counters.ttft = self._ttft
        since, tokens = self._first
        if answer.finish_reason is None and now - since > 0.2 and len(answer.token_ids) > tokens:
            counters.rate = (len(answer.token_ids) - tokens) / (now - since)
