"""PrefillPacer: prompts are read in pieces that decodes hardly feel, and in whole steps when nobody decodes."""

import pytest

from llmkernel.engine.scheduler.prefill_pacer import LEAST, STRETCH, PrefillPacer
from tests.engine.harness import Engine, reference_answer


def simulate(pacer: PrefillPacer, *, decode: float, token: float, prompt: int, streams: int = 8) -> list[float]:
    """Seconds of the steps in which a prompt is read beside streams; its tokens get dearer along the way."""
    steps, read = [], 0
    while read < prompt:
        count = min(pacer.limit(), prompt - read)
        seconds = decode + count * token * (1 + read / prompt)
        pacer.observe(decodes=streams, prompt_tokens=count, seconds=seconds)
        steps.append(seconds)
        read += count
    return steps


@pytest.mark.parametrize(("decode", "token"), [(0.020, 0.0003), (0.100, 0.002), (0.030, 0.00002)])
def test_steps_are_stretched_as_far_as_meant(decode: float, token: float) -> None:
    pacer = PrefillPacer(2048)
    pacer.observe(decodes=0, prompt_tokens=128, seconds=128 * token)
    for _ in range(20):
        pacer.observe(decodes=8, prompt_tokens=0, seconds=decode)
    steps = simulate(pacer, decode=decode, token=token, prompt=4000)
    assert max(steps) < 2.5 * decode
    assert max(steps) > 0.8 * STRETCH * decode or len(steps) == 2  # and no shorter than need be


def test_what_nobody_feels_is_not_held_back() -> None:
    pacer = PrefillPacer(2048)
    assert pacer.limit() == 2048  # nothing is known yet
    pacer.observe(decodes=0, prompt_tokens=100, seconds=0.0001)
    pacer.observe(decodes=3, prompt_tokens=0, seconds=0.0002)
    assert pacer.limit() == 2048


def test_a_prompt_comes_to_its_end_on_a_slow_machine() -> None:
    pacer = PrefillPacer(2048)
    pacer.observe(decodes=0, prompt_tokens=10, seconds=10)
    pacer.observe(decodes=3, prompt_tokens=0, seconds=0.1)
    assert pacer.limit() == LEAST
    assert PrefillPacer(16).limit() == 16


def test_a_cold_first_step_is_soon_forgotten() -> None:
    """The first prompt warms caches up; the limit finds its place within a few steps."""
    pacer = PrefillPacer(2048)
    pacer.observe(decodes=0, prompt_tokens=20, seconds=1.0)
    pacer.observe(decodes=8, prompt_tokens=0, seconds=0.020)
    simulate(pacer, decode=0.020, token=0.0003, prompt=400)
    assert pacer.limit() == pytest.approx(0.020 / 0.0006, abs=4)


def test_a_long_prompt_is_read_beside_streams_that_go_on() -> None:
    engine = Engine("step_ms=5", num_blocks=256, max_num_batched_tokens=256)
    for index in range(3):
        engine.add(f"stream-{index}", [65 + index] * 8, max_tokens=60)
    for _ in range(4):
        engine.step()
    prompt = [80 + index % 9 for index in range(600)]
    engine.add("long", prompt, max_tokens=3)
    while not engine.tokens("long"):
        before = [len(engine.tokens(f"stream-{index}")) for index in range(3)]
        engine.step()
        assert [len(engine.tokens(f"stream-{index}")) - count for index, count in enumerate(before)] == [1, 1, 1]
    read = [step.num_scheduled_tokens["long"] for step in engine.executor.steps if "long" in step.num_scheduled_tokens]
    assert read[0] == LEAST  # 5 ms for 24 tokens was dear
    assert max(read) > 2 * LEAST  # and then it shows that the length of a prompt costs this model nothing
    engine.run()
    assert engine.tokens("long") == reference_answer(prompt, max_tokens=3)[0]


def test_nobody_who_decodes_nobody_who_waits() -> None:
    engine = Engine("step_ms=5", num_blocks=256, max_num_batched_tokens=256)
    for index in range(3):
        engine.add(f"prompt-{index}", [65 + index] * 200, max_tokens=2)
    engine.step()
    engine.step()
    assert [step.total_num_scheduled_tokens for step in engine.executor.steps[:2]] == [256, 256]
    engine.run()
