"""A private place for run directories, so that a test can see what is left there."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from llmkernel.client.async_mp_client import AsyncMPClient
from tests.client.fake_engine import make_async_client


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run directories are made in this test, and by the processes that it starts; a short path, for sockets."""
    with TemporaryDirectory(prefix="llmkernel-test-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
async def client() -> AsyncIterator[AsyncMPClient]:
    """A ready client of a fake engine, on the test's loop."""
    made = make_async_client("fake:step_ms=0.5,fail_token=99,crash_token=98,max_model_len=4000,num_blocks=600")
    try:
        await made.ready()
        yield made
    finally:
        made.shutdown()
