"""A chat: what each turn is told, what is taken back, what a stopped or failed answer leaves; on a fake engine."""

from collections.abc import AsyncIterator

import pytest

from llmkernel.errors import InvalidRequestError, RequestFailedError
from llmkernel.notebook.conversation import Cell
from llmkernel.notebook.session import Session

FAKE = "fake:step_ms=2,fail_token=33,max_model_len=2048"


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    with Session() as session:
        await session.load(FAKE, name="fake")
        yield session


def _chatml(*turns: str, system: str = "") -> str:
    roles = ["user", "assistant"] * len(turns)
    said = [("system", system)] if system else []
    said += list(zip(roles, turns, strict=False))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + "<|im_start|>assistant\n"


async def test_what_was_said_goes_with_the_next_turn_and_comes_out_of_the_prefix_cache(session: Session) -> None:
    first = await session.chat("Hi", system="Be brief.", max_tokens=12)
    assert first.prompt == _chatml("Hi", system="Be brief.")
    second = await session.chat("And then?", max_tokens=4)
    assert second.prompt == _chatml("Hi", first.text, "And then?", system="Be brief.")
    assert second.metrics.cached_tokens >= 16
    chat = session.chats.conversation()
    assert [message["content"] for message in chat.messages] == [
        "Be brief.",
        "Hi",
        first.text,
        "And then?",
        second.text,
    ]
    assert len(chat) == 2 and "assistant" in str(chat) and repr(chat) == "<Conversation with fake: 2 turns>"
    assert chat._repr_mimebundle_()["text/markdown"].startswith("**system**\n\nBe brief.\n\n**user**")


async def test_undo_and_reset(session: Session) -> None:
    first = await session.chat("one", max_tokens=8)
    await session.chat("two", max_tokens=8)
    chat = session.chats.conversation()
    assert chat.undo() == 1 and len(chat) == 1
    again = await session.chat("two, edited", max_tokens=4)
    assert again.prompt == _chatml("one", first.text, "two, edited")
    assert again.metrics.cached_tokens >= 16, "what stands before the edited turn was not computed again"
    assert chat.undo(9) == 2 and chat.undo() == 0
    await session.chat("three", system="s", max_tokens=1)
    assert chat.reset() == 1 and chat.messages == [] and str(chat) == "Nothing was said yet."


async def test_a_cell_that_is_run_again_replaces_its_turn_and_what_came_after(session: Session) -> None:
    ask = session.chats.ask
    options = {"max_tokens": 4}
    first = await ask("one", options, cell=Cell("a", 1))
    await ask("two", options, cell=Cell("b", 2))
    await ask("three", options, cell=Cell("c", 3))
    again = await ask("two again", options, cell=Cell("b", 4))
    assert again.prompt == _chatml("one", first.text, "two again")
    assert again.notes == ["This is turn 2 again; it replaces the earlier one and the 1 after it."]
    assert again.metrics.cached_tokens >= 16
    loop = [await ask("in a loop", options, cell=Cell("d", 5)) for _ in range(2)]
    assert not loop[1].notes and len(session.chats.conversation()) == 4, "one execution may ask several turns"
    nameless = [await ask("x", options, cell=Cell("", serial)) for serial in (6, 7)]
    assert not nameless[1].notes and len(session.chats.conversation()) == 6


async def test_a_stopped_answer_stays_as_far_as_it_came(session: Session) -> None:
    running = session.chat("hello", max_tokens=400)
    with pytest.raises(InvalidRequestError, match="still being answered"):
        session.chat("too early")
    async for _ in running:
        running.cancel()
        break
    await running
    assert 0 < len(running.text) < 400
    after = await session.chat("go on", max_tokens=1)
    assert after.prompt == _chatml("hello", running.text, "go on")
    session.chat("next", max_tokens=9).cancel()
    assert len(session.chats.conversation()) == 2, "stopped before its first token: the question is gone, too"


async def test_an_answer_that_failed_is_dropped_with_its_question(session: Session) -> None:
    with pytest.raises(RequestFailedError):
        await session.chat("bad!")
    with pytest.raises(InvalidRequestError, match="shorten"):
        await session.chat("x" * 3000)
    good = await session.chat("good", max_tokens=2)
    assert good.prompt == _chatml("good")


async def test_undo_ends_what_still_runs(session: Session) -> None:
    running = session.chat("hello", max_tokens=400)
    assert session.chats.conversation().undo() == 1
    await running
    assert running.state == "cancelled" and len(session.chats.conversation()) == 0


async def test_every_model_has_a_conversation_of_its_own(session: Session) -> None:
    await session.load("fake:echo=1", name="echo")
    echoed = await session.chat("say it", max_tokens=40)
    assert echoed.model == "echo"
    other = await session.chat("hi", model="fake", max_tokens=1)
    assert other.prompt == _chatml("hi")
    await session.unload("echo")
    assert session.chats.conversation("echo").turns()[0]["content"] == "say it", "it outlives the model"
    await session.load("fake:", name="echo")
    again = await session.chat("more", max_tokens=1)
    assert again.prompt is not None and again.prompt.startswith(_chatml("say it", echoed.text, "more")[:40])


async def test_mistakes_take_nothing_back(session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="no chat with fake yet; %%chat begins one"):
        session.chats.conversation()
    await session.chats.ask("one", {"max_tokens": 2}, cell=Cell("a", 1))
    for options, words in (
        ({"n": 2}, "leave n out"),
        ({"raw": True}, "leave raw out"),
        ({"model": ["fake", "other"]}, "one model"),
        ({"model": "other"}, "No model is called 'other'"),
        ({"temperature": 7.0}, "temperature = 7.0"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            session.chat("two", **options)
    with pytest.raises(InvalidRequestError, match="max_tokens = 0"):
        session.chats.ask("one again", {"max_tokens": 0}, cell=Cell("a", 2))
    with pytest.raises(InvalidRequestError, match="empty"):
        session.chat("")
    assert len(session.chats.conversation()) == 1
    session.settings.configure({"n": 3, "raw": True, "temperature": 0.5})
    assert len((await session.chat("two", max_tokens=1)).outputs) == 1
