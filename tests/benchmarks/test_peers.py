"""peers.py measures the engine beside a peer of which it is known how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peer_process import PEER_ENGINES

STEADY = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(PEER_ENGINES)!r})
from answers import answer_lines

def answer(cell):
    streams = len(cell["prompts"])
    return {{"moments": [(2 + token / 10, streams * (token + 1)) for token in range(cell["tokens"])]}}

answer_lines(lambda: ({{"version": "steady"}}, answer))
"""
"""Whatever script it is told to run: 2 s to the first token, then 10 tokens a second for each stream."""


@pytest.mark.slow
def test_cells_beside_a_steady_peer(tmp_path: Path) -> None:
    peer, into = tmp_path / "peer", tmp_path / "peers.json"
    peer.write_text(STEADY)
    peer.chmod(0o755)
    command = [
        sys.executable,
        PEER_ENGINES.parent / "peers.py",
        "--peer",
        f"vllm={peer}",
        "--rounds",
        "1",
        "--into",
        into,
    ]
    choice = ["--groups", "bfloat16", "--cells", "prefill 8 x *", "decode 16 x 128"]
    done = subprocess.run([*command, *choice], stdout=subprocess.PIPE, text=True, check=True)

    report = json.loads(done.stdout)
    assert report == json.loads(into.read_text())
    ((run, told),) = report["runs"].items()
    assert told["facts"]["vllm"] == {"version": "steady"} and told["facts"]["llmkernel"]["dtype"] == "bfloat16"
    cells = report["groups"]["bfloat16"]
    assert {name: cell["vllm"]["vllm"] for name, cell in cells.items()} == {
        "decode 16 x 128": 160,
        "prefill 8 x 256": 1024,
    }
    for cell in cells.values():
        figures = cell["vllm"]
        assert figures["run"] == run and figures["rounds"] == 1
        assert figures["ratio"] == pytest.approx(figures["llmkernel"] / figures["vllm"], abs=0.01)
