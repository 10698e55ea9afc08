"""A forked child neither ends nor uses its parent's engine, however it comes and goes."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("kind", "way"),
    [("LLM", "exits"), ("LLM", "pool"), ("AsyncLLM", "exits"), ("AsyncLLM", "collects"), ("guest", "exits")],
)
def test_a_forked_child(kind: str, way: str) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.llm.forking_script", kind, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert done.stderr == ""
