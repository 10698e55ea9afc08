"""What every test shares: a quiet environment, and the proof that the whole run leaves no engine process behind."""

import os
from collections.abc import Iterator

import psutil
import pytest

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _engines() -> list[psutil.Process]:
    """Engine processes that this test process started and that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "llmkernel.engine" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue  # it ended while we looked
    return found


@pytest.fixture(scope="module", autouse=True)
def no_engine_is_left() -> Iterator[None]:
    """Every test module ends the engines that it started."""
    yield
    _, alive = psutil.wait_procs(_engines(), timeout=5)
    for engine in alive:
        engine.kill()
    assert not alive, f"left running: {alive}"
