"""A model that attacks the reader: what is stored, and what nbconvert makes of it, does nothing."""

from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter, MarkdownExporter

from tests.notebook.kernel import Kernel, running_kernel
from tests.notebook.rendered import dangers_in

ATTACK = r"""<script>window.owned = 1</script> <img src=x onerror=owned()>
![spy](https://evil.example/pixel.png) [click](javascript:owned()) [data](data:text/html,owned)
<iframe srcdoc="x"></iframe> <svg onload=owned()> <a href='javascript:owned()'>y</a>

    <script>in(code)</script>

```html
<script>in(fence)</script>
```
- `<b>` and `$x$` **bold**
"""
FORMULA = r"so $\href{javascript:owned()}{x} <img src=x onerror=owned()>$ it is"
CONTROL = "\x1b[31mred\x1b[0m \x1b]0;owned\x07 \x9b2J \x00 \x7f ok"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(
        tmp_path_factory.mktemp("hostile"), "%load_ext llmkernel", "%llm load fake:echo=1,step_ms=1 --name echo"
    ) as kernel:
        yield kernel


def stored_outputs(kernel: Kernel, code: str) -> list[dict[str, Any]]:
    cell = kernel.run(code)
    assert cell.status == "ok", cell.traceback
    every = cell.of_type("display_data", "update_display_data")
    assert all("text/html" not in content["data"] for content in every)
    return cell.displays


def as_notebook(outputs: list[dict[str, Any]]) -> Any:
    notebook = nbformat.v4.new_notebook()
    made = [nbformat.v4.new_output("display_data", data=o["data"], metadata=o["metadata"]) for o in outputs]
    notebook.cells.append(nbformat.v4.new_code_cell("%%generate\n...", outputs=made))
    nbformat.validate(notebook)
    return notebook


@pytest.mark.parametrize("options", ["", "-n 2 -t 1"])
def test_markup_is_inert_in_the_bundle_and_in_nbconvert(kernel: Kernel, options: str) -> None:
    outputs = stored_outputs(kernel, f"%%generate --raw {options}\n{ATTACK}")
    assert ATTACK.strip() in outputs[0]["data"]["text/plain"]
    notebook = as_notebook(outputs)
    html, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
    assert not [finding for finding in dangers_in(html) if finding.startswith("<") or "owned" in finding]
    assert "&lt;script&gt;window.owned" in html and "fence" in html and "https://evil.example" in html
    assert "<code>&lt;b&gt;</code> and <code>$x$</code>" in html
    markdown, _ = MarkdownExporter().from_notebook_node(notebook)
    assert "![spy](" not in markdown and "<script>window" not in markdown


def test_a_formula_carries_nothing(kernel: Kernel) -> None:
    (stored,) = stored_outputs(kernel, f"%%generate --raw\n{FORMULA}")
    html, _ = HTMLExporter(template_name="basic").from_notebook_node(as_notebook([stored]))
    assert "\\text{javascript:owned()}{x}" in stored["data"]["text/markdown"]
    assert not [finding for finding in dangers_in(html) if finding.startswith("<")]


def test_a_hostile_prompt_in_a_label_is_inert(kernel: Kernel) -> None:
    kernel.run("attack = ['<img src=x onerror=owned()> ![s](http://e)', 'b']")
    outputs = stored_outputs(kernel, "%generate --raw --prompts attack")
    html, _ = HTMLExporter(template_name="basic").from_notebook_node(as_notebook(outputs))
    assert not [finding for finding in dangers_in(html) if "<img" in finding or "owned" in finding]


def test_control_characters_reach_no_output(kernel: Kernel) -> None:
    kernel.run(f"control = [{CONTROL!r}]")
    (stored,) = stored_outputs(kernel, "g = %generate --raw --prompts control")
    for text in stored["data"].values():
        assert "ok" in text and not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in text)
    assert kernel.value("g.text") == CONTROL
    listed = kernel.run("%llm ps").stdout
    assert "\x1b" not in listed and "\x9b" not in listed


def test_special_tokens_in_a_prompt_are_told(kernel: Kernel) -> None:
    cell = kernel.run("%%generate\nignore <|im_end|> this")
    assert "<|im_end|> in the prompt was sent as the special token." in cell.stdout
