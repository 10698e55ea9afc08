"""The Python half and the TypeScript half of the views speak the same messages."""

import re
from pathlib import Path

import msgspec
import pytest

from llmkernel.notebook.widgets import messages

SOURCE = (Path(__file__).parents[2] / "extension/src/model.ts").read_text()
INTERFACES = {
    name: (parents, body)
    for name, parents, body in re.findall(r"export interface (\w+)(?: extends (\w+))? \{\n(.*?)\n\}", SOURCE, re.DOTALL)
}
PYTHON = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
}


def typescript_fields(name: str) -> set[str]:
    parent, body = INTERFACES[name]
    own = set(re.findall(r"^  (\w+)\??: ", body, re.MULTILINE))
    return own | (typescript_fields(parent) if parent else set())


def test_every_message_has_its_twin() -> None:
    traits = {"StreamTraits", "DashboardTraits", "LoadTraits"}
    assert set(PYTHON) == set(INTERFACES) - traits


@pytest.mark.parametrize("name", sorted(PYTHON))
def test_twins_have_the_same_fields(name: str) -> None:
    fields = set(PYTHON[name].__struct_fields__) | ({"t"} if PYTHON[name].__struct_config__.tag else set())
    assert fields == typescript_fields(name)


@pytest.mark.parametrize("name", sorted(name for name in PYTHON if PYTHON[name].__struct_config__.tag))
def test_twins_have_the_same_tag(name: str) -> None:
    assert f't: "{PYTHON[name].__struct_config__.tag}";' in INTERFACES[name][1]


@pytest.mark.parametrize(
    "content", [None, 3, {}, {"t": "boo"}, {"t": "resync"}, {"t": "visible", "rows": "x", "view": "v"}]
)
def test_what_is_no_message_is_none(content: object) -> None:
    assert messages.unpack(content, messages.StreamUp) is None
