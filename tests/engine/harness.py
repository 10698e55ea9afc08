"""An engine core with a fake executor, what it said, and the checks that must hold at any moment."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from llmkernel.config import EngineArgs
from llmkernel.engine.core import EngineCore
from llmkernel.engine.fake_executor import FakeExecutor, fake_next_token
from llmkernel.engine.request import Request, RequestStatus
from llmkernel.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from llmkernel.protocol.outputs import EngineCoreOutput, FinishReason
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams
from llmkernel.protocol.stats import SchedulerStats

EOS = 258


def make_message(request_id: str, prompt: Sequence[int], **options: Any) -> EngineCoreRequest:
    """An ADD message; options are fields of EngineCoreRequest or, for the rest, sampling parameters."""
    fields: dict[str, Any] = {"eos_token_id": EOS, "arrival_time": 0.0}
    for name in list(options):
        if name in EngineCoreRequest.__struct_fields__:
            fields[name] = options.pop(name)
    defaults = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"),
    )
    params = fields.pop("sampling_params", None) or SamplingParams(**options)
    return EngineCoreRequest(
        **(defaults | fields), request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params
    )


def reference_answer(
    prompt: Sequence[int],
    *,
    max_tokens: int,
    max_model_len: int = 10**6,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    eos_every: int = 0,
    letters: int = 27,
) -> tuple[list[int], FinishReason]:
    """What the fake model answers to a request that is alone in the world, written without the engine."""
    token_ids = list(prompt)
    while True:
        token_id = fake_next_token(token_ids, eos_every=eos_every, letters=letters)
        done = len(token_ids) - len(prompt)
        if token_id == EOS and done < min_tokens:
            token_id = ord("z")
        token_ids.append(token_id)
        answer = token_ids[len(prompt) :]
        if done >= min_tokens and (token_id == EOS or token_id in stop_token_ids):
            return answer, FinishReason.STOP
        if len(answer) == max_tokens or len(token_ids) == max_model_len:
            return answer, FinishReason.LENGTH


class RecordingExecutor(FakeExecutor):
    """Keeps every step that it was given. num_raised: of how many it raised."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[SchedulerOutput] = []
        self.num_raised = 0

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        try:
            return super().execute_model(step)
        except RuntimeError:
            self.num_raised += 1
            raise


class Engine:
    """A core on a tiny pool: blocks of 4 tokens unless told otherwise. `outputs` holds everything said, by request."""

    def __init__(self, settings: str = "", *, num_blocks: int = 32, block_size: int = 4, **args: Any) -> None:
        model = f"fake:num_blocks={num_blocks},block_size={block_size}" + (f",{settings}" if settings else "")
        self.executor = RecordingExecutor()
        self.args = EngineArgs(model=model, **args)
        self.core = EngineCore(self.args, self.executor, lambda *progress: None)
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.clients: dict[str, int] = {}
        self.stats: list[SchedulerStats] = []

    @property
    def pool(self):
        return self.core.scheduler.kv_cache.pool

    @property
    def last_step(self) -> SchedulerOutput:
        return self.executor.steps[-1]

    def add(self, request_id: str, prompt: Sequence[int], **options: Any) -> Request:
        request = self.core.preprocess_add_request(make_message(request_id, prompt, **options))
        self.core.add_request(request)
        return request

    def step(self) -> list[EngineCoreOutput]:
        """One step, checked before and after; what it said."""
        said = []
        for client_index, message in self.core.step().items():
            if message.scheduler_stats is not None:
                self.stats.append(message.scheduler_stats)
            for output in message.outputs:
                self._receive(client_index, output)
                said.append(output)
        self.check()
        return said

    def run(self, limit: int = 5_000) -> None:
        """Step until there is nothing to do."""
        for _ in range(limit):
            if not self.core.has_requests():
                return
            self.step()
        raise AssertionError(f"not idle after {limit} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, ()) for token in output.new_token_ids]

    def last(self, request_id: str) -> EngineCoreOutput:
        """The output that ended the request."""
        output = self.outputs[request_id][-1]
        assert output.finished
        return output

    def is_empty(self) -> bool:
        """Nothing lives, and every block is back."""
        return not self.core.has_unfinished_requests() and self.pool.num_used_blocks == 0

    def check(self) -> None:
        """What holds between any two steps."""
        check_blocks(self.core.scheduler)
        scheduler = self.core.scheduler
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert all(request.status is RequestStatus.RUNNING for request in scheduler.running)
        waiting = len(scheduler.waiting) + len(scheduler.compiling)
        assert len(scheduler.running) + waiting == len(scheduler.requests)
        if self.executor.steps:
            check_step(self.last_step, scheduler.max_num_batched_tokens)

    def _receive(self, client_index: int, output: EngineCoreOutput) -> None:
        known = self.outputs.setdefault(output.request_id, [])
        assert not (known and known[-1].finished), f"{output.request_id} goes on after its end"
        assert output.new_token_ids or output.finished, "an output that says nothing"
        known.append(output)
        self.clients[output.request_id] = client_index


def check_step(step: SchedulerOutput, budget: int) -> None:
    assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values()) <= budget
    assert all(count > 0 for count in step.num_scheduled_tokens.values())
    ids = [new.req_id for new in step.scheduled_new_reqs] + step.scheduled_cached_reqs.req_ids
    assert len(ids) == len(set(ids)) and set(ids) == step.num_scheduled_tokens.keys()
    assert step.scheduled_cached_reqs.resumed_req_ids <= set(step.scheduled_cached_reqs.req_ids)
    for new in step.scheduled_new_reqs:
        assert new.num_computed_tokens <= len(new.prompt_token_ids) - 1, "a hit must leave one token to compute"


def check_blocks(scheduler: Any) -> None:
    """free + used == total, nobody holds what he should not, and counts are right."""
    pool = scheduler.kv_cache.pool
    held = scheduler.kv_cache.held_blocks()
    counts = Counter(block.block_id for blocks in held.values() for block in blocks)
    free = [block.block_id for block in pool.free_queue]
    assert pool.num_free_blocks == len(free) == len(set(free))
    assert pool.num_free_blocks + len(counts) == pool.num_usable_blocks
    assert not counts.keys() & set(free) and pool.null_block.block_id not in counts.keys() | set(free)
    for block in pool.blocks[1:]:
        assert block.ref_cnt == counts[block.block_id]
    assert held.keys() == {request.request_id for request in scheduler.running}
    for request_id, blocks in held.items():
        _check_shared(scheduler.requests[request_id], blocks, counts)


def _check_shared(request: Request, blocks: Sequence[Any], counts: Counter[int]) -> None:
    """A block that caches something caches what its holder has there; only such blocks are shared."""
    for index, block in enumerate(blocks):
        assert counts[block.block_id] == 1 or block.block_hash is not None, "shared by accident"
        assert block.block_hash is None or block.block_hash == request.block_hashes[index]
