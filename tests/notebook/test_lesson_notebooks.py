"""notebooks/many_requests, dashboard, sampling_and_logprobs and benchmarks run from top to bottom."""

import re
import shutil
from pathlib import Path

import pytest

from tests.notebook.run_notebook import NOTEBOOKS, output_text, run_notebook


@pytest.mark.timeout(300)
def test_many_requests() -> None:
    notebook = run_notebook("many_requests.ipynb", timeout=240)
    assert re.findall(r"^\[\d\]$", output_text(notebook, "n"), re.MULTILINE) == ["[1]", "[2]", "[3]", "[4]"]
    table = output_text(notebook, "table").splitlines()
    assert len(table) == 4 and "why does a cow live nea" in table[0]
    assert re.search(r"^g\d+ +\[\d+\] +smollm2 +running", output_text(notebook, "ps"), re.MULTILINE)
    assert output_text(notebook, "stop").startswith("Stopped g")
    assert output_text(notebook, "partial") == "cancelled True\n"
    assert output_text(notebook, "iterate").endswith("pieces, 2 answers\n")
    side_by_side = output_text(notebook, "models")
    assert side_by_side.startswith("smollm2\n") and "\nparrot\n" in side_by_side
    assert "[1] In one sentence: why does a cow" in output_text(notebook, "show")
    assert "widgets" not in notebook.metadata


@pytest.mark.timeout(120)
def test_dashboard() -> None:
    notebook = run_notebook("dashboard.ipynb", timeout=60)
    assert "this is how it stands" in output_text(notebook, "dashboard")
    waiting = r"^g1 +\[4\] +tiny +queued #1: .*needs \d+ blocks, \d+ free.* \(\+\d+\) +\d+ tokens  Question 0: "
    assert re.search(waiting, output_text(notebook, "ps"), re.MULTILINE)
    assert output_text(notebook, "stop") == "Stopped g1.\n"
    assert re.search(r"^g2 .*(prefill \d+ / 456 tokens|running|done)", output_text(notebook, "prefill"), re.MULTILINE)
    way = output_text(notebook, "trace")
    assert way.count("engine  prefill") == 7 and "kernel  detokenized" in way
    again = output_text(notebook, "trace-again")
    assert "prompt of 456 tokens, 448 of them cached" in again and "prefill" not in again
    assert output_text(notebook, "figures").startswith("448 of 456 prompt tokens cached\n8 tokens, length\n")


@pytest.mark.timeout(300)
def test_sampling_and_logprobs() -> None:
    notebook = run_notebook("sampling_and_logprobs.ipynb", timeout=240)
    for cell in ("same", "narrow", "sum"):
        assert output_text(notebook, cell) == "True\n", cell
    read = output_text(notebook, "logprobs-read").splitlines()
    assert len(read) == 5 and all(line.count("%") == 3 for line in read)
    assert output_text(notebook, "compare-read").count("per token") == 4


@pytest.mark.timeout(120)
def test_benchmarks(no_matplotlib: str) -> None:
    notebook = run_notebook("benchmarks.ipynb", timeout=60, env={"PYTHONPATH": no_matplotlib})
    assert output_text(notebook, "read").startswith("matplotlib is not installed: tables")
    assert re.search(r"^decode, engine_core +[\d.]+ ", output_text(notebook, "decode"), re.MULTILINE)
    assert re.search(r"^governor( +[\d.]+){4}$", output_text(notebook, "busy"), re.MULTILINE)
    assert re.search(r"^over vllm +[\d.]+ ", output_text(notebook, "peers"), re.MULTILINE)
    for cell, row in {"prefill": "prefill, 8 at once", "mixed": "beside a long prompt", "frontend": "vllm"}.items():
        assert re.search(rf"^{row}( +[\d.,]+)+$", output_text(notebook, cell), re.MULTILINE), cell
    assert "No run yet" not in "".join(output_text(notebook, cell.id) for cell in notebook.cells if "outputs" in cell)
    measured = output_text(notebook, "scheduler").splitlines()
    assert measured[1].split() == ["running", "requests", "1", "64", "256"]
    one, _, many = (float(figure.replace(",", "")) for figure in measured[2].split()[1:])
    assert 0 < one < many


@pytest.mark.timeout(120)
def test_benchmarks_of_which_a_part_was_run(tmp_path: Path, no_matplotlib: str) -> None:
    """What is there is drawn; of the rest it is said how it is measured."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "benchmarks" / "scheduler.py").symlink_to(NOTEBOOKS.parent / "benchmarks" / "scheduler.py")
    (tmp_path / "notebooks").mkdir()
    notebook_path = shutil.copy(NOTEBOOKS / "benchmarks.ipynb", tmp_path / "notebooks")
    (results / "mixed.json").write_text("{")
    (results / "prefill-laptop.json").write_text('{"cells": {"1 x 128": {"tokens_per_second": 1234.5}}}')
    (results / "frontend.json").write_text('{"path": {"cpu_us_per_token": {"1": {"llmkernel": 6.5}}}}')

    notebook = run_notebook(notebook_path, timeout=60, env={"PYTHONPATH": no_matplotlib})
    assert re.search(r"^prefill-laptop, 1 at once +1,234$", output_text(notebook, "prefill"), re.MULTILINE)
    assert output_text(notebook, "mixed").splitlines() == [
        "mixed.json is not JSON: was its run interrupted?",
        "No run yet: python -m benchmarks.mixed > benchmarks/results/mixed.json",
    ]
    assert output_text(notebook, "frontend").endswith("measured without vLLM (--peer vllm=PYTHON).\n")
    assert output_text(notebook, "peers").endswith("--peer NAME=PYTHON --into benchmarks/results/peers.json\n")
    for cell in ("decode", "busy", "startup", "sampler", "speculation", "streams"):
        assert output_text(notebook, cell).startswith("No run yet: python -m benchmarks."), cell


@pytest.fixture
def no_matplotlib(tmp_path: Path) -> str:
    """A folder for PYTHONPATH: nobody can read figures out of a plot."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "matplotlib.py").write_text("raise ImportError")
    return str(folder)
