"""The socket factory: sides, options, addresses, and a ROUTER that does not drop silently."""

import errno
import threading
import time
from contextlib import ExitStack

import pytest
import zmq
import zmq.asyncio

from llmkernel.protocol.outputs import ENGINE_CORE_DEAD
from llmkernel.protocol.requests import EngineCoreRequestType, engine_identity
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.transport import bound_address, make_zmq_socket

WAIT_MS = 10_000


@pytest.mark.row("A-033", "A-034")
@pytest.mark.parametrize(
    ("kind", "binds"),
    [
        (zmq.ROUTER, True),
        (zmq.DEALER, True),
        (zmq.PULL, True),
        (zmq.PAIR, True),
        (zmq.XPUB, True),
        (zmq.PUSH, False),
        (zmq.SUB, False),
        (zmq.XSUB, False),
    ],
)
def test_a_type_has_its_side(ctx: zmq.Context, run: RunDirectory, kind: int, binds: bool) -> None:
    with make_zmq_socket(ctx, run.address("in0"), kind, linger=0), make_socket_of_the_other_side(ctx, run, binds):
        assert run.file("in0").exists()  # whoever binds makes the file


def make_socket_of_the_other_side(ctx: zmq.Context, run: RunDirectory, binds: bool) -> zmq.Socket:
    return make_zmq_socket(ctx, run.address("in0"), zmq.PAIR, bind=not binds, linger=0)


@pytest.mark.row("A-033", "A-034")
def test_the_side_can_be_said(ctx: zmq.Context, run: RunDirectory) -> None:
    with make_zmq_socket(ctx, run.address("in0"), zmq.DEALER, bind=False, linger=0):
        assert not run.file("in0").exists()
    with make_zmq_socket(ctx, run.address("in0"), zmq.PUSH, bind=True, linger=0):
        assert run.file("in0").exists()


@pytest.mark.row("A-034", "A-027")
def test_options_arrive_on_the_socket(ctx: zmq.Context, run: RunDirectory) -> None:
    with make_zmq_socket(ctx, run.address("a"), zmq.DEALER, bind=False, identity=b"\1\0", linger=4000) as socket:
        assert socket.getsockopt(zmq.IDENTITY) == b"\1\0"
        assert socket.getsockopt(zmq.LINGER) == 4000
        assert (socket.getsockopt(zmq.RCVHWM), socket.getsockopt(zmq.SNDHWM)) == (0, 0)
    with make_zmq_socket(ctx, run.address("b"), zmq.PUSH, hwm=3, linger=0) as socket:
        assert socket.getsockopt(zmq.SNDHWM) == 3
    with make_zmq_socket(ctx, run.address("c"), zmq.PULL, hwm=3) as socket:
        assert socket.getsockopt(zmq.RCVHWM) == 3


def test_a_full_socket_says_so_instead_of_growing(ctx: zmq.Context, run: RunDirectory) -> None:
    with make_zmq_socket(ctx, run.address("out0"), zmq.PUSH, hwm=3, linger=0) as socket:
        for _ in range(3):
            socket.send(b"x", zmq.NOBLOCK)
        with pytest.raises(zmq.Again):
            socket.send(b"x", zmq.NOBLOCK)


@pytest.mark.row("A-035")
async def test_plain_and_asyncio_contexts_share_an_endpoint(ctx: zmq.Context, run: RunDirectory) -> None:
    shadow = zmq.asyncio.Context(ctx)
    with (
        make_zmq_socket(shadow, run.address("out0"), zmq.PULL) as pull,
        make_zmq_socket(ctx, run.address("out0"), zmq.PUSH) as push,
    ):
        assert isinstance(pull, zmq.asyncio.Socket)
        assert not isinstance(push, zmq.asyncio.Socket)
        push.send_multipart([b"a", b"b"])
        assert await pull.recv_multipart() == [b"a", b"b"]


@pytest.mark.row("A-158")
def test_the_bound_address_is_the_real_one(ctx: zmq.Context, run: RunDirectory) -> None:
    with make_zmq_socket(ctx, run.address("in0"), zmq.ROUTER) as socket:
        assert bound_address(socket) == run.address("in0")
    with make_zmq_socket(ctx, "tcp://127.0.0.1:*", zmq.PULL) as pull:
        address = bound_address(pull)
        assert int(address.removeprefix("tcp://127.0.0.1:")) > 0
        with make_zmq_socket(ctx, address, zmq.PUSH, linger=0) as push:
            push.send(b"x")
            assert pull.recv() == b"x"


@pytest.mark.parametrize(
    "path",
    ["tcp://*:5555", "tcp://0.0.0.0:1", "tcp://localhost:1", "tcp://[::1]:1", "tcp://10.0.0.1:1", "tcp://127.0.0.1",
     "udp://127.0.0.1:1", "ipc://", "in0", "", "ipc:///" + "x" * 100],
)  # fmt: skip
def test_other_places_are_refused(ctx: zmq.Context, path: str) -> None:
    with pytest.raises(ValueError, match="socket"):
        make_zmq_socket(ctx, path, zmq.PULL)


def test_a_failed_bind_leaves_no_socket_open(run: RunDirectory) -> None:
    context = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        make_zmq_socket(context, f"ipc://{run.path}/no/such/folder", zmq.PULL)
    context.term()  # would wait for an open socket


@pytest.mark.row("A-036")
def test_an_exit_stack_closes_every_socket(run: RunDirectory) -> None:
    with ExitStack() as stack, zmq.Context() as context:
        sockets = [
            stack.enter_context(make_zmq_socket(context, run.address(f"in{index}"), zmq.DEALER, bind=False, linger=0))
            for index in range(3)
        ]
        assert not any(socket.closed for socket in sockets)
        stack.close()
    assert all(socket.closed for socket in sockets)


@pytest.mark.row("A-040", "A-023", "A-154")
def test_a_router_knows_a_dealer_only_after_its_registration(ctx: zmq.Context, run: RunDirectory) -> None:
    with (
        make_zmq_socket(ctx, run.address("in0"), zmq.ROUTER) as router,
        make_zmq_socket(ctx, run.address("in0"), zmq.DEALER, bind=False, identity=engine_identity(0)) as dealer,
    ):
        with pytest.raises(zmq.ZMQError) as caught:
            router.send_multipart([engine_identity(9), EngineCoreRequestType.ADD.value, b""])
        assert caught.value.errno == errno.EHOSTUNREACH
        dealer.send(b"")  # an old peer's registration; ours carries an EngineCoreReadyResponse
        assert router.recv_multipart() == [engine_identity(0), b""]
        router.send_multipart([engine_identity(0), EngineCoreRequestType.ABORT.value, b"\x90"])
        assert dealer.recv_multipart() == [b"\1", b"\x90"]


@pytest.mark.row("A-040")
def test_a_send_to_a_vanished_engine_raises(ctx: zmq.Context, run: RunDirectory) -> None:
    with make_zmq_socket(ctx, run.address("in0"), zmq.ROUTER, linger=0) as router:
        dealer = make_zmq_socket(ctx, run.address("in0"), zmq.DEALER, bind=False, identity=b"\0\0")
        dealer.send(b"")
        router.recv_multipart()
        dealer.close(linger=0)
        deadline = time.monotonic() + WAIT_MS / 1000
        with pytest.raises(zmq.ZMQError) as caught:
            while time.monotonic() < deadline:  # until ZMQ's own thread has seen the connection end
                router.send_multipart([b"\0\0", b"\0", b""])
                router.poll(1)
        assert caught.value.errno == errno.EHOSTUNREACH


def test_a_router_that_is_not_mandatory_drops(ctx: zmq.Context, run: RunDirectory) -> None:
    with make_zmq_socket(ctx, run.address("in0"), zmq.ROUTER, router_mandatory=False) as router:
        router.send_multipart([b"nobody", b"lost"])


@pytest.mark.row("A-037")
def test_lingering_delivers_the_last_frame(ctx: zmq.Context, run: RunDirectory) -> None:
    """The engine closes at once after its last word; the word arrives although the client was not there yet."""
    engine = zmq.Context()
    with make_zmq_socket(engine, run.address("out0"), zmq.PUSH, linger=4000) as push:
        push.send(ENGINE_CORE_DEAD)
    ending = threading.Thread(target=engine.term)
    ending.start()
    with make_zmq_socket(ctx, run.address("out0"), zmq.PULL) as pull:
        assert pull.poll(WAIT_MS)
        assert pull.recv_multipart() == [ENGINE_CORE_DEAD]
    ending.join(10)
    assert not ending.is_alive()


@pytest.mark.row("A-042", "A-033", "A-158")
def test_an_engine_serves_several_front_ends(ctx: zmq.Context, run: RunDirectory) -> None:
    """One DEALER and one PUSH per client; what goes to one is not seen by the other."""
    with ExitStack() as stack:
        routers = [stack.enter_context(make_zmq_socket(ctx, run.address(f"in{i}"), zmq.ROUTER)) for i in range(2)]
        pulls = [stack.enter_context(make_zmq_socket(ctx, run.address(f"out{i}"), zmq.PULL)) for i in range(2)]
        identity = engine_identity(0)
        dealers = [
            stack.enter_context(make_zmq_socket(ctx, bound_address(r), zmq.DEALER, bind=False, identity=identity))
            for r in routers
        ]
        pushes = [stack.enter_context(make_zmq_socket(ctx, bound_address(p), zmq.PUSH)) for p in pulls]
        for index, dealer in enumerate(dealers):
            dealer.send(b"ready %d" % index)
        assert [router.recv_multipart()[1] for router in routers] == [b"ready 0", b"ready 1"]
        routers[1].send_multipart([identity, b"\0", b"for one"])
        assert dealers[1].recv_multipart() == [b"\0", b"for one"]
        pushes[0].send(b"answer")
        assert pulls[0].recv() == b"answer"
        assert (dealers[0].poll(0), pulls[1].poll(0)) == (0, 0)
