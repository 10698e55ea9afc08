"""What a word on the line of a magic stands for: a variable, a file, or text as it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

__all__ = ["look_up", "resolve_words"]

_FILES = ("grammar", "json_schema", "template")
"""Options whose word may be the name of a file, whose text is meant."""

_VARIABLES = ("params", *_FILES)


def resolve_words(options: Mapping[str, Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with the words of those that take a variable or a file replaced by what they stand for."""
    return {
        name: _meant(name, value, namespace) if name in _VARIABLES and isinstance(value, str) else value
        for name, value in options.items()
    }


def look_up(flag: str, word: str, namespace: Mapping[str, Any]) -> Any:
    """The variable, or attribute of one (`Answers.short`), that `word` names."""
    name, *attributes = word.split(".")
    try:
        value = namespace[name]
        for attribute in attributes:
            value = getattr(value, attribute)
    except (KeyError, AttributeError):
        raise UsageError(f"{flag}: there is no variable {word!r}.") from None
    return value


def _meant(name: str, word: str, namespace: Mapping[str, Any]) -> Any:
    flag = "--" + name.replace("_", "-")
    if name == "json_schema" and word.lstrip().startswith("{"):
        return word
    if word.partition(".")[0] in namespace:
        return look_up(flag, word, namespace)
    if name not in _FILES:
        return look_up(flag, word, namespace)
    path = Path(word).expanduser()
    if not path.is_file():
        raise UsageError(f"{flag}: there is neither a variable nor a file {word!r}.")
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag}: {word} cannot be read as text ({error}).") from None
