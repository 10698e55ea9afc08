"""Session and Generation without a notebook: a script's event loop and a fake engine."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import EngineDeadError, EngineStartupError, InvalidRequestError
from llmkernel.notebook.generation import Generation
from llmkernel.notebook.session import Session
from llmkernel.notebook.status_text import status_text

FAKE = "fake:step_ms=2,fail_token=33,max_model_len=512"


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    with Session() as session:
        await session.load(FAKE, name="fake")
        yield session
    others = asyncio.all_tasks() - {asyncio.current_task()}
    _, pending = await asyncio.wait(others, timeout=2) if others else (set(), set())
    assert not [task for task in pending if task.get_name().startswith("llmkernel")]


async def test_a_generation_runs_before_it_is_awaited(session: Session) -> None:
    generation = session.generate("hello", raw=True, max_tokens=8)
    assert not generation.done and generation.state == "waiting" and generation.text == ""
    assert await generation is generation
    assert generation.text == answer("hello", 8) == str(generation)
    assert generation.prompt_token_ids == list(b"hello") and generation.prompt == "hello"
    assert generation.outputs[0].finish_reason == "length" and generation.state == "done"
    assert repr(generation) == f"<Generation {generation.id}: fake, done, 8 tokens>"
    metrics = generation.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens, metrics.preemptions) == (5, 8, 0)
    assert metrics.time_to_first_token and metrics.tokens_per_second and metrics.inter_token_latency


async def test_a_cell_is_one_turn_of_a_chat(session: Session) -> None:
    generation = await session.generate("Hi", system="Be brief.", max_tokens=2)
    assert generation.prompt is not None
    assert generation.prompt.index("Be brief.") < generation.prompt.index("user\nHi<|im_end|>")
    assert generation.prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.row("A-119")
async def test_text_is_iterated_as_it_comes_and_from_the_beginning(session: Session) -> None:
    generation = session.generate(["a", "b"], raw=True, n=2, max_tokens=6)
    pieces: dict[tuple[int, int], list[str]] = {}
    async for delta in generation:
        pieces.setdefault((delta.row, delta.answer), []).append(delta)
    assert {key: "".join(parts) for key, parts in pieces.items()} == {
        (row, index): answer("ab"[row], 6) for row in range(2) for index in range(2)
    }
    assert any(len(parts) > 1 for parts in pieces.values())
    assert "".join([delta async for delta in generation if (delta.row, delta.answer) == (1, 1)]) == answer("b", 6)


async def test_leaving_an_iteration_leaves_the_request_alone(session: Session) -> None:
    generation = session.generate("hello", raw=True, max_tokens=20)
    async for _ in generation:
        break
    assert (await generation).text == answer("hello", 20)


async def test_rows_fail_alone(session: Session) -> None:
    generation = await session.generate(["good", "bad!", "x" * 600, "fine"], raw=True, max_tokens=4)
    assert generation.texts == [answer("good", 4), "", "", answer("fine", 4)]
    assert [type(error).__name__ for error in generation.errors] == [
        "NoneType", "RequestFailedError", "InvalidRequestError", "NoneType",
    ]  # fmt: skip
    assert [output.finish_reason for output in generation.outputs] == ["length", "error", "error", "length"]
    assert generation.state == "failed"
    with pytest.raises(InvalidRequestError, match="shorten it to 511"):
        await session.generate("x" * 600, raw=True)


async def test_cancel_keeps_the_text_and_frees_the_engine(session: Session) -> None:
    generation = session.generate("hello", raw=True, max_tokens=400)
    async for _ in generation:
        generation.cancel()
        break
    await generation
    assert generation.done and generation.state == "cancelled" and generation.outputs[0].finish_reason == "abort"
    assert generation.text and answer("hello", 400).startswith(generation.text)
    generation.cancel()
    stats = await session.models["fake"].llm.get_stats()
    assert stats["num_running_reqs"] == 0 and stats["kv_cache_usage"] == 0


async def test_cancelling_whoever_waits_aborts(session: Session) -> None:
    waits = [session.generate("hello", raw=True, max_tokens=400) for _ in range(3)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waits[0], 0.05)
    gathered = asyncio.gather(*waits[1:])
    await asyncio.sleep(0)
    gathered.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathered
    assert [generation.state for generation in waits] == ["cancelled"] * 3


async def test_two_models_by_name_and_the_newest_is_the_default(session: Session) -> None:
    await session.load("fake:echo=1", name="echo")
    assert (await session.generate("say it", raw=True)).text == "say it"
    assert (await session.generate("hello", raw=True, model="fake", max_tokens=3)).text == answer("hello", 3)
    assert {slot.process.pid for slot in session.models.values()}.__len__() == 2
    given_back = await session.unload("echo")
    assert given_back["echo"] > 1_000_000
    assert session.default == "fake" and (await session.generate("a", raw=True, max_tokens=1)).model == "fake"


async def test_loading_again_gives_what_is_there(session: Session) -> None:
    first = session.models["fake"].llm
    assert await session.load(FAKE, name="fake") is first
    with pytest.raises(InvalidRequestError, match="loaded with other options"):
        session.load("fake:", name="fake")
    with pytest.raises(InvalidRequestError, match="did you mean 'max_model_len'"):
        session.load("fake:", max_model_length=3)


async def test_unloading_ends_what_runs(session: Session) -> None:
    generation = session.generate("hello", raw=True, max_tokens=400)
    async for _ in generation:
        break
    await session.unload()
    await generation
    assert generation.state == "cancelled" and generation.text
    with pytest.raises(InvalidRequestError, match="No model is loaded"):
        session.slot()


async def test_unloading_one_of_two_models_leaves_the_other_ones_answer_alone() -> None:
    with Session() as session:
        for name in ("a", "b"):
            await session.load("fake:step_ms=5", name=name)
        both = session.generate("hello", raw=True, max_tokens=60, model=["a", "b"])
        async for _ in both:
            break
        await session.unload("a")
        await both
        assert [one.finish_reason for one in both.outputs] == ["abort", "length"]
        assert both.texts[1] == answer("hello", 60) and both.state == "done"


async def test_mistakes_are_told_before_anything_happens(session: Session) -> None:
    for prompts, options, message in (
        ("", {}, "prompt is empty"),
        ([], {}, "no prompt"),
        ("a", {"max_tokens": 0}, "max_tokens = 0"),
        ("a", {"temperature": 0, "n": 2}, "n = 2"),
        ("a", {"model": "other"}, "No model is called 'other' (loaded: fake)"),
        ("a", {"max_token": 3}, "did you mean max_tokens"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            session.generate(prompts, **options)
        assert message in str(caught.value)
    assert not session.generations


async def test_a_failed_load_is_told_and_forgotten() -> None:
    with Session() as session:
        with pytest.raises(EngineStartupError, match="told to fail its load"):
            await session.load("fake:fail_load=1", name="bad")
        assert not session.models
        await session.load("fake:", name="bad")
        assert session.models["bad"].state == "ready"


async def test_a_request_waits_for_the_load_and_outlives_its_waiter() -> None:
    with Session() as session:
        session.load("fake:load_ms=300", name="slow")
        generation = session.generate("hello", raw=True, max_tokens=3)
        assert generation.waits_for_load
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.generate("other", raw=True), 0.01)
        assert session.models["slow"].loading
        assert (await generation).text == answer("hello", 3)


async def test_a_dead_engine_fails_its_generations_with_the_partial_text() -> None:
    with Session() as session:
        await session.load("fake:step_ms=2,crash_token=33", name="fragile")
        running = session.generate("hello", raw=True, max_tokens=400)
        async for _ in running:
            break
        with pytest.raises(EngineDeadError):
            await session.generate("bad!", raw=True)
        with pytest.raises(EngineDeadError):
            await running
        assert running.text and running.state == "failed"
        assert session.models["fragile"].state == "dead"
        await session.load("fake:", name="fragile")
        assert (await session.generate("hello", raw=True, max_tokens=2)).text == answer("hello", 2)


async def test_only_the_newest_generations_are_remembered(session: Session) -> None:
    made: list[Generation] = [session.generate("a", raw=True, max_tokens=1) for _ in range(70)]
    await asyncio.gather(*made)
    assert len(session.generations) == 64 and session.generation().id == made[-1].id
    with pytest.raises(InvalidRequestError, match="No generation is called 'g1'"):
        session.generation("g1")


async def test_status_tells_what_became_of_drafts() -> None:
    with Session() as session:
        await session.load("fake:letters=3", name="fake", speculative="ngram")
        await session.generate("one two", raw=True, max_tokens=4)
        assert "speculation: no drafts yet" in status_text(session)
        await session.generate("one two", raw=True, max_tokens=80)
        assert re.search(r"speculation: \d+% of \d+ drafted tokens accepted", status_text(session))
        with pytest.raises(InvalidRequestError, match="speculative: 'engram' is no method; use 'ngram'"):
            session.load("fake:", name="other", speculative="engram")
