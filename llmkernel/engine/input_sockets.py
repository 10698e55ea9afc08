"""InputSockets: the DEALER of every client, on the input thread; clients come and go while it polls."""

import contextlib
import queue
import socket
from collections.abc import Callable, Iterator, Sequence

import zmq

from llmkernel.protocol.curve_key import CurveKey
from llmkernel.protocol.requests import EngineIdentity
from llmkernel.protocol.transport import make_zmq_socket

__all__ = ["InputSockets"]


class InputSockets:
    """Belongs to the input thread, but for `attach` and `detach`: those may be called from any thread.

    registration: what the engine says first to every client. clients: indices of those connected now. on_detached:
    called on the input thread when nothing more will come from a client.
    """

    def __init__(self, registration: bytes, on_detached: Callable[[int], None], key: CurveKey | None = None) -> None:
        self.clients: set[int] = set()
        self._identity: EngineIdentity = b""
        self._registration = registration
        self._key = key
        self._on_detached = on_detached
        self._changes: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()  # None: detach
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._ctx = zmq.Context()
        self._poller = zmq.Poller()
        self._dealers: dict[int, zmq.Socket[bytes]] = {}

    def attach(self, client_index: int, address: str) -> None:
        """Connect to one more client and register with it, soon."""
        self._change(client_index, address)

    def detach(self, client_index: int) -> None:
        """Let go of a client, soon; what it has sent and nobody has read is dropped."""
        self._change(client_index, None)

    @contextlib.contextmanager
    def opened(
        self, addresses: Sequence[str], coordinator_address: str | None, identity: EngineIdentity
    ) -> Iterator[None]:
        """Connected to the clients 0, 1, ... at `addresses`, and to the data-parallel coordinator if there is one."""
        self._identity = identity
        try:
            self._poller.register(self._wake_reader, zmq.POLLIN)
            for client_index, address in enumerate(addresses):
                self._connect(client_index, address)
            if coordinator_address is not None:
                xsub = make_zmq_socket(
                    self._ctx, coordinator_address, zmq.XSUB, bind=False, identity=self._identity, key=self._key
                )
                xsub.send(b"\x01")  # subscribe to everything
                self._poller.register(xsub, zmq.POLLIN)
            yield
        finally:
            self._ctx.destroy()

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Wait; then one message of every client that has sent some."""
        woken = False
        for ready, _ in self._poller.poll():
            if isinstance(ready, zmq.Socket):
                yield ready.recv_multipart(copy=False)
            else:
                woken = True
        if woken:  # last: a socket that is closed must not be among those that are ready
            self._wake_reader.recv(4096)
            self._make_changes()

    def _change(self, client_index: int, address: str | None) -> None:
        self._changes.put((client_index, address))
        self._wake_writer.send(b"\0")

    def _make_changes(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                client_index, address = self._changes.get_nowait()
                if address is not None:
                    self._connect(client_index, address)
                else:
                    self._disconnect(client_index)

    def _connect(self, client_index: int, address: str) -> None:
        dealer = make_zmq_socket(
            self._ctx, address, zmq.DEALER, bind=False, identity=self._identity, linger=0, key=self._key
        )
        dealer.send(self._registration)  # a ROUTER cannot address whom it never heard
        self._poller.register(dealer, zmq.POLLIN)
        self._dealers[client_index] = dealer
        self.clients.add(client_index)

    def _disconnect(self, client_index: int) -> None:
        self.clients.discard(client_index)
        dealer = self._dealers.pop(client_index)
        self._poller.unregister(dealer)
        dealer.close()
        self._on_detached(client_index)
