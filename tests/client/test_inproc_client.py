"""InprocClient: the engine in this process, one step per get_output."""

import subprocess
import sys

import pytest

from llmkernel.client.core_client import make_client
from llmkernel.client.engine_core_client import EngineCoreClient
from llmkernel.config import EngineArgs
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import EngineDeadError, InvalidRequestError
from llmkernel.protocol.outputs import FinishReason
from tests.client.fake_engine import FAKE_EXECUTOR, collect_sync, make_request, tokens


@pytest.fixture
def client() -> EngineCoreClient:
    return make_client(False, False, EngineArgs(model="fake:"), FAKE_EXECUTOR)


@pytest.mark.row("A-008", "A-012")
def test_get_output_is_one_step(client: EngineCoreClient) -> None:
    with client:
        assert client.ready().model.architecture == "Fake"
        assert client.get_output().outputs == []
        client.add_request(make_request("a", max_tokens=3))
        assert [output.new_token_ids for output in client.get_output().outputs] == [fake_answer([1, 2, 3], 1)]
        assert tokens(collect_sync(client, "a")["a"]) == fake_answer([1, 2, 3], 3)[1:]


@pytest.mark.row("A-012")
def test_aborts_and_utilities(client: EngineCoreClient) -> None:
    client.add_request(make_request("a", max_tokens=300))
    client.get_output()
    with pytest.raises(InvalidRequestError, match="call get_output"):
        client.call_utility("pause_scheduler", "wait")
    client.abort_requests(["a"])
    assert collect_sync(client, "a")["a"][-1].finish_reason is FinishReason.ABORT
    assert client.collective_rpc("echo", args=[1]) == [[1]]
    with pytest.raises(AttributeError, match="no utility"):
        client.call_utility("nonsense")
    with pytest.raises(InvalidRequestError, match="empty"):
        client.add_request(make_request("b", []))


def test_after_shutdown_every_call_says_so(client: EngineCoreClient) -> None:
    assert client.shutdown() == 0
    assert client.shutdown() == 0
    assert client.engine_dead
    client.abort_requests(["a"])
    for call in (client.get_output, lambda: client.add_request(make_request("a")), lambda: client.call_utility("x")):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_the_other_clients_do_not_import_the_engine_nor_torch() -> None:
    code = (
        "import sys, llmkernel.client.core_client; "
        "print([m for m in sys.modules if m.startswith(('llmkernel.engine', 'torch', 'transformers', 'psutil'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
