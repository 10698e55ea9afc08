"""Runs requests through EngineCore with the real worker, and transformers' answers to compare them with."""

import dataclasses
import functools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from llmkernel.config import EngineArgs
from llmkernel.engine.core import EngineCore
from llmkernel.engine.executor import UniProcExecutor
from llmkernel.protocol.outputs import FinishReason, LogprobsLists
from llmkernel.protocol.requests import EngineCoreRequest
from llmkernel.protocol.sampling_params import SamplingParams

TIE = 1e-4
"""Two float32 runs may part where the reference's two best logits lie this close (design D13)."""


@dataclasses.dataclass
class Answer:
    """What one request got. logits: float32 [tokens, vocab], up to a constant per row, where they were asked for."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    logprobs: list[LogprobsLists] = dataclasses.field(default_factory=list)
    prompt_logprobs: LogprobsLists | None = None


class EngineRun:
    """An EngineCore in this process, with counters of what happened while it ran."""

    def __init__(self, model: str | Path, **options: object) -> None:
        settings = {"dtype": "float32", "num_threads": 1, "device": "cpu"} | options
        self.progress: list[str] = []
        self.core = EngineCore(
            EngineArgs.from_options(str(model), **settings), UniProcExecutor(), lambda stage, *_: self._note(stage)
        )
        self._compiled = threading.Event()
        self.core.on_grammar_compiled = self._compiled.set
        self.num_preempted = 0
        self._count = 0

    def __enter__(self) -> "EngineRun":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.core.shutdown()

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int, *, logits: bool = False, **params: object
    ) -> list[Answer]:
        """Greedy answers of exactly `max_tokens` tokens (unless params say otherwise) to prompts that run together."""
        settings = {"temperature": 0, "ignore_eos": True, "logprobs": -1 if logits else None} | params
        answers: dict[str, Answer] = {}
        for prompt in prompts:
            self._count += 1
            request = make_request(f"r{self._count}", prompt, SamplingParams(max_tokens=max_tokens, **settings))
            self.core.add_request(self.core.preprocess_add_request(request))
            answers[request.request_id] = Answer()
        while self.core.has_unfinished_requests() or self.core.has_requests():
            self.wait_for_grammars()
            self._take(self.core.step(), answers)
        return list(answers.values())

    def wait_for_grammars(self) -> None:
        """Block while all that there is waits for its grammar."""
        self._compiled.clear()
        if not self.core.has_requests():
            assert self._compiled.wait(30)

    def _take(self, outputs: dict, answers: dict[str, Answer]) -> None:
        for batch in outputs.values():
            if batch.scheduler_stats is not None:
                self.num_preempted += batch.scheduler_stats.num_preempted
            for output in batch.outputs:
                answer = answers[output.request_id]
                answer.token_ids += output.new_token_ids
                if output.new_logprobs is not None:
                    answer.logits += list(output.new_logprobs.logprobs[:, 1:])
                    answer.logprobs.append(output.new_logprobs)
                if output.new_prompt_logprobs_tensors is not None:
                    assert answer.prompt_logprobs is None, "told twice"
                    answer.prompt_logprobs = output.new_prompt_logprobs_tensors
                if output.prefill_stats is not None:
                    answer.num_cached = output.prefill_stats.num_cached_tokens
                answer.finish_reason = output.finish_reason
                answer.stop_reason = output.stop_reason

    def _note(self, stage: str) -> None:
        if stage not in self.progress:
            self.progress.append(stage)


def make_request(request_id: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class Reference:
    """transformers on the same weights: its own attention, masks and cache."""

    def __init__(self, folder: str | Path, attn_implementation: str = "eager") -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attn_implementation
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._generate = functools.cache(self._generate_once)

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], np.ndarray]:
        """Greedy ids by generate(), and the logits [tokens, vocab] that they were picked from."""
        return self._generate(tuple(prompt), max_tokens)

    @torch.inference_mode()
    def logits_after(self, prompt: list[int], output: list[int]) -> np.ndarray:
        """Logits [len(output), vocab] in front of each output token, all tokens given (teacher-forced), no cache."""
        ids = torch.tensor([prompt + output[:-1]])
        return self._model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().numpy()

    def _generate_once(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], np.ndarray]:
        ids = torch.tensor([prompt])
        result = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits).float().numpy()


class Comparison:
    """Answers against the reference: teacher-forced logits everywhere, ids up to ties. Counts what it saw."""

    def __init__(self, reference: Reference, tolerance: float) -> None:
        self._reference = reference
        self._tolerance = tolerance
        self.largest = 0.0
        self.num_answers = 0
        self.num_parted = 0

    def check(self, prompts: Sequence[list[int]], answers: Sequence[Answer], what: str) -> None:
        """Fails where ids part without a tie in the reference, or logits differ by more than the tolerance."""
        for prompt, answer in zip(prompts, answers, strict=True):
            where = f"{what}, prompt of {len(prompt)} tokens"
            assert answer.finish_reason is FinishReason.LENGTH, f"{where}: {answer.stop_reason}"
            ids, logits = self._reference.generate(prompt, len(answer.token_ids))
            self.num_answers += 1
            if answer.token_ids != ids:
                self.num_parted += 1
                first = next(i for i, (a, b) in enumerate(zip(answer.token_ids, ids, strict=True)) if a != b)
                best, second = np.sort(logits[first])[-2:][::-1]
                assert best - second < TIE, f"{where}: token {first} differs, reference's gap is {best - second}"
                logits = self._reference.logits_after(prompt, answer.token_ids)
            if answer.logits:
                difference = float(np.abs(_centred(np.stack(answer.logits)) - _centred(logits)).max())
                assert difference < self._tolerance, f"{where}: logits differ by {difference}"
                self.largest = max(self.largest, difference)

    def __str__(self) -> str:
        return f"{self.num_answers} answers, {self.num_parted} parted at a tie, logits within {self.largest:.1e}"


def _centred(logits: np.ndarray) -> np.ndarray:
    return logits.astype(np.float64) - logits.astype(np.float64).mean(-1, keepdims=True)
