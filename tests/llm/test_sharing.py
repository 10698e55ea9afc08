"""LLM(engine=...) and AsyncLLM.attach: several clients at one engine, in this process and in others."""

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError, InvalidRequestError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.llm import LLM
from llmkernel.llm.llm_engine import LLMEngine
from llmkernel.protocol.control import FIRST_ATTACHED, EngineStatus
from llmkernel.protocol.sampling_params import SamplingParams
from tests.llm.engines import FAKE, answer, collect, fake_llm

TEN, LONG = SamplingParams(max_tokens=10), SamplingParams(max_tokens=3900)
SETTINGS = "step_ms=1,num_blocks=900,max_model_len=4000"


@pytest.fixture
def owner() -> Iterator[LLM]:
    with LLM(f"fake:{SETTINGS}", executor_class=FAKE, quiet=True) as llm:
        yield llm


def status(llm: LLM) -> EngineStatus:
    assert llm.llm_engine.running_engine is not None
    with llm.llm_engine.running_engine.control() as control:
        return control.status()


def wait_until_alone(llm: LLM, within: float) -> None:
    """Ask until nothing runs and the owner is the only client, and no guest's socket is left."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        found = status(llm)
        if [(client.client_index, client.unfinished) for client in found.clients] == [(0, 0)]:
            names = set(os.listdir(os.path.dirname(found.log)))
            assert names == {"card", "ctl", "hs", "in0", "init", "lock", "log", "out0"}
            return
    raise AssertionError(f"never alone: {found}")


def guest_process(owner: LLM, verb: str, prompt: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.llm.guest_script", str(owner.llm_engine.facts.pid), verb, prompt]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_blocking_calls_in_a_cell_share_the_engine_of_its_loop(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_llm(SETTINGS) as mine:
        running = asyncio.create_task(collect(mine.generate("a stream", SamplingParams(max_tokens=200))))
        await asyncio.sleep(0)
        with LLM(engine=mine) as llm:  # blocks the loop
            assert llm.generate(["a", "b"], TEN)[1].text == answer("b", 10)
            assert llm.llm_engine.facts.pid == mine.facts.pid  # type: ignore[union-attr]
        assert (await running)[-1].text == answer("a stream", 200)
        assert await mine.call_utility("is_sleeping") is False
    assert capsys.readouterr().err == ""  # it takes no memory


async def test_sharing_an_engine_that_still_loads_while_its_loop_is_blocked() -> None:
    with AsyncLLM(EngineArgs(model="fake:load_ms=50"), executor_class=FAKE) as mine:
        with LLM(engine=mine) as llm:
            assert llm.generate("a", TEN)[0].text == answer("a", 10)
        assert (await collect(mine.generate("b", TEN)))[-1].text == answer("b", 10)


async def test_sharing_an_engine_whose_load_fails() -> None:
    with AsyncLLM(EngineArgs(model="fake:load_ms=200,fail_load=1"), executor_class=FAKE) as mine:
        with pytest.raises(
            EngineStartupError, match=r"Could not attach to the engine.*ended before it was ready"
        ) as caught:
            LLM(engine=mine)
        assert "fail_load" in caught.value.log_tail


def test_guests_in_threads_and_a_guest_of_a_guest(owner: LLM) -> None:
    def use(number: int) -> list[str]:
        with LLM(engine=owner) as guest, LLM(engine=guest.llm_engine) as second:
            texts = [output.text for output in guest.generate([f"{number}", "x"], TEN)]
            return texts + [output.text for output in second.generate(f"{number}", TEN)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for number, texts in enumerate(pool.map(use, range(8))):
            assert texts == [answer(f"{number}", 10), answer("x", 10), answer(f"{number}", 10)]
    wait_until_alone(owner, 5)
    assert owner.generate("mine", TEN)[0].text == answer("mine", 10)


def test_guests_in_other_processes(owner: LLM) -> None:
    guests = [guest_process(owner, "answer", f"guest {number}") for number in range(2)]
    assert owner.generate("mine", TEN)[0].text == answer("mine", 10)
    for number, guest in enumerate(guests):
        assert guest.communicate(timeout=30)[0] == answer(f"guest {number}", 10) + "\n"
        assert guest.returncode == 0
    wait_until_alone(owner, 5)


def test_an_owner_that_is_killed_takes_the_engine_from_its_guests() -> None:
    command = [sys.executable, "-m", "tests.client.owner_script", "sync", f"fake:{SETTINGS}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline().split()[1])
        assert owner.stdout.readline() == "waiting\n"
        with LLM(engine=pid) as guest:
            run = guest.llm_engine.running_engine
            assert run is not None and run.owner_pid == owner.pid
            killed = 0.0
            with pytest.raises(EngineDeadError, match=rf"it ends with its owner, process {owner.pid}"):
                for _ in guest.stream("x", LONG):
                    if not killed:
                        killed = time.monotonic()
                        owner.kill()
            assert time.monotonic() - killed < 2
            assert not run.run_path.exists()


async def test_blocking_calls_in_threads_that_a_cell_joins() -> None:
    async with fake_llm(SETTINGS) as mine:
        found: dict[int, str] = {}

        def use(number: int) -> None:
            with LLM(engine=mine) as guest:
                found[number] = guest.generate(f"{number}", TEN)[0].text

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)  # the loop stands still meanwhile
        assert found == {number: answer(f"{number}", 10) for number in range(4)}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_guest_that_vanishes_has_its_requests_aborted(owner: LLM, end: signal.Signals) -> None:
    with guest_process(owner, "hold", "x") as guest:
        assert guest.stdout is not None and guest.stdout.readline() == "begun\n"
        found = status(owner)
        assert [(client.client_index, client.pid, client.unfinished) for client in found.clients] == [
            (0, os.getpid(), 0),
            (FIRST_ATTACHED, guest.pid, 1),
        ]
        guest.send_signal(end)
        guest.wait(10)
        wait_until_alone(owner, 2)
    assert owner.generate("mine", TEN)[0].text == answer("mine", 10)


async def test_a_guest_without_an_owner_gets_an_error_that_says_so() -> None:
    owner = LLM(f"fake:{SETTINGS}", executor_class=FAKE, quiet=True)
    guest = AsyncLLM.attach(owner)
    assert guest.args == owner.llm_engine.args
    stream = guest.generate("x", LONG)
    first = await anext(stream)
    await asyncio.to_thread(owner.shutdown)
    with pytest.raises(
        EngineDeadError, match=rf"shared engine has ended \(it ends with its owner, process {os.getpid()}"
    ) as caught:
        while True:
            first = await anext(stream)
    assert caught.value.partial.text.startswith(first.text)  # type: ignore[attr-defined]
    assert guest.shutdown() == 0
    with pytest.raises(EngineDeadError):
        LLM(engine=owner)


def test_a_killed_engine_is_told_to_a_blocking_guest(owner: LLM) -> None:
    """A guest has no child to wait for: it watches the process."""
    with LLM(engine=owner) as guest:
        killed = 0.0
        with pytest.raises(EngineDeadError, match="shared engine has ended"):
            for _ in guest.stream("x", LONG):
                if not killed:
                    killed = time.monotonic()
                    os.kill(owner.llm_engine.facts.pid, signal.SIGKILL)
        assert time.monotonic() - killed < 1


async def test_a_killed_engine_is_told_to_every_waiter_of_a_guest(owner: LLM) -> None:
    guest = AsyncLLM.attach(owner)
    begun = [asyncio.Event() for _ in range(8)]

    async def read(event: asyncio.Event) -> None:
        async for _ in guest.generate("x", LONG):
            event.set()

    streams = [asyncio.create_task(read(event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    pause = asyncio.create_task(guest.call_utility("pause_scheduler", "wait"))
    await guest.call_utility("is_sleeping")  # behind the pause, which waits for the streams
    os.kill(owner.llm_engine.facts.pid, signal.SIGKILL)
    started = time.monotonic()
    outcomes = await asyncio.gather(*streams, pause, return_exceptions=True)
    assert time.monotonic() - started < 1
    assert all("shared engine has ended" in str(outcome) for outcome in outcomes)
    guest.shutdown()


def test_a_guest_that_was_shut_down_says_so_and_the_engine_goes_on(owner: LLM) -> None:
    guest = LLM(engine=owner)
    assert guest.shutdown() == 0
    guest.shutdown()
    with pytest.raises(EngineDeadError, match=r"shut down here; the engine that it shared goes on"):
        guest.generate("a", TEN)
    wait_until_alone(owner, 5)
    assert owner.generate("mine", TEN)[0].text == answer("mine", 10)


def test_what_cannot_be_shared_is_refused(owner: LLM) -> None:
    for options in ({"model": "other"}, {"dtype": "float32"}, {"executor_class": FAKE}):
        with pytest.raises(InvalidRequestError, match=f"leave out {next(iter(options))}"):
            LLM(engine=owner, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="engine = str must be an AsyncLLM"):
        LLM(engine="smollm2")
    with pytest.raises(
        InvalidRequestError, match=rf"{os.getpid()} is no engine of yours .*{owner.llm_engine.facts.pid}"
    ):
        LLM(engine=os.getpid())
    inside = LLMEngine(EngineArgs(model="fake:"), executor_class=FAKE, multiprocess_mode=False)
    with inside, pytest.raises(InvalidRequestError, match="its own process only"):
        LLM(engine=inside)
