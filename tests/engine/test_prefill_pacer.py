"""PrefillPacer: prompts are read in turns with those who decode, and in whole steps when nobody decodes."""

import pytest

from llmkernel.engine.scheduler.prefill_pacer import LEAST, SHORT_PROMPT, STRETCH, PrefillPacer
from tests.engine.harness import Engine, reference_answer


def taught(*, decode: float, token: float) -> PrefillPacer:
    """One that has seen a prompt of 128 tokens, and then decodes."""
    pacer = PrefillPacer(2048)
    pacer.observe(decodes=0, prompt_tokens=128, seconds=128 * token)
    for _ in range(20):
        pacer.observe(decodes=8, prompt_tokens=0, seconds=decode)
    return pacer


def simulate(pacer: PrefillPacer, *, decode: float, token: float, prompt: int) -> list[float]:
    """Seconds of the steps until a prompt is read beside eight streams; its tokens get dearer along the way."""
    steps, read = [], 0
    while read < prompt:
        count = min(pacer.limit(1), prompt - read)
        seconds = decode + count * token * (1 + read / prompt)
        pacer.observe(decodes=8, prompt_tokens=count, seconds=seconds)
        steps.append(seconds)
        read += count
    return steps


@pytest.mark.parametrize(("decode", "token"), [(0.020, 0.0003), (0.100, 0.002), (0.030, 0.0001)])
def test_steps_are_stretched_as_far_as_meant(decode: float, token: float) -> None:
    steps = simulate(taught(decode=decode, token=token), decode=decode, token=token, prompt=4000)
    assert max(steps) < 2.5 * decode
    assert max(steps) > 0.8 * (1 + STRETCH) * decode  # and no shorter than need be


def test_who_waits_counts() -> None:
    """Two who wait for a first token weigh more than the evenness of the streams; eight take all."""
    pacer = taught(decode=0.040, token=0.0005)
    assert [pacer.limit(waiting) for waiting in (1, 2, 8)] == [80, 320, 2048]


def test_what_nobody_feels_is_not_held_back() -> None:
    pacer = PrefillPacer(2048)
    assert pacer.limit(1) == 2048  # nothing is known yet
    pacer = taught(decode=0.0002, token=0.000001)
    for _ in range(3):
        assert pacer.limit(1) == 2048
        pacer.observe(decodes=3, prompt_tokens=2048, seconds=0.002)


def test_a_prompt_comes_to_its_end_on_a_slow_machine() -> None:
    pacer = taught(decode=0.1, token=1.0)
    assert pacer.limit(1) == LEAST
    assert PrefillPacer(16).limit(1) == 16


def test_a_cold_first_step_is_soon_forgotten() -> None:
    """The first prompt warms caches up; the limit finds its place within a few steps."""
    pacer = taught(decode=0.020, token=0.05)
    simulate(pacer, decode=0.020, token=0.0003, prompt=800)
    assert pacer.limit(1) == pytest.approx(STRETCH * 0.020 / 0.0006, rel=0.3)


def test_a_long_prompt_is_read_beside_streams_that_go_on() -> None:
    engine = Engine("step_ms=15", num_blocks=256, max_num_batched_tokens=256)
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
    assert read[0] < 100  # 15 ms for 24 tokens was dear
    assert max(read) > read[0]  # and then it shows that the length of a prompt costs this model nothing
    engine.run()
    assert engine.tokens("long") == reference_answer(prompt, max_tokens=3)[0]


def test_a_short_prompt_is_read_in_one_step_past_a_long_one() -> None:
    engine = Engine("step_ms=15", num_blocks=256, max_num_batched_tokens=512)
    engine.add("stream", [65] * 8, max_tokens=30)
    for _ in range(4):
        engine.step()
    engine.add("long", [71] * 500, max_tokens=2)
    engine.step()
    assert engine.last_step.num_scheduled_tokens["long"] < 100
    engine.add("short", [70] * SHORT_PROMPT, max_tokens=2)
    engine.step()
    assert engine.last_step.num_scheduled_tokens["short"] == SHORT_PROMPT
    engine.run()


def test_the_first_burst_of_all_is_read_in_whole_steps() -> None:
    """Nothing has only decoded yet; and then many who wait take the whole budget anyway."""
    engine = Engine("step_ms=15", num_blocks=1024, max_num_batched_tokens=256)
    for index in range(6):
        engine.add(f"prompt-{index}", [65 + index] * 300, max_tokens=20)
    while sum(bool(engine.tokens(f"prompt-{index}")) for index in range(6)) < 6:
        engine.step()
    sizes = [step.total_num_scheduled_tokens for step in engine.executor.steps]
    assert sizes[:-1] == [256] * (len(sizes) - 1)
    engine.run()


def test_nobody_who_decodes_nobody_who_waits() -> None:
    engine = Engine("step_ms=5", num_blocks=256, max_num_batched_tokens=256)
    for index in range(3):
        engine.add(f"prompt-{index}", [65 + index] * 200, max_tokens=2)
    engine.step()
    engine.step()
    assert [step.total_num_scheduled_tokens for step in engine.executor.steps[:2]] == [256, 256]
    engine.run()
