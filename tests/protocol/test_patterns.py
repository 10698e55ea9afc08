"""The socket patterns as labs: what each promises, and why requests and outputs travel as they do (A-022 to A-032)."""

import ast
import errno
import itertools
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

import llmkernel
from llmkernel.protocol.requests import engine_identity
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.transport import bound_address, make_zmq_socket
from tests.protocol import client_server_demo

WAIT_MS = 10_000


@pytest.fixture
def address(run: RunDirectory) -> str:
    return run.address("lab")


@pytest.fixture
def router(ctx: zmq.Context, address: str) -> Iterator[zmq.Socket]:
    with make_zmq_socket(ctx, address, zmq.ROUTER) as socket:
        yield socket


def dealer(ctx: zmq.Context, address: str, identity: bytes) -> zmq.Socket:
    return make_zmq_socket(ctx, address, zmq.DEALER, bind=False, identity=identity, linger=0)


# REQ / REP, and why not


@pytest.mark.row("A-022")
def test_req_cannot_send_twice(ctx: zmq.Context, address: str) -> None:
    with (
        make_zmq_socket(ctx, address, zmq.REP) as rep,
        make_zmq_socket(ctx, address, zmq.REQ, bind=False, linger=0) as req,
    ):
        req.send(b"first")
        with pytest.raises(zmq.ZMQError, match="current state") as caught:
            req.send(b"second")
        assert caught.value.errno == zmq.EFSM
        assert rep.recv() == b"first"
        rep.send(b"answer")
        assert req.recv() == b"answer"
        req.send(b"second")  # only now
        assert rep.recv() == b"second"


@pytest.mark.row("A-022")
def test_rep_serves_one_at_a_time_and_never_first(ctx: zmq.Context, address: str) -> None:
    with (
        make_zmq_socket(ctx, address, zmq.REP) as rep,
        make_zmq_socket(ctx, address, zmq.REQ, bind=False, linger=0) as one,
        make_zmq_socket(ctx, address, zmq.REQ, bind=False, linger=0) as other,
    ):
        with pytest.raises(zmq.ZMQError) as caught:
            rep.send(b"news")  # no server push
        assert caught.value.errno == zmq.EFSM
        one.send(b"slow")
        other.send(b"quick")
        rep.recv()
        with pytest.raises(zmq.ZMQError) as caught:
            rep.recv()  # the second client waits until the first is answered
        assert caught.value.errno == zmq.EFSM


@pytest.mark.row("A-022", "A-023")
def test_rep_hides_the_envelope_that_router_shows(ctx: zmq.Context, run: RunDirectory) -> None:
    with (
        make_zmq_socket(ctx, run.address("rep"), zmq.REP) as rep,
        make_zmq_socket(ctx, run.address("router"), zmq.ROUTER) as router,
        ctx.socket(zmq.REQ) as req,
    ):
        req.setsockopt(zmq.IDENTITY, b"me")
        req.setsockopt(zmq.LINGER, 0)
        req.connect(bound_address(rep))
        req.send(b"hello")
        assert rep.recv_multipart() == [b"hello"]
        rep.send(b"")
        req.recv()
        req.disconnect(bound_address(rep))
        req.connect(bound_address(router))
        req.send(b"hello")
        assert router.recv_multipart() == [b"me", b"", b"hello"]


@pytest.mark.row("A-022")
def test_no_engine_path_uses_req_or_rep() -> None:
    used = set()
    for file in Path(llmkernel.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "zmq":
                used.add(node.attr)
    assert {"ROUTER", "DEALER", "PUSH", "PULL"} <= used
    assert not used & {"REQ", "REP"}


# ROUTER and DEALER


@pytest.mark.row("A-023", "A-027", "A-028")
def test_router_prefixes_the_sender_and_answers_by_it(ctx: zmq.Context, address: str, router: zmq.Socket) -> None:
    with dealer(ctx, address, b"client-1") as one, dealer(ctx, address, b"client-2") as two:
        one.send(b"from one")
        assert router.recv_multipart() == [b"client-1", b"from one"]
        two.send_multipart([b"from", b"two"])
        assert router.recv_multipart() == [b"client-2", b"from", b"two"]
        router.send_multipart([b"client-2", b"to two"])
        router.send_multipart([b"client-1", b"to one"])
        assert (one.recv_multipart(), two.recv_multipart()) == ([b"to one"], [b"to two"])


@pytest.mark.row("A-027")
def test_an_identity_belongs_to_one_peer(ctx: zmq.Context, address: str, router: zmq.Socket) -> None:
    with dealer(ctx, address, b"same") as first, dealer(ctx, address, b"same") as second:
        first.send(b"registered")
        assert router.recv_multipart() == [b"same", b"registered"]
        second.send(b"too late")
        router.send_multipart([b"same", b"answer"])
        assert first.recv() == b"answer"
        assert second.poll(0) == 0


@pytest.mark.row("A-024", "A-025", "A-026")
def test_dealer_submits_a_batch_and_takes_answers_in_any_order(
    ctx: zmq.Context, address: str, router: zmq.Socket
) -> None:
    with dealer(ctx, address, b"client") as client:
        asked = {}
        for index in range(1000):  # nobody has answered, or even read, anything yet
            message = {"msg_id": str(uuid.uuid4()), "query": f"question {index}", "timestamp": time.time()}
            asked[message["msg_id"]] = message["query"]
            client.send_json(message)
        batch = [router.recv_multipart() for _ in range(1000)]
        read = [zmq.utils.jsonapi.loads(payload) for _, payload in batch]
        assert [message["query"] for message in read] == list(asked.values())
        assert all(set(message) == {"msg_id", "query", "timestamp"} for message in read)
        for message in reversed(read):
            answer = {"msg_id": message["msg_id"], "text": message["query"].upper()}
            router.send_multipart([b"client", zmq.utils.jsonapi.dumps(answer)])
        answers = [client.recv_json() for _ in range(1000)]
    assert [answer["msg_id"] for answer in answers] == list(reversed(asked))
    assert all(answer["text"] == asked[answer["msg_id"]].upper() for answer in answers)


@pytest.mark.row("A-025")
def test_many_dealers_share_a_router_that_serves_them_in_parallel(ctx: zmq.Context, address: str) -> None:
    """Two slow questions are under way at once: each worker starts only when the other has its question too."""
    together = threading.Barrier(2, timeout=10)

    def work(router: zmq.Socket, lock: threading.Lock, identity: bytes) -> None:
        together.wait()
        with lock:  # a socket belongs to one thread at a time
            router.send_multipart([identity, b"done"])

    with (
        make_zmq_socket(ctx, address, zmq.ROUTER) as router,
        dealer(ctx, address, b"a") as a,
        dealer(ctx, address, b"b") as b,
    ):
        lock = threading.Lock()
        a.send(b"slow")
        b.send(b"slow")
        workers = []
        for _ in range(2):
            identity, _ = router.recv_multipart()
            workers.append(threading.Thread(target=work, args=(router, lock, identity)))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert (a.recv(), b.recv()) == (b"done", b"done")


# Poller


@pytest.mark.row("A-030", "A-156")
def test_a_poller_watches_several_sockets_in_one_thread(ctx: zmq.Context, run: RunDirectory) -> None:
    with (
        make_zmq_socket(ctx, run.address("a"), zmq.ROUTER) as one,
        make_zmq_socket(ctx, run.address("b"), zmq.PULL) as two,
        dealer(ctx, run.address("a"), b"x") as talker,
        make_zmq_socket(ctx, run.address("b"), zmq.PUSH, linger=0) as pusher,
    ):
        poller = zmq.Poller()
        poller.register(one, zmq.POLLIN)
        poller.register(two, zmq.POLLIN)
        assert poller.poll(0) == []  # the time-out; and a ROUTER that could write is not reported
        pusher.send(b"1")
        assert poller.poll(WAIT_MS) == [(two, zmq.POLLIN)]
        talker.send(b"2")
        assert one.poll(WAIT_MS)
        assert dict(poller.poll(WAIT_MS)) == {one: zmq.POLLIN, two: zmq.POLLIN}
        assert two.recv() == b"1"
        assert dict(poller.poll(WAIT_MS)) == {one: zmq.POLLIN}


@pytest.mark.row("A-030")
def test_a_busy_socket_does_not_starve_the_other(ctx: zmq.Context, run: RunDirectory) -> None:
    """One message per ready socket and turn: the quiet socket is served in the first turn that finds it ready."""
    with (
        make_zmq_socket(ctx, run.address("a"), zmq.PULL) as busy,
        make_zmq_socket(ctx, run.address("b"), zmq.PULL) as quiet,
        make_zmq_socket(ctx, run.address("a"), zmq.PUSH, linger=0) as flood,
        make_zmq_socket(ctx, run.address("b"), zmq.PUSH, linger=0) as drop,
    ):
        for number in range(1000):
            flood.send(b"%d" % number)
        drop.send(b"one")
        assert busy.poll(WAIT_MS) and quiet.poll(WAIT_MS)
        poller = zmq.Poller()
        for socket in (busy, quiet):
            poller.register(socket, zmq.POLLIN)
        served = [socket.recv() for socket, _ in poller.poll(WAIT_MS)]
        assert served == [b"0", b"one"]


@pytest.mark.row("A-030")
def test_a_poller_can_wait_for_room_to_write(ctx: zmq.Context, run: RunDirectory) -> None:
    with make_zmq_socket(ctx, run.address("a"), zmq.PUSH, hwm=1, linger=0) as push:
        poller = zmq.Poller()
        poller.register(push, zmq.POLLOUT)
        assert poller.poll(0) == [(push, zmq.POLLOUT)]
        push.send(b"fills the queue")
        assert poller.poll(0) == []
        with make_zmq_socket(ctx, run.address("a"), zmq.PULL) as pull:
            assert pull.recv() == b"fills the queue"
            assert poller.poll(WAIT_MS) == [(push, zmq.POLLOUT)]


# PUSH and PULL


@pytest.mark.row("A-031", "A-154")
def test_push_pull_delivers_10_000_messages_in_order(ctx: zmq.Context, address: str) -> None:
    with make_zmq_socket(ctx, address, zmq.PULL) as pull, make_zmq_socket(ctx, address, zmq.PUSH) as push:
        producer = threading.Thread(target=lambda: [push.send(b"token %d" % number) for number in range(10_000)])
        producer.start()
        found = [pull.recv() for _ in range(10_000)]
        producer.join()
    assert found == [b"token %d" % number for number in range(10_000)]


@pytest.mark.row("A-031")
def test_a_producer_never_waits_for_its_consumer(ctx: zmq.Context, address: str) -> None:
    with make_zmq_socket(ctx, address, zmq.PUSH, linger=0) as push:
        for number in range(10_000):
            push.send(b"%d" % number, zmq.NOBLOCK)  # would raise if it had to wait
        with make_zmq_socket(ctx, address, zmq.PULL) as pull:
            assert [pull.recv() for _ in range(10_000)] == [b"%d" % number for number in range(10_000)]


@pytest.mark.row("A-031")
def test_push_pull_goes_one_way(ctx: zmq.Context, address: str) -> None:
    with make_zmq_socket(ctx, address, zmq.PULL) as pull, make_zmq_socket(ctx, address, zmq.PUSH, linger=0) as push:
        for attempt in (lambda: pull.send(b"reply"), lambda: push.recv()):
            with pytest.raises(zmq.ZMQError) as caught:
                attempt()
            assert caught.value.errno == errno.ENOTSUP


@pytest.mark.row("A-032", "A-033", "A-081")
def test_requests_are_routed_by_identity_and_results_flow_into_one_pull(ctx: zmq.Context, run: RunDirectory) -> None:
    """The two channels of an engine, with two engines: the front end binds both and chooses by identity."""
    with (
        make_zmq_socket(ctx, run.address("in0"), zmq.ROUTER) as requests,
        make_zmq_socket(ctx, run.address("out0"), zmq.PULL) as results,
        dealer(ctx, run.address("in0"), engine_identity(0)) as input_0,
        dealer(ctx, run.address("in0"), engine_identity(1)) as input_1,
        make_zmq_socket(ctx, run.address("out0"), zmq.PUSH) as output_0,
        make_zmq_socket(ctx, run.address("out0"), zmq.PUSH) as output_1,
    ):
        for engine in (input_0, input_1):
            engine.send(b"")
        assert {requests.recv_multipart()[0] for _ in range(2)} == {engine_identity(0), engine_identity(1)}
        requests.send_multipart([engine_identity(1), b"\0", b"work for 1"])
        assert input_1.recv_multipart() == [b"\0", b"work for 1"]
        assert input_0.poll(0) == 0
        output_1.send(b"from 1")
        output_0.send(b"from 0")
        assert {results.recv() for _ in range(2)} == {b"from 0", b"from 1"}


# The demo: an engine thread and three clients


@pytest.mark.row("A-029", "A-028", "A-163")
def test_the_demo_answers_every_client() -> None:
    answers = client_server_demo.main()
    asked = {f"question {i} of client {c}" for i, c in itertools.product(range(3), repeat=2)}
    assert answers == {query: query.upper() for query in asked}


@pytest.mark.row("A-163")
def test_the_demo_never_sleeps() -> None:
    assert client_server_demo.__file__
    assert "sleep(" not in Path(client_server_demo.__file__).read_text()


@pytest.mark.row("A-029", "A-144")
def test_an_interrupted_demo_ends_with_a_word() -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", client_server_demo.__name__, "--endless"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert demo.stdout is not None
    assert demo.stdout.readline() == "The clients ask.\n"
    demo.send_signal(signal.SIGINT)
    told, errors = demo.communicate(timeout=20)
    assert (demo.returncode, errors) == (0, "")
    assert "Interrupted: the demo ends." in told
