"""Random ids in the tokenizers of well-known models: pieces join to the decode of the whole, stop strings are found as
in the whole text, and nothing appears late, early or in halves."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Sequence

import pytest

from llmkernel.config import EngineArgs
from llmkernel.llm.output_processor import OutputProcessor
from llmkernel.llm.outputs import CompletionOutput, RequestOutput
from llmkernel.llm.parallel_sampling import ParentRequest
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.llm.stream_decoder import StreamDecoder
from llmkernel.llm.tokenizer import REPLACEMENT, Tokenizer
from llmkernel.protocol.handshake import TokenizerFacts
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.llm.fetched_tokenizers import FETCHED, fetched
from tests.llm.outputs_of_an_engine import logprobs as made_logprobs
from tests.llm.outputs_of_an_engine import output, request
from tests.llm.tokenizers_on_the_spot import smollm2, smollm2_folder, trained_byte_fallback, unigram, word_piece

MADE_HERE = {make.__name__: make for make in (word_piece, unigram, trained_byte_fallback)}
KINDS = ["smollm2", *FETCHED, *MADE_HERE]
every_kind = pytest.mark.parametrize("kind", KINDS)

SCRIPTS = [
    "hello world, don't stop: it's  3.14 ...\n\n",
    "naïve café, Ελληνικά и русский",
    "東京タワーに行きました。",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b",
    "გამარჯობა العربية हिन्दी",
    "def f(x):\n\treturn x ** 2  # <s> </s> <|im_end|>\r\n",
]
LAG = 24
"""Tokens whose text may be held back at most while a character may still become whole."""
BYTE_LAG = 48
"""The same for a run of byte tokens: one wrong byte would turn all of it into U+FFFD."""


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    if kind == "smollm2":
        if not (smollm2_folder() / "tokenizer.json").exists():
            from llmkernel.engine.worker.model_source import resolve_model  # heavy, and seldom needed

            resolve_model(EngineArgs(), lambda *_: None)
        backend = smollm2()
    else:
        backend = MADE_HERE[kind]() if kind in MADE_HERE else fetched(kind)
    return Tokenizer(backend, TokenizerFacts())


@functools.cache
def _pools(kind: str) -> list[list[int]]:
    """Ids of all kinds, those that are no ASCII, those that hold parts of characters, and special ones."""
    tok = _tokenizer(kind)
    every = list(range(tok.vocab_size))
    sample = every if len(every) < 3000 else random.Random(kind).sample(every, 3000)
    texts = {token_id: tok.decode([token_id], skip_special_tokens=False) for token_id in sample}
    foreign = [token_id for token_id, text in texts.items() if not text.isascii()]
    parts = [token_id for token_id, text in texts.items() if REPLACEMENT in text] + sorted(tok.byte_ids)
    return [every, foreign or every, parts or every, sorted(tok.special_ids) or every]


def _random_ids(kind: str, chance: random.Random, length: int) -> list[int]:
    """Ids at random; or text of several scripts, cut anywhere, with a few strangers in it."""
    if chance.random() < 0.5:
        every, *others = _pools(kind)
        pool = every if chance.random() < 0.4 else chance.choice(others)
        return [chance.choice(pool if chance.random() < 0.8 else every) for _ in range(length)]
    text = "".join(chance.choice(SCRIPTS)[chance.randrange(8) :] for _ in range(3))
    ids = _tokenizer(kind).encode(text, add_special_tokens=False)
    start = chance.randrange(max(1, len(ids) - 4))
    ids = ids[start : start + length]
    for _ in range(chance.choice([0, 0, 1, 2])):
        ids.insert(chance.randint(0, len(ids)), chance.choice(_pools(kind)[chance.randrange(4)]))
    return ids


def _common(left: str, right: str) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _kept(tok: Tokenizer, ids: Sequence[int], skip: bool) -> list[int]:
    return [token_id for token_id in ids if not (skip and token_id in tok.special_ids)]


def _byte_run(tok: Tokenizer, ids: Iterable[int]) -> bytes:
    """The bytes that stand in byte tokens at the beginning of `ids`."""
    run = itertools.takewhile(tok.byte_ids.__contains__, ids)
    return bytes(int(tok.backend.id_to_token(token_id)[3:5], 16) for token_id in run)


@functools.cache
def _inside(tok: Tokenizer) -> frozenset[int]:
    """Ids after which a run of byte tokens may go on."""
    return tok.byte_ids | tok.special_ids if tok.byte_ids else frozenset()


def _is_utf8(data: bytes) -> bool:
    try:
        return data.decode() != ""
    except UnicodeDecodeError:
        return False


def _own_texts(tok: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> set[str]:
    """The output's part of the decode of everything: what it may be.

    A character that the prompt leaves open is the output's, the prompt's U+FFFD are not. Of a long run of byte tokens
    the beginning is told before a wrong byte turns all of it into U+FFFD.
    """
    prompt, output = _kept(tok, prompt, skip), _kept(tok, output, skip)
    decode = functools.partial(tok.decode, skip_special_tokens=skip)
    before, whole = decode(prompt), decode(prompt + output)
    run = _byte_run(tok, reversed(prompt))[::-1]
    joined = run + _byte_run(tok, output)
    if len(joined) > len(run) > 0 and not _is_utf8(joined):
        start = len(decode(prompt[: -len(run)]))
        told = len(run.decode("utf-8", "ignore").encode())
        return {
            whole[start + len(run) :],
            whole[start + told :] if len(joined) >= BYTE_LAG else whole[start + len(run) :],
        }
    own = _common(before, whole)
    if own < len(before):
        own += len(run.decode("utf-8", "ignore"))
    return {whole[own:]}


def _equals(text: str, expected: str, long_runs: bool) -> bool:
    at = _common(text, expected)
    told = text[at:].partition(REPLACEMENT)[0]
    if text == expected or not (long_runs and told):
        return text == expected
    return _equals(text[at + len(told) :], expected[at + len(told.encode()) :], long_runs)


def _check_sequence(kind: str, chance: random.Random) -> None:
    tok = _tokenizer(kind)
    skip = chance.random() < 0.5
    ids = _random_ids(kind, chance, chance.choice([8, 60, 60, 100]))
    split = chance.choice([0, 1, chance.randint(0, len(ids)), len(ids) // 2])
    prompt, output = ids[:split], ids[split:]
    decoder = StreamDecoder(tok, prompt, skip_special_tokens=skip)
    pieces = [*(decoder.push(token_id) for token_id in output), decoder.flush()]
    text = "".join(pieces)
    expected = _own_texts(tok, prompt, output, skip)
    assert any(_equals(text, one, bool(tok.byte_ids) and len(ids) >= BYTE_LAG) for one in expected), (text, expected)
    at, lag = chance.randint(0, len(output)), BYTE_LAG if tok.byte_ids else LAG
    told, kept = "".join(pieces[:at]), _kept(tok, output[:at], skip)
    if len(kept) > lag:
        certain = min(_own_texts(tok, prompt, kept[:-lag], skip), key=len)
        assert len(told) >= len(certain.rstrip(REPLACEMENT)), "no burst"
    (now, *_) = _own_texts(tok, prompt, kept, skip)
    if not tok.byte_ids and not now.endswith(REPLACEMENT):
        assert told == now, "a character appears with its last token"


@pytest.mark.row("A-107")
@every_kind
def test_pieces_join_to_the_decode_of_all_ids(kind: str) -> None:
    chance = random.Random(1)
    for _ in range(1500):
        _check_sequence(kind, chance)


@pytest.mark.soak
@every_kind
def test_ten_thousand_sequences(kind: str) -> None:
    chance = random.Random(2)
    for _ in range(10_000):
        _check_sequence(kind, chance)


@dataclasses.dataclass
class _Answer:
    """ids: what the engine will say. text, stop: what must come of it, and the stop string that ends it. fewest, most:
    how many of the ids belong to it; one number, unless a character is open where the stop string ends."""

    ids: list[int]
    text: str
    stop: str | None
    fewest: int
    most: int


def _expected(tok: Tokenizer, prompt: list[int], ids: list[int], params: SamplingParams, stop_token: bool) -> _Answer:
    """The earliest end of a stop string wins, then the order of the list; searched in the whole text."""
    shown = len(ids) - 1 if stop_token and not params.include_stop_str_in_output else len(ids)
    texts = [min(_own_texts(tok, prompt, ids[:length], params.skip_special_tokens)) for length in range(shown + 1)]
    whole = texts[-1]
    start = len(texts[params.min_tokens])
    found = [
        (at + len(stop), order)
        for order, stop in enumerate(params.stop_strings)
        if (at := whole.find(stop, start)) >= 0
    ]
    if not found:
        return _Answer(ids, whole, None, len(ids), len(ids))
    end, order = min(found)
    stop = params.stop_strings[order]
    text = whole[: end if params.include_stop_str_in_output else end - len(stop)]
    enough = (length for length, text in enumerate(texts) if len(text) >= end and whole.startswith(text[:end]))
    fewest = next(enough)
    whole_again = (
        length
        for length in range(max(1, fewest), shown)
        if not texts[length].endswith(REPLACEMENT) and ids[length - 1] not in _inside(tok)
    )
    return _Answer(ids, text, stop, fewest, next(whole_again, len(ids)))


def _stop_params(tok: Tokenizer, chance: random.Random, whole: str, longest: int) -> SamplingParams:
    stops = []
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(whole) + 1)
        stops.append(
            whole[at : at + chance.randint(1, 6)] or "zq" if chance.random() < 0.8 else chance.choice("eo ,x東")
        )
    kind = chance.choice(list(RequestOutputKind))
    return SamplingParams(
        n=chance.choice([1, 1, 2, 3]),
        max_tokens=None,
        min_tokens=chance.choice([0, 0, 1, 3]) if longest > 3 else 0,
        stop=stops,
        include_stop_str_in_output=chance.random() < 0.3,
        skip_special_tokens=chance.random() < 0.7,
        stream_interval=chance.choice([1, 2, 7, 1000]),
        output_kind=kind,
        logprobs=chance.choice([None, 0]),
    )


def _check_stop_strings(kind: str, chance: random.Random) -> None:
    tok = _tokenizer(kind)
    prompt = _random_ids(kind, chance, chance.randint(1, 8))
    first = _random_ids(kind, chance, chance.randint(4, 30))
    params = _stop_params(tok, chance, tok.decode(first, skip_special_tokens=False), len(first))
    answers, last = [], [chance.random() < 0.3 for _ in range(params.n)]
    for index in range(params.n):
        ids = first if index == 0 else _random_ids(kind, chance, chance.randint(4, 30))
        border = tok.decode(ids[: params.min_tokens], skip_special_tokens=params.skip_special_tokens)
        if border.endswith(REPLACEMENT) or (params.min_tokens and ids[params.min_tokens - 1] in _inside(tok)):
            params.min_tokens = 0  # which side of the border an open character is on is not what this test asks
        answers.append(ids)
    params.stop_token_ids = [ids[-1] for ids in answers]
    expected = [_expected(tok, prompt, ids, params, stop) for ids, stop in zip(answers, last, strict=True)]
    seen = _played(tok, prompt, params, expected, last, chance)
    for answer, stop_token, (texts, ids, reason, stop_reason, logprobs) in zip(expected, last, seen, strict=True):
        assert texts[-1] == answer.text
        assert all(answer.text.startswith(text) for text in texts), "nothing of a stop string, and nothing twice"
        assert ids == answer.ids[: len(ids)] and answer.fewest <= len(ids) <= answer.most
        assert (reason, stop_reason) == (
            ("stop", answer.stop) if answer.stop is not None else ("stop", 7) if stop_token else ("length", None)
        )
        assert logprobs == (0 if params.logprobs is None else len(ids))


def _played(
    tok: Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    answers: list[_Answer],
    stop_token: list[bool],
    chance: random.Random,
) -> list[tuple[list[str], list[int], str | None, int | str | None, int]]:
    """Let an OutputProcessor have the answers in steps of 1 to 4 tokens, and read its queue now and then. By answer:
    the texts that were seen, the ids, the reasons, and the number of logprobs."""
    processor = OutputProcessor(tok)
    asked = request("a-1", params, prompt)
    parent = ParentRequest(asked) if params.n > 1 else None
    children = parent.children if parent is not None else [asked]
    queue = RequestOutputCollector(params.output_kind)
    for index, child in enumerate(children):
        processor.add_request(child, None, parent, index, queue)
    outputs: list[RequestOutput] = []
    position = [0] * len(children)
    while processor.has_unfinished_requests():
        step = []
        for index, child in enumerate(children):
            if child.request_id not in processor.request_states:
                continue
            ids = answers[index].ids[position[index] :][: chance.choice([1, 1, 1, 2, 4])]
            position[index] += len(ids)
            over = position[index] == len(answers[index].ids)
            finish = (FinishReason.STOP if stop_token[index] else FinishReason.LENGTH) if over else None
            said = 7 if over and stop_token[index] else None
            step.append(
                output(
                    child.request_id,
                    ids,
                    finish,
                    stop_reason=said,
                    new_logprobs=made_logprobs(ids, 0) if params.logprobs == 0 else None,
                )
            )
        aborted = processor.process_outputs(step).reqs_to_abort
        assert not set(aborted) & set(processor.request_states)
        if chance.random() < 0.6 and (got := queue.get_nowait()):
            outputs.append(got)
    if got := queue.get_nowait():
        outputs.append(got)
    assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
    return [
        _as_seen(params.output_kind, [one for got in outputs for one in got.outputs if one.index == index])
        for index in range(len(children))
    ]


def _as_seen(
    kind: RequestOutputKind, completions: list[CompletionOutput]
) -> tuple[list[str], list[int], str | None, int | str | None, int]:
    final = completions[-1]
    assert kind != RequestOutputKind.FINAL_ONLY or len(completions) == 1
    if kind != RequestOutputKind.DELTA:
        return (
            [one.text for one in completions],
            final.token_ids,
            final.finish_reason,
            final.stop_reason,
            len(final.logprobs or ()),
        )
    texts = list(itertools.accumulate(one.text for one in completions))
    ids = [token_id for one in completions for token_id in one.token_ids]
    return texts, ids, final.finish_reason, final.stop_reason, sum(len(one.logprobs or ()) for one in completions)


@pytest.mark.row("A-107", "A-108")
@every_kind
def test_stop_strings_equal_a_search_in_the_whole_text(kind: str) -> None:
    chance = random.Random(3)
    for _ in range(1430):
        _check_stop_strings(kind, chance)


@pytest.mark.soak
@every_kind
def test_ten_thousand_stop_strings(kind: str) -> None:
    chance = random.Random(4)
    for _ in range(10_000):
        _check_stop_strings(kind, chance)
