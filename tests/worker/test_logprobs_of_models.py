"""Logprobs of samples and prompts against transformers' log_softmax, in float32, however the work is cut up."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.protocol.outputs import LogprobsLists
from tests.worker import tiny_models
from tests.worker.engine_run import Answer, EngineRun, Reference

TOLERANCE = 1e-4
LENGTHS = (1, 2, 15, 16, 17, 40, 65)
NEW_TOKENS = 10
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}


class Oracle:
    """transformers' log_softmax at every position of prompt and answer, compared entry by entry."""

    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)
        self.largest = 0.0
        self.entries = 0

    def check(self, prompt: list[int], answer: Answer, count: int, prompt_count: int | None = None) -> None:
        ids = prompt + answer.token_ids
        logits = self._reference.logits_after(ids[:1], ids[1:])
        expected = torch.from_numpy(logits).double().log_softmax(-1).numpy()
        about_prompt = len(prompt) - 1
        if prompt_count is not None:
            assert answer.prompt_logprobs is not None
            self._compare(answer.prompt_logprobs, prompt[1:], expected[:about_prompt], prompt_count)
        samples = LogprobsLists(
            *(
                np.concatenate([getattr(one, name) for one in answer.logprobs])
                for name in LogprobsLists.__struct_fields__
            )
        )
        self._compare(samples, answer.token_ids, expected[about_prompt:], count)

    def _compare(self, lists: LogprobsLists, chosen: Sequence[int], expected: np.ndarray, count: int) -> None:
        width = 1 + (expected.shape[1] if count < 0 else count)
        assert lists.logprob_token_ids.shape == lists.logprobs.shape == (len(chosen), width)
        assert lists.logprob_token_ids[:, 0].tolist() == list(chosen)
        rows = np.arange(len(chosen))[:, None]
        difference = np.abs(lists.logprobs - expected[rows, lists.logprob_token_ids])
        self.largest = max(self.largest, float(difference.max(initial=0)))
        self.entries += difference.size
        assert (difference < TOLERANCE).all()
        own = expected[rows, lists.logprob_token_ids[:, :1]]
        near = (np.abs(expected - own) < TOLERANCE).sum(-1)
        ranks = (expected >= own).sum(-1)
        assert (np.abs(lists.sampled_token_ranks - ranks) < np.maximum(near, 1)).all()
        if count > 0:  # the best ones, in order, but for near ties
            best = -np.sort(-expected, axis=-1)[:, :count]
            assert np.abs(lists.logprobs[:, 1:] - best).max(initial=0) < TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(9)
    return [rng.integers(0, tiny_models.VOCAB_SIZE, length).tolist() for length in LENGTHS]


def pool_of(folder: Path, blocks: int) -> int:
    with EngineRun(folder, block_size=8, kv_cache_memory="1MiB") as run:
        return run.core.ready.kv_cache_bytes // run.core.ready.num_gpu_blocks * blocks


@pytest.mark.parametrize("count", [0, 3, -1])
@pytest.mark.parametrize("chunk", [5, 16, 2048])
def test_in_chunks_cold_and_warm(
    folder: Path, oracle: Oracle, prompts: list[list[int]], chunk: int, count: int
) -> None:
    with EngineRun(folder, block_size=16, max_num_batched_tokens=chunk) as run:
        for state in ("cold", "warm"):
            answers = run.generate(prompts, NEW_TOKENS, logprobs=count, prompt_logprobs=count, **SAMPLING)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.num_cached == 0, state
                oracle.check(prompt, answer, count, count)
        reused = run.generate(prompts, NEW_TOKENS, logprobs=count, **SAMPLING)
        assert [answer.num_cached for answer in reused] == [(length - 1) // 16 * 16 for length in LENGTHS]
        for prompt, answer in zip(prompts, reused, strict=True):
            assert answer.prompt_logprobs is None
            oracle.check(prompt, answer, count)
    print(f"largest difference {oracle.largest:.1e} of {oracle.entries} entries")


@pytest.mark.parametrize("chunk", [6, 2048])
def test_preempted_and_resumed(folder: Path, oracle: Oracle, prompts: list[list[int]], chunk: int) -> None:
    with EngineRun(
        folder, block_size=8, kv_cache_memory=pool_of(folder, blocks=16), max_num_batched_tokens=chunk
    ) as run:
        many = prompts * 2
        answers = run.generate(many, 24, logprobs=2, prompt_logprobs=2, **SAMPLING)
        assert run.num_preempted > 0
        for prompt, answer in zip(many, answers, strict=True):
            oracle.check(prompt, answer, 2, 2)


def test_ids_that_are_asked_for_by_name(folder: Path, oracle: Oracle, prompts: list[list[int]]) -> None:
    wanted = [90, 3, 41]
    with EngineRun(folder) as run:
        answers = run.generate(prompts, NEW_TOKENS, logprob_token_ids=wanted, **SAMPLING)
        alone = run.generate(prompts, NEW_TOKENS, logprobs=-1, **SAMPLING)
    for answer, full in zip(answers, alone, strict=True):
        assert answer.token_ids == full.token_ids
        for named, whole in zip(answer.logprobs, full.logprobs, strict=True):
            assert named.logprob_token_ids[0].tolist() == [int(whole.logprob_token_ids[0, 0]), *wanted]
            assert np.abs(named.logprobs[0, 1:] - whole.logprobs[0, 1:][wanted]).max() < TOLERANCE


def test_prompts_that_want_logprobs_share_a_small_budget(folder: Path, prompts: list[list[int]]) -> None:
    rng = np.random.default_rng(1)
    long = [rng.integers(0, tiny_models.VOCAB_SIZE, 200).tolist() for _ in range(4)]
    with EngineRun(folder) as run:
        told = run.generate(long, 4, prompt_logprobs=1)
        assert all(answer.prompt_logprobs is not None for answer in told)
        plain = run.generate(long, 4)
    assert [answer.token_ids for answer in told] == [answer.token_ids for answer in plain]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_the_default_model(smollm2_files: ModelFiles) -> None:
    oracle = Oracle(smollm2_files.folder)
    with EngineRun("smollm2") as run:
        facts = run.core.ready.tokenizer
        tokenizer = Tokenizer.from_str(facts.json) if facts.json else Tokenizer.from_file(facts.path)
        text = "In 1869 the periodic table had gaps, and the gaps turned out to be predictions; naïve 😀. " * 14
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids[:length] for length in (1, 70, 280)]
        cold = run.generate(prompts, 6, logprobs=5, prompt_logprobs=5, **SAMPLING)
        warm = run.generate(prompts[1:2], 6, logprobs=5, prompt_logprobs=5, **SAMPLING)
        for prompt, answer in zip(prompts + prompts[1:2], cold + warm, strict=True):
            oracle.check(prompt, answer, 5, 5)
    print(f"SmolLM2, float32: largest difference {oracle.largest:.1e} of {oracle.entries} entries")
