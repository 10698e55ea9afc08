"""What holds whatever happens: random adds, aborts, steps, failures, pauses and resets on pools that are too small.

The harness checks after every step that free + used == total, that counts are right, that nothing is shared by
accident, that the budget holds and that no stream goes on after its end; the fake executor checks every KV slot that is
read.
"""

import dataclasses
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmkernel.protocol.outputs import FinishReason
from tests.engine.harness import Engine, reference_answer

RAISE, FAIL = 300, 301


@dataclasses.dataclass(frozen=True)
class Configuration:
    """An engine that is short of something. drafts: of a request in a step, 0 = no speculation."""

    num_blocks: int
    budget: int
    max_num_seqs: int
    policy: str
    caching: bool
    eos_every: int
    stream_interval: int
    drafts: int
    letters: int
    pace: float

    def start(self) -> Engine:
        engine = Engine(
            f"raise_token={RAISE},fail_token={FAIL},eos_every={self.eos_every},letters={self.letters},reject_every=7",
            num_blocks=self.num_blocks,
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            scheduling_policy=self.policy,
            enable_prefix_caching=self.caching,
            stream_interval=self.stream_interval,
            speculative={"method": "ngram", "num_speculative_tokens": self.drafts, "disable_by_batch_size": 6}
            if self.drafts
            else None,
        )
        engine.core.pace_outputs(self.pace)
        return engine


@dataclasses.dataclass
class Expected:
    """The answer of an undisturbed run, and how the stream may end."""

    prompt: list[int]
    tokens: list[int]
    reason: FinishReason
    aborted: bool = False
    rest: dict = dataclasses.field(default_factory=dict)


class Play:
    """An engine with a memory of what was asked."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.engine = configuration.start()
        self.expected: dict[str, Expected] = {}
        self.paused = False

    @property
    def live(self) -> list[str]:
        return list(self.engine.core.scheduler.requests)

    @property
    def longest_prompt(self) -> int:
        return self.engine.core.ready.max_model_len - 1

    def add(self, prompt: list[int], max_tokens: int, min_tokens: int, priority: int, salt: str | None) -> None:
        name = f"r{len(self.expected)}"
        prompt = prompt[: self.longest_prompt]
        tokens, reason = reference_answer(
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            max_model_len=self.engine.core.ready.max_model_len,
            eos_every=self.configuration.eos_every,
            letters=self.configuration.letters,
        )
        self.expected[name] = Expected(prompt, tokens, reason)
        self.engine.add(
            name,
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            priority=priority,
            cache_salt=salt,
            client_index=len(self.expected) % 3,
            prompt_logprobs=1 if len(self.expected) % 4 == 0 else None,
            logprobs=2 if len(self.expected) % 3 == 0 else None,
        )

    def abort(self, names: list[str]) -> None:
        for name in names:
            self.expected[name].aborted = True
        self.engine.core.abort_requests(names)
        self.engine.check()

    def step(self) -> None:
        core, executor = self.engine.core, self.engine.executor
        live, steps, raised = core.has_unfinished_requests(), len(executor.steps), executor.num_raised
        self.engine.step()
        if live and not self.paused:
            runs, failures = len(executor.steps) - steps, executor.num_raised - raised
            assert runs == 1 if not failures else 1 <= failures <= runs  # run again by halves: see step_retry
            assert self.engine.last_step.total_num_scheduled_tokens > 0, "nobody got a token though somebody waits"

    def pause(self, mode: str, clear_cache: bool) -> None:
        if mode == "abort":
            for name in self.live:
                self.expected[name].aborted = True
        self.engine.core.pause_scheduler(mode, clear_cache)
        self.paused = True
        self.engine.check()

    def resume(self) -> None:
        self.engine.core.resume_scheduler()
        self.paused = False

    def end(self) -> None:
        """Let it run out; then every stream has ended once, as it should, and everything is given back."""
        self.resume()
        self.engine.run()
        assert self.engine.is_empty()
        assert self.engine.executor.collective_rpc("held_requests") == [[]]
        assert self.engine.outputs.keys() == self.expected.keys()
        for name, expected in self.expected.items():
            self.check_answer(name, expected)

    def check_answer(self, name: str, expected: Expected) -> None:
        told = [output.new_prompt_logprobs_tensors for output in self.engine.outputs[name]]
        wanted = int(name[1:]) % 4 == 3 and bool(self.engine.tokens(name))
        assert [one is not None for one in told] == [wanted and index == 0 for index in range(len(told))]
        if wanted:
            assert told[0].logprob_token_ids[:, 0].tolist() == expected.prompt[1:]
        tokens, last = self.engine.tokens(name), self.engine.last(name)
        parts = [output.new_logprobs for output in self.engine.outputs[name] if output.new_logprobs is not None]
        asked = tokens if int(name[1:]) % 3 == 2 else []
        assert [token for part in parts for token in part.logprob_token_ids[:, 0].tolist()] == asked
        if last.finish_reason is FinishReason.ABORT:
            assert expected.aborted
            assert tokens == expected.tokens[: len(tokens)]
        elif last.finish_reason is FinishReason.ERROR:
            words = f"holds raise_token {RAISE}" if "raise_token" in last.stop_reason else f"holds fail_token {FAIL}"
            assert words in last.stop_reason, "the only errors are those that were played"
            assert tokens == expected.tokens[: len(tokens)]
        else:
            assert FAIL not in expected.prompt and RAISE not in expected.prompt
            assert (tokens, last.finish_reason) == (expected.tokens, expected.reason)


configurations = st.builds(
    Configuration,
    num_blocks=st.integers(3, 14),
    budget=st.sampled_from([1, 2, 5, 16, 64]),
    max_num_seqs=st.sampled_from([1, 2, 4, 16]),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    eos_every=st.sampled_from([0, 0, 7, 40]),
    stream_interval=st.sampled_from([1, 1, 3]),
    drafts=st.sampled_from([0, 1, 5, 9]),
    letters=st.sampled_from([27, 2, 3, 5]),
    pace=st.sampled_from([0.0, math.inf]),
)
stems = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9], [7], [5, 5, 5, 5, 5]]
prompts = st.builds(
    lambda stem, rest: stem + rest,
    st.sampled_from(stems),
    st.lists(st.integers(1, 3), max_size=20),
)


class EngineMachine(RuleBasedStateMachine):
    """Hypothesis looks for a sequence of operations that breaks something."""

    @initialize(configuration=configurations)
    def start(self, configuration: Configuration) -> None:
        self.play = Play(configuration)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 24),
        min_tokens=st.sampled_from([0, 0, 3]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "x"]),
    )
    def add(self, prompt: list[int], max_tokens: int, min_tokens: int, priority: int, salt: str | None) -> None:
        self.play.add(prompt, max_tokens, min_tokens, priority, salt)

    @rule(token_id=st.sampled_from([RAISE, FAIL]), prompt=prompts)
    def add_one_that_fails(self, token_id: int, prompt: list[int]) -> None:
        self.play.add([token_id, *prompt], 3, 0, 0, None)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.play.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = list(self.play.expected)
        if names:
            self.play.abort(data.draw(st.lists(st.sampled_from(names), max_size=3)))

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        done = self.play.engine.core.reset_prefix_cache(reset_running)
        assert done or not reset_running

    @rule(mode=st.sampled_from(["abort", "wait", "keep"]), clear_cache=st.booleans())
    def pause(self, mode: str, clear_cache: bool) -> None:
        self.play.pause(mode, clear_cache)

    @rule()
    def resume(self) -> None:
        self.play.resume()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "play"):
            self.play.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.end()


TestEngineMachine = pytest.mark.row("A-015", "A-016", "A-053")(EngineMachine.TestCase)
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def play_at_random(seed: int, num_operations: int) -> Play:
    """Weights like those of a busy notebook: mostly steps and adds, some aborts, rarely the rest."""
    dice = random.Random(seed)
    play = Play(
        Configuration(
            num_blocks=dice.randint(4, 20),
            budget=dice.choice([3, 8, 16, 64, 2048]),
            max_num_seqs=dice.choice([1, 3, 8, 64, 64]),
            policy=dice.choice(["fcfs", "priority"]),
            caching=dice.random() < 0.7,
            eos_every=dice.choice([0, 9, 50]),
            stream_interval=dice.choice([1, 1, 4]),
            drafts=dice.choice([0, 1, 3, 7]),
            letters=dice.choice([27, 3, 5]),
            pace=dice.choice([0.0, math.inf]),
        )
    )
    for _ in range(num_operations):
        kind = dice.choices(["step", "add", "abort", "bad", "reset", "pause", "resume"], [70, 20, 3, 1, 1, 1, 5])[0]
        prompt = dice.choice(stems) + dice.choices([1, 2, 3], k=dice.randint(0, 20))
        if kind == "step":
            play.step()
        elif kind == "add":
            salt = dice.choice([None, None, "x"])
            play.add(prompt, dice.randint(1, 40), dice.choice([0, 0, 4]), dice.randint(-1, 1), salt)
        elif kind == "bad":
            play.add([dice.choice([RAISE, FAIL]), *prompt], 3, 0, 0, None)
        elif kind == "abort" and play.expected:
            play.abort(dice.choices(play.live or list(play.expected), k=dice.randint(1, 3)))
        elif kind == "reset":
            play.engine.core.reset_prefix_cache(dice.random() < 0.5)
        elif kind == "pause":
            play.pause(dice.choice(["abort", "wait", "keep"]), dice.random() < 0.5)
        elif kind == "resume":
            play.resume()
    play.end()
    return play


@pytest.mark.parametrize("seed", range(20))
def test_200_random_operations(seed: int) -> None:
    play_at_random(seed, 200)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_1000_random_operations(seed: int) -> None:
    play_at_random(seed, 1_000)


def test_random_play_reaches_what_it_is_for() -> None:
    """Preemption, hits, resumption, refusals to share, drafts of all fates: all of it happens in the seeds above."""
    plays = [play_at_random(seed, 200) for seed in range(10)]
    steps = [step for play in plays for step in play.engine.executor.steps]
    stats = [stats for play in plays for stats in play.engine.stats]
    assert sum(len(step.preempted_req_ids) for step in steps) > 20
    assert sum(len(step.scheduled_cached_reqs.resumed_req_ids) for step in steps) > 20
    assert sum(item.prefix_cache_stats.hits for item in stats if item.prefix_cache_stats) > 100
    assert any(item.num_skipped_waiting_reqs for item in stats)
    drafted = [play.engine.stats[-1].spec_decoding_stats for play in plays if play.configuration.drafts]
    assert sum(item.num_accepted_tokens for item in drafted) > 100
    assert sum(item.num_draft_tokens - item.num_accepted_tokens for item in drafted) > 100
    reasons = {play.engine.last(name).finish_reason for play in plays for name in play.expected}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
