"""Rows of --prompts, and {names} in a prompt."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.interpolation import interpolate
from llmkernel.notebook.prompts import prompts_from


class Frame:
    """As much of a DataFrame as is looked at, so that pandas need not be installed."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.columns = list(records[0]) if records else []

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self.records


def texts(*arguments: Any, **keywords: Any) -> list[str]:
    return [prompt.text for prompt in prompts_from(*arguments, **keywords)]


def test_items_go_as_they_are() -> None:
    assert texts(["a", "{b}"]) == ["a", "{b}"]
    assert texts(("x", 3)) == ["x", "3"]
    assert texts(np.array(["a", "b"])) == ["a", "b"]
    assert texts(word for word in "ab") == ["a", "b"]
    assert texts([{"prompt": "hi", "id": 1}]) == ["hi"]
    assert texts(Frame([{"prompt": "hi"}, {"prompt": "ho"}])) == ["hi", "ho"]


def test_a_template_takes_items_keys_and_columns() -> None:
    assert texts(["cat", "dog"], "Say {prompt}: {json} {}") == ["Say cat: {json} {}", "Say dog: {json} {}"]
    assert texts([{"city": "Rome", "n": 2}], "{n} facts on {city}") == ["2 facts on Rome"]
    assert texts(Frame([{"city": "Oslo"}]), "About {city} in {lang}", variables={"lang": "Latin"}) == [
        "About Oslo in Latin"
    ]


@pytest.mark.parametrize(
    ("items", "template", "message"),
    [
        ([], None, "prompts is empty"),
        ("one text", None, "is a str, not a list of prompts; put it into a list"),
        (3, None, "is a int, not a list"),
        ({"a": 1}, None, "is a dict, not a list"),
        (["a"], "no field here", "write {prompt} in it"),
        ([{"city": "Rome"}], "{town}", "write {city} in it"),
        ([{"city": "Rome"}], None, "has no column or key 'prompt' (city)"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(items: Any, template: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prompts_from(items, template)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_item_fails_alone() -> None:
    rows = prompts_from(["a", None, float("nan")], "{prompt}!")
    assert rows[0].error is None
    assert [str(row.error) for row in rows[1:]] == [
        "Item 2 of prompts is missing; fill it in.",
        "Item 3 of prompts is missing; fill it in.",
    ]


def test_only_known_names_are_filled_in() -> None:
    names = {"x": 1, "user": SimpleNamespace(name="Ann"), "braces": "{x}"}
    text = '{x} {user.name} {y} {user.nope} {"a": 1} {} {1} { x } {x!r} {x:>3} {{x}} {braces}'
    assert interpolate(text, names) == '1 Ann {y} {user.nope} {"a": 1} {} {1} { x } {x!r} {x:>3} {1} {x}'
