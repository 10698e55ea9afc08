"""The way of a token from the engine's message to its reader, timed: one loop for llmkernel's classes and vLLM's.

Their names and signatures are the same, so both do the same work. In each step EngineCoreOutputs with one token for
every stream are encoded, decoded and processed (statistics, detokenizing, a RequestOutput into each collector), and
every reader takes his own. Not in it: the socket, and making the EngineCoreOutputs, which is the scheduler's.

A question {"prompt": [id, ...], "streams": [[id, ...], ...], "kind": "DELTA", "passes": N} is answered with
{"cpu_us_per_token": median of the passes, "texts": SHA-256 of all texts}.
"""

import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from answers import answer_lines

__all__ = ["FrontEnd", "serve_front_end"]


@dataclass(frozen=True)
class FrontEnd:
    """The classes of one library; `facts` for the report. make_stats: an IterationStats from EngineCoreOutputs."""

    facts: dict[str, Any]
    tokenizer: Any
    request: type
    output: type
    outputs: type
    finish_reason: Any
    sampling_params: type
    output_kind: Any
    processor: type
    collector: type
    encoder: type
    decoder: type
    make_stats: Callable[[Any], Any]

    def measure(self, prompt: list[int], streams: list[list[int]], kind: str) -> tuple[float, list[str]]:
        """CPU seconds of this process for all tokens, and the text of each stream."""
        output_kind = self.output_kind[kind]
        processor = self.processor(self.tokenizer, log_stats=True)
        collectors = [self.collector(output_kind, str(number)) for number in range(len(streams))]
        for number, (tokens, collector) in enumerate(zip(streams, collectors, strict=True)):
            params = self.sampling_params(max_tokens=len(tokens), output_kind=output_kind)
            processor.add_request(self._request(str(number), prompt, params), None, None, 0, collector)
        steps = [self._step(streams, at) for at in range(len(streams[0]))]
        encoder, decoder, buffer = self.encoder(), self.decoder(self.outputs), bytearray()
        texts = [""] * len(streams)
        whole = kind == "CUMULATIVE"
        started = time.process_time()
        for step in steps:
            message = decoder.decode(encoder.encode_into(step, buffer))
            processor.process_outputs(message.outputs, message.timestamp, self.make_stats(message))
            for number, collector in enumerate(collectors):
                text = collector.get_nowait().outputs[0].text
                texts[number] = text if whole else texts[number] + text
        return time.process_time() - started, texts

    def _request(self, request_id: str, prompt: list[int], params: Any) -> Any:
        return self.request(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=request_id,
        )

    def _step(self, streams: list[list[int]], at: int) -> Any:
        reason = self.finish_reason.LENGTH if at == len(streams[0]) - 1 else None
        return self.outputs(
            outputs=[
                self.output(str(number), [tokens[at]], finish_reason=reason) for number, tokens in enumerate(streams)
            ]
        )


def serve_front_end(open_front_end: Callable[[], FrontEnd]) -> None:
    """Answer until stdin ends."""

    def open_peer() -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
        front_end = open_front_end()
        gc.collect()
        gc.freeze()  # what the imports left behind is not the front end's to walk through
        return front_end.facts, lambda question: _answer(front_end, question)

    answer_lines(open_peer)


def _answer(front_end: FrontEnd, question: dict[str, Any]) -> dict[str, Any]:
    streams = question["streams"]
    passes = [front_end.measure(question["prompt"], streams, question["kind"]) for _ in range(question["passes"])]
    seconds = statistics.median(seconds for seconds, _ in passes)
    return {
        "cpu_us_per_token": seconds / sum(map(len, streams)) * 1e6,
        "texts": hashlib.sha256(json.dumps(passes[0][1]).encode()).hexdigest(),
    }
