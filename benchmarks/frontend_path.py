"""The way of a token through the front end, ours beside vLLM's, in turns (see peer_engines/front_end.py)."""

import statistics
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.peer_process import OURS, PeerProcess
from llmkernel.config import EngineArgs
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.handshake import TokenizerFacts

__all__ = ["PEERS", "measure_path"]

SCRIPTS = {OURS: "front_end_of_llmkernel.py", "vllm": "front_end_of_vllm.py"}
PEERS = [name for name in SCRIPTS if name != OURS]
ROUNDS = 5
TOKENS_OF_A_ROUND = 20_000
"""At least so many, in as many passes as it takes: a pass of one stream is too short for the clock."""

SENTENCES = (
    "The cow, of course, lives near the water; nobody in the village had ever asked why. ",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # square metres\n\n",
    "Größe 42, übermäßig teuer (129,90 €), später für 20 € verkauft: schöne Überraschung! ",
    "Numbers such as 1,024, 3.5e-7 and 0x7f, and a list:\n- one\n- two\n- three\n\n",
    "Two cows 🐄🐄 and a mountain ⛰️; in Japanese: 牛は水の近くに住んでいます。 ",
)
"""What the streams say, each beginning with another one: prose, code, and characters of several tokens."""


def measure_path(peers: dict[str, str], model: str, streams: list[int], tokens: int, kind: str) -> dict[str, Any]:
    """Facts of each, CPU microseconds per token by number of streams, and `over PEER`: theirs / ours in one round.

    peers: name -> interpreter. kind: DELTA or CUMULATIVE. The texts of all must be the same.
    """
    folder = str(resolve_model(EngineArgs(model=model), lambda *_: None).folder)
    tokenizer = Tokenizer.from_facts(TokenizerFacts(path=f"{folder}/tokenizer.json"))
    with ExitStack() as stack:
        ends = [
            stack.enter_context(PeerProcess(name, python, SCRIPTS[name], ["--model", folder]))
            for name, python in ({OURS: sys.executable} | peers).items()
        ]
        facts = {end.name: end.wait_ready() for end in ends}
        counts = {count: _measure_streams(ends, tokenizer, count, tokens, kind) for count in streams}
    return {"facts": facts, "model": model, "cpu_us_per_token": counts}


def _measure_streams(
    ends: list[PeerProcess], tokenizer: Tokenizer, count: int, tokens: int, kind: str
) -> dict[str, float]:
    question = {
        "prompt": tokenizer.encode("Tell me something."),
        "streams": [_answer_ids(tokenizer, number, tokens) for number in range(count)],
        "kind": kind,
        "passes": -(-TOKENS_OF_A_ROUND // (count * tokens)),
    }
    spent: dict[str, list[float]] = {end.name: [] for end in ends}
    for number in range(ROUNDS + 1):
        answers = {end.name: end.ask(question) for end in (ends if number % 2 == 0 else ends[::-1])}
        if len({answer["texts"] for answer in answers.values()}) > 1:
            sys.exit("The front ends do not give the same texts, so their costs cannot be compared.")
        for name, answer in answers.items():
            spent[name].append(answer["cpu_us_per_token"])
    measured = {name: values[1:] for name, values in spent.items()}  # the first round warms up
    ratios = {
        f"over {name}": round(statistics.median(b / a for a, b in zip(measured[OURS], values, strict=True)), 2)
        for name, values in measured.items()
        if name != OURS
    }
    return {name: round(statistics.median(values), 2) for name, values in measured.items()} | ratios


def _answer_ids(tokenizer: Tokenizer, number: int, tokens: int) -> list[int]:
    """Of the stream `number`: its first sentence is that of the same number, and so on around."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer.encode(SENTENCES[number % len(SENTENCES)], add_special_tokens=False)
        number += 1
    return ids[:tokens]
