"""What an executor tells about the model that it loaded, and how it reports while it loads."""

import dataclasses
from collections.abc import Callable

from llmkernel.protocol.handshake import ModelFacts, TokenizerFacts

__all__ = ["ExecutorFacts", "ReportProgress"]

ReportProgress = Callable[[str, int, int, str], None]
"""(stage, done, total, detail): see handshake.Progress."""


@dataclasses.dataclass(frozen=True)
class ExecutorFacts:
    """What is known once the model is loaded and the KV pool stands.

    num_blocks: of the pool, the null block 0 included. block_size: tokens. max_model_len: tokens, at most what the
    model and the pool allow.
    """

    model: ModelFacts
    tokenizer: TokenizerFacts
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_cache_bytes: int
    num_threads: int
    load_timings: dict[str, float] = dataclasses.field(default_factory=dict)
