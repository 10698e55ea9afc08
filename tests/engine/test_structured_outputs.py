"""Structured output in the engine, on the fake model: it says what it would say, as far as its grammar lets it."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.engine.structured.compiler import GrammarCompiler
from llmkernel.engine.structured.grammar import Grammar, GrammarBackend, GrammarError
from llmkernel.errors import InvalidRequestError
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.sampling_params import StructuredOutputsParams
from tests.engine.harness import EOS, Engine

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def text_of(engine: Engine, request_id: str) -> str:
    return bytes(token for token in engine.tokens(request_id) if token < 256).decode()


def run(engine: Engine) -> None:
    """Until everything is through, grammars included."""
    compiled = threading.Event()
    engine.core.on_grammar_compiled = compiled.set
    while engine.core.has_unfinished_requests():
        compiled.clear()
        if not engine.core.has_requests():
            assert compiled.wait(10)
        engine.step()


def wanting(**constraint: object) -> dict[str, object]:
    return {"structured_outputs": StructuredOutputsParams(**constraint), "max_tokens": 400}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        ({"json": PERSON}, lambda text: json.loads(text)["name"] in ("Ada", "Grace")),
        ({"json": json.dumps(PERSON)}, lambda text: 10 <= json.loads(text)["age"] <= 99),
        ({"json": PERSON, "disable_any_whitespace": True}, lambda text: " " not in text and json.loads(text)),
        ({"regex": "[a-f]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"choice": ["yes", "no", "maybe not"]}, lambda text: text in ("yes", "no", "maybe not")),
        ({"choice": ['quoted "text" \\ \n', "naïve 😀"]}, lambda text: text in ('quoted "text" \\ \n', "naïve 😀")),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, lambda text: text[0] == "<" and text[2:] == ">"),
        ({"grammar": 'start: "<" DIGIT ">"\nDIGIT: /[0-9]/'}, lambda text: text[0] == "<" and text[2:] == ">"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_each_kind_is_followed_to_its_end(constraint: dict, is_right: Callable[[str], bool]) -> None:
    engine = Engine(num_blocks=128)
    engine.add("s", [1, 2, 3], **wanting(**constraint))
    run(engine)
    assert engine.last("s").finish_reason is FinishReason.STOP
    assert is_right(text_of(engine, "s")), text_of(engine, "s")
    assert engine.is_empty()


def test_neighbours_say_what_they_say_alone() -> None:
    engine = Engine(num_blocks=64)
    for number in range(6):
        engine.add(f"free{number}", [number + 1, 7], max_tokens=12)
        engine.add(f"bound{number}", [number + 1, 7], **wanting(regex=f"[a-c]{{{number + 1}}}"))
    engine.add("broken", [9], **wanting(regex="("))
    run(engine)
    for number in range(6):
        assert engine.tokens(f"free{number}") == fake_answer([number + 1, 7], 12)
        assert len(text_of(engine, f"bound{number}")) == number + 1
    assert engine.last("broken").finish_reason is FinishReason.ERROR
    assert engine.last("broken").stop_reason == (
        "structured_outputs.regex cannot be used: invalid regex: unclosed group."
    )


def test_an_end_token_is_possible_only_where_the_grammar_may_end() -> None:
    engine = Engine("eos_every=1")
    engine.add("s", [1, 2, 3], **wanting(regex="(ab)+"))
    run(engine)
    assert engine.tokens("s") == [*b"ab", EOS]
    assert engine.last("s").stop_reason is None


def test_ignore_eos_goes_on_where_it_can_and_ends_where_it_must() -> None:
    engine = Engine("eos_every=1")
    engine.add("endless", [1], **wanting(regex="(ab)+") | {"max_tokens": 9, "ignore_eos": True, "eos_token_id": None})
    engine.add("empty", [1], **wanting(choice=[""]) | {"ignore_eos": True, "eos_token_id": None})
    run(engine)
    assert engine.tokens("endless") == [*b"ababababa"]
    assert engine.last("endless").finish_reason is FinishReason.LENGTH
    assert engine.tokens("empty") == [EOS] and engine.last("empty").finish_reason is FinishReason.STOP


def test_complete_counts_as_stop_even_at_the_length_limit() -> None:
    engine = Engine()
    engine.add("s", [1], **wanting(regex="[a-z]{4}") | {"max_tokens": 4})
    engine.add("cut", [1], **wanting(regex="[a-z]{5}") | {"max_tokens": 4})
    run(engine)
    assert engine.last("s").finish_reason is FinishReason.STOP
    assert engine.last("cut").finish_reason is FinishReason.LENGTH


def test_preemption_and_chunks_change_nothing() -> None:
    def answers(**options: object) -> dict[str, list[int]]:
        engine = Engine(**options)
        for number in range(5):
            engine.add(f"r{number}", range(1, 12 + number), **wanting(regex="([a-z][0-9]{2})+") | {"max_tokens": 30})
        run(engine)
        assert engine.is_empty()
        preempted = sum(stats.num_preempted for stats in engine.stats)
        assert (preempted > 0) == (options["num_blocks"] == 16)
        return {request_id: engine.tokens(request_id) for request_id in engine.outputs}

    expected = answers(num_blocks=128, max_num_batched_tokens=512)
    assert answers(num_blocks=16, max_num_batched_tokens=7, max_num_seqs=5) == expected
    assert all(len(tokens) == 30 for tokens in expected.values())


class SlowBackend(GrammarBackend):
    """Compiles when it is told to, one grammar for each permit; every grammar allows the one token "a", once."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.compiled: list[StructuredOutputsParams] = []

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        assert self.permits.acquire(timeout=20)
        self.compiled.append(params)
        if params.regex == "bug":
            raise ZeroDivisionError("a bug of the library")
        return OneLetter()


class OneLetter(Grammar):
    num_words = 16

    def __init__(self) -> None:
        self.said: list[int] = []

    @property
    def is_terminated(self) -> bool:
        return bool(self.said)

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        self.said += token_ids
        if self.said != [97]:
            raise GrammarError("only the letter a is known")

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        return [97] if not self.said and token_ids[:1] == [97] else []

    def rollback(self, num_tokens: int) -> None:
        del self.said[-num_tokens:]

    def fill_bitmask(self, words: np.ndarray) -> None:
        words.fill(0)
        words[97 // 32] = 1 << 97 % 32

    def copy(self) -> "OneLetter":
        return OneLetter()


@pytest.fixture
def slow() -> Iterator[SlowBackend]:
    backend = SlowBackend()
    yield backend
    backend.permits.release(100)


def use(engine: Engine, backend: GrammarBackend | Callable[[], GrammarBackend], timeout: float = 20) -> threading.Event:
    """Make the engine compile with this; the event is set whenever something was compiled."""
    compiled = threading.Event()
    engine.core.on_grammar_compiled = compiled.set
    make = backend if callable(backend) else lambda: backend
    engine.core._grammars = GrammarCompiler(make, [EOS], lambda: engine.core.on_grammar_compiled(), timeout=timeout)
    return compiled


def test_compiling_holds_nobody_up_and_an_idle_engine_sleeps(slow: SlowBackend) -> None:
    engine = Engine(max_num_seqs=2)
    compiled = use(engine, slow)
    for number in range(5):
        engine.add(f"bound{number}", [5], **wanting(regex=f"x{number}"))
    engine.add("free", [1, 2], max_tokens=3)
    engine.run()
    assert engine.tokens("free") == fake_answer([1, 2], 3)
    assert engine.core.has_unfinished_requests() and not engine.core.has_requests()
    assert engine.core.get_stats()["num_waiting_reqs"] == 5
    assert engine.core.get_stats()["waiting_head"]["reason"] == "its grammar is being compiled"
    slow.permits.release()
    assert compiled.wait(10)
    engine.run()
    assert engine.tokens("bound0") == [97] and "bound1" not in engine.outputs
    engine.core.abort_requests(["bound1", "bound2"])
    slow.permits.release(4)
    while not {"bound3", "bound4"} <= engine.outputs.keys():
        compiled.clear()
        engine.run()
        if not {"bound3", "bound4"} <= engine.outputs.keys():
            assert compiled.wait(10)
    assert engine.last("bound1").finish_reason is FinishReason.ABORT
    assert engine.is_empty()


def test_the_same_grammar_is_compiled_once(slow: SlowBackend) -> None:
    engine = Engine()
    use(engine, slow)
    slow.permits.release(100)
    for number in range(4):
        engine.add(f"a{number}", [5], **wanting(choice=["a", "b"]))
        engine.add(f"b{number}", [5], **wanting(json=PERSON))
    run(engine)
    assert len(slow.compiled) == 2
    assert all(engine.tokens(request_id) == [97] for request_id in engine.outputs)


def test_what_the_library_raises_fails_the_request_alone(slow: SlowBackend) -> None:
    engine = Engine()
    use(engine, slow)
    slow.permits.release(100)
    engine.add("bug", [5], **wanting(regex="bug"))
    engine.add("good", [5], **wanting(regex="good"))
    run(engine)
    assert engine.last("bug").finish_reason is FinishReason.ERROR
    assert "ZeroDivisionError" in str(engine.last("bug").stop_reason)
    assert engine.tokens("good") == [97]


def test_a_grammar_that_takes_too_long_fails_its_requests(slow: SlowBackend) -> None:
    engine = Engine()
    use(engine, slow, timeout=0.05)
    engine.add("late", [5], **wanting(regex="late"))
    run(engine)
    assert engine.last("late").finish_reason is FinishReason.ERROR
    assert "took more than 0.05 s to compile" in str(engine.last("late").stop_reason)


def test_a_model_without_a_usable_tokenizer_says_so_every_time() -> None:
    def fail() -> GrammarBackend:
        raise GrammarError("the model has no tokenizer")

    engine = Engine()
    use(engine, fail)
    engine.add("a", [5], **wanting(regex="a"))
    engine.add("b", [5], **wanting(json_object=True))
    run(engine)
    assert engine.last("a").stop_reason == "structured_outputs.regex cannot be used: the model has no tokenizer."
    assert engine.last("b").stop_reason == "structured_outputs.json_object cannot be used: the model has no tokenizer."


def test_a_grammar_that_dies_on_the_way_fails_its_request_with_the_reason() -> None:
    engine = Engine()
    engine.add("dead end", [5], **wanting(grammar='start: "a" REST\nREST: /[^\\s\\S]/'))
    engine.add("free", [1, 2], max_tokens=6)
    run(engine)
    assert engine.last("dead end").finish_reason is FinishReason.ERROR
    assert "cannot go on" in str(engine.last("dead end").stop_reason)
    assert engine.tokens("free") == fake_answer([1, 2], 6)


def test_a_paused_engine_keeps_what_is_compiled(slow: SlowBackend) -> None:
    engine = Engine()
    compiled = use(engine, slow)
    engine.add("s", [5], **wanting(regex="x"))
    engine.core.pause_scheduler("keep", clear_cache=False)
    slow.permits.release()
    assert compiled.wait(10)
    engine.run()
    assert "s" not in engine.outputs
    engine.core.resume_scheduler()
    engine.run()
    assert engine.tokens("s") == [97]


def test_a_request_that_is_refused_compiles_nothing(slow: SlowBackend) -> None:
    engine = Engine()
    use(engine, slow)
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add("s", [], **wanting(regex="x"))
    assert not engine.core._grammars._threads
