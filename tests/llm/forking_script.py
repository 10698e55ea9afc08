"""A program whose forked children meet its engine: `forking_script.py KIND WAY`, see test_forks. It prints "ok" last.

KIND: LLM, AsyncLLM, or guest (an LLM that shares an engine). WAY: how the child comes and goes.
"""

import asyncio
import gc
import multiprocessing
import os
import sys
from typing import Any

from llmkernel.config import EngineArgs
from llmkernel.errors import EngineDeadError
from llmkernel.llm.async_llm import AsyncLLM
from llmkernel.llm.llm import LLM
from llmkernel.protocol.sampling_params import SamplingParams
from tests.llm.engines import FAKE, answer

TEN = SamplingParams(max_tokens=10)
held: list[Any] = []  # the children find it as their parent left it


def ask(llm: Any, prompt: str) -> str:
    if isinstance(llm, LLM):
        return llm.generate(prompt, TEN)[0].text

    async def last() -> str:
        return [output async for output in llm.generate(prompt, TEN)][-1].text

    return asyncio.run(last())


def use_in_child(_: int = 0) -> str:
    """What a child hears that uses its parent's engine, or ends it."""
    llm = held[0]
    try:
        ask(llm, "from the child")
    except EngineDeadError as error:
        assert llm.shutdown() == 0
        return str(error)
    return "answered"


def fork(way: str) -> None:
    child = os.fork()
    if child == 0:
        said = use_in_child()
        assert "a forked child cannot use it" in said, said
        if way == "collects":
            held.clear()
            gc.collect()
        if way == "exits":
            sys.exit(7)  # finalisers and exit hooks run
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def main() -> None:
    kind, way = sys.argv[1:]
    owner = LLM("fake:", executor_class=FAKE, quiet=True) if kind != "AsyncLLM" else None
    held.append(
        LLM(engine=owner) if kind == "guest" else owner or AsyncLLM(EngineArgs(model="fake:"), executor_class=FAKE)
    )
    assert ask(held[0], "before") == answer("before", 10)
    if way == "pool":  # as a DataLoader's workers
        with multiprocessing.get_context("fork").Pool(2) as pool:
            said = pool.map(use_in_child, range(4))
        assert all("a forked child cannot use it" in words for words in said), said
    else:
        fork(way)
    assert ask(held[0], "after") == answer("after", 10)
    if owner is not None:
        assert ask(owner, "owner") == answer("owner", 10)
    held.pop().shutdown()
    print("ok", flush=True)


if __name__ == "__main__":
    main()
