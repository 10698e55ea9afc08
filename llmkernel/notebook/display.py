"""What shows a generation in a cell: growing in place, printed in a terminal, or once at the end if captured."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.displaypub import CapturingDisplayPublisher

from llmkernel.notebook.cells import is_terminal
from llmkernel.notebook.final_bundle import final_bundle, live_data
from llmkernel.notebook.front_end import shows_widgets
from llmkernel.notebook.live_output import LiveOutput
from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.remarks import print_remarks

if TYPE_CHECKING:
    from llmkernel.notebook.generation import AnswerView, Generation
    from llmkernel.notebook.live_views import LiveViews

__all__ = ["CapturedView", "GrowingView", "TerminalView", "answer_view"]

_PATIENCE = 0.5


def answer_view(
    shell: Any, generation: "Generation", *, patient: bool = True, live: "Callable[[], LiveViews] | None" = None
) -> "AnswerView | None":
    """The view that suits the shell and the options; None for --quiet, and for --background in a terminal.

    patient: say so when the first token takes its time; False where the cell shows a load anyway. live: where live
    views come from, asked for if the front end shows widgets.
    """
    if generation.options.get("quiet"):
        return None
    if isinstance(shell.display_pub, CapturingDisplayPublisher):
        return CapturedView(generation)
    if is_terminal(shell):
        return None if generation.options.get("background") else TerminalView(generation)
    if live is not None and _loop_runs() and shows_widgets(shell):
        return live().open(shell, generation, after_load=not patient)
    return GrowingView(shell, generation, patient=patient)


class GrowingView:
    """One output that grows; at the end it holds the final bundle."""

    def __init__(self, shell: Any, generation: "Generation", *, patient: bool = True) -> None:
        self._generation = generation
        self._output = LiveOutput(shell, self._render)
        self._finished = False
        self._patience: asyncio.TimerHandle | None = None
        if not patient:
            return
        with contextlib.suppress(RuntimeError):  # no loop runs here: nothing grows before it is awaited
            self._patience = asyncio.get_running_loop().call_later(_PATIENCE, self._output.changed)

    def changed(self) -> None:
        if self._generation.metrics.generation_tokens:
            self._stop_patience()
            self._output.changed()

    def finish(self) -> None:
        self._stop_patience()
        self._finished = True
        if self._output.shown or not self._generation.raises or any(self._generation.texts):
            self._output.finish()
        print_remarks(self._generation)

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _render(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._finished:
            return final_bundle(self._generation)
        if any(self._generation.texts):
            return live_data(self._generation), {}
        what = f"{self._generation.model} to load" if self._generation.waits_for_load else "the first token"
        return {"text/plain": f"waiting for {what} …"}, {}


class CapturedView:
    """Under %%capture every update would be kept: the final bundle alone."""

    def __init__(self, generation: "Generation") -> None:
        self._generation = generation

    def changed(self) -> None:
        """Nothing to show yet."""

    def finish(self) -> None:
        if not self._generation.raises or any(self._generation.texts):
            self._generation.show()
        print_remarks(self._generation)


class TerminalView:
    """Prints a single answer as it comes; several, one after the other at the end."""

    def __init__(self, generation: "Generation") -> None:
        self._generation = generation
        self._printed = 0
        self._single = len(generation.rows) == 1 and generation.options.get("n", 1) == 1

    def changed(self) -> None:
        if not self._single:
            return
        text = clean_text(self._generation.text.removesuffix("\r"))
        print(text[self._printed :], end="", flush=True)  # noqa: T201 - the terminal is the display
        self._printed = max(self._printed, len(text))

    def finish(self) -> None:
        if self._single:
            self.changed()
            print(flush=True)  # noqa: T201
        else:
            print(final_bundle(self._generation)[0]["text/plain"])  # noqa: T201
        print_remarks(self._generation)


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
