"""A library's process is asked in JSON lines, stands still in between, and says why when it dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.peer_process import PEER_ENGINES, PeerProcess

PEER = f"""
import os, sys
sys.path.insert(0, {str(PEER_ENGINES)!r})
from answers import answer_lines

def answer(question):
    print("not an answer")
    if "sum" not in question:
        raise SystemExit("cannot do that")
    return {{"sum": sum(question["sum"])}}

answer_lines(lambda: ({{"version": sys.argv[1], "pid": os.getpid()}}, answer))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    return str(path)


def test_it_runs_only_while_it_is_asked(script: str) -> None:
    with PeerProcess("adder", sys.executable, script, ["1.0"]) as peer:
        facts = peer.wait_ready()
        assert facts["version"] == "1.0" and peer.start_seconds > 0
        process = psutil.Process(facts["pid"])
        for numbers in ([1, 2], [40, 2]):
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # or wait for it to stop
            assert process.status() == psutil.STATUS_STOPPED
            assert peer.ask({"sum": numbers}) == {"sum": sum(numbers)}
    assert not process.is_running()


def test_a_dead_one_ends_the_run_with_what_it_said(script: str) -> None:
    with PeerProcess("adder", sys.executable, script, ["1.0"]) as peer:
        peer.wait_ready()
        with pytest.raises(SystemExit, match=r"(?s)not an answer.*cannot do that.*adder ended without an answer"):
            peer.ask({"product": [1, 2]})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_goes_with_the_one_that_asks(script: str, number: signal.Signals) -> None:
    conductor = f"""
import sys, time
from benchmarks.peer_process import PeerProcess, end_in_order
end_in_order()
with PeerProcess("adder", sys.executable, {script!r}, ["1.0"]) as peer:
    print(peer.wait_ready()["pid"], flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", conductor], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        peer = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        process.wait(10)
        peer.wait(10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "ollama=python"], "'ollama=python' is not NAME=PYTHON with NAME one of llama.cpp, vllm, "),
        (["--peer", "vllm"], "'vllm' is not NAME=PYTHON"),
        ([], "give at least one --peer"),
        (
            ["--peer", "vllm=python", "--groups", "q4_0", "--cells", "decode 16 *"],
            "no cell 'decode 16 *' in q4_0; there are: decode 1 x 128",
        ),
    ],
)
def test_a_choice_that_there_is_not_is_refused_by_name(arguments: list[str], said: str) -> None:
    script = PEER_ENGINES.parent / "peers.py"
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
