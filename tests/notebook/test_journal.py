"""Finished answers outlive the page, the kernel and a full disk; what is kept is for its owner's eyes."""
# ruff: noqa: ASYNC240 - the files are small

import json
import logging
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.notebook import journal as home
from llmkernel.notebook.journal import Journal, journal_path
from llmkernel.notebook.session import Session
from tests.notebook.kernel import running_kernel


def answer(prompt: str, count: int) -> str:
    return bytes(fake_answer(list(prompt.encode()), count)).decode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.jsonl"


@pytest.fixture
async def session(path: Path) -> AsyncIterator[Session]:
    with Session(journal=Journal(path, "mine.ipynb")) as session:
        await session.load("fake:", name="fake")
        yield session


async def test_an_answer_is_kept_for_its_owner_alone(session: Session, path: Path) -> None:
    generation = await session.generate("hello", raw=True, max_tokens=5)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (line,) = path.read_text().splitlines()
    kept = json.loads(line)
    assert (kept["id"], kept["notebook"], kept["model"]) == (generation.id, "mine.ipynb", "fake")
    assert kept["data"]["text/plain"] == answer("hello", 5)
    found = Journal(path, "mine.ipynb").find(generation.id)
    assert found is not None and found.metadata["llmkernel"]["usage"]["completion_tokens"] == 5
    assert session.stored(generation.id) is None  # memory has it, and comes first
    session.generations.clear()
    assert session.stored(generation.id) == session.stored() == found


async def test_what_was_cut_short_is_kept_and_an_empty_answer_is_not(session: Session, path: Path) -> None:
    running = session.generate("hello", raw=True, max_tokens=1000)
    async for _ in running:
        running.cancel()
        break
    await running
    before = session.generate("hello", raw=True, max_tokens=9)
    before.cancel()
    await before
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["data"]["text/plain"] == running.text != ""


async def test_a_line_that_was_cut_short_spoils_nothing(session: Session, path: Path) -> None:
    first = await session.generate("a", raw=True, max_tokens=3)
    with path.open("ab") as file:
        file.write(b'{"id": "g9", "noteb')
    second = await session.generate("b", raw=True, max_tokens=3)
    journal = Journal(path, "")
    for generation, prompt in ((first, "a"), (second, "b")):
        found = journal.find(generation.id)
        assert found is not None and found.data["text/plain"] == answer(prompt, 3)
    path.write_bytes(path.read_bytes() + b'\xff\xfe[1]\n{"id": 3}\n7\n')
    assert journal.find(second.id) is not None and journal.find("g9") is None


async def test_the_own_notebook_comes_first(session: Session, path: Path) -> None:
    generation = await session.generate("a", raw=True, max_tokens=3)
    Journal(path, "other.ipynb").add(await session.generate("b", raw=True, max_tokens=3))
    other = await session.generate("c", raw=True, max_tokens=3)
    other.id = generation.id
    Journal(path, "other.ipynb").add(other)
    texts = {}
    for notebook in ("mine.ipynb", "other.ipynb", "third.ipynb"):
        found = Journal(path, notebook).find(generation.id)
        assert found is not None
        texts[notebook] = found.data["text/plain"]
    assert texts == {"mine.ipynb": answer("a", 3), "other.ipynb": answer("c", 3), "third.ipynb": answer("c", 3)}
    assert Journal(path, "third.ipynb").find() is None


async def test_the_older_half_goes(session: Session, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "LIMIT", 8000)
    made = [await session.generate("hello", raw=True, max_tokens=20) for _ in range(30)]
    assert path.stat().st_size < 8000 and stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [one.id for one in made[-len(lines) :]] and 3 < len(lines) < 30
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("obstacle", ["full", "folder", "link"])
async def test_a_journal_that_cannot_be_written_costs_nothing_else_and_is_said_once(
    obstacle: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = {"full": Path("/dev/full"), "folder": tmp_path, "link": tmp_path / "link"}[obstacle]
    if obstacle == "link":
        path.symlink_to(tmp_path / "elsewhere")
    with Session(journal=Journal(path, "")) as session, caplog.at_level(logging.WARNING, "llmkernel"):
        await session.load("fake:", name="fake")
        for _ in range(3):
            assert (await session.generate("a", raw=True, max_tokens=3)).text == answer("a", 3)
        assert [record.message for record in caplog.records if "cannot be kept" in record.message] == [
            record.message for record in caplog.records
        ][:1]
        assert len(caplog.records) == 1 and str(path) in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLMKERNEL_JOURNAL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert journal_path() == tmp_path / "llmkernel" / "journal.jsonl"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert journal_path() == tmp_path / ".local" / "state" / "llmkernel" / "journal.jsonl"
    monkeypatch.setenv("LLMKERNEL_JOURNAL", str(tmp_path / "j"))
    assert journal_path() == tmp_path / "j"
    monkeypatch.setenv("LLMKERNEL_JOURNAL", "off")
    assert journal_path() is None
    Journal(None, "").add(None)  # type: ignore[arg-type]
    assert Journal(None, "").find() is None


def test_show_finds_it_after_the_kernel_was_killed(tmp_path: Path) -> None:
    with running_kernel(tmp_path, "%load_ext llmkernel", XDG_STATE_HOME=str(tmp_path)) as kernel:
        kernel.run("%llm load fake: --name fake")
        asked = kernel.run("%generate --raw --max-tokens 6 hello").answers[0]
        kernel.restart()
        kernel.run("%load_ext llmkernel")
        for line in ("%llm show g1", "%llm show"):
            shown = kernel.run(line).answers[0]
            assert (shown["data"], shown["metadata"]) == (asked["data"], asked["metadata"])
        assert shown["data"]["text/plain"] == answer("hello", 6)
        kernel.run("%llm load fake: --name fake\n%generate --raw --max-tokens 2 again")
        assert kernel.run("%llm show g1").answers[0]["data"]["text/plain"] == answer("again", 2)
        assert "No generation is called 'g7' (known: g1)." in kernel.run("%llm show g7").traceback
