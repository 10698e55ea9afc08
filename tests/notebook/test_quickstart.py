"""notebooks/quickstart.ipynb runs from top to bottom on the default model."""

import re
from typing import Any

import pytest

from tests.notebook.run_notebook import output_text, run_notebook


@pytest.fixture(scope="module")
def quickstart() -> Any:
    return run_notebook("quickstart.ipynb", timeout=240)


def outputs(notebook: Any, cell_id: str) -> list[Any]:
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return cell.outputs


@pytest.mark.timeout(300)
def test_the_quickstart_answers(quickstart: Any) -> None:
    assert output_text(quickstart, "load").startswith("smollm2 is ready (")
    (first,) = outputs(quickstart, "first")
    assert first.data["text/plain"] == "The capital of France is Paris." == first.data["text/markdown"]
    assert first.metadata["llmkernel"]["finish_reason"] == "stop"
    read = output_text(quickstart, "handle-read")
    assert "<Generation" in read and "24 written" in read
    many = outputs(quickstart, "many")[0]
    assert re.findall(r"^\[\d\]$", many.data["text/plain"], re.MULTILINE) == ["[1]", "[2]", "[3]"]
    sounds = outputs(quickstart, "prompts")[0]
    assert len(sounds.metadata["llmkernel"]["requests"]) == 3
    assert output_text(quickstart, "prompts-read").count("\n") == 3
    assert output_text(quickstart, "line").count("->") == 2
    assert "Wall time" in output_text(quickstart, "time")
    assert "smollm2 (default): ready" in output_text(quickstart, "status")
    assert output_text(quickstart, "python").strip()
    assert output_text(quickstart, "async").strip()
    assert "given back" in output_text(quickstart, "unload")


def test_nothing_is_stored_that_a_viewer_refuses(quickstart: Any) -> None:
    assert "widgets" not in quickstart.metadata
    for cell in quickstart.cells:
        for output in cell.get("outputs", []):
            assert not set(output.get("data", {})) - {"text/plain", "text/markdown"}
