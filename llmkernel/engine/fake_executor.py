"""FakeExecutor: an executor without a model, for tests, benchmarks and lessons.

It is deterministic, needs no torch, and distrusts its caller: it keeps a record of what was written into which KV slot
and raises when a step leans on KV that is not there. So it is the oracle of the scheduler's tests.
"""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmkernel.config import EngineArgs
from llmkernel.engine.executor import Executor
from llmkernel.engine.executor_facts import ExecutorFacts, ReportProgress
from llmkernel.engine.fake_kv import FakeKVCache, FakeRequest, FakeStepError
from llmkernel.engine.fake_tokenizer import EOS_TOKEN_ID, NUM_TOKENS, fake_tokenizer_facts
from llmkernel.engine.scheduler.output import GrammarMasks, ModelRunnerOutput, SchedulerOutput
from llmkernel.errors import InvalidRequestError
from llmkernel.protocol.handshake import ModelFacts
from llmkernel.protocol.outputs import LogprobsLists
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["CRASH_EXIT_CODE", "FakeExecutor", "FakeSettings", "fake_answer", "fake_next_token"]

CRASH_EXIT_CODE = 17
"""Exit code of the process after `crash_token`."""


@dataclasses.dataclass(frozen=True)
class FakeSettings:
    """Settings, written into the model's name: "fake:step_ms=5,num_blocks=64".

    step_ms, load_ms: how long a step and the load sleep (0: never). fail_load=1: the load raises. echo=1: the answer is
    the prompt, then the end token. eos_every=N: about one token in N is the end token (0: none). letters=N: of
    how many a text is made; of few it comes to repeat itself. reject_every=N: about one right draft in N is rejected
    all the same (0: none). fail_token: a request whose prompt holds this id fails alone; raise_token: the
    step raises; crash_token: the process ends in the step (-1: none). verify=0: do not check KV slots, for benchmarks.
    """

    step_ms: float = 0
    load_ms: float = 0
    vocab_size: int = 512
    num_blocks: int = 256
    block_size: int = 16
    max_model_len: int = 2048
    fail_load: int = 0
    fail_token: int = -1
    raise_token: int = -1
    crash_token: int = -1
    eos_every: int = 0
    echo: int = 0
    verify: int = 1
    letters: int = 27
    reject_every: int = 0

    @classmethod
    def parse(cls, model: str) -> "FakeSettings":
        """The settings in a model's name; any other name has the defaults. InvalidRequestError for an unknown one."""
        kind, _, words = model.partition(":")
        if kind != "fake" or not words:
            return cls()
        known = {field.name: float if field.name.endswith("_ms") else int for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for word in words.split(","):
            name, _, value = word.partition("=")
            try:
                values[name.strip()] = known[name.strip()](value)
            except (KeyError, ValueError) as error:
                raise InvalidRequestError(
                    f"{word!r} is no setting of the fake model; write NAME=NUMBER, of {', '.join(known)}.",
                    parameter="model",
                    value=model,
                ) from error
        settings = cls(**values)
        if settings.vocab_size < NUM_TOKENS:
            raise InvalidRequestError(
                f"vocab_size = {settings.vocab_size} must be at least {NUM_TOKENS}.", parameter="model"
            )
        return settings


def fake_next_token(token_ids: Sequence[int], *, eos_every: int = 0, letters: int = 27) -> int:
    """The token after `token_ids`: a letter a to z or a space, from the last two tokens and the position.

    mix = 31 * last + 17 * last but one + 7 * position; the token is chr(97 + mix % letters), the 27th being the space.
    With eos_every = N it is the end token wherever mix % N == 0.
    """
    before = token_ids[-2] if len(token_ids) > 1 else 0
    mix = 31 * token_ids[-1] + 17 * before + 7 * len(token_ids)
    if eos_every and mix % eos_every == 0:
        return EOS_TOKEN_ID
    letter = mix % letters
    return 32 if letter == 26 else 97 + letter


def fake_answer(prompt_token_ids: Sequence[int], num_tokens: int, *, eos_every: int = 0) -> list[int]:
    """The first `num_tokens` tokens after a prompt; the end token, should it come, is the last one."""
    token_ids = list(prompt_token_ids)
    while len(token_ids) < len(prompt_token_ids) + num_tokens:
        token_ids.append(fake_next_token(token_ids, eos_every=eos_every))
        if token_ids[-1] == EOS_TOKEN_ID:
            break
    return token_ids[len(prompt_token_ids) :]


class FakeExecutor(Executor):
    """Answers with `fake_next_token`. Settings: EngineArgs.model; max_model_len and block_size of EngineArgs win."""

    def __init__(self) -> None:
        self._settings = FakeSettings()
        self._kv: FakeKVCache | None = None
        self._requests: dict[str, FakeRequest] = {}
        self._num_steps = 0

    def start(self, args: EngineArgs, report: ReportProgress) -> ExecutorFacts:
        settings = self._settings = FakeSettings.parse(args.model)
        started = time.monotonic()
        for part in range(4):
            report("weights", part, 4, "")
            _sleep_ms(settings.load_ms / 4)
        if settings.fail_load:
            raise RuntimeError("The fake model was told to fail its load; leave fail_load out.")
        report("kv cache", 0, 0, f"{settings.num_blocks} blocks")
        block_size = args.block_size or settings.block_size
        self._kv = FakeKVCache(settings.num_blocks, block_size)
        report("warm-up", 0, 0, "")
        return ExecutorFacts(
            model=_model_facts(args.model, settings),
            tokenizer=fake_tokenizer_facts(),
            num_blocks=settings.num_blocks,
            block_size=block_size,
            max_model_len=min(settings.max_model_len, args.max_model_len or settings.max_model_len),
            kv_cache_bytes=settings.num_blocks * block_size * 8,
            num_threads=1,
            load_timings={"weights": time.monotonic() - started},
        )

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert self._kv is not None, "start() comes first"
        self._num_steps += 1
        _sleep_ms(self._settings.step_ms)
        for request_id in step.finished_req_ids:
            self._requests.pop(request_id, None)
        for request_id in step.preempted_req_ids & self._requests.keys():
            self._requests[request_id].block_ids = []
        scheduled = self._take_in(step)
        self._play_accidents(scheduled)
        if self._settings.verify:
            self._write_and_verify(step, scheduled)
        return self._answer(step, scheduled)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """One worker. Methods: echo(*args), held_requests(), num_steps()."""
        answers: dict[str, Any] = {
            "echo": list(args),
            "held_requests": sorted(self._requests),
            "num_steps": self._num_steps,
        }
        if method not in answers:
            raise AttributeError(f"The fake worker has no method {method!r}; it has {', '.join(answers)}.")
        return [answers[method]]

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        self._requests.clear()
        self._kv = None

    def _take_in(self, step: SchedulerOutput) -> list[FakeRequest]:
        """Requests of the step, with their blocks and computed counts as the scheduler says they are."""
        for new in step.scheduled_new_reqs:
            if new.req_id in self._requests:
                raise FakeStepError(f"{new.req_id} is new, but it was never said to be finished.")
            self._requests[new.req_id] = FakeRequest(
                new.req_id, list(new.prompt_token_ids), new.sampling_params, new.eos_token_id, new.block_ids
            )
            self._requests[new.req_id].num_computed_tokens = new.num_computed_tokens
            if new.num_computed_tokens and new.sampling_params.prompt_logprobs is not None:
                raise FakeStepError(f"{new.req_id} wants logprobs of prompt tokens that it does not compute.")
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self._requests.get(request_id)
            if request is None:
                raise FakeStepError(f"{request_id} is scheduled, but it is unknown or finished.")
            if request_id in cached.resumed_req_ids:
                request.block_ids = []
            request.block_ids = request.block_ids + cached.new_block_ids[index]
            request.num_computed_tokens = cached.num_computed_tokens[index]
            if request.num_output_tokens != cached.num_output_tokens[index]:
                raise FakeStepError(
                    f"{request_id} has {request.num_output_tokens} output tokens, "
                    f"not {cached.num_output_tokens[index]} as the step says."
                )
        return [self._requests[request_id] for request_id in step.num_scheduled_tokens]

    def _play_accidents(self, scheduled: list[FakeRequest]) -> None:
        settings = self._settings
        for request in scheduled:
            if _holds(request, settings.crash_token):
                os._exit(CRASH_EXIT_CODE)
            if _holds(request, settings.raise_token):
                raise RuntimeError(f"the prompt of {request.request_id} holds raise_token {settings.raise_token}")

    def _write_and_verify(self, step: SchedulerOutput, scheduled: list[FakeRequest]) -> None:
        """What was computed before is checked first: a request must not lean on what this very step writes."""
        assert self._kv is not None
        if step.total_num_scheduled_tokens != sum(step.num_scheduled_tokens.values()):
            raise FakeStepError("total_num_scheduled_tokens is not the sum of num_scheduled_tokens.")
        for request in scheduled:
            self._kv.verify(request)
        for request in scheduled:
            drafts = step.scheduled_spec_decode_tokens.get(request.request_id, ())
            self._kv.write(request, step.num_scheduled_tokens[request.request_id], drafts)

    def _answer(self, step: SchedulerOutput, scheduled: list[FakeRequest]) -> ModelRunnerOutput:
        output = ModelRunnerOutput({})
        for request in scheduled:
            request_id = request.request_id
            if _holds(request, self._settings.fail_token):
                output.errors[request_id] = f"the prompt holds fail_token {self._settings.fail_token}"
                continue
            request.num_computed_tokens += step.num_scheduled_tokens[request_id]
            if request.num_computed_tokens < len(request.token_ids):
                continue
            first = request.num_output_tokens == 0
            token_ids = self._say(request, step.scheduled_spec_decode_tokens.get(request_id, []), step.grammar)
            if not token_ids:
                output.errors[request_id] = "no token is allowed"
                continue
            if request.sampling_params.prompt_logprobs is not None and first:
                output.prompt_logprobs[request_id] = _prompt_logprobs(request, self._settings.vocab_size)
            output.sampled_token_ids[request_id] = token_ids
            if request.sampling_params.logprobs is not None:
                output.logprobs[request_id] = _logprobs(token_ids, request.sampling_params, self._settings.vocab_size)
        return output

    def _say(self, request: FakeRequest, drafts: list[int], grammar: GrammarMasks | None) -> list[int]:
        """The next token, and the one after each draft that is what it would have said."""
        said: list[int] = []
        for ahead in range(len(drafts) + 1):
            token_id = self._next_token(request, grammar.of(request.request_id, ahead) if grammar else None)
            if token_id is None:
                break
            request.token_ids.append(token_id)
            said.append(token_id)
            if ahead == len(drafts) or token_id != drafts[ahead] or self._rejects(request):
                break
        return said

    def _rejects(self, request: FakeRequest) -> bool:
        every = self._settings.reject_every
        return every > 0 and (13 * request.token_ids[-1] + 5 * len(request.token_ids)) % every == 0

    def _next_token(self, request: FakeRequest, mask: np.ndarray | None) -> int | None:
        """What it would say, or the next id that its grammar allows; None if there is none."""
        token_id = self._free_token(request)
        if mask is None:
            return token_id
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._settings.vocab_size].nonzero()[0]
        if not len(allowed):
            return None
        return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])

    def _free_token(self, request: FakeRequest) -> int:
        if self._settings.echo:
            prompt, done = request.prompt_token_ids, request.num_output_tokens
            token_id = prompt[done] if done < len(prompt) else EOS_TOKEN_ID
        else:
            settings = self._settings
            token_id = fake_next_token(request.token_ids, eos_every=settings.eos_every, letters=settings.letters)
        masked = request.num_output_tokens < request.sampling_params.min_tokens
        return ord("z") if masked and token_id == request.eos_token_id else token_id


def _holds(request: FakeRequest, token_id: int) -> bool:
    return token_id >= 0 and token_id in request.prompt_token_ids


def _sleep_ms(milliseconds: float) -> None:
    if milliseconds > 0:
        time.sleep(milliseconds / 1000)


def _model_facts(name: str, settings: FakeSettings) -> ModelFacts:
    return ModelFacts(
        name=name,
        source=name,
        architecture="Fake",
        implementation="fake",
        dtype="none",
        device="none",
        vocab_size=settings.vocab_size,
        max_position=settings.max_model_len,
    )


def _logprobs(token_ids: list[int], params: SamplingParams, vocab_size: int) -> LogprobsLists:
    assert params.logprobs is not None
    return _make_logprobs(token_ids, params.logprobs, vocab_size)


def _prompt_logprobs(request: FakeRequest, vocab_size: int) -> LogprobsLists:
    assert request.sampling_params.prompt_logprobs is not None
    return _make_logprobs(request.prompt_token_ids[1:], request.sampling_params.prompt_logprobs, vocab_size)


def _make_logprobs(token_ids: list[int], count: int, vocab_size: int) -> LogprobsLists:
    """Every token has rank 1; the ids after it come next, each less likely by 1."""
    offsets = np.arange(vocab_size if count == -1 else count)
    chosen = np.array(token_ids, np.int32).reshape(-1, 1)
    values = np.concatenate([[-0.5], -0.5 - offsets]).astype(np.float32)
    return LogprobsLists(
        np.concatenate([chosen, (chosen + offsets) % vocab_size], axis=1).astype(np.int32),
        np.tile(values, (len(token_ids), 1)),
        np.ones(len(token_ids), np.int32),
    )
