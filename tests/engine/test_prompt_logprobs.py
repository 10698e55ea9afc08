"""Prompt logprobs in the scheduler: every prompt token is computed by its own request, a few hundred in a step."""

import numpy as np

from llmkernel.engine.fake_executor import fake_answer
from llmkernel.engine.scheduler.step_plan import PROMPT_LOGPROBS_BUDGET
from tests.engine.harness import Engine

PROMPT = [number % 200 for number in range(600)]


def told(engine: Engine, request_id: str) -> list[int]:
    """Ids that the prompt's logprobs are about; they come once, with the first token."""
    outputs = engine.outputs[request_id]
    found = [output.new_prompt_logprobs_tensors for output in outputs]
    assert found[0] is not None and not any(one is not None for one in found[1:])
    assert outputs[0].new_token_ids
    assert found[0].logprobs.shape[1] == 3
    return found[0].logprob_token_ids[:, 0].tolist()


def test_a_warm_cache_is_not_read_and_steps_are_bounded() -> None:
    engine = Engine(num_blocks=512, block_size=4)
    engine.add("warms", PROMPT, max_tokens=2)
    engine.run()
    steps = len(engine.executor.steps)
    engine.add("told", PROMPT, max_tokens=4, prompt_logprobs=2)
    engine.add("free", PROMPT[:300], max_tokens=4)
    engine.run()
    assert told(engine, "told") == PROMPT[1:] and engine.tokens("told") == fake_answer(PROMPT, 4)
    assert engine.outputs["free"][0].prefill_stats.num_cached_tokens == 296
    assert engine.outputs["told"][0].prefill_stats.num_cached_tokens == 0
    chunks = [step.num_scheduled_tokens.get("told", 0) for step in engine.executor.steps[steps:]]
    assert chunks[:3] == [PROMPT_LOGPROBS_BUDGET, PROMPT_LOGPROBS_BUDGET, 600 - 2 * PROMPT_LOGPROBS_BUDGET]
    assert engine.executor.steps[steps].num_scheduled_tokens["free"] > 0, "nobody else waits"


def test_several_prompts_share_the_bound() -> None:
    engine = Engine(num_blocks=1024, block_size=4)
    for number in range(4):
        engine.add(f"r{number}", [number, *PROMPT[:200]], max_tokens=3, prompt_logprobs=2)
    engine.run()
    for number in range(4):
        assert told(engine, f"r{number}") == PROMPT[:200]
    for step in engine.executor.steps:
        prefills = [count for count in step.num_scheduled_tokens.values() if count > 1]
        assert sum(prefills) <= PROMPT_LOGPROBS_BUDGET


def test_preempted_in_the_middle_they_are_still_whole() -> None:
    engine = Engine(num_blocks=40, block_size=4, max_num_batched_tokens=16)
    for number in range(4):
        engine.add(f"r{number}", [number, *PROMPT[:50]], max_tokens=30, prompt_logprobs=2)
    engine.run()
    assert sum(stats.num_preempted for stats in engine.stats) > 0
    for number in range(4):
        assert told(engine, f"r{number}") == PROMPT[:50]
        assert engine.tokens(f"r{number}") == fake_answer([number, *PROMPT[:50]], 30)
    assert engine.is_empty()


def test_a_prompt_of_one_token_has_empty_ones() -> None:
    engine = Engine()
    engine.add("r", [7], max_tokens=2, prompt_logprobs=0)
    engine.run()
    found = engine.outputs["r"][0].new_prompt_logprobs_tensors
    assert found is not None and found.logprobs.shape == (0, 1) and found.logprobs.dtype == np.float32
