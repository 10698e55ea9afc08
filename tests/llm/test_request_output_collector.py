"""RequestOutputCollector: one place, nothing lost, whatever the order of puts and gets."""

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkernel.errors import EngineDeadError
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.protocol.sampling_params import RequestOutputKind

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def _output(index: int, text: str, *, finished: bool = False, all_finished: bool = False) -> RequestOutput:
    reason = "stop" if finished else None
    completion = CompletionOutput(index, text, [ord(letter) for letter in text], finish_reason=reason)
    return RequestOutput("r", None, [1], outputs=[completion], finished=all_finished)


@pytest.mark.row("A-114", "A-115")
@settings(deadline=None)
@given(
    puts=st.lists(st.tuples(st.integers(0, 3), st.text("abc", min_size=1, max_size=3)), min_size=1, max_size=20),
    gets=st.lists(st.booleans(), min_size=20, max_size=20),
)
@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_every_interleaving_delivers_the_same(
    kind: RequestOutputKind, puts: list[tuple[int, str]], gets: list[bool]
) -> None:
    collector = RequestOutputCollector(kind)
    expected: dict[int, str] = {}
    seen: dict[int, str] = {}

    def take() -> None:
        output = collector.get_nowait()
        for completion in output.outputs if output is not None else ():
            before = seen.get(completion.index, "") if kind == DELTA else ""
            seen[completion.index] = before + completion.text
            assert completion.token_ids == [ord(letter) for letter in completion.text]

    for (index, text), read in zip(puts, gets, strict=False):
        expected[index] = expected.get(index, "") + text
        collector.put(_output(index, text if kind == DELTA else expected[index]))
        if read:
            take()
    take()
    assert seen == expected
    assert collector.get_nowait() is None


def test_finished_sticks_when_outputs_merge() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(_output(0, "a", finished=True))
    collector.put(_output(1, "b", finished=True, all_finished=True))
    output = collector.get_nowait()
    assert output is not None
    assert output.finished
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "a", "stop"), (1, "b", "stop")]


def test_an_exception_waits_behind_the_text_that_was_there() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(_output(0, "text"))
    collector.put(EngineDeadError("gone"))
    output = collector.get_nowait()
    assert output is not None and output.text == "text"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            collector.get_nowait()


async def test_get_waits_and_a_cancelled_wait_loses_nothing() -> None:
    collector = RequestOutputCollector(DELTA)
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(_output(0, "a"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await collector.get()).text == "a"


async def test_put_from_another_thread_wakes_the_reader() -> None:
    collector = RequestOutputCollector(DELTA)
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    thread = threading.Thread(target=collector.put, args=(_output(0, "a"),))
    thread.start()
    assert (await asyncio.wait_for(waiting, 5)).text == "a"
    thread.join()


def test_it_belongs_to_no_loop() -> None:
    collector = RequestOutputCollector(CUMULATIVE)
    collector.put(_output(0, "a"))
    assert asyncio.run(collector.get()).text == "a"
    collector.put(_output(0, "ab"))
    assert asyncio.run(collector.get()).text == "ab"


async def test_two_readers_are_refused() -> None:
    collector = RequestOutputCollector(DELTA)
    first = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="Two tasks"):
        await collector.get()
    collector.put(_output(0, "a"))
    assert (await first).text == "a"
