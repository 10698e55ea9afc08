"""`%load_ext llmkernel` and `%unload_ext llmkernel`: everything that is hung into IPython, and taken out again."""

from typing import Any

from llmkernel.config import format_bytes
from llmkernel.notebook import awaiting, completion
from llmkernel.notebook.cells import Cells
from llmkernel.notebook.journal import Journal, journal_path
from llmkernel.notebook.kernel_life import KernelLife
from llmkernel.notebook.line_text import QuestionLine
from llmkernel.notebook.magics import LLMMagics
from llmkernel.notebook.notebook_name import notebook_name
from llmkernel.notebook.re_attachment import re_attach
from llmkernel.notebook.session import Session

__all__ = ["load", "unload"]

_MAGICS = ("generate", "chat", "llm")


def load(shell: Any) -> None:
    """Register the magics, the await transformer, completion, and the session behind them."""
    unload(shell)  # what an earlier, perhaps broken, load has left
    cells = Cells(shell)
    life = KernelLife(shell)
    session = Session(cells, journal=Journal(journal_path(), notebook_name(shell)), life=life)
    cells.start()
    life.start(session.give_up_leases)
    shell.register_magics(LLMMagics(shell, session))
    shell.input_transformers_post.append(awaiting.await_our_magics)
    shell.input_transformer_manager.token_transformers.append(QuestionLine)
    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(completion.matcher(session))
    Session.current = session
    re_attach(shell, session, life)


def unload(shell: Any) -> None:
    """End the models and take everything out. By module name: after a reload the functions are other objects."""
    for kind in ("line", "cell"):
        for name in _MAGICS:
            shell.magics_manager.magics[kind].pop(name, None)
    _remove_ours(shell.input_transformers_post, awaiting.__name__)
    _remove_ours(shell.input_transformer_manager.token_transformers, QuestionLine.__module__)
    if shell.Completer is not None:
        _remove_ours(shell.Completer.custom_matchers, completion.__name__)
    magics = shell.magics_manager.registry.pop(LLMMagics.__name__, None)
    if magics is None:
        return
    magics.close_views()
    session: Session = magics.session
    if session.cells is not None:
        session.cells.stop()
    if session.life is not None:
        session.life.stop()
    for name, given_back in session.close().items():
        print(f"Unloaded {name}: {format_bytes(given_back)} given back.")  # noqa: T201 - the cell's output
    if type(session).current is session:
        type(session).current = None


def _remove_ours(functions: list[Any], module: str) -> None:
    functions[:] = [function for function in functions if getattr(function, "__module__", "") != module]
