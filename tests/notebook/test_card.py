"""The reproducibility card, and `rerun`: the same tokens again, on a tiny model that draws."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llmkernel.errors import InvalidRequestError
from llmkernel.notebook.card import MOST_IDS, described_prompt, hash_of
from llmkernel.notebook.final_bundle import final_bundle
from llmkernel.notebook.session import Session
from tests.worker.tiny_models import build, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(build("llama"), path)
    return path


@pytest.fixture
async def fake() -> AsyncIterator[Session]:
    with Session() as session:
        await session.load("fake:", name="fake")
        yield session


async def test_a_model_that_draws(folder: Path) -> None:
    """One load for several tests: it takes seconds."""
    with Session() as session:
        await session.load(str(folder), name="tiny", dtype="float32", kv_cache_memory="8MiB")
        await _the_card_holds_what_was_sent_and_to_what(session)
        await _the_same_tokens_come_again_whatever_else_runs(session)
        await _another_way_of_loading_is_said(session, folder)


async def _the_card_holds_what_was_sent_and_to_what(session: Session) -> None:
    generation = await session.generate("a b", raw=True, n=2, max_tokens=6, temperature=1.5, seed=3, stop="zz")
    card = generation.card()
    assert json.loads(json.dumps(card)) == card
    (model,) = card["models"].values()
    assert model["weights"].startswith("sha256-of-ends ") and model["dtype"] == "float32"
    assert {"torch", "transformers", "llmkernel", "python"} <= model["versions"].keys()
    (request,) = card["requests"]
    assert (request["prompt"], request["seed"]) == ("a b", 3)
    assert request["prompt_token_ids"] == generation.prompt_token_ids
    assert request["params"] == {"n": 2, "temperature": 1.5, "max_tokens": 6, "stop": ["zz"]}
    assert [answer["token_ids"] for answer in request["answers"]] == [one.token_ids for one in generation.outputs]
    text = str(card)
    assert "float32 on cpu" in text and "seed 3" in text and 'prompt        "a b"' in text and hash_of([1]) not in text
    metadata = final_bundle(generation)[1]["llmkernel"]
    assert metadata["weights"] == model and metadata["prompt_token_ids"] == generation.prompt_token_ids
    assert metadata["seed"] == 3 and metadata["prompt"] == "a b"


async def _the_same_tokens_come_again_whatever_else_runs(session: Session) -> None:
    generation = await session.generate(["a b", "c"], raw=True, n=2, max_tokens=12, temperature=1.8)
    assert len({tuple(answer.token_ids) for answer in generation.outputs}) == 4, "it draws"
    others = [session.generate("d e f", raw=True, max_tokens=12) for _ in range(3)]
    again = await generation.rerun()
    for other in others:
        await other
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in generation.outputs]
    assert again.id != generation.id and again.notes == [] and again.prompt == "a b"
    assert again.card()["requests"][0]["seed"] == generation.card()["requests"][0]["seed"]
    third = await again.rerun()
    assert third.texts == generation.texts


async def _another_way_of_loading_is_said(session: Session, folder: Path) -> None:
    generation = await session.generate("a b", raw=True, max_tokens=2)
    await session.unload("tiny")
    with pytest.raises(InvalidRequestError, match="No model is called 'tiny'"):
        generation.rerun()
    await session.load(str(folder), name="tiny", dtype="bfloat16", kv_cache_memory="8MiB")
    again = await generation.rerun()
    assert again.notes == ["tiny was loaded in another way then: the tokens may differ; compare the cards."]


async def test_what_was_never_sent_cannot_be_run_again(fake: Session) -> None:
    generation = fake.generate("a b", raw=True)
    generation.cancel()
    await generation
    with pytest.raises(InvalidRequestError, match="brought nothing to run again; ask anew"):
        generation.rerun()
    assert generation.card()["requests"][0]["prompt_token_ids"] == []
    assert "(token ids only)" in str(generation.card())


async def test_of_many_those_that_were_never_sent_are_asked_as_they_were_given(fake: Session) -> None:
    generation = await fake.generate(["a", "x" * 3000, "b"], raw=True, max_tokens=3)
    again = await generation.rerun()
    assert again.texts == generation.texts and again.texts[0]
    assert [type(error).__name__ for error in again.errors] == ["NoneType", "InvalidRequestError", "NoneType"]


async def test_many_ids_are_stored_as_their_hash(fake: Session) -> None:
    generation = await fake.generate("a b", raw=True, max_tokens=1)
    output = generation.requests[0]
    assert output is not None
    output.prompt_token_ids = [1] * (MOST_IDS + 1)
    assert described_prompt(output) == {"prompt_token_ids_sha256": hash_of([1] * (MOST_IDS + 1))}
    assert described_prompt(None) == {}
