"""GuidanceBackend: tokenizers of several kinds, the matcher's moves, and constraints that explode."""

import time

import numpy as np
import pytest

from llmkernel.engine.fake_tokenizer import EOS_TOKEN_ID, fake_tokenizer_facts
from llmkernel.engine.structured.grammar import Grammar, GrammarError
from llmkernel.engine.structured.guidance_backend import GuidanceBackend
from llmkernel.protocol.handshake import TokenizerFacts
from llmkernel.protocol.structured_outputs import StructuredOutputsParams
from tests.llm import tokenizers_on_the_spot

BYTES = GuidanceBackend(fake_tokenizer_facts(), 512, [EOS_TOKEN_ID])


def allowed(grammar: Grammar) -> list[int]:
    words = np.zeros(grammar.num_words, np.int32)
    grammar.fill_bitmask(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def compiled(**constraint: object) -> Grammar:
    return BYTES.compile(StructuredOutputsParams(**constraint))  # type: ignore[arg-type]


def draw(grammar: Grammar, seed: int, limit: int = 200) -> list[int]:
    rng = np.random.default_rng(seed)
    token_ids: list[int] = []
    while not grammar.is_terminated and len(token_ids) < limit:
        token_ids.append(int(rng.choice(allowed(grammar))))
        grammar.accept_tokens(token_ids[-1:])
    return token_ids


def test_accept_validate_roll_back_and_copy() -> None:
    grammar = compiled(regex="ab[cd]")
    assert allowed(grammar) == [97] and grammar.validate_tokens([97, 98, 97]) == [97, 98]
    grammar.accept_tokens([97, 98])
    twin = grammar.copy()
    grammar.accept_tokens([99])
    assert grammar.is_terminated and not twin.is_terminated and allowed(twin) == [99, 100]
    grammar.rollback(2)
    assert not grammar.is_terminated and allowed(grammar) == [98]
    grammar.rollback(0)
    with pytest.raises(GrammarError):
        grammar.accept_tokens([99])


def test_the_end_token_belongs_to_the_grammar_and_can_be_rolled_back() -> None:
    grammar = compiled(regex="a+")
    grammar.accept_tokens([97])
    assert allowed(grammar) == [97, EOS_TOKEN_ID]
    grammar.accept_tokens([EOS_TOKEN_ID])
    assert grammar.is_terminated
    grammar.rollback(1)
    assert allowed(grammar) == [97, EOS_TOKEN_ID]


def test_masks_reach_as_far_as_the_larger_vocabulary() -> None:
    assert BYTES.compile(StructuredOutputsParams(regex="a")).num_words == 16
    small = GuidanceBackend(fake_tokenizer_facts(), 100, [EOS_TOKEN_ID])
    assert small.compile(StructuredOutputsParams(regex="a")).num_words == 9


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace_byte_fallback", "unigram"])
@pytest.mark.parametrize("pattern", ["[a-e ]{3,12}", "hello [0-9]{2}", "é?llo world"])
def test_text_is_what_the_models_own_tokenizer_decodes(kind: str, pattern: str) -> None:
    tokenizer = tokenizers_on_the_spot.tokenizer(kind)
    facts = TokenizerFacts(json=tokenizer.backend.to_str())
    end = tokenizer.backend.token_to_id("</s>")
    backend = GuidanceBackend(facts, tokenizer.vocab_size, [end])
    before = tokenizer.encode("a b", add_special_tokens=False)
    for seed in range(5):
        grammar = backend.compile(StructuredOutputsParams(regex=pattern))
        try:
            token_ids = [token for token in draw(grammar, seed) if token != end]
        except GrammarError:  # a vocabulary that lacks a letter
            assert kind == "unigram"
            continue
        text = tokenizer.text_after(before, token_ids)
        fresh = compiled(regex=pattern)
        fresh.accept_tokens(list(text.encode()))
        assert fresh.is_terminated or EOS_TOKEN_ID in allowed(fresh), text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (TokenizerFacts(), "no tokenizer"),
        (
            TokenizerFacts(json=tokenizers_on_the_spot.word_piece().to_str()),
            "of a kind that the grammar library cannot",
        ),
    ],
    ids=["none", "word piece"],
)
def test_tokenizers_that_cannot_be_used_are_named(facts: TokenizerFacts, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        GuidanceBackend(facts, 200, [])


@pytest.mark.parametrize(
    "regex",
    [
        "(a{1,1000}){1,1000}",
        "((a{1,100}){1,100}){1,100}b",
        "(.*a){50}",
        ".*a.{200}",
        "(.*a.{20}b){3}",
        "(a+)+$",
        "|".join(f"(a|b)*x{number}.{{50}}" for number in range(300)),
        "(a|a?)+" * 30,
    ],
    ids=lambda regex: regex[:24],
)
def test_a_regex_that_explodes_is_held_by_limits(regex: str) -> None:
    start = time.monotonic()
    try:
        grammar = compiled(regex=regex)
        draw(grammar, 0, limit=40)
    except GrammarError as error:
        assert str(error)
    assert time.monotonic() - start < 20
