"""Speculation on real models in float32: the texts are those without drafts, greedy and drawn, up to ties (D13)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.llm.tokenizer import Tokenizer
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.stats import SpecDecodingStats
from tests.worker import tiny_models
from tests.worker.engine_run import EngineRun
from tests.worker.test_sampling_of_models import WAYS, Asked, Draws, run_some

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "disable_by_batch_size": 100}
NEW_TOKENS = 32
COMMON = [
    ("fused", "mistral-window"),
    ("fused", "qwen3"),
    ("transformers", "gemma2"),
    ("transformers", "gpt-oss-sinks"),
]
OTHERS = [("fused", family) for family in tiny_models.FUSED_FAMILIES] + [
    ("transformers", family) for family in tiny_models.FAMILIES
]


def requests() -> Asked:
    """Prompts that repeat themselves, each asked in every way; some of the ways are cold, so that texts do the same."""
    dice = np.random.default_rng(4)
    ways = [*WAYS, {"temperature": 0.2}, {"temperature": 0.3, "top_p": 0.9, "repetition_penalty": 1.02}]
    asked: Asked = {}
    for number in range(2 * len(ways)):
        motif = dice.integers(0, tiny_models.VOCAB_SIZE, int(dice.integers(2, 8))).tolist()
        prompt = (motif * 20)[: int(dice.integers(9, 40))]
        fields = {"max_tokens": NEW_TOKENS, "seed": 1000 + number, "logprobs": -1} | ways[number % len(ways)]
        asked[f"r{number}"] = prompt, SamplingParams(**fields)
    return asked


def drafts_of(run: EngineRun) -> SpecDecodingStats:
    stats = run.core.scheduler.make_stats(0.0).spec_decoding_stats
    assert stats is not None
    return stats


def save(implementation: str, family: str, folder: Path) -> Path:
    saves = {"fused": tiny_models.save_fused_family, "transformers": tiny_models.save_family}
    return saves[implementation](family, folder)


@pytest.mark.parametrize(
    ("implementation", "family"),
    [*COMMON, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case not in COMMON)],
)
def test_texts_are_those_without_drafts(implementation: str, family: str, tmp_path: Path) -> None:
    folder = save(implementation, family, tmp_path)
    asked = requests()
    options: dict[str, Any] = {"implementation": implementation, "block_size": 8}
    with EngineRun(folder, **options) as run:
        draws = Draws(asked, run_some(run, asked))
        block = run.core.ready.kv_cache_bytes // run.core.ready.num_gpu_blocks
    with EngineRun(folder, speculative=NGRAM, **options) as run:
        draws.check(run_some(run, asked), "together")
        draws.check(run_some(run, asked), "with cached prefixes")
        drafts = drafts_of(run)
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    with EngineRun(folder, speculative=NGRAM, max_num_batched_tokens=9, max_num_seqs=5, **options) as run:
        draws.check(run_some(run, asked), "in chunks")
        assert drafts_of(run).num_accepted_tokens
    with EngineRun(folder, speculative=NGRAM, kv_cache_memory=30 * block, **options) as run:
        draws.check(run_some(run, asked), "preempted")
        assert run.num_preempted > 0
    print(f"{family}, {implementation}: {draws.num_answers} answers, {draws.num_parted} parted at an edge; {drafts}")
    assert draws.num_parted <= draws.num_answers // 25


@pytest.mark.slow
def test_the_default_model_copies_a_text_in_fewer_steps(smollm2_files: ModelFiles) -> None:
    text = " the cat sat on the mat and looked at the dog that sat at the door"
    with EngineRun("smollm2") as run:
        tokenizer = Tokenizer.from_facts(run.core.ready.tokenizer)
        prompts = [tokenizer.encode(text * times) for times in (2, 4)]
        plain = run.generate(prompts, 40, logits=True)
        drawn = run.generate(prompts, 40, temperature=0.5, seed=3)
        steps = run.core.scheduler.step_counter
    with EngineRun("smollm2", speculative="ngram") as run:
        for answer, expected in zip(run.generate(prompts, 40), plain, strict=True):
            assert_equal_up_to_a_tie(answer.token_ids, expected.token_ids, expected.logits)
        assert [answer.token_ids for answer in run.generate(prompts, 40, temperature=0.5, seed=3)] == [
            answer.token_ids for answer in drawn
        ]
        assert run.core.scheduler.step_counter * 1.5 < steps
        print(drafts_of(run), run.core.scheduler.step_counter, steps)


def assert_equal_up_to_a_tie(found: list[int], expected: list[int], logits: list[np.ndarray]) -> None:
    if found != expected:
        first = next(at for at, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        best, second = np.sort(logits[first])[-2:][::-1]
        assert best - second < 1e-4, f"token {first} differs"
