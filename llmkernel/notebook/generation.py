"""Generation: the handle of what a cell asked for: one request or many, growing, then done."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from llmkernel.errors import InvalidRequestError
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.notebook.answer_records import answer_frame, answer_records
from llmkernel.notebook.brief_errors import brief
from llmkernel.notebook.card import Card, make_card
from llmkernel.notebook.cells import Cells, interruptible, is_terminal
from llmkernel.notebook.final_bundle import final_bundle
from llmkernel.notebook.generation_metrics import GenerationMetrics
from llmkernel.notebook.generation_row import GenerationRow
from llmkernel.notebook.model_slot import ModelSlot
from llmkernel.notebook.prompts import Prompt
from llmkernel.notebook.structured import parsed_answer
from llmkernel.notebook.text_delta import TextDelta
from llmkernel.notebook.token_records import token_records

__all__ = ["AnswerView", "Generation"]

_WAIT_FOR_CANCELLED = 0.3


class AnswerView(Protocol):
    """What shows a generation while it grows."""

    def changed(self) -> None:
        """There is more text."""

    def finish(self) -> None:
        """Everything has ended."""


class Generation:
    """What `%%generate` gives back. The requests run already; nothing has to be awaited for them to go on.

    `await it` (the value is itself), or `async for text in it`. id: what `%llm ps`, `stop` and `show` call it. cell:
    the execution count of its cell, 0 outside a notebook. rows: one per prompt. Cancelling whoever awaits it aborts its
    requests and keeps the text so far. A single request that fails raises when it is awaited; of many, a failure stands
    in `errors`, and raises only when all have failed. on_end: called with it when everything has ended.
    """

    def __init__(
        self,
        id: str,
        slots: Sequence[ModelSlot],
        prompts: Sequence[Prompt],
        options: Mapping[str, Any],
        *,
        cells: Cells | None = None,
        view: Callable[["Generation"], AnswerView | None] | None = None,
    ) -> None:
        """`slots`: the models, each is asked every prompt. `options`: merged settings. `cells`: the shell's, if a cell
        asked. `view`: makes what shows it.
        """
        self.id = id
        self.cell = cells.count if cells is not None else 0
        self.model = ", ".join(slot.name for slot in slots)
        self.options = dict(options)
        self.notes: list[str] = []
        pairs = [(slot, prompt) for prompt in prompts for slot in slots]
        self.rows = [
            GenerationRow(f"{id}.{number}" if len(pairs) > 1 else id, slot, prompt, self.options)
            for number, (slot, prompt) in enumerate(pairs, 1)
        ]
        self.slots = list(slots)
        self._cells = cells
        self._cell_serial = -1
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Task[None] | None = None
        self._growth = asyncio.Event()
        self._cancelled = False
        self._waiters = 0
        self.on_end: list[Callable[[Generation], None]] = []
        self.resubmit: Callable[[Generation], Generation] | None = None
        self.open_view: Callable[[Generation], bool] | None = None
        self.view = view(self) if view is not None else None
        if _loop_runs():  # else it starts when it is awaited
            self._start()

    @property
    def text(self) -> str:
        """Text of the first answer so far."""
        return self.rows[0].answers[0].text

    @property
    def texts(self) -> list[str]:
        """Text of every answer, in the order of the prompts."""
        return [output.text for output in self.outputs]

    @property
    def outputs(self) -> list[CompletionOutput]:
        """Every answer, in the order of the prompts; n of them for each, empty where nothing has come."""
        return [answer for row in self.rows for answer in row.answers]

    @property
    def parsed(self) -> Any:
        """The first answer as data, where --json-schema or the like asked for a form; None until it is whole."""
        return self.parsed_all[0]

    @property
    def parsed_all(self) -> list[Any]:
        """Every answer as data, in the order of `outputs`; None for those that are not whole."""
        return [
            parsed_answer(self.options, answer.text) if answer.finish_reason == "stop" else None
            for answer in self.outputs
        ]

    @property
    def requests(self) -> list[RequestOutput | None]:
        """The RequestOutput of each prompt so far."""
        return [row.output for row in self.rows]

    @property
    def errors(self) -> list[Exception | None]:
        """Why the request of each prompt failed, None where it did not."""
        return [row.error for row in self.rows]

    @property
    def prompt(self) -> str | None:
        """The first prompt as the model saw it; None until it is known."""
        return self.rows[0].output.prompt if self.rows[0].output else None

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return self.rows[0].output.prompt_token_ids if self.rows[0].output else None

    @property
    def metrics(self) -> GenerationMetrics:
        return GenerationMetrics.of(self.requests)

    @property
    def done(self) -> bool:
        """Nothing will come any more."""
        return all(row.done for row in self.rows)

    @property
    def state(self) -> str:
        """ "waiting", "running", "done", "cancelled" or "failed"."""
        if not self.done:
            return "running" if any(row.output for row in self.rows) else "waiting"
        if any(row.error for row in self.rows):
            return "failed"
        stopped = all(answer.finish_reason == "abort" for answer in self.outputs)
        return "cancelled" if self._cancelled or stopped else "done"

    @property
    def raises(self) -> bool:
        """Whether its failure is about to be raised in somebody who awaits it."""
        return self._waiters > 0 and self._failure() is not None

    @property
    def shown_here(self) -> bool:
        """Whether the cell that runs now is the one that shows it already, or was told to be quiet."""
        shows = self.view is not None or self.options.get("quiet", False)
        return shows and self._cells is not None and self._cells.serial == self._cell_serial

    @property
    def waits_for_load(self) -> bool:
        return any(not row.done and row.slot.loading for row in self.rows)

    def cancel(self, slot: ModelSlot | None = None) -> None:
        """Abort what still runs (at `slot` only, if one is given); the text so far stays. Call it on the loop."""
        running = [row for row in self.rows if not row.done and slot in (None, row.slot)]
        if not running:
            return
        self._cancelled = self._cancelled or slot is None
        for each in self.slots:
            if not each.loading and each.facts is not None:
                each.llm.abort_soon([row.request_id for row in running if row.slot is each])
        for row in running:
            row.abort()
            if row.request_id in self._tasks:
                self._tasks[row.request_id].cancel()
        self._changed()
        if not self._tasks and self.view is not None:
            self.view.finish()

    def fail_at(self, slot: ModelSlot, error: Exception) -> None:
        """End what still runs at `slot` with `error`; the text so far stays. Call it on the loop."""
        for row in self.rows:
            if row.slot is slot and not row.done:
                row.fail(error)
                if row.request_id in self._tasks:
                    self._tasks[row.request_id].cancel()
        self._changed()

    def stop_unsent(self, ids: Sequence[str]) -> None:
        """End those of these requests that have brought nothing yet, sent or not. Call it on the loop."""
        for row in self.rows:
            if row.request_id in ids and row.output is None and not row.done:
                row.abort()
                if row.request_id in self._tasks:
                    self._tasks[row.request_id].cancel()
        self._changed()

    def card(self) -> Card:
        """What one needs to know to get these answers again: prompt, ids, parameters, seed, weights, versions."""
        return make_card(self)

    def rerun(self) -> "Generation":
        """Ask the same again: the ids, parameters and seeds that were sent, of the models of the same names.

        On the same weights, versions and arithmetic the tokens are the same (in float32; see the card).
        """
        if self.resubmit is None:
            raise brief(InvalidRequestError("This generation belongs to no session any more; ask anew."))
        return self.resubmit(self)

    def sent_prompts(self) -> list[Prompt]:
        """The prompts as they were sent, those that were not as they were given; InvalidRequestError if none was."""
        if all(row.sent is None for row in self.rows):
            raise brief(InvalidRequestError(f"{self.id} brought nothing to run again; ask anew.", parameter="prompt"))
        prompts = []
        for first in range(0, len(self.rows), len(self.slots)):
            rows = self.rows[first : first + len(self.slots)]
            sent = {row.slot.name: row.sent for row in rows if row.sent is not None}
            again = sent if len(sent) == len(rows) else None
            prompts.append(dataclasses.replace(rows[0].prompt, again=again))
        return prompts

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict per answer: see `answer_records`."""
        return answer_records(self)

    def tokens(self) -> list[dict[str, Any]]:
        """A dict per token with what else stood to choose, where --logprobs was asked for: see `token_records`."""
        return token_records(self)

    def to_frame(self) -> Any:
        """The same as a pandas DataFrame, where pandas is installed."""
        return answer_frame(self)

    def show(self, *, view: bool = False) -> None:
        """Display the answer, wherever this is called. view: as the live view, with its switches and tokens, on a page
        that draws it; a view is not stored with the notebook."""
        if view and self.open_view is not None and self.open_view(self):
            return
        from IPython.display import publish_display_data  # lazy: a script has no use for it

        nothing_yet = not self.done and not any(self.texts)
        data, metadata = ({"text/plain": repr(self)}, {}) if nothing_yet else final_bundle(self)
        publish_display_data(data, metadata)

    def __await__(self) -> Generator[Any, None, "Generation"]:
        return self._wait().__await__()

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """New text of any answer as it comes, from the beginning."""
        told: dict[tuple[int, int], int] = {}
        self._start()
        while True:
            growth, finished = self._growth, self.done
            for number, row in enumerate(self.rows):
                for answer in row.answers:
                    start = told.get((number, answer.index), 0)
                    if len(answer.text) > start:
                        told[number, answer.index] = len(answer.text)
                        yield TextDelta.of(answer.text[start:], number, answer.index)
            if finished:
                break
            if growth is self._growth:
                await interruptible(self._cells, growth.wait(), self._give_up)
        await self._wait()

    async def _wait(self) -> "Generation":
        ended = self._start()
        self._waiters += 1
        try:
            await interruptible(self._cells, asyncio.shield(ended), self._give_up)
        finally:
            self._waiters -= 1
        if (error := self._failure()) is not None:
            raise brief(error) from None
        return self

    async def _give_up(self) -> str:
        """Abort our requests; what to say."""
        loading = self.waits_for_load
        self.cancel()
        if self._tasks:  # in a terminal the loop stands still after the cell: let the aborts leave now
            await asyncio.wait(self._tasks.values(), timeout=_WAIT_FOR_CANCELLED)
        if self._cells is not None and self._cells.interrupted:
            self._cells.keep(self)
        if loading:
            return f"this cell stopped waiting; the load of {self.model} goes on (%llm unload {self.model} ends it)."
        return "generation interrupted; partial text kept in `_`." if self.text else "generation interrupted."

    def _failure(self) -> Exception | None:
        errors = [error for error in self.errors if error is not None]
        if len(errors) < len(self.rows):
            return None
        return errors[0]

    def _start(self) -> "asyncio.Task[None]":
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._cell_serial = self._cells.serial if self._cells is not None else -1
            self._tasks = {
                row.request_id: loop.create_task(self._run(row), name=f"llmkernel-req-{row.request_id}")
                for row in self.rows
                if not row.done
            }
            self._ended = loop.create_task(self._end(), name=f"llmkernel-{self.id}")
        return self._ended

    async def _run(self, row: GenerationRow) -> None:
        try:
            llm = await row.slot.ready()
            async for output in row.stream(llm, self.notes):
                row.take(output)
                self._changed()
        except asyncio.CancelledError:
            row.abort()
            raise
        except Exception as error:  # noqa: BLE001 - kept by the row, raised by the handle; its neighbours go on
            row.fail(error)
        finally:
            self._changed()

    async def _end(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks.values())
            self._tasks.clear()  # a notebook keeps every handle, and a task keeps its context
        for tell in self.on_end:
            tell(self)
        if self.view is not None:
            self.view.finish()

    def _changed(self) -> None:
        self._growth.set()
        self._growth = asyncio.Event()
        if self.view is not None and not self.done:
            self.view.changed()

    def __repr__(self) -> str:
        many = f"{len(self.outputs)} answers, " if len(self.outputs) > 1 else ""
        return f"<Generation {self.id}: {self.model}, {self.state}, {many}{self.metrics.generation_tokens} tokens>"

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, Any], dict[str, Any]]:
        return final_bundle(self)

    def _ipython_display_(self) -> None:
        """As the value of a cell: nothing in the cell that shows it already, the answer in any other."""
        if not self.shown_here:
            self.show(view=not self.done)
        elif self._cells is not None and is_terminal(self._cells.shell):
            print(repr(self))  # noqa: T201 - the terminal has written "Out[n]: " already


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
