"""Shows a load in the cell that started it: a bar on a notebook page, else a line that changes in place, or two lines
in a terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmkernel.notebook.cells import is_terminal
from llmkernel.notebook.front_end import shows_widgets
from llmkernel.notebook.load_line import load_line
from llmkernel.notebook.load_output import LoadOutput

if TYPE_CHECKING:
    from llmkernel.notebook.live_views import LiveViews
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["show_load"]


def show_load(shell: Any, slot: "ModelSlot", live: "Callable[[], LiveViews]", *, reason: str = "") -> None:
    """Show the load of `slot` in this cell until it is over. live: where a bar comes from, asked for if the front end
    shows widgets. reason: a word on why it is loaded."""
    if not is_terminal(shell):
        LoadOutput(shell, slot, reason, live if shows_widgets(shell) else None)
        return
    print(f"Loading {slot.name}{reason} ...")  # noqa: T201 - the terminal is the display

    def tell() -> None:
        if slot.state != "loading":
            slot.listeners.remove(tell)
            print(load_line(slot, reason))  # noqa: T201

    slot.listeners.append(tell)
