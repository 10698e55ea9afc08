"""Answers as a pandas DataFrame, and DataFrames and Series as prompts, with the real pandas."""

import sys
from collections.abc import AsyncIterator

import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.errors import UnsupportedFeatureError
from llmkernel.notebook.prompts import prompts_from
from llmkernel.notebook.session import Session


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    with Session() as session:
        await session.load("fake:step_ms=0,fail_token=33", name="fake")
        yield session


async def test_a_frame_has_a_row_for_each_answer(session: Session) -> None:
    pytest.importorskip("pandas")
    generation = await session.generate(["good", "bad!"], raw=True, max_tokens=4, n=2, seed=1)
    frame = generation.to_frame()
    assert list(frame.columns) == list(generation.to_dicts()[0]) and len(frame) == 4
    assert list(frame["prompt"]) == ["good", "good", "bad!", "bad!"] and list(frame["answer"]) == [0, 1, 0, 1]
    assert frame["text"][0] == answer("good", 4) and list(frame["tokens"][:2]) == [4, 4]
    assert frame["tokens"].dtype.kind == "i" and frame["time_to_first_token"].dtype.kind == "f"
    assert frame["error"].isna().tolist() == [True, True, False, False]
    assert frame.groupby("prompt")["tokens"].sum().to_dict() == {"bad!": 0, "good": 8}


async def test_tokens_make_a_frame_too(session: Session) -> None:
    pandas = pytest.importorskip("pandas")
    generation = await session.generate("good", raw=True, max_tokens=5, logprobs=2)
    frame = pandas.DataFrame(generation.tokens())
    assert "".join(frame["text"]) == generation.text and frame["logprob"].max() <= 0


def test_a_frame_and_a_series_are_prompts() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"city": ["Rome", None], "n": [2, 3]})
    rows = prompts_from(frame, "{n} facts on {city}")
    assert rows[0].text == "2 facts on Rome"
    assert str(rows[1].error) == "Item 2 of prompts has no city; fill it in."
    rows = prompts_from(pandas.Series(["a", pandas.NA, float("nan")]), None)
    assert rows[0].text == "a" and [row.error is None for row in rows] == [True, False, False]


async def test_without_pandas_it_says_what_to_do(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    generation = await session.generate("good", raw=True, max_tokens=1)
    with pytest.raises(UnsupportedFeatureError, match=r"pip install pandas, or use to_dicts\(\)"):
        generation.to_frame()
