"""SmolLM2-135M, its real weights in float32: greedy ids equal transformers' generate(), however the work is cut up.

Equality is design D13's: ids may part only where the reference's two best logits lie within 1e-4; teacher-forced logits
are compared at every position. The soak form runs every prompt in every mode with more tokens.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from llmkernel.engine.worker.model_files import ModelFiles
from tests.worker.engine_run import Comparison, EngineRun, Reference

LENGTHS = (1, 2, 3, 5, 8, 13, 17, 31, 32, 33, 64, 65, 100, 128, 150, 200, 300, 450, 800, 1500)
TOLERANCE = 2e-4
"""Largest difference of float32 logits, which span about 40 units here; measured: below 8e-5."""

SHORT, LONG = 12, 32
"""New tokens of the short form and of the soak."""

THREADS = 2

_SENTENCES = (
    "The scheduler hands out one budget of tokens and every request takes its share of it.",
    "A river that has been dammed for a century does not find its old bed in a single spring.",
    "She counted the boxes twice, wrote the number on the wall, and went to look for the driver.",
    "In 1869 the periodic table had gaps, and the gaps turned out to be predictions.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Nobody at the harbour could say when the last ferry had left, or whether it would come back.",
    "Dear Ms. Okafor, thank you for your letter of the 4th; the parts will be shipped on Monday.",
    "Bread needs four things: flour, water, salt and time, and most people are short of the last.",
)


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """English of exactly LENGTHS tokens, each prompt with a number of its own in front, so that none shares a block."""
    prompts = []
    for seed, length in enumerate(LENGTHS):
        rng = np.random.default_rng(seed)
        text, ids = f"No. {seed}: ", []
        while len(ids) < length:
            text += " ".join(rng.permutation(_SENTENCES)) + " "
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        prompts.append(ids[:length])
    return prompts


@pytest.fixture(scope="module")
def reference(smollm2_files: ModelFiles) -> Reference:
    return Reference(smollm2_files.folder, attn_implementation="sdpa")


@pytest.fixture(scope="module", params=["fused", "transformers"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(smollm2_files: ModelFiles, implementation: str) -> Iterator[EngineRun]:
    with EngineRun("smollm2", num_threads=THREADS, implementation=implementation) as run:
        yield run


@pytest.fixture(scope="module")
def prompts(run: EngineRun) -> list[list[int]]:
    facts = run.core.ready.tokenizer
    return make_prompts(Tokenizer.from_str(facts.json) if facts.json else Tokenizer.from_file(facts.path))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Two here: it is a real model (the other tests of this folder use one)."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seen(reference: Reference) -> Iterator[Comparison]:
    comparison = Comparison(reference, TOLERANCE)
    yield comparison
    print(f"SmolLM2, float32: {comparison}")


@pytest.mark.slow
@pytest.mark.row("A-017")
def test_all_together_cold_then_warm(run: EngineRun, prompts: list[list[int]], seen: Comparison) -> None:
    cold = run.generate(prompts, SHORT, logits=True)
    assert not any(answer.num_cached for answer in cold)
    seen.check(prompts, cold, "together, cold")
    warm = run.generate(prompts, SHORT, logits=True)
    assert [answer.num_cached for answer in warm] == [(length - 1) // 32 * 32 for length in LENGTHS]
    seen.check(prompts, warm, "together, warm")


@pytest.mark.slow
def test_some_alone(run: EngineRun, prompts: list[list[int]], seen: Comparison) -> None:
    run.core.call_utility("reset_prefix_cache")
    for length in (1, 17, 33, 128, 450):
        prompt = prompts[LENGTHS.index(length)]
        seen.check([prompt], run.generate([prompt], SHORT, logits=True), "alone")


@pytest.mark.slow
def test_chunks_of_64_in_a_pool_so_small_that_requests_are_preempted(
    implementation: str, prompts: list[list[int]], seen: Comparison
) -> None:
    first = prompts[LENGTHS.index(800)]  # fills nearly all; what is admitted beside it must give way when it all grows
    some = [first, *(prompt for prompt in prompts if len(prompt) < 800)]
    with small_engine(implementation, tokens=900, max_num_batched_tokens=64) as run:
        seen.check(some, run.generate(some, SHORT, logits=True), "chunks of 64, small pool")
        assert run.num_preempted > 0


@pytest.mark.slow
def test_chunks_of_16(implementation: str, prompts: list[list[int]], seen: Comparison) -> None:
    some = [prompt for prompt in prompts if len(prompt) <= 200]
    with EngineRun("smollm2", num_threads=THREADS, implementation=implementation, max_num_batched_tokens=16) as run:
        seen.check(some, run.generate(some, SHORT, logits=True), "chunks of 16")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_every_prompt_in_every_mode(
    chunk: int, implementation: str, prompts: list[list[int]], seen: Comparison
) -> None:
    with EngineRun("smollm2", num_threads=THREADS, implementation=implementation, max_num_batched_tokens=chunk) as run:
        alone = [run.generate([prompt], LONG, logits=True)[0] for prompt in prompts]
        seen.check(prompts, alone, f"alone, cold, chunks of {chunk}")
        again = [run.generate([prompt], LONG, logits=True)[0] for prompt in prompts]
        assert sum(answer.num_cached > 0 for answer in again) == sum(length > 32 for length in LENGTHS)
        seen.check(prompts, again, f"alone, warm, chunks of {chunk}")
        seen.check(prompts, run.generate(prompts, LONG, logits=True), f"together, warm, chunks of {chunk}")
        run.core.call_utility("reset_prefix_cache")
        seen.check(prompts, run.generate(prompts, LONG, logits=True), f"together, cold, chunks of {chunk}")
    with small_engine(implementation, tokens=1600, max_num_batched_tokens=chunk) as run:
        longest_first = prompts[-1:] + prompts[:-1]
        seen.check(longest_first, run.generate(longest_first, LONG, logits=True), f"small pool, chunks of {chunk}")
        assert run.num_preempted > 0


def small_engine(implementation: str, tokens: int, max_num_batched_tokens: int) -> EngineRun:
    """A pool of so many tokens (46,080 bytes each), in blocks of 4: every few tokens somebody needs another one."""
    return EngineRun(
        "smollm2",
        num_threads=THREADS,
        implementation=implementation,
        block_size=4,
        kv_cache_memory=tokens * 46080,
        max_num_batched_tokens=max_num_batched_tokens,
    )
