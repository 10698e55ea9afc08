"""The timed way of tokens through the front end: what it says, and what it refuses to compare."""

import sys
from pathlib import Path

import pytest

from benchmarks import frontend_path
from benchmarks.frontend_path import measure_path
from benchmarks.peer_process import PEER_ENGINES


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_path, "ROUNDS", 2)
    monkeypatch.setattr(frontend_path, "TOKENS_OF_A_ROUND", 100)


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_two_front_ends_beside_each_other(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(frontend_path.SCRIPTS, "twin", "front_end_of_llmkernel.py")
    report = measure_path({"twin": sys.executable}, "smollm2", [1, 3], 60, kind)
    assert report["facts"]["llmkernel"] == report["facts"]["twin"] and report["facts"]["twin"]["version"]
    for cell in report["cpu_us_per_token"].values():
        assert set(cell) == {"llmkernel", "twin", "over twin"} and min(cell.values()) > 0
    assert list(report["cpu_us_per_token"]) == [1, 3]


def test_costs_of_different_texts_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = (PEER_ENGINES / "front_end_of_llmkernel.py").read_text()
    other = tmp_path / "other.py"
    other.write_text(
        f"import sys\nsys.path.insert(0, {str(PEER_ENGINES)!r})\n"
        + source.replace(
            "sampling_params=SamplingParams,", "sampling_params=lambda **k: SamplingParams(detokenize=False, **k),"
        )
    )
    monkeypatch.setitem(frontend_path.SCRIPTS, "other", str(other))
    with pytest.raises(SystemExit, match="do not give the same texts"):
        measure_path({"other": sys.executable}, "smollm2", [2], 60, "DELTA")
