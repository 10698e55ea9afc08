"""Custom logits processors: classes of the user's, loaded by import path (vLLM's interface, engine.md D.4)."""

from llmkernel.engine.worker.logits_processors.adapter import AdapterLogitsProcessor, RequestLogitsProcessor
from llmkernel.engine.worker.logits_processors.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

__all__ = [
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "RequestLogitsProcessor",
]
