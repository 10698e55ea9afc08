"""RequestBatch: the requests of one blocking call, which nobody else's requests get mixed up with."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmkernel.errors import EngineDeadError, RequestFailedError
from llmkernel.llm.input_processor import check_params
from llmkernel.llm.llm_engine import LLMEngine
from llmkernel.llm.outputs import RequestOutput
from llmkernel.llm.prompts import ChatPrompt, PromptType
from llmkernel.llm.request_output_collector import RequestOutputCollector
from llmkernel.protocol.requests import LoRARequest
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["RequestBatch"]

_request_ids = itertools.count()


class RequestBatch:
    """Submits prompts, waits for their outputs, and aborts what is unfinished at the end of its `with`.

    Requests are known by the position of their prompt. `step_lock` is the engine's: several threads may have a batch
    each, and whoever waits takes the engine's steps for all.
    """

    def __init__(self, engine: LLMEngine, step_lock: threading.Lock) -> None:
        self._engine = engine
        self._step_lock = step_lock
        self._queues: list[RequestOutputCollector] = []
        self._running: set[int] = set()

    def __enter__(self) -> "RequestBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def submit(
        self,
        prompt: PromptType | ChatPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the next prompt."""
        check_params(params)
        queue = RequestOutputCollector(params.output_kind)
        with self._step_lock:
            self._running.add(len(self._queues))
            self._queues.append(queue)
            self._engine.add_request(
                str(next(_request_ids)),
                prompt,
                params,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                priority=priority,
                queue=queue,
            )

    def outputs(self) -> Iterator[tuple[int, RequestOutput]]:
        """(position, output) as they come, until all are finished.

        A request that fails while it is processed here says so in its last output, as one that fails in the engine.
        """
        while self._running:
            self._step([self._queues[position] for position in self._running])
            for position in sorted(self._running):
                output = _take(self._queues[position])
                if output is not None:
                    if output.finished:
                        self._running.discard(position)
                    yield position, output

    def abort(self) -> None:
        """End what is unfinished."""
        ids = [self._queues[position].request_id for position in self._running]
        self._running.clear()
        with self._step_lock:
            self._engine.abort_request([request_id for request_id in ids if request_id], internal=True)

    def last_output(self, position: int) -> RequestOutput | None:
        """What a request that was aborted, or that an error ended, had to say; None if that is nothing."""
        try:
            return self._queues[position].get_nowait() if position < len(self._queues) else None
        except (EngineDeadError, RequestFailedError) as error:
            return error.partial if isinstance(error.partial, RequestOutput) else None

    def _step(self, queues: Sequence[RequestOutputCollector]) -> None:
        """Wait for the engine's next message, unless another thread has brought something for these queues."""
        with self._step_lock:
            if any(queue.has_item for queue in queues):
                return
            try:
                self._engine.step()
            except EngineDeadError:
                if not any(queue.has_item for queue in queues):
                    raise
                # each queue holds the error now, with what its request had generated


def _take(queue: RequestOutputCollector) -> RequestOutput | None:
    try:
        return queue.get_nowait()
    except RequestFailedError as error:
        if not isinstance(error.partial, RequestOutput):
            raise
        return error.partial
