"""Random adds, aborts, cancels and slow readers from three clients at once, with engines that end in between.

Every stream ends exactly once, with its text or an error; nothing is left behind.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError, EngineStartupError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.engines import FAKE, answer

ARGS = EngineArgs(model="fake:step_ms=1,num_blocks=160,max_model_len=1024", max_num_seqs=12)
PATIENCE = 30.0


class Stream:
    """One request of one client, read by a task of its own."""

    def __init__(self, llm: AsyncLLM, name: str, dice: random.Random) -> None:
        self.name = name
        self.count = dice.choice([1, 5, 40, 300])
        self.pause = dice.choice([0.0, 0.0, 0.0, 0.02])  # a slow reader
        self.text = ""
        self.ends: list[str] = []
        kind = dice.choice(list(RequestOutputKind))
        self._params = SamplingParams(max_tokens=self.count, output_kind=kind)
        self.task = asyncio.create_task(self._read(llm))

    async def _read(self, llm: AsyncLLM) -> None:
        try:
            async with contextlib.aclosing(llm.generate(self.name, self._params, request_id=self.name)) as outputs:
                async for output in outputs:
                    delta = self._params.output_kind is RequestOutputKind.DELTA
                    self.text = self.text + output.text if delta else output.text
                    if output.finished:
                        self.ends.append(str(output.outputs[0].finish_reason))
                        continue  # the stream says itself that there is no more
                    await asyncio.sleep(self.pause)
        except asyncio.CancelledError:
            self.ends.append("cancelled")
        except (EngineDeadError, EngineStartupError):  # the latter from a guest that left before it had a place
            self.ends.append("dead")

    def check(self, *, known: bool) -> str:
        """How it ended; what it said is what the model says, where that is known."""
        assert len(self.ends) == 1, (self.name, self.ends)
        (end,) = self.ends
        if not known:
            return end
        whole = answer(self.name, self.count)
        assert self.text == whole if end == "length" else whole.startswith(self.text), (self.name, end)
        return end


class Chaos:
    """Owns an engine and two guests of it, and plays."""

    def __init__(self, seed: int, args: EngineArgs) -> None:
        self.dice = random.Random(seed)
        self.args = args
        self.fake = args.model.startswith("fake:")
        self.ends: Counter[str] = Counter()
        self.streams: list[Stream] = []
        self.owner: AsyncLLM | None = None
        self._made = 0

    async def start(self) -> None:
        """A new engine: in the same AsyncLLM if the last one was killed, else in one of its own."""
        if self.owner is None:
            self.owner = AsyncLLM(self.args, executor_class=FAKE if self.fake else None)
        else:
            await self.owner.restart()
        self.clients = [self.owner, AsyncLLM.attach(self.owner), AsyncLLM.attach(self.owner)]
        await asyncio.gather(*(client.ready() for client in self.clients))

    async def play(self, operations: int) -> None:
        for _ in range(operations):
            await self._operate()
            await asyncio.sleep(self.dice.choice([0, 0, 0, 0.002, 0.01]))

    async def _operate(self) -> None:
        running = [stream for stream in self.streams if not stream.task.done()]
        verb = self.dice.choice(["add", "add", "add", "abort", "stop", "cancel", "guest"])
        client = self.dice.choice(self.clients)
        if verb == "add" or not running:
            self._made += 1
            self.streams.append(Stream(client, f"s{self._made}", self.dice))
            return
        stream = self.dice.choice(running)
        if verb == "abort":
            await asyncio.gather(*(each.abort(stream.name) for each in self.clients))
        elif verb == "stop":
            await asyncio.to_thread(client.stop_requests, [stream.name])
        elif verb == "cancel":
            stream.task.cancel()
        else:  # a guest leaves, and another comes
            at = self.dice.choice([1, 2])
            await asyncio.to_thread(self.clients[at].shutdown)
            self.clients[at] = AsyncLLM.attach(self.owner)

    async def settle(self) -> None:
        """All that was asked has ended; the engine is where it was."""
        await asyncio.wait_for(asyncio.gather(*(stream.task for stream in self.streams)), PATIENCE)
        self.ends.update(stream.check(known=self.fake) for stream in self.streams)
        self.streams.clear()
        deadline = time.monotonic() + PATIENCE
        while True:
            assert self.owner is not None
            stats = await self.owner.get_stats()
            busy = stats["num_running_reqs"] + stats["num_waiting_reqs"]
            if not busy and stats["num_free_blocks"] == stats["num_blocks"]:
                break
            assert time.monotonic() < deadline, stats
        assert [client.num_unfinished_requests for client in self.clients] == [0, 0, 0]

    async def end(self, how: str) -> None:
        """The engine ends under its clients."""
        owner, *guests = self.clients
        if how == "kill":
            assert owner.facts is not None
            os.kill(owner.facts.pid, signal.SIGKILL)
            await asyncio.gather(*(stream.task for stream in self.streams))
        else:
            self.owner = None
            await asyncio.to_thread(owner.shutdown)
        for guest in guests:
            await asyncio.to_thread(guest.shutdown)
        await asyncio.wait_for(asyncio.gather(*(stream.task for stream in self.streams)), PATIENCE)
        self.ends.update(stream.check(known=self.fake) for stream in self.streams)
        self.streams.clear()


def holdings() -> dict[str, int]:
    """What this process holds, when all that can go has gone."""
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
    }


async def chaos(seed: int, operations: int, restarts: int, args: EngineArgs = ARGS) -> dict[str, Any]:
    game = Chaos(seed, args)
    before: dict[str, int] | None = None
    for round_number in range(restarts + 1):
        await game.start()
        await game.play(operations // (restarts + 1))
        if round_number % 2:
            await game.settle()
            await game.play(20)
        await game.end("kill" if round_number % 3 and round_number < restarts else "shutdown")
        if game.owner is None:  # else its sockets wait for the restart
            held = await settled_holdings(before)
            before = before or held  # the first round leaves the loop's pool of threads behind
    return {"seed": seed, "operations": operations, "restarts": restarts, "ends": dict(game.ends), "left": held}


async def settled_holdings(before: dict[str, int] | None) -> dict[str, int]:
    deadline = time.monotonic() + 5
    held = holdings()
    while (before is not None and held["descriptors"] > before["descriptors"]) or held["tasks"] > 1:
        assert time.monotonic() < deadline, (before, held)
        await asyncio.sleep(0.01)  # tasks that were told to end do so when the loop turns
        held = holdings()
    if before is not None:
        assert held["threads"] <= before["threads"] + 4, (before, held)  # the pool of to_thread grows at its own pace
    return held


async def test_a_short_game() -> None:
    report = await chaos(seed=1, operations=160, restarts=3)
    assert report["ends"]["length"] and report["ends"]["abort"] and report["ends"]["dead"], report


@pytest.mark.slow
async def test_a_short_game_on_the_default_model() -> None:
    report = await chaos(seed=2, operations=60, restarts=2, args=EngineArgs(max_num_seqs=12, kv_cache_memory="64MiB"))
    assert report["ends"]["abort"] and report["ends"]["dead"], report


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_long_game(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [await chaos(seed, operations=1000, restarts=9) for seed in range(3)]
    with capsys.disabled():
        print(json.dumps(reports))
