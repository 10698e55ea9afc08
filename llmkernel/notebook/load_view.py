"""Shows a load in the cell that started it: a line that changes in place, or two lines in a terminal."""

from typing import TYPE_CHECKING, Any

from llmkernel.notebook.cells import is_terminal
from llmkernel.notebook.live_output import LiveOutput
from llmkernel.notebook.load_line import load_line

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["show_load"]


def show_load(shell: Any, slot: "ModelSlot", *, reason: str = "") -> None:
    """Show the load of `slot` in this cell until it is over. reason: a word on why it is loaded."""
    if is_terminal(shell):
        print(f"Loading {slot.name}{reason} ...")  # noqa: T201 - the terminal is the display

        def tell() -> None:
            if slot.state != "loading":
                slot.listeners.remove(tell)
                print(load_line(slot, reason))  # noqa: T201
    else:
        output = LiveOutput(shell, lambda: ({"text/plain": load_line(slot, reason)}, {}))
        output.changed()

        def tell() -> None:
            if slot.state == "loading":
                output.changed()
            else:
                slot.listeners.remove(tell)
                output.finish()

    slot.listeners.append(tell)
