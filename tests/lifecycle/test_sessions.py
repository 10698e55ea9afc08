"""Session in a script: restarts by itself if it was told to; a forgotten one takes its engines along."""

import asyncio
import gc
import os
import signal
import weakref

import psutil
import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import EngineDeadError
from llmkernel.notebook.session import Session


def answer(count: int) -> str:
    return bytes(fake_answer(list(b"hello"), count)).decode()


async def test_a_killed_engine_comes_back_by_itself() -> None:
    with Session(auto_restart=True) as session:
        llm = await session.load("fake:step_ms=5", name="fake")
        running = session.generate("hello", raw=True, max_tokens=1000)
        async for _ in running:
            break
        pid = llm.facts.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await running
        assert running.text and answer(1000).startswith(running.text)
        after = await session.generate("hello", raw=True, max_tokens=4)  # waits for the new engine
        assert after.text == answer(4)
        assert session.models["fake"].llm is llm and llm.generation == 1 and llm.facts.pid != pid


async def test_without_being_told_it_stays_dead_until_it_is_restarted() -> None:
    with Session() as session:
        llm = await session.load("fake:", name="fake")
        os.kill(llm.facts.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await session.generate("hello", raw=True, max_tokens=4)
        assert session.models["fake"].state == "dead" and llm.generation == 0
        assert await session.restart() is llm
        assert (await session.generate("hello", raw=True, max_tokens=4)).text == answer(4)
        given_back = await session.unload()
        assert given_back["fake"] > 0 and session.models == {}


async def test_a_forgotten_session_takes_its_engine_along() -> None:
    session = Session()
    await session.load("fake:", name="fake")
    await session.generate("hello", raw=True, max_tokens=4)
    engine, gone = psutil.Process(session.models["fake"].process.pid), weakref.ref(session)
    del session
    async with asyncio.timeout(5):
        while gone() is not None or (engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE):
            gc.collect()
            await asyncio.sleep(0.02)
