"""Conversation: the turns of a chat with one model, each a question and the Generation that answers it."""

import dataclasses
from typing import TYPE_CHECKING, Any

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.brief_errors import brief
from llmkernel.notebook.markdown_safety import safe_markdown
from llmkernel.notebook.plain_text import clean_text

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation

__all__ = ["Cell", "Conversation"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Where a turn was asked: the notebook's id of the cell, "" where there is none, and which execution it was."""

    id: str
    serial: int


@dataclasses.dataclass
class _Turn:
    question: str
    generation: "Generation"
    cell: Cell

    @property
    def answer(self) -> str:
        return self.generation.text

    @property
    def holds(self) -> bool:
        """Whether it is part of what was said: an answer that was stopped is, one that failed or never began is not."""
        failed = any(error is not None for error in self.generation.errors)
        return not self.generation.done or (bool(self.answer) and not failed)


class Conversation:
    """What `%%chat` goes on with. model: name of the model. system: the system message, "" = none.

    A turn whose answer was stopped or interrupted stays, with the text so far; one whose answer failed, or was stopped
    before its first token, is dropped with its question. When a notebook's cell is run again, its turn and all later
    ones are replaced.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.system = ""
        self._turns: list[_Turn] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that was said, as a chat template takes it."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return start + self.turns()

    def turns(self) -> list[dict[str, str]]:
        """The same without the system message."""
        self._drop_what_came_to_nothing()
        said = []
        for turn in self._turns:
            said.append({"role": "user", "content": turn.question})
            said.append({"role": "assistant", "content": turn.answer})
        return said

    def make_room(self, cell: Cell) -> int:
        """Get ready for a turn that this cell asks; the number of turns that it replaces.

        InvalidRequestError while the last turn is still being answered.
        """
        self._drop_what_came_to_nothing()
        reruns = (at for at, turn in enumerate(self._turns) if _is_rerun(turn.cell, cell))
        replaced = self.undo(len(self._turns) - first) if (first := next(reruns, None)) is not None else 0
        if self._turns and not self._turns[-1].generation.done:
            raise brief(
                InvalidRequestError("The last turn is still being answered; wait for it, or end it with %llm stop.")
            )
        return replaced

    def add(self, question: str, generation: "Generation", cell: Cell) -> None:
        self._turns.append(_Turn(question, generation, cell))

    def undo(self, count: int = 1) -> int:
        """Take back the last turns, question and answer; how many there were to take. Ends those that still run."""
        self._drop_what_came_to_nothing()
        gone = self._turns[max(0, len(self._turns) - count) :]
        del self._turns[len(self._turns) - len(gone) :]
        for turn in gone:
            turn.generation.cancel()
        return len(gone)

    def reset(self) -> int:
        """Take back everything, the system message included; how many turns there were."""
        self.system = ""
        return self.undo(len(self._turns))

    def _drop_what_came_to_nothing(self) -> None:
        self._turns = [turn for turn in self._turns if turn.holds]

    def __len__(self) -> int:
        return len(self.turns()) // 2

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Conversation with {self.model}: {len(self)} turns>"

    def __str__(self) -> str:
        said = [f"{one['role']}: {clean_text(one['content'])}" for one in self.messages]
        return "\n\n".join(said) or "Nothing was said yet."

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        said = [f"**{one['role']}**\n\n{safe_markdown(one['content'])}" for one in self.messages]
        return {"text/markdown": "\n\n".join(said) or "Nothing was said yet.", "text/plain": str(self)}


def _is_rerun(earlier: Cell, cell: Cell) -> bool:
    return bool(cell.id) and earlier.id == cell.id and earlier.serial != cell.serial
