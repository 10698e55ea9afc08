"""EngineCore through its doors: refusals, failures of one request and of a step, utilities."""

import logging
import subprocess
import sys
import threading

import numpy as np
import pytest

from llmkernel.config import EngineArgs
from llmkernel.engine.core import UNBUILT_UTILITIES, EngineCore
from llmkernel.engine.fake_executor import CRASH_EXIT_CODE, FakeExecutor, fake_answer
from llmkernel.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from llmkernel.engine.step_retry import MOST_RETRIES
from llmkernel.errors import InvalidRequestError, LLMKernelError, UnsupportedFeatureError
from llmkernel.protocol.outputs import FinishReason
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import LoRARequest
from tests.engine.harness import Engine, RecordingExecutor, make_message


@pytest.mark.row("A-017")
def test_the_executor_is_started_once_and_its_progress_passed_on() -> None:
    said = []
    core = EngineCore(EngineArgs(model="fake"), FakeExecutor(), lambda *progress: said.append(progress))
    assert [stage for stage, *_ in said] == ["weights"] * 4 + ["kv cache", "warm-up"]
    ready = core.ready
    assert (ready.num_gpu_blocks, ready.block_size, ready.max_model_len) == (256, 16, 2048)
    assert ready.kv_cache_size_tokens == 255 * 16
    assert ready.tokenizer.eos_token_id == 258


def test_a_load_that_fails_says_so() -> None:
    with pytest.raises(RuntimeError, match="told to fail its load"):
        Engine("fail_load=1")


@pytest.mark.row("A-018")
def test_a_step_is_schedule_execute_update() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=2)
    assert engine.core.has_requests()
    (output,) = engine.step()
    assert len(engine.executor.steps) == 1
    assert output.new_token_ids == fake_answer([1, 2, 3], 1)


def test_no_torch_and_no_sockets_are_needed() -> None:
    code = (
        "import sys, llmkernel.engine.core, llmkernel.engine.fake_executor;"
        "sys.exit(bool({'torch', 'transformers', 'zmq'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Refused at the door.

REFUSALS = [
    ({"prompt": []}, "prompt_token_ids", "The prompt is empty"),
    ({"prompt": [1] * 200}, "prompt_token_ids", "200 tokens and needs 50 KV blocks of 4 tokens; the pool has 31"),
    ({"prompt": [1] * 100}, "prompt_token_ids", "100 tokens; at most 99 leave room for an answer"),
    ({"prompt": [1, 512]}, "prompt_token_ids", "Token id 512 in prompt_token_ids is outside of the vocabulary"),
    ({"prompt": [-1]}, "prompt_token_ids", "use ids from 0 to 511"),
    ({"stop_token_ids": [600]}, "stop_token_ids", "Token id 600 in stop_token_ids"),
    ({"allowed_token_ids": [3, 700]}, "allowed_token_ids", "Token id 700"),
    ({"logit_bias": {900: 1.0}}, "logit_bias", "Token id 900"),
    ({"bad_words_token_ids": [[1, 2], [999]]}, "bad_words", "Token id 999"),
    ({"n": 2}, "n", "one answer per request"),
]
UNBUILT = [
    {"lora_request": LoRARequest("x", 1)},
    {"data_parallel_rank": 1},
    {"prompt_embeds": np.zeros((2, 2), dtype=np.float32)},
    {"resumable": True},
    {"pooling_params": PoolingParams()},
]


@pytest.mark.parametrize(("options", "parameter", "words"), REFUSALS, ids=[words for *_, words in REFUSALS])
def test_what_can_never_run_is_refused_with_numbers(options: dict, parameter: str, words: str) -> None:
    engine = Engine(max_model_len=100)
    prompt = options.get("prompt", [1, 2])
    rest = {name: value for name, value in options.items() if name != "prompt"}
    with pytest.raises(InvalidRequestError, match=words) as caught:
        engine.core.preprocess_add_request(make_message("a", prompt, **rest))
    assert caught.value.parameter == parameter
    assert not engine.core.has_requests()


@pytest.mark.parametrize("options", UNBUILT, ids=[next(iter(options)) for options in UNBUILT])
def test_what_is_not_built_is_refused_by_name(options: dict) -> None:
    engine = Engine()
    (name,) = options
    with pytest.raises(UnsupportedFeatureError, match=name):
        engine.core.preprocess_add_request(make_message("a", [1], **options))


def test_the_longest_prompt_that_fits_the_pool_runs() -> None:
    engine = Engine(num_blocks=5)
    engine.add("a", [1] * 16, max_tokens=5)
    engine.run()
    assert engine.tokens("a") == fake_answer([1] * 16, 1)
    with pytest.raises(InvalidRequestError, match="17 tokens and needs 5 KV blocks of 4 tokens; the pool has 4"):
        engine.add("b", [1] * 17)


def test_a_refused_request_ends_with_its_reason_and_alone() -> None:
    engine = Engine()
    engine.add("good", [1], max_tokens=3)
    engine.core.reject_request(make_message("bad", [], client_index=4), "The prompt is empty.")
    engine.run()
    assert engine.last("bad").finish_reason is FinishReason.ERROR
    assert engine.last("bad").stop_reason == "The prompt is empty."
    assert engine.clients["bad"] == 4
    assert engine.tokens("good") == fake_answer([1], 3)


def test_a_rejection_alone_is_something_to_do() -> None:
    engine = Engine()
    engine.core.reject_request(make_message("bad", []), "no")
    assert engine.core.has_requests()
    (output,) = engine.step()
    assert output.request_id == "bad"
    assert not engine.core.has_requests()


def test_an_id_in_use_is_refused_and_its_owner_not_touched(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=3)
    engine.step()
    with pytest.raises(InvalidRequestError, match="'a' is in use") as caught:
        engine.add("a", [2])
    with caplog.at_level(logging.WARNING, logger="llmkernel.engine.core"):
        engine.core.reject_request(make_message("a", [2]), str(caught.value))
    assert "sent twice" in caplog.text
    engine.core.reject_request(make_message("a", [2], client_index=1), str(caught.value))
    messages = engine.core.step()
    assert messages[1].outputs[0].finish_reason is FinishReason.ERROR
    assert not messages[0].outputs[0].finished
    assert messages[0].outputs[0].new_token_ids == fake_answer([1], 2)[1:]


def test_requests_are_checked_and_hashed_in_another_thread() -> None:
    engine = Engine()
    made = []
    thread = threading.Thread(
        target=lambda: made.extend(
            engine.core.preprocess_add_request(make_message(str(index), [index + 1] * 9, max_tokens=2))
            for index in range(50)
        )
    )
    engine.add("main", [300] * 9, max_tokens=30)
    thread.start()
    while thread.is_alive():
        engine.step()
    thread.join()
    for request in made:
        engine.core.add_request(request)
    engine.run()
    assert all(engine.tokens(str(index)) == fake_answer([index + 1] * 9, 2) for index in range(50))


# Failures.


@pytest.mark.row("A-062")
def test_a_request_that_fails_alone_leaves_its_neighbours() -> None:
    engine = Engine("fail_token=99")
    engine.add("good", [1] * 8, max_tokens=4)
    engine.add("bad", [5, 99], max_tokens=4)
    engine.run()
    assert engine.last("bad").finish_reason is FinishReason.ERROR
    assert engine.last("bad").stop_reason == "the prompt holds fail_token 99"
    assert engine.tokens("good") == fake_answer([1] * 8, 4)
    assert engine.is_empty() and engine.executor.collective_rpc("held_requests") == [[]]


def test_a_step_that_raises_costs_the_request_at_fault_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("raise_token=99", max_num_seqs=2)
    engine.add("neighbour", [1], max_tokens=4)
    engine.add("bad", [5, 99], max_tokens=4)
    engine.add("waiting", [2], max_tokens=4)
    with caplog.at_level(logging.WARNING, logger="llmkernel.engine"):
        engine.step()
    assert "A step of 2 requests failed" in caplog.text and "went on without ['bad']" in caplog.text
    assert engine.last("bad").finish_reason is FinishReason.ERROR
    assert engine.last("bad").stop_reason == "RuntimeError: the prompt of bad holds raise_token 99"
    engine.run()
    assert engine.tokens("neighbour") == fake_answer([1], 4)
    assert engine.tokens("waiting") == fake_answer([2], 4)
    assert engine.is_empty() and engine.executor.collective_rpc("held_requests") == [[]]


def test_a_step_that_raised_leaves_nothing_wrong_in_the_prefix_cache() -> None:
    """Blocks of the failed step were never written; a later request must not hit them."""
    engine = Engine("raise_token=99")
    prompt = [99, *range(1, 16)]
    engine.add("bad", prompt, max_tokens=2)
    engine.run()
    assert engine.pool.num_cached_hashes == 0
    engine.add("again", prompt, max_tokens=2)
    engine.step()
    assert engine.executor.steps[-1].scheduled_new_reqs[0].num_computed_tokens == 0


class BrokenExecutor(RecordingExecutor):
    """Raises in chosen runs, before it has read anything."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_steps: set[int] = set()
        self.healthy = True

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if len(self.steps) in self.broken_steps:
            self.steps.append(step)
            raise OSError("the device went away")
        return super().execute_model(step)

    def check_health(self) -> None:
        if not self.healthy:
            raise LLMKernelError("the worker is gone")


def broken_engine(**args) -> Engine:
    engine = Engine(**args)
    executor = BrokenExecutor()
    executor.start(engine.args, lambda *progress: None)
    engine.executor = executor
    engine.core = EngineCore(engine.args, executor, lambda *progress: None)
    return engine


def test_who_had_finished_before_a_failed_step_is_told_again() -> None:
    engine = broken_engine()
    engine.add("done", [1], max_tokens=1)
    engine.add("a", [2], max_tokens=5)
    engine.step()
    engine.executor.broken_steps = {1}
    engine.step()
    assert engine.last("a").stop_reason == "OSError: the device went away"
    engine.run()
    assert engine.last_step.finished_req_ids == {"done", "a"}
    assert engine.executor.collective_rpc("held_requests") == [[]]


def test_who_was_preempted_in_a_failed_step_is_told_again() -> None:
    engine = broken_engine(num_blocks=7)
    for name in "abc":
        engine.add(name, [ord(name)] * 7, max_tokens=12)
    engine.step()
    engine.step()
    engine.executor.broken_steps = set(range(2, 2 + 1 + MOST_RETRIES))
    engine.step()
    assert all("c" in step.preempted_req_ids for step in engine.executor.steps[2:])
    engine.executor.broken_steps = set()
    engine.step()
    assert engine.last_step.preempted_req_ids == {"c"} and engine.last_step.finished_req_ids == {"a", "b"}
    assert engine.last_step.scheduled_cached_reqs.resumed_req_ids == {"c"}
    engine.run()
    assert engine.tokens("c") == fake_answer([ord("c")] * 7, 12)


def test_a_failed_step_without_requests_is_not_repeated_for_ever() -> None:
    engine = broken_engine()
    engine.add("a", [1], max_tokens=1)
    engine.step()
    engine.executor.broken_steps = {1}
    engine.run(limit=3)
    assert engine.is_empty()


def test_an_executor_that_is_gone_ends_the_engine() -> None:
    engine = broken_engine()
    engine.add("a", [1], max_tokens=1)
    engine.executor.broken_steps, engine.executor.healthy = {0}, False
    with pytest.raises(LLMKernelError, match="the worker is gone"):
        engine.core.step()


def test_a_request_without_its_token_fails_alone() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=3)
    engine.add("b", [2], max_tokens=3)
    step = engine.core.scheduler.schedule()
    output = engine.executor.execute_model(step)
    output.sampled_token_ids["a"] = []
    engine.core.scheduler.update_from_output(step, output)
    (message,) = engine.core.scheduler.outbox.take().values()
    ends = {said.request_id: said.finish_reason for said in message.outputs}
    assert ends == {"a": FinishReason.ERROR, "b": None}
    engine.check()


def test_a_crash_takes_the_process() -> None:
    code = (
        "from tests.engine.harness import Engine\n"
        "engine = Engine('crash_token=99')\n"
        "engine.add('a', [1]); engine.step(); engine.add('b', [99]); engine.step()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == CRASH_EXIT_CODE


# Utilities.


def test_utilities_answer_by_name() -> None:
    core = Engine().core
    assert core.call_utility("get_supported_tasks") == ["generate"]
    assert core.call_utility("list_loras", []) == []
    assert core.call_utility("is_sleeping", ()) is False
    assert core.call_utility("check_health") is None
    assert core.call_utility("collective_rpc", ["echo", None, [1, "x"], {}]) == [[1, "x"]]


def test_an_unknown_utility_names_the_known_ones() -> None:
    core = Engine().core
    for name in ("nonsense", "__init__", "step", "shutdown", "scheduler"):
        with pytest.raises(AttributeError, match=rf"no utility '{name}'; it has check_health, collective_rpc"):
            core.call_utility(name)
    with pytest.raises(AttributeError, match="has no method 'nonsense'; it has echo"):
        core.call_utility("collective_rpc", ["nonsense"])
    with pytest.raises(UnsupportedFeatureError, match="code does not travel"):
        core.call_utility("collective_rpc", [print])


@pytest.mark.parametrize("name", sorted(UNBUILT_UTILITIES))
def test_an_unbuilt_utility_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{name} is not built yet"):
        Engine().core.call_utility(name)


def test_get_stats_is_plain_data_with_totals() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [1] * 8, max_tokens=1)
    engine.add("b", [1] * 8, max_tokens=9)
    engine.step()
    engine.step()
    stats = engine.core.call_utility("get_stats")
    assert stats["num_running_reqs"] == 1 and stats["num_blocks"] == 31
    assert stats["prefix_cache_stats"] == {
        "reset": False,
        "requests": 2,
        "queries": 16,
        "hits": 4,
        "preempted_requests": 0,
        "preempted_queries": 0,
        "preempted_hits": 0,
    }
    assert engine.core.call_utility("get_stats") == stats, "asking changes nothing"
    engine.add("c", [3])
    engine.step()
    assert engine.core.call_utility("get_stats")["waiting_head"]["request_id"] == "c"


def test_reset_prefix_cache() -> None:
    engine = Engine()
    engine.add("a", [1] * 8, max_tokens=9)
    engine.step()
    assert engine.core.call_utility("reset_prefix_cache") is False
    assert engine.core.call_utility("reset_prefix_cache", [True]) is True
    engine.run()
    assert engine.tokens("a") == fake_answer([1] * 8, 9)
    assert any(stats.prefix_cache_stats.reset for stats in engine.stats)
    assert {"a"} in [step.preempted_req_ids for step in engine.executor.steps]
    assert engine.core.call_utility("reset_prefix_cache") is True
    assert engine.pool.num_cached_hashes == 0
    with pytest.raises(UnsupportedFeatureError, match="reset_connector"):
        engine.core.call_utility("reset_prefix_cache", [False, True])


def test_shutdown_is_idempotent_and_final() -> None:
    core = Engine().core
    core.shutdown()
    core.shutdown()
    with pytest.raises(LLMKernelError, match="was shut down"):
        core.check_health()
