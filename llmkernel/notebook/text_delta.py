"""TextDelta: what iterating a generation yields."""

__all__ = ["TextDelta"]


class TextDelta(str):
    """A piece of new text. row: of which prompt, answer: of which of its n answers; both count from 0."""

    row: int
    answer: int

    @classmethod
    def of(cls, text: str, row: int, answer: int) -> "TextDelta":
        delta = cls(text)
        delta.row, delta.answer = row, answer
        return delta
