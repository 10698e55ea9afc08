"""ModelRunner: one step of the scheduler, as one forward of the model and the draws of the requests due a token."""

from collections.abc import Hashable, Mapping

import numpy as np
import torch

from llmkernel.engine.scheduler.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.compiled.kernels import CompiledKernels
from llmkernel.engine.worker.dense_rows import DenseRows
from llmkernel.engine.worker.input_batch import InputBatch, StepInputs
from llmkernel.engine.worker.kv_store import KVStore
from llmkernel.engine.worker.models.runnable import RunnableModel
from llmkernel.engine.worker.paged_attention import PagedAttention
from llmkernel.engine.worker.prompt_logprobs import PromptLogprobs
from llmkernel.engine.worker.run_sampler import sample_runs
from llmkernel.engine.worker.sampler.sampler import Sampler
from llmkernel.errors import LLMKernelError

__all__ = ["ModelRunner"]


class ModelRunner:
    """Owns the requests' state in the worker. All torch work happens in the thread that calls execute.

    dense_bytes: what the kept rows of decodes may take (DenseRows). kernels: see PagedAttention.
    """

    def __init__(
        self,
        model: RunnableModel,
        layers: Mapping[Hashable, LayerSpec],
        store: KVStore,
        sampler: Sampler,
        *,
        dtype: torch.dtype,
        device: torch.device,
        dense_bytes: int = 0,
        kernels: CompiledKernels | None = None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._store = store
        self._sampler = sampler
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._dense = DenseRows(store, dtype, device, dense_bytes)
        self._batch = InputBatch(store.block_size)
        self._num_embeddings = model.num_embeddings

    @property
    def num_requests(self) -> int:
        """Requests that have state here."""
        return len(self._batch.requests)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Mixed prefill chunks and decodes in one forward. A request that is at fault fails alone (errors)."""
        errors = self._update_requests(step)
        due = {req_id: count for req_id, count in step.num_scheduled_tokens.items() if req_id not in errors}
        output = ModelRunnerOutput(sampled_token_ids={}, errors=errors)
        if not due:
            return output
        inputs = self._batch.make_inputs(due, step.scheduled_spec_decode_tokens)
        if inputs.unfinished_blocks:
            self._store.clear_blocks(inputs.unfinished_blocks)
        context = PagedAttention(
            self._store,
            self._layers,
            inputs.sequences,
            dtype=self._dtype,
            device=self._device,
            dense=self._dense,
            kernels=self._kernels,
        )
        logits = self._model.forward(
            self._tensor(inputs.token_ids), self._tensor(inputs.positions), self._tensor(inputs.logits_rows), context
        )
        self._dense.end_step(inputs.sequences)
        for request, sequence in zip(inputs.requests, inputs.sequences, strict=True):
            request.num_computed = sequence.context
        if inputs.prompts:
            output.errors.update(self._take_prompt_logprobs(logits, inputs))
        if not inputs.sampled:
            return output
        drawn = sample_runs(self._sampler, logits[: inputs.num_sampled_rows], inputs.sampled, step.grammar)
        for run in inputs.sampled:
            request = run.request
            if request.prompt_logprobs is not None:
                output.prompt_logprobs[request.req_id] = request.prompt_logprobs.lists()
                request.prompt_logprobs = None
        output.sampled_token_ids = drawn.token_ids
        output.logprobs = drawn.logprobs
        output.errors.update(drawn.errors)
        return output

    def _take_prompt_logprobs(self, logits: torch.Tensor, inputs: StepInputs) -> dict[str, str]:
        """Keep what this step says of prompts. Returns the requests whose prompt cannot be told, with the reason."""
        errors = {}
        for prompt in inputs.prompts:
            request, positions = prompt.request, prompt.positions
            assert request.prompt_logprobs is not None
            followers = request.token_ids[positions.start + 1 : positions.stop + 1]
            lists = self._sampler.prompt_logprobs(
                request.req_id, logits[prompt.row : prompt.row + len(positions)], followers
            )
            if np.isnan(lists.logprobs).any():
                errors[request.req_id] = (
                    "The model's logits for the prompt hold NaN; check the weights, or load it with dtype float32."
                )
            request.prompt_logprobs.put(positions.start, lists)
        return errors

    def _update_requests(self, step: SchedulerOutput) -> dict[str, str]:
        """Bring the requests' state to the scheduler's. Returns the requests that cannot run, with the reason."""
        for req_id in step.finished_req_ids:
            if self._batch.remove(req_id):
                self._sampler.remove(req_id)
        self._update_known(step.scheduled_cached_reqs)
        errors: dict[str, str] = {}
        for data in step.scheduled_new_reqs:
            reason = self._start(data)
            if reason is not None:
                errors[data.req_id] = reason
        return errors

    def _start(self, data: NewRequestData) -> str | None:
        """Begin a request; the reason if its parameters or tokens cannot be served by this model."""
        request = self._batch.add(data)
        for token_id in data.prompt_token_ids:
            if not 0 <= token_id < self._num_embeddings:
                return (
                    f"Token id {token_id} is outside of the vocabulary; use ids from 0 to {self._num_embeddings - 1}."
                )
        try:
            self._sampler.add(
                data.req_id,
                data.sampling_params,
                data.prompt_token_ids,
                data.eos_token_id,
                data.bad_words_token_ids,
            )
        except LLMKernelError as error:
            return str(error)
        count = data.sampling_params.prompt_logprobs
        if count is not None:
            width = 1 + (self._model.vocab_size if count < 0 else min(count, self._model.vocab_size))
            request.prompt_logprobs = PromptLogprobs(request.num_prompt, width)
        return None

    def _update_known(self, data: CachedRequestData) -> None:
        for index, req_id in enumerate(data.req_ids):
            request = self._batch.requests[req_id]
            request.keep_output(data.num_output_tokens[index])
            request.num_computed = data.num_computed_tokens[index]
            if req_id in data.resumed_req_ids:
                request.replace_blocks(data.new_block_ids[index])
            else:
                request.add_blocks(data.new_block_ids[index])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
