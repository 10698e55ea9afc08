"""How far the engine's clock is from ours, from messages that were sent anyway."""

import time

import pytest

from llmkernel.client.clock_offset import ClockOffset
from llmkernel.client.startup import Startup
from llmkernel.protocol.handshake import Hello, Ready
from tests.client.fake_engine import make_async_client, make_sync_client
from tests.client.test_startup_machine import INIT, ME, frames


def test_nothing_is_known_and_nothing_is_added() -> None:
    clock = ClockOffset()
    clock.heard(0.0, 50.0)  # an older peer tells no times
    clock.told(50.0, 0.0)
    assert clock.seconds == 0.0


def test_clocks_that_may_be_the_same_are_taken_for_that() -> None:
    clock = ClockOffset()
    clock.heard(theirs=10.0, ours=10.7)
    clock.told(ours=11.0, theirs=11.002)
    assert clock.seconds == 0.0


@pytest.mark.parametrize("offset", [5000.0, -5000.0])
def test_another_clock_is_known_to_half_the_time_on_the_way(offset: float) -> None:
    clock = ClockOffset()
    clock.heard(theirs=10.0, ours=10.0 + offset + 3.0)  # our loop stood still
    clock.told(ours=20.0 + offset, theirs=20.001)
    clock.heard(theirs=30.0, ours=30.0 + offset + 0.003)
    assert clock.seconds == pytest.approx(offset, abs=0.002)


def test_one_direction_alone_is_better_than_nothing() -> None:
    clock = ClockOffset()
    clock.heard(theirs=1.0, ours=0.5)
    assert clock.seconds == -0.5
    clock = ClockOffset()
    clock.told(ours=9.0, theirs=1.0)
    assert clock.seconds == 8.0


@pytest.mark.row("A-147")
def test_the_handshake_measures_it() -> None:
    startup = Startup(ME, INIT)
    ahead = 3600.0
    startup.handshake_message(frames(Hello(pid=5, clock=time.monotonic() + ahead)))
    startup.handshake_message(frames(Ready(clock=time.monotonic() + ahead, init_clock=time.monotonic() + ahead)))
    assert startup.clock.seconds == pytest.approx(-ahead, abs=0.05)


async def test_an_engine_on_this_machine_has_our_clock() -> None:
    client = make_async_client()
    try:
        await client.ready()
        assert client.clock_offset == 0.0
        assert client.startup.clock._most < 10.0, "the engine's messages carried its time"
        with make_sync_client() as other:
            other.ready()
            assert other.clock_offset == 0.0
    finally:
        client.shutdown()
