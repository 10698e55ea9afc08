"""Memory that ZMQ may still read is known, kept and given back (better.md M13 to M15)."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
import zmq.asyncio

from llmkernel.protocol.outputs import EngineCoreOutput, EngineCoreOutputs
from llmkernel.protocol.pending import PendingMessages, track_frames
from llmkernel.protocol.run_directory import RunDirectory
from llmkernel.protocol.serial import MsgpackDecoder, MsgpackEncoder
from llmkernel.protocol.transport import make_zmq_socket

LARGE = 2**20


class Switch:
    """A tracker that is done when told."""

    def __init__(self) -> None:
        self.done = False


@pytest.fixture
def lonely(ctx: zmq.Context, run: RunDirectory) -> Iterator[zmq.Socket]:
    """A PUSH whose peer is not there: what it sends stays queued."""
    with make_zmq_socket(ctx, run.address("out0"), zmq.PUSH, linger=0) as socket:
        yield socket


@pytest.mark.row("A-059")
def test_the_tracker_of_send_multipart_speaks_of_the_last_frame_only(lonely: zmq.Socket) -> None:
    tracker = lonely.send_multipart([bytearray(LARGE), b"0123456789"], copy=False, track=True)
    assert tracker is not None and tracker.done


@pytest.mark.row("A-058", "A-059", "A-038")
def test_the_tracker_of_track_frames_speaks_of_the_first_frame_too(lonely: zmq.Socket, ctx: zmq.Context) -> None:
    frames, tracker = track_frames([bytearray(LARGE), b"0123456789"])
    lonely.send_multipart(frames, copy=False)
    del frames
    assert not tracker.done
    with make_zmq_socket(ctx, lonely.getsockopt_string(zmq.LAST_ENDPOINT), zmq.PULL) as peer:
        assert [len(frame) for frame in peer.recv_multipart()] == [LARGE, 10]
        tracker.wait(timeout=10)
    assert tracker.done


def test_nothing_but_the_tracker_guards_a_queued_buffer(lonely: zmq.Socket) -> None:
    buffer = bytearray(LARGE)
    frames, tracker = track_frames([buffer, b"aux"])
    lonely.send_multipart(frames, copy=False)
    buffer.extend(b"x")  # Python sees no export that forbids it
    assert not tracker.done


def test_small_frames_are_copied_and_free_at_once(lonely: zmq.Socket) -> None:
    frames, tracker = track_frames([bytearray(100), b"aux"])
    lonely.send_multipart(frames, copy=False)
    assert tracker.done


def test_an_array_stays_alive_while_its_message_is_queued(lonely: zmq.Socket, ctx: zmq.Context) -> None:
    array = np.full(LARGE, 7, dtype=np.uint8)
    gone = weakref.ref(array)
    frames, tracker = track_frames(MsgpackEncoder().encode([array]))
    lonely.send_multipart(frames, copy=False)
    del array, frames
    gc.collect()
    assert gone() is not None
    with make_zmq_socket(ctx, lonely.getsockopt_string(zmq.LAST_ENDPOINT), zmq.PULL) as peer:
        assert set(peer.recv_multipart()[1]) == {7}
        tracker.wait(timeout=10)


@pytest.mark.row("A-058")
def test_pending_gives_back_what_is_done_oldest_first() -> None:
    pending, switches = PendingMessages(), [Switch() for _ in range(4)]
    for number, switch in enumerate(switches):
        pending.add(switch, number, f"buffer {number}")
    assert pending.reclaim() == []
    switches[2].done = switches[0].done = True
    assert pending.reclaim() == [(0, "buffer 0"), (2, "buffer 2")]
    assert len(pending) == 2
    switches[1].done = switches[3].done = True
    assert pending.reclaim() == [(1, "buffer 1"), (3, "buffer 3")]
    assert len(pending) == 0


@pytest.mark.row("A-058")
def test_pending_keeps_its_objects_alive() -> None:
    pending, switch = PendingMessages(), Switch()
    array = np.zeros(3)
    gone = weakref.ref(array)
    pending.add(switch, array)
    del array
    gc.collect()
    assert gone() is not None
    switch.done = True
    pending.reclaim()
    gc.collect()
    assert gone() is None


@pytest.mark.row("A-056", "A-058")
def test_buffers_that_are_reused_when_done_corrupt_nothing(lonely: zmq.Socket, ctx: zmq.Context) -> None:
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    pending, free = PendingMessages(), [bytearray()]
    made = 0
    with make_zmq_socket(ctx, lonely.getsockopt_string(zmq.LAST_ENDPOINT), zmq.PULL) as peer:
        for step in range(40):
            free += [buffer for (buffer,) in pending.reclaim()]
            if not free:
                made += 1
            buffer = free.pop() if free else bytearray()
            outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(f"r{step}", [step] * 70_000)])
            frames, tracker = track_frames(encoder.encode_into(outputs, buffer))
            lonely.send_multipart(frames, copy=False)
            del frames
            pending.add(tracker, buffer)
            if step % 4 == 3:  # the peer reads in gusts
                for earlier in range(step - 3, step + 1):
                    found = decoder.decode(peer.recv_multipart(copy=False)).outputs[0]
                    assert (found.request_id, set(found.new_token_ids)) == (f"r{earlier}", {earlier})
                tracker.wait(timeout=10)
    assert made < 8


@pytest.mark.row("A-159")
async def test_a_tracked_send_of_a_loop_registers_itself_when_it_left(run: RunDirectory) -> None:
    pending = PendingMessages()
    array = np.arange(LARGE, dtype=np.int8)
    with (
        zmq.asyncio.Context() as ctx,
        make_zmq_socket(ctx, run.address("in0"), zmq.PULL) as peer,
        make_zmq_socket(ctx, run.address("in0"), zmq.PUSH, linger=0) as socket,
    ):
        sent = socket.send_multipart(MsgpackEncoder().encode([array]), copy=False, track=True)
        assert isinstance(sent, asyncio.Future)
        registered = asyncio.Event()

        def add_pending(done: "asyncio.Future[zmq.MessageTracker]") -> None:
            pending.add(done.result(), array)
            registered.set()

        sent.add_done_callback(add_pending)
        await asyncio.wait_for(registered.wait(), 10)
        assert len(pending) == 1
        assert len((await peer.recv_multipart())[1]) == LARGE
        sent.result().wait(timeout=10)
    assert [objects[0] is array for objects in pending.reclaim()] == [True]
