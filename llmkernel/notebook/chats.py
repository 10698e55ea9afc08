"""Chats: the conversations of a session, one per model, and the way from a question to the next turn."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.brief_errors import brief
from llmkernel.notebook.conversation import Cell, Conversation
from llmkernel.notebook.prompts import Prompt
from llmkernel.notebook.settings import completed

if TYPE_CHECKING:
    from llmkernel.notebook.generation import AnswerView, Generation
    from llmkernel.notebook.session import Session

__all__ = ["Chats"]

_SCRIPT = Cell("", 0)


class Chats:
    """conversations: by the model's name; one outlives the unloading of its model."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.conversations: dict[str, Conversation] = {}

    def conversation(self, model: str | None = None) -> Conversation:
        """The one with `model`, or with the default model; InvalidRequestError if there was none yet."""
        name = model or self._session.default or next(reversed(self.conversations), None)
        found = self.conversations.get(name) if name is not None else None
        if found is None:
            who = f" with {name}" if name is not None else ""
            known = f" (there is one with {', '.join(self.conversations)})" if self.conversations else ""
            raise brief(InvalidRequestError(f"There was no chat{who} yet{known}; %%chat begins one."))
        return found

    def ask(
        self,
        question: str,
        options: Mapping[str, Any],
        view: "Callable[[Generation], AnswerView | None] | None" = None,
        cell: Cell = _SCRIPT,
    ) -> "Generation":
        """Go on with a question; `options`: merged settings. A system message, once given, stays."""
        if not question:
            raise brief(InvalidRequestError("The question is empty; write one.", parameter="prompt"))
        options = self._checked(options)
        slot = self._session.slot_or_default(options.get("model"))
        conversation = self.conversations.setdefault(slot.name, Conversation(slot.name))
        replaced = conversation.make_room(cell)
        conversation.system = options.get("system", conversation.system)
        said = conversation.turns()
        generation = self._session.submit(
            Prompt(question, before=tuple(said)),
            {**options, "model": slot.name, "system": conversation.system},
            view,
        )
        conversation.add(question, generation, cell)
        if replaced:
            more = f" and the {replaced - 1} after it" if replaced > 1 else ""
            generation.notes.append(f"This is turn {len(said) // 2 + 1} again; it replaces the earlier one{more}.")
        return generation

    def _checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of one turn: mistakes are told before anything is taken back or loaded."""
        names = options.get("model") or []
        names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
        if len(names) > 1:
            raise brief(InvalidRequestError("A chat goes on with one model; name one.", parameter="model"))
        return completed({**options, "n": 1, "raw": False, "model": names[0] if names else None})
