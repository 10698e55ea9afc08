"""What every test shares: a quiet environment, and the proof that the whole run leaves no engine process behind."""

import os
import tempfile
from collections.abc import Iterator

import psutil
import pytest

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_state = tempfile.TemporaryDirectory(prefix="llmkernel-state-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _state.name  # journals of tests are not the user's


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
