"""A restarted kernel takes up the engines that its predecessor has left (keep_alive)."""

import asyncio
from typing import TYPE_CHECKING, Any

from llmkernel.errors import LLMKernelError
from llmkernel.notebook.kernel_life import KernelLife
from llmkernel.notebook.live_output import LiveOutput
from llmkernel.notebook.load_line import load_line
from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.session import Session

if TYPE_CHECKING:
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["re_attach"]


def re_attach(shell: Any, session: Session, life: KernelLife) -> None:
    """Make the engines that were kept alive for this kernel those of `session`, and show it in the cell.

    Where the kernel's loop does not turn yet (IPython's configuration loads the extension), with the first cell.
    """
    if not life.identity:
        return

    def at_first_cell(_info: Any) -> None:
        shell.events.unregister("pre_run_cell", at_first_cell)
        _adopt(shell, session, life)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        shell.events.register("pre_run_cell", at_first_cell)
    else:
        _adopt(shell, session, life)


def _adopt(shell: Any, session: Session, life: KernelLife) -> None:
    from llmkernel.client.kept_engines import kept_engines  # lazy: %load_ext need not wait for the wire's messages

    for kept in kept_engines(life.identity):
        keep = life.keep(kept.card.name, auto_restart=kept.card.auto_restart)
        assert keep is not None  # it has an identity
        try:
            slot = session.adopt(kept, keep)
        except LLMKernelError as error:
            print(f"{keep.name} was kept alive, and cannot be re-attached: {clean_text(str(error))}")  # noqa: T201
        else:
            _show(shell, slot)


def _show(shell: Any, slot: "ModelSlot") -> None:
    """In this cell, at once and when it is over."""
    output = LiveOutput(shell, lambda: ({"text/plain": load_line(slot)}, {}))
    output.finish()

    def tell() -> None:
        if slot.state != "loading":
            slot.listeners.remove(tell)
            output.finish()

    slot.listeners.append(tell)
