"""A context whose end never waits, and a short place for sockets."""

from collections.abc import Iterator

import pytest
import zmq

from llmkernel.protocol.run_directory import RunDirectory


@pytest.fixture
def ctx() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def run() -> Iterator[RunDirectory]:
    with RunDirectory() as directory:
        yield directory
