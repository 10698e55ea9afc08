"""Start-up: the messages of the handshake socket, and the registration message of the input socket.

    engine -> client   Hello                      I run; my pid
    client -> engine   EngineHandshakeMetadata    INIT: where to connect, what to be
    engine -> client   Progress *                 staged progress of the load
    engine -> client   Ready | StartupFailed      status only
    engine -> client   EngineCoreReadyResponse    on the INPUT socket, the DEALER's first message to every client

Handshake messages are msgpack maps with a `status` key; the registration message is a msgpack map.
"""

from typing import Any

import msgspec

from llmkernel.config import EngineArgs

__all__ = [
    "STAGES",
    "EngineAddresses",
    "EngineCoreReadyResponse",
    "EngineHandshakeMetadata",
    "EngineMessage",
    "Hello",
    "ModelFacts",
    "Progress",
    "Ready",
    "StartupFailed",
    "TokenizerFacts",
]

STAGES = ("spawned", "download", "convert", "importing", "weights", "kv cache", "warm-up", "ready")
"""Stages of a load, in order; `download` and `convert` only when they are needed."""


class Hello(msgspec.Struct, tag_field="status", tag="HELLO", omit_defaults=True):
    """The engine process runs and has connected. local and headless as vLLM's (True, False on one machine).

    clock: the engine's time.monotonic() now, seconds.
    """

    pid: int
    local: bool = True
    headless: bool = False
    clock: float = 0.0


class EngineAddresses(msgspec.Struct, omit_defaults=True):
    """Where the engine connects: one input (DEALER) and one output (PUSH) per client, at the client's index."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None


class EngineHandshakeMetadata(msgspec.Struct, tag_field="status", tag="INIT", omit_defaults=True):
    """What the engine is to be. executor_class: import path "module:Class"; None = UniProcExecutor."""

    addresses: EngineAddresses
    engine_args: EngineArgs
    executor_class: str | None = None
    parallel_config: dict[str, Any] = {}


class Progress(msgspec.Struct, tag_field="status", tag="PROGRESS", omit_defaults=True):
    """One step of the load. stage: of STAGES. done / total: bytes, tensors or 0 / 0; detail: words for people."""

    stage: str
    done: int = 0
    total: int = 0
    detail: str = ""


class Ready(msgspec.Struct, tag_field="status", tag="READY", omit_defaults=True):
    """The engine takes requests. timings: seconds per stage.

    clock, init_clock: the engine's time.monotonic() now, and when INIT had come, 0.0 if it was read from its copy.
    """

    local: bool = True
    headless: bool = False
    parallel_config_hash: str | None = None
    timings: dict[str, float] = {}
    clock: float = 0.0
    init_clock: float = 0.0


class StartupFailed(msgspec.Struct, tag_field="status", tag="FAILED", omit_defaults=True):
    """The load failed: exception class name, one-line message with what to change, formatted traceback."""

    type: str
    message: str
    traceback: str


EngineMessage = Hello | Progress | Ready | StartupFailed
"""Everything that an engine sends on the handshake socket."""


class TokenizerFacts(msgspec.Struct, omit_defaults=True):
    """The tokenizer of the loaded model, enough to build it with `tokenizers` and jinja2 alone.

    json or path: the tokenizer.json, as text or as a file (one of them). special_tokens: name -> text,
    e.g. {"bos_token": "<s>"}. chat_template: jinja source, None for a base model. named_chat_templates: further ones by
    name, such as "tool_use".
    """

    json: str | None = None
    path: str | None = None
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    named_chat_templates: dict[str, str] = {}


class ModelFacts(msgspec.Struct, omit_defaults=True):
    """What was loaded, as `%llm status` tells it.

    name: as asked for. source: file, folder or Hub id with revision. implementation: "transformers" or "fused".
    vocab_size: ids the model can emit. max_position: its own context limit in tokens. generation_defaults:
    temperature, top_p, top_k ... of generation_config. stop_token_ids: end tokens beyond eos_token_id.
    weights_bytes: memory of the weights.
    notes: things worth saying once ("Q4_1 is dequantised to float32"). identity: what an answer depends on:
    "weights" ("commit HEX", "sha256 HEX" or "sha256-of-ends HEX"), and versions by package; {} if nobody knows.
    """

    name: str
    source: str
    architecture: str
    implementation: str
    dtype: str
    device: str
    vocab_size: int
    max_position: int
    quantization: str = "none"
    num_parameters: int = 0
    weights_bytes: int = 0
    generation_defaults: dict[str, Any] = {}
    stop_token_ids: list[int] = []
    notes: list[str] = []
    identity: dict[str, str] = {}


class EngineCoreReadyResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Registration message: the first thing a DEALER says to each client, so that the ROUTER knows its address.

    max_model_len: tokens. num_gpu_blocks: blocks of the KV pool, the null block included (vLLM's name, on any device).
    kv_cache_bytes: memory of the pool. kv_cache_size_tokens: tokens it holds. num_threads: torch threads of the engine.
    """

    version: str
    engine_index: int = 0
    pid: int = 0
    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_size_tokens: int = 0
    kv_cache_bytes: int = 0
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    world_size: int = 1
    data_parallel_rank: int = 0
    num_threads: int = 0
    model: ModelFacts
    tokenizer: TokenizerFacts
    load_timings: dict[str, float] = {}
