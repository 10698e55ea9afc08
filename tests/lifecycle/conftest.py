"""A private place for run directories, so that a test can see what is left there."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run directories are made by the processes that a test starts; a short path, for sockets."""
    with TemporaryDirectory(prefix="llmk-test-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
