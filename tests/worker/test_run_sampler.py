"""Several positions of a request at once against one after the other: the same tokens, logprobs and failures."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.scheduler.output import GrammarMasks, NewRequestData
from llmkernel.engine.worker.input_batch import RunningRequest, SampledRun
from llmkernel.engine.worker.logits_processors.loader import load_logits_processors
from llmkernel.engine.worker.run_sampler import RunsOutput, sample_runs
from llmkernel.engine.worker.sampler import Sampler
from llmkernel.protocol.outputs import LogprobsLists
from llmkernel.protocol.sampling_params import SamplingParams
from tests.worker.sampler.batch_tools import CPU, make_logits

VOCAB = 100
PROMPT = [3, 4, 5]
EOS = 99

WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.6, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.01},
    {"repetition_penalty": 1.4},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0, "bad_words": [[7], [50, 51]]},
    {"min_tokens": 6, "stop_token_ids": [1, 2, 3]},
    {"allowed_token_ids": list(range(20, 40)), "logit_bias": {21: 3.0}},
    {"logprobs": 3},
    {"temperature": 0, "logprobs": 0, "presence_penalty": 1.0},
    {"logprobs": -1},
]


@dataclasses.dataclass
class Asked:
    """One request: its logits at each of its next positions [drafts + 1, vocab], what it has said, its drafts."""

    req_id: str
    params: SamplingParams
    bad_words: list[list[int]]
    logits: torch.Tensor
    output: list[int]
    drafts: list[int] = dataclasses.field(default_factory=list)
    allowed: np.ndarray | None = None
    """bool [drafts + 1, vocab], of a grammar."""

    def running(self) -> RunningRequest:
        request = RunningRequest(NewRequestData(self.req_id, PROMPT, self.params, [1], 0))
        for token_id in self.output:
            request.append(token_id)
        return request


def sampler_of(asked: list[Asked], **options: Any) -> Sampler:
    sampler = Sampler(VOCAB, CPU, **options)
    for one in asked:
        sampler.add(one.req_id, one.params, PROMPT, EOS, one.bad_words)
    return sampler


def words_of(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros(128, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def one_by_one(asked: Asked, sampler: Sampler) -> tuple[list[int], list[LogprobsLists]]:
    """All positions of a request, whatever its drafts are."""
    said, lists = [], []
    for position, row in enumerate(asked.logits):
        masks = None
        if asked.allowed is not None:
            masks = GrammarMasks({asked.req_id: 0}, words_of(asked.allowed[position])[None])
        drawn = sampler.sample(row[None], [asked.req_id], [asked.output + said], masks)
        if drawn.errors:
            break
        said += drawn.token_ids
        lists += drawn.logprobs.values()
    return said, lists


def at_once(asked: list[Asked], sampler: Sampler) -> tuple[RunsOutput, dict[str, RunningRequest]]:
    runs, row, masks, rows = [], 0, GrammarMasks({}, np.zeros((0, 4), np.int32)), []
    for one in asked:
        runs.append(SampledRun(one.running(), one.drafts, row))
        row += len(one.logits)
        if one.allowed is not None:
            masks.rows[one.req_id] = len(rows)
            rows += [words_of(allowed) for allowed in one.allowed]
    masks.bitmask = np.array(rows, np.int32).reshape(-1, 4)
    drawn = sample_runs(sampler, torch.cat([one.logits for one in asked]), runs, masks)
    return drawn, {run.request.req_id: run.request for run in runs}


def make_asked(dice: random.Random, number: int) -> Asked:
    way = dict(WAYS[number % len(WAYS)])
    bad_words = way.pop("bad_words", [])
    params = SamplingParams(max_tokens=None, seed=number, **way)
    positions = dice.randint(1, 6)
    logits = make_logits(positions, VOCAB, seed=dice.randint(0, 10**6), spread=2.0)
    asked = Asked(f"r{number}", params, bad_words, logits, dice.choices(range(VOCAB), k=dice.randint(0, 8)))
    if dice.random() < 0.3:
        asked.allowed = np.array([[dice.random() < 0.7 for _ in range(VOCAB)] for _ in range(positions)])
    return asked


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_drafts_change_nothing(seed: int, mode: Any) -> None:
    dice = random.Random(seed)
    asked = [make_asked(dice, number) for number in range(2 * len(WAYS))]
    expected = {}
    for one in asked:
        said, lists = one_by_one(one, sampler_of([one], logprobs_mode=mode))
        one.drafts = said[: len(one.logits) - 1]
        right = dice.randint(0, len(one.drafts))
        if right < len(one.drafts):
            one.drafts[right] = (one.drafts[right] + 1) % VOCAB
        expected[one.req_id] = said[: right + 1], lists[: right + 1]
    drawn, running = at_once(asked, sampler_of(asked, logprobs_mode=mode))
    assert not drawn.errors and drawn.token_ids.keys() == expected.keys()
    for one in asked:
        said, lists = expected[one.req_id]
        assert drawn.token_ids[one.req_id] == said, one
        assert running[one.req_id].output_token_ids == one.output + said
        assert running[one.req_id].token_ids == PROMPT + one.output + said
        assert (one.req_id in drawn.logprobs) == bool(lists)
        if lists:
            found = drawn.logprobs[one.req_id]
            np.testing.assert_array_equal(found.logprob_token_ids, np.concatenate([x.logprob_token_ids for x in lists]))
            np.testing.assert_allclose(found.logprobs, np.concatenate([x.logprobs for x in lists]), atol=1e-6)
            np.testing.assert_array_equal(
                found.sampled_token_ranks, np.concatenate([x.sampled_token_ranks for x in lists])
            )


@pytest.mark.parametrize("way", [{"temperature": 0}, {"temperature": 0, "presence_penalty": 0.1}], ids=str)
def test_a_position_that_fails_is_told_when_it_is_the_first(way: dict[str, Any]) -> None:
    logits = make_logits(3, VOCAB)
    logits[1] = torch.nan
    best = int(logits[0].argmax())
    one = Asked("a", SamplingParams(max_tokens=None, **way), [], logits, [])
    for drafts in ([best, 5], [best + 1, 5]):
        one.drafts = drafts
        drawn, _ = at_once([one], sampler_of([one]))
        assert drawn.token_ids == {"a": [best]} and not drawn.errors, "what comes before it stands"
    one.logits, one.drafts = logits[1:], [5]
    drawn, _ = at_once([one], sampler_of([one]))
    assert not drawn.token_ids and "NaN" in drawn.errors["a"]


def test_logits_processors_see_every_token_before_they_are_asked() -> None:
    path = "tests.worker.test_run_sampler:Counting"
    processors = load_logits_processors(EngineArgs(model="m", import_paths=(path,)), CPU)
    one = Asked("a", SamplingParams(max_tokens=None, temperature=0), [], make_logits(4, VOCAB), [9, 9])
    one.drafts = [2, 3, 50]
    drawn, _ = at_once([one], sampler_of([one], processors=processors))
    assert drawn.token_ids == {"a": [2, 3, 4]}


class Counting:
    """A logits processor: the token is the number of tokens before it."""

    def __init__(self, *_: Any) -> None:
        self._outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: Any) -> None:
        for index, _, _, output in update.added if update else ():
            self._outputs[index] = output

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits.fill_(-torch.inf)
        for index in range(len(logits)):
            logits[index, len(self._outputs[index])] = 0
        return logits
