"""A run of some cells goes into the report of earlier ones."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peer_report import PeerReport


class Clock:
    """time.strftime and time.gmtime of `hour`."""

    hour = 1

    def gmtime(self) -> None:
        return None

    def strftime(self, form: str, moment: None) -> str:
        return f"2026-12-01T{self.hour:02}:00:00Z"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("benchmarks.peer_report.time", clock)
    return clock


def engines(*names: str) -> dict[Any, dict[str, Any]]:
    class Engine(SimpleNamespace):
        __hash__ = object.__hash__

    return {Engine(name=name, start_seconds=1.234): {"version": f"of {name}"} for name in ("llmkernel", *names)}


def test_the_newest_of_each_cell_and_peer_stays(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "peers.json"
    report = PeerReport(path, "smollm2")
    first = report.begin_run("CPU", engines("vllm", "transformers"))
    for cell in ("decode 1 x 128", "decode 16 x 128"):
        report.add(first, "bfloat16", cell, {"llmkernel": [100, 90], "vllm": [50, 60], "transformers": [25, 30]})

    clock.hour = 2
    report = PeerReport(path, "smollm2")
    second = report.begin_run("CPU", engines("vllm"))
    report.add(second, "bfloat16", "decode 16 x 128", {"llmkernel": [120], "vllm": [40]})
    report.add(second, "bfloat16", "decode 16 x 4096", {"llmkernel": [30], "vllm": [20]})

    content = json.loads(path.read_text())
    assert content == report.content
    assert list(content["runs"]) == [first, second]
    assert content["runs"][second]["facts"] == {
        "llmkernel": {"version": "of llmkernel"},
        "vllm": {"version": "of vllm"},
    }
    assert content["runs"][second]["start_seconds"] == {"llmkernel": 1.23, "vllm": 1.23}
    cells = content["groups"]["bfloat16"]
    assert list(cells) == ["decode 1 x 128", "decode 16 x 128", "decode 16 x 4096"]
    assert cells["decode 1 x 128"]["vllm"] == {
        "llmkernel": 95,
        "vllm": 55,
        "ratio": 1.75,
        "rounds": 2,
        "run": first,
    }
    assert cells["decode 16 x 128"]["vllm"]["ratio"] == 3 and cells["decode 16 x 128"]["vllm"]["run"] == second
    assert cells["decode 16 x 128"]["transformers"]["run"] == first, "the run did not measure it"


def test_a_run_of_which_nothing_is_left_goes(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "peers.json"
    for clock.hour in (1, 2, 3):
        report = PeerReport(path, "smollm2")
        run = report.begin_run("CPU", engines("llama.cpp"))
        report.add(run, "q4_1", "prefill 1 x 512", {"llmkernel": [3], "llama.cpp": [2]})
    assert list(json.loads(path.read_text())["runs"]) == [run]
    assert [entry.name for entry in tmp_path.iterdir()] == ["peers.json"]


def test_a_report_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"model": "smollm2", "runs": {}, "groups": {}}))
    with pytest.raises(ValueError, match=r"holds figures of smollm2, not other; name another file"):
        PeerReport(path, "other")


def test_the_stored_report_names_a_run_for_every_figure() -> None:
    content = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "peers.json").read_text())
    figures = [figures for cells in content["groups"].values() for cell in cells.values() for figures in cell.values()]
    assert {entry["run"] for entry in figures} == set(content["runs"])
