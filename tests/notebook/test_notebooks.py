"""The notebooks are stored clean and run from top to bottom in a real kernel."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from llmkernel.engine.fake_executor import fake_answer
from tests.notebook.run_notebook import NOTEBOOKS, output_text, run_notebook

FILES = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def under_the_hood() -> Any:
    return run_notebook("under_the_hood.ipynb")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_notebooks_are_stored_valid_and_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.nbformat_minor >= 5
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.row("A-163")
def test_under_the_hood_never_sleeps() -> None:
    assert "sleep" not in (NOTEBOOKS / "under_the_hood.ipynb").read_text()


@pytest.mark.row("A-022")
def test_the_dialogue_refuses_a_second_question(under_the_hood: Any) -> None:
    told = output_text(under_the_hood, "req-rep-twice")
    assert "refused: Operation cannot be accomplished in current state" in told
    assert "the server sees [b'first question']" in told


@pytest.mark.row("A-023", "A-024", "A-025", "A-026", "A-027", "A-028")
def test_the_batch_is_answered_backwards_by_identity(under_the_hood: Any) -> None:
    told = output_text(under_the_hood, "router-dealer-batch")
    assert "b'client-1'" in told
    assert all(f'"{field}"' in told for field in ("msg_id", "query", "timestamp"))
    order = told.partition("answered in this order:")[2]
    assert order.index("token") < order.index("socket") < order.index("queue")
    assert "refused: Host unreachable" in output_text(under_the_hood, "router-mandatory")


@pytest.mark.row("A-030")
def test_the_poller_names_who_is_ready(under_the_hood: Any) -> None:
    told = output_text(under_the_hood, "poller-two")
    assert "nothing sent: []" in told
    assert "one ready:    ['control']" in told
    assert "both ready:   ['requests', 'control']" in told


@pytest.mark.row("A-031")
def test_the_pipe_keeps_its_order(under_the_hood: Any) -> None:
    assert "in order: True" in output_text(under_the_hood, "push-pull-order")


@pytest.mark.row("A-029", "A-163")
def test_three_clients_are_served(under_the_hood: Any) -> None:
    told = output_text(under_the_hood, "demo-run")
    for number in range(3):
        assert str([f"QUESTION {index} OF CLIENT {number}" for index in range(3)]) in told


@pytest.mark.row("A-045", "A-046", "A-051")
def test_the_request_shows_its_frames(under_the_hood: Any) -> None:
    told = output_text(under_the_hood, "request-build")
    assert [line.split()[0] for line in told.splitlines()] == ["identity", "type", "payload"]
    assert "b'\\x00\\x00'" in told and "by-hand-1" in told
    assert output_text(under_the_hood, "request-decode").startswith("True\n['by-hand-1', [72, 101")
    arrays = output_text(under_the_hood, "arrays-frames")
    assert "a frame of 4000 bytes" in arrays and arrays.count("True") == 2


@pytest.mark.row("A-046", "A-061", "A-062", "A-063")
def test_a_real_engine_answers_the_request_token_by_token(under_the_hood: Any) -> None:
    told = output_text(under_the_hood, "engine-send")
    expected = bytes(fake_answer(list(b"Hello, engine"), 12)).decode()
    assert f"the answer: {expected}" in told
    assert told.count("finish_reason=None") == 11
    assert "finish_reason=length" in told
    assert "'num_running_reqs': 0" in output_text(under_the_hood, "utility-call")
    assert "engine dead: True" in output_text(under_the_hood, "engine-stop")
