"""Real engine processes with the fake executor, and what the fake model answers."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from llmkernel.config import EngineArgs
from llmkernel.engine.fake_executor import fake_answer
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.outputs import RequestOutput

FAKE = "llmkernel.engine.fake_executor:FakeExecutor"


def answer(prompt: str | Sequence[int], count: int) -> str:
    """Text of the fake model's first `count` tokens."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return bytes(fake_answer(ids, count)).decode()


@contextlib.asynccontextmanager
async def fake_llm(settings: str = "", **options: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM on the fake model, shut down at the end."""
    async with AsyncLLM(EngineArgs(model=f"fake:{settings}", **options), executor_class=FAKE) as llm:
        yield llm


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def free_blocks(llm: AsyncLLM) -> tuple[int, int]:
    """Free blocks and all blocks of the KV pool, as the engine says, and that it works on nothing."""
    stats = await llm.get_stats()
    assert stats["num_running_reqs"] == stats["num_waiting_reqs"] == 0
    return stats["num_free_blocks"], stats["num_blocks"]
