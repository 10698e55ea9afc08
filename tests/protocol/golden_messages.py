"""One full and one minimal specimen of every message that travels, by name. Their bytes stand in golden.toml."""

from typing import Any

import numpy as np

from llmkernel.config import EngineArgs
from llmkernel.protocol.control import (
    Abort,
    Answer,
    Attach,
    Attached,
    ClientStatus,
    Detach,
    Done,
    EngineStatus,
    KeepAlive,
    Ping,
    Pong,
    Question,
    Refused,
    Shutdown,
    Status,
)
from llmkernel.protocol.handshake import (
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineHandshakeMetadata,
    EngineMessage,
    Hello,
    ModelFacts,
    Progress,
    Ready,
    StartupFailed,
    TokenizerFacts,
)
from llmkernel.protocol.outputs import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
    UtilityFailure,
    UtilityOutput,
    UtilityResult,
)
from llmkernel.protocol.pooling_params import PoolingParams
from llmkernel.protocol.requests import EngineCoreRequest, LoRARequest
from llmkernel.protocol.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from llmkernel.protocol.stats import (
    PrefillStats,
    PrefixCacheStats,
    RequestProgress,
    SchedulerStats,
    SpecDecodingStats,
    WaitReason,
)

__all__ = ["MESSAGES"]


def _add_full() -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r1-8f3a",
        prompt_token_ids=[1, 200, 40000],
        mm_features=None,
        sampling_params=SamplingParams(
            n=2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            temperature=0.75,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=7,
            stop=["END"],
            stop_token_ids=[2],
            max_tokens=64,
            min_tokens=1,
            logprobs=5,
            output_kind=RequestOutputKind.DELTA,
            logit_bias={50: -1.5},
            allowed_token_ids=[1, 2, 3],
            bad_words=["bad"],
            extra_args={"note": "x"},
        ),
        pooling_params=None,
        arrival_time=1700000000.5,
        lora_request=LoRARequest("adapter", 1, "/adapters/a"),
        cache_salt="salt",
        data_parallel_rank=0,
        prompt_embeds=np.arange(128, dtype=np.float32).reshape(2, 64),
        prompt_is_token_ids=[True, False],
        client_index=1,
        current_wave=2,
        priority=-3,
        trace_headers={"traceparent": "00-ab"},
        resumable=True,
        external_req_id="r1",
        reasoning_ended=False,
        reasoning_parser_kwargs={"k": 1},
        abort_immediately=True,
        session_id="s",
        kv_hints={"h": 1},
        eos_token_id=2,
        bad_words_token_ids=[[5, 6]],
    )


def _add_minimal() -> EngineCoreRequest:
    return EngineCoreRequest("r", [1], None, SamplingParams(), None, 1.5, None, None, None)


def _add_constrained() -> EngineCoreRequest:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(
            json={"type": "object", "properties": {"a": {"type": "integer"}}},
            disable_additional_properties=True,
            whitespace_pattern=" ?",
        ),
        repetition_detection=RepetitionDetectionParams(max_pattern_size=8, min_pattern_size=2, min_count=3),
    )
    return EngineCoreRequest("c", [1], None, params, None, 1.5, None, None, None)


def _add_pooling() -> EngineCoreRequest:
    return EngineCoreRequest("p", [1], None, None, PoolingParams(dimensions=8, task="embed"), 1.5, None, None, None)


def _logprobs(positions: int, width: int) -> LogprobsLists:
    size = positions * width
    return LogprobsLists(
        np.arange(size, dtype=np.int32).reshape(positions, width),
        -np.arange(size, dtype=np.float32).reshape(positions, width) / 4,
        np.arange(1, positions + 1, dtype=np.int32),
    )


def _outputs_full() -> EngineCoreOutputs:
    first = EngineCoreOutput(
        request_id="r1-8f3a",
        new_token_ids=[7, 70000],
        new_logprobs=_logprobs(2, 3),
        new_prompt_logprobs_tensors=_logprobs(8, 16),
        pooling_output=np.array([0.5, 0.25], dtype=np.float16),
        finish_reason=FinishReason.STOP,
        stop_reason=2,
        events=[
            EngineCoreEvent(EngineCoreEventType.QUEUED, 10.5),
            EngineCoreEvent(EngineCoreEventType.PREEMPTED, 11.0),
            EngineCoreEvent(EngineCoreEventType.PREFILLED, 11.5, 512),
        ],
        kv_transfer_params={"k": 1},
        ec_transfer_params={"e": 1},
        trace_headers={"traceparent": "00-ab"},
        prefill_stats=PrefillStats(num_prompt_tokens=9, num_cached_tokens=4, num_computed_tokens=5),
    )
    failed = EngineCoreOutput("r2", [], finish_reason=FinishReason.ERROR, stop_reason="no")
    stats = SchedulerStats(
        num_running_reqs=1,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=3,
        step_counter=4,
        current_wave=5,
        kv_cache_usage=0.5,
        prefix_cache_stats=PrefixCacheStats(True, 1, 2, 3, 4, 5, 6),
        step_time=0.125,
        num_batched_tokens=7,
        num_preempted=8,
        num_blocks=64,
        num_free_blocks=32,
        waiting_head=WaitReason("r3", "needs 12 blocks, 9 free"),
        num_threads=2,
        spec_decoding_stats=SpecDecodingStats(num_drafts=3, num_draft_tokens=9, num_accepted_tokens=6),
    )
    return EngineCoreOutputs(
        engine_index=1,
        outputs=[first, failed],
        scheduler_stats=stats,
        timestamp=12.5,
        finished_requests={"r1-8f3a"},
        wave_complete=1,
        start_wave=2,
        pushed=12.75,
    )


def _utility(output: UtilityOutput) -> EngineCoreOutputs:
    return EngineCoreOutputs(timestamp=1.0, utility_output=output)


def _ready_response() -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(
        version="0.1.0",
        engine_index=1,
        pid=4321,
        max_model_len=2048,
        num_gpu_blocks=256,
        block_size=16,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        kv_cache_size_tokens=4080,
        kv_cache_bytes=2**20,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        world_size=2,
        data_parallel_rank=1,
        num_threads=2,
        model=ModelFacts(
            name="smollm2",
            source="/m",
            architecture="LlamaForCausalLM",
            implementation="transformers",
            dtype="float32",
            device="cpu",
            vocab_size=49152,
            max_position=8192,
            quantization="int8",
            num_parameters=134515008,
            weights_bytes=538060032,
            generation_defaults={"temperature": 0.7},
            stop_token_ids=[0],
            notes=["dequantised"],
            identity={"weights": "commit 0123", "torch": "2.9"},
        ),
        tokenizer=TokenizerFacts(
            json="{}",
            path="/m/tokenizer.json",
            chat_template="{{ x }}",
            special_tokens={"eos_token": "<|im_end|>"},
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
            named_chat_templates={"tool_use": "{{ tools }}"},
        ),
        load_timings={"weights": 0.5},
    )


def _ready_response_minimal() -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(
        version="0.1.0",
        max_model_len=1,
        num_gpu_blocks=2,
        block_size=3,
        max_num_seqs=4,
        max_num_batched_tokens=5,
        model=ModelFacts("n", "s", "A", "i", "d", "cpu", 6, 7),
        tokenizer=TokenizerFacts(),
    )


def _engine_status(**lease: float) -> EngineStatus:
    return EngineStatus(
        pid=4321,
        owner_pid=4000,
        model="smollm2",
        state="starting",
        stage=Progress("weights", 3, 9),
        uptime=1.5,
        memory=2**20,
        running=1,
        waiting=2,
        step_counter=3,
        step_age=0.25,
        clients=[ClientStatus(client_index=0, pid=4000, unfinished=3)],
        log="/r/log",
        engine_args={"model": "smollm2"},
        **lease,
    )


MESSAGES: dict[str, tuple[Any, Any]] = {
    "add": (_add_full(), EngineCoreRequest),
    "add_minimal": (_add_minimal(), EngineCoreRequest),
    "add_constrained": (_add_constrained(), EngineCoreRequest),
    "add_pooling": (_add_pooling(), EngineCoreRequest),
    "abort": (["r1-8f3a", "r2"], None),
    "utility": ([1, 77, "reset_prefix_cache", [True]], None),
    "start_dp_wave": ([3, None], None),
    "outputs": (_outputs_full(), EngineCoreOutputs),
    "outputs_minimal": (EngineCoreOutputs(outputs=[EngineCoreOutput("r", [5])], timestamp=1.0), EngineCoreOutputs),
    "utility_result": (_utility(UtilityOutput(77, result=UtilityResult({"free": [1, 2.5, None]}))), EngineCoreOutputs),
    "utility_failure": (
        _utility(UtilityOutput(78, failure=UtilityFailure("KeyError", "'x'", "Traceback ..."))),
        EngineCoreOutputs,
    ),
    "request_progress": (RequestProgress("r1-8f3a", 2, "needs 12 blocks, 9 free", 5, 9, 4, 1), RequestProgress),
    "request_progress_minimal": (RequestProgress("r1-8f3a", 1), RequestProgress),
    "hello": (Hello(pid=4321), EngineMessage),
    "hello_with_clock": (Hello(pid=4321, clock=7.5), EngineMessage),
    "hello_remote": (Hello(pid=1, local=False, headless=True), EngineMessage),
    "init": (
        EngineHandshakeMetadata(
            addresses=EngineAddresses(["ipc:///r/in0"], ["ipc:///r/out0"], "ipc:///r/ci", "ipc:///r/co"),
            engine_args=EngineArgs(model="smollm2", max_num_seqs=8),
            executor_class="m:C",
            parallel_config={"size": 1},
        ),
        EngineHandshakeMetadata,
    ),
    "progress": (Progress("weights", done=3, total=9, detail="model.safetensors"), EngineMessage),
    "ready": (Ready(parallel_config_hash="h", timings={"weights": 0.5}), EngineMessage),
    "ready_with_clocks": (Ready(clock=9.5, init_clock=7.75), EngineMessage),
    "startup_failed": (StartupFailed("ValueError", "no such model", "Traceback ..."), EngineMessage),
    "ready_response": (_ready_response(), EngineCoreReadyResponse),
    "ready_response_minimal": (_ready_response_minimal(), EngineCoreReadyResponse),
    "ask_ping": (Ping(), Question),
    "ask_status": (Status(), Question),
    "ask_abort": (Abort(["r1-8f3a"]), Question),
    "ask_attach": (Attach("ipc:///r/in1", "ipc:///r/out1", 4400), Question),
    "ask_attach_as_owner": (Attach("ipc:///r/in1", "ipc:///r/out1", 4400, owner=True), Question),
    "ask_detach": (Detach(1), Question),
    "ask_keep_alive": (KeepAlive(600.0), Question),
    "ask_shutdown": (Shutdown(), Question),
    "answer_pong": (Pong(step_counter=3, step_age=0.25), Answer),
    "answer_status": (_engine_status(), Answer),
    "answer_status_of_a_lease": (_engine_status(keep_alive=600.0, lease_left=1.5), Answer),
    "answer_attached": (Attached(1), Answer),
    "answer_attached_with_clock": (Attached(1, clock=9.5), Answer),
    "answer_done": (Done(), Answer),
    "answer_refused": (Refused("not built"), Answer),
}
"""name -> (message, type to decode it as)."""
