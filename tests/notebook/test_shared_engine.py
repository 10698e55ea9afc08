"""Blocking calls and other loops in the cells of a real kernel, on the engine that %llm load has loaded."""

from collections.abc import Iterator

import pytest

from tests.notebook.kernel import Kernel, running_kernel
from tests.notebook.test_cells import answer

SETUP = """
import asyncio, threading
from llmkernel import LLM, SamplingParams, Session
llm, params = Session.current.models["fake"].llm, SamplingParams(max_tokens=8)

async def last(prompt):
    async for output in llm.generate(prompt, params):
        pass
    return output.outputs[0].text

def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(
        tmp_path_factory.mktemp("shared"), "%load_ext llmkernel", "%llm load fake:step_ms=2 --name fake", SETUP
    ) as kernel:
        yield kernel


@pytest.mark.parametrize(
    "expression",
    [
        "LLM(engine=llm).generate('x', params)[0].text",
        "in_thread(lambda: LLM(engine=llm).generate('x', params)[0].text)",
        "in_thread(lambda: asyncio.run(last('x')))",
        "[in_thread(lambda: asyncio.run(last('x'))) for _ in range(3)][-1]",
        "await last('x')",
        "(await asyncio.gather(asyncio.to_thread(lambda: asyncio.run(last('x'))), last('y')))[0]",
    ],
)
def test_every_way_to_ask_in_a_cell_while_another_answer_streams(kernel: Kernel, expression: str) -> None:
    cell = kernel.run(
        f"other = %generate -b --raw --max-tokens 200 other\nassert {expression} == {answer('x', 8)!r}\n"
        f"await other\nassert other.text == {answer('other', 200)!r}, other.text"
    )
    assert cell.status == "ok", cell.traceback
    assert cell.stderr == ""


def test_guests_leave_nothing_behind_and_the_engine_is_the_same(kernel: Kernel) -> None:
    cell = kernel.run(
        "import gc\ngc.collect()\n"
        "for _ in range(100):\n"
        "    with llm.running_engine.control() as control:\n"
        "        clients = [client.client_index for client in control.status().clients]\n"
        "    if clients == [0]:\n"
        "        break\n"
        "assert clients == [0], clients\n"
        "assert await llm.call_utility('is_sleeping') is False"
    )
    assert cell.status == "ok", cell.traceback


def test_stop_of_a_stream_while_a_cell_blocks_the_loop(kernel: Kernel) -> None:
    """What a click on Stop does: from another thread, heard by the engine at once."""
    cell = kernel.run(
        "import time\n"
        "long = %generate -b --raw --max-tokens 1500 long\n"
        "await asyncio.sleep(0.1)\n"
        "started = time.monotonic()\n"
        "threading.Thread(target=Session.current.stop_requests, args=([long.rows[0].request_id],)).start()\n"
        "with llm.running_engine.control() as control:\n"  # on the loop, which stands still
        "    while control.status().running:\n"
        "        assert time.monotonic() - started < 5\n"
        "assert time.monotonic() - started < 0.5\n"
        "await long\n"
        "assert long.state == 'cancelled' and long.text"
    )
    assert cell.status == "ok", cell.traceback
