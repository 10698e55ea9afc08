"""An engine process with a fake model, spoken to with bare sockets: what is on the wire, without a client around it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from llmkernel.client.process import EngineProcess
from llmkernel.config import EngineArgs
from llmkernel.protocol.handshake import (
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineMessage,
    Progress,
    Ready,
)
from llmkernel.protocol.outputs import ENGINE_CORE_DEAD, EngineCoreOutput, EngineCoreOutputs
from llmkernel.protocol.requests import EngineCoreRequest, EngineCoreRequestType, engine_identity
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder
from llmkernel.protocol.transport import make_zmq_socket

FAKE_EXECUTOR = "llmkernel.engine.fake_executor:FakeExecutor"
ENGINE = engine_identity(0)
PATIENCE_MS = 20_000


def make_request(
    request_id: str, prompt: Sequence[int] = (1, 2, 3), client_index: int = 0, **params: Any
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        list(prompt),
        None,
        SamplingParams(**params),
        None,
        time.time(),
        None,
        None,
        None,
        client_index=client_index,
    )


class RawEngine:
    """Owns the process and the sockets of `num_clients` clients; the engine has `others` more, which the test brings.

    Use it with `with`.
    """

    def __init__(
        self, model: str = "fake:step_ms=0", num_clients: int = 1, others: int = 0, output_hwm: int = 64, **args: Any
    ) -> None:
        self.run = RunDirectory()
        self.ctx = zmq.Context()
        self.progress: list[Progress] = []
        self.registrations: list[EngineCoreReadyResponse] = []
        addresses = EngineAddresses(
            [self.run.address(f"in{i}") for i in range(num_clients + others)],
            [self.run.address(f"out{i}") for i in range(num_clients + others)],
        )
        self.inputs = [make_zmq_socket(self.ctx, path, zmq.ROUTER, linger=0) for path in addresses.inputs[:num_clients]]
        self.outputs = [
            make_zmq_socket(self.ctx, path, zmq.PULL, linger=0, hwm=output_hwm)
            for path in addresses.outputs[:num_clients]
        ]
        self.handshake = make_zmq_socket(self.ctx, self.run.address("hs"), zmq.ROUTER, linger=0)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self.process = EngineProcess(self.run.address("hs"), self.run)
        self._start(EngineHandshakeMetadata(addresses, EngineArgs(model=model, **args), FAKE_EXECUTOR))

    def send(self, kind: EngineCoreRequestType, payload: Any, client: int = 0) -> None:
        self.send_frames(kind.value, *self._encoder.encode(payload), client=client)

    def send_frames(self, *frames: Any, client: int = 0) -> None:
        self.inputs[client].send_multipart([ENGINE, *frames])

    def add(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), client: int = 0, **params: Any) -> None:
        self.send(EngineCoreRequestType.ADD, make_request(request_id, prompt, client, **params), client)

    def abort(self, *request_ids: str, client: int = 0) -> None:
        self.send(EngineCoreRequestType.ABORT, list(request_ids), client)

    def receive_frames(self, client: int = 0) -> list[bytes]:
        assert self.outputs[client].poll(PATIENCE_MS), f"nothing came; log:\n{self.process.log_tail()}"
        return self.outputs[client].recv_multipart()

    def receive(self, client: int = 0) -> EngineCoreOutputs:
        frames = self.receive_frames(client)
        assert frames != [ENGINE_CORE_DEAD], f"the engine died; log:\n{self.process.log_tail()}"
        return self._decoder.decode(frames)

    def call(self, method: str, *args: Any, client: int = 0, call_id: int = 7) -> Any:
        """The UtilityOutput for a call; outputs that come before it are dropped."""
        self.send(EngineCoreRequestType.UTILITY, (client, call_id, method, args), client)
        while True:
            answer = self.receive(client).utility_output
            if answer is not None and answer.call_id == call_id:
                return answer

    def collect(self, *request_ids: str, client: int = 0) -> dict[str, list[EngineCoreOutput]]:
        """Everything that is said about these requests until each has ended."""
        found: dict[str, list[EngineCoreOutput]] = {request_id: [] for request_id in request_ids}
        open_ids = set(request_ids)
        while open_ids:
            for output in self.receive(client).outputs:
                found[output.request_id].append(output)
                if output.finished:
                    open_ids.remove(output.request_id)
        return found

    def tokens(self, request_id: str, client: int = 0) -> list[int]:
        return [t for output in self.collect(request_id, client=client)[request_id] for t in output.new_token_ids]

    def wait_until(self, condition: Callable[[dict[str, Any]], bool], client: int = 0) -> dict[str, Any]:
        """Ask for get_stats until they meet `condition`; each question waits for its answer."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while time.monotonic() < deadline:
            stats = self.call("get_stats", client=client).result.result
            if condition(stats):
                return stats
        raise AssertionError(f"never so: {stats}")

    def close(self) -> None:
        self.process.shutdown()
        self.ctx.destroy(linger=0)
        self.run.close()

    def __enter__(self) -> "RawEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, init: EngineHandshakeMetadata) -> None:
        while True:
            assert self.handshake.poll(PATIENCE_MS), f"no handshake; log:\n{self.process.log_tail()}"
            identity, payload = self.handshake.recv_multipart()
            message = msgspec.msgpack.decode(payload, type=EngineMessage)
            if isinstance(message, Progress):
                self.progress.append(message)
            elif isinstance(message, Ready):
                break
            else:
                self.handshake.send_multipart([identity, msgspec.msgpack.encode(init)])
        for router in self.inputs:
            identity, payload = router.recv_multipart()
            assert identity == ENGINE
            self.registrations.append(msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse))
