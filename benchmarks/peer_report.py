"""PeerReport: the figures of peers.py, of which a run may bring a part."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.peer_process import OURS, PeerProcess

__all__ = ["PeerReport"]


class PeerReport:
    """groups: group -> cell -> peer -> its newest figures; runs: what these were measured with, by the time of a run.

    Figures: tokens per second of both, `ratio` (the median over the rounds of ours / theirs), `rounds`, and `run`. A
    run: machine, load, versions and build flags (`facts`), `start_seconds` from the start of each process to its first
    token. path: a report that is gone on with, and rewritten after every cell; None begins a new one, kept nowhere.
    """

    def __init__(self, path: Path | None, model: str) -> None:
        self._path = path
        self.content: dict[str, Any] = {"benchmark": "peers", "model": model, "runs": {}, "groups": {}}
        if path is not None and path.exists():
            self.content = json.loads(path.read_text("utf-8"))
            if self.content["model"] != model:
                raise ValueError(f"{path} holds figures of {self.content['model']}, not {model}; name another file.")

    def begin_run(self, cpu: str, engines: dict[PeerProcess, dict[str, Any]]) -> str:
        """Engines that are ready, with their facts; the name of the run."""
        name = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.content["runs"][name] = {
            "cpu": cpu,
            "cores": len(os.sched_getaffinity(0)),
            "load_average": round(os.getloadavg()[0], 2),
            "facts": {engine.name: facts for engine, facts in engines.items()},
            "start_seconds": {engine.name: round(engine.start_seconds, 2) for engine in engines},
        }
        return name

    def add(self, run: str, group: str, cell: str, rates: dict[str, list[float]]) -> dict[str, Any]:
        """Tokens per second of each engine, round by round; each peer's figures replace its former ones."""
        ours = rates[OURS]
        figures = {
            peer: {
                OURS: round(statistics.median(ours), 1),
                peer: round(statistics.median(theirs), 1),
                "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
                "rounds": len(theirs),
                "run": run,
            }
            for peer, theirs in rates.items()
            if peer != OURS
        }
        self.content["groups"].setdefault(group, {}).setdefault(cell, {}).update(figures)
        self._drop_unused_runs()
        if self._path is not None:
            half = self._path.with_suffix(".tmp")
            half.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
            half.replace(self._path)
        return figures

    def _drop_unused_runs(self) -> None:
        groups = self.content["groups"].values()
        used = {figures["run"] for cells in groups for cell in cells.values() for figures in cell.values()}
        self.content["runs"] = {name: run for name, run in sorted(self.content["runs"].items()) if name in used}
