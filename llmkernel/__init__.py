"""llmkernel: a continuous-batching inference engine behind a notebook.

Public names are loaded at first use, so that `import llmkernel` and `%load_ext llmkernel` stay fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "llmkernel.llm.async_llm",
    "BeamSearchParams": "llmkernel.protocol.sampling_params",
    "CompletionOutput": "llmkernel.llm.outputs",
    "EngineArgs": "llmkernel.config",
    "EngineDeadError": "llmkernel.errors",
    "EngineStartupError": "llmkernel.errors",
    "Generation": "llmkernel.notebook.generation",
    "GenerationInterrupted": "llmkernel.errors",
    "InvalidRequestError": "llmkernel.errors",
    "LLM": "llmkernel.llm.llm",
    "LLMEngine": "llmkernel.llm.llm_engine",
    "LLMKernelError": "llmkernel.errors",
    "PoolingParams": "llmkernel.protocol.pooling_params",
    "RequestFailedError": "llmkernel.errors",
    "RequestOutput": "llmkernel.llm.outputs",
    "RequestOutputKind": "llmkernel.protocol.sampling_params",
    "SamplingParams": "llmkernel.protocol.sampling_params",
    "Session": "llmkernel.notebook.session",
    "StructuredOutputsParams": "llmkernel.protocol.sampling_params",
    "UnsupportedFeatureError": "llmkernel.errors",
    "UtilityCallError": "llmkernel.errors",
}
"""Public name -> the module it lives in."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineStartupError",
    "Generation",
    "GenerationInterrupted",
    "InvalidRequestError",
    "LLMEngine",
    "LLMKernelError",
    "PoolingParams",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Session",
    "StructuredOutputsParams",
    "UnsupportedFeatureError",
    "UtilityCallError",
]

if TYPE_CHECKING:
    from llmkernel.config import EngineArgs
    from llmkernel.errors import (
        EngineDeadError,
        EngineStartupError,
        GenerationInterrupted,
        InvalidRequestError,
        LLMKernelError,
        RequestFailedError,
        UnsupportedFeatureError,
        UtilityCallError,
    )
    from llmkernel.llm.async_llm import AsyncLLM
    from llmkernel.llm.llm import LLM
    from llmkernel.llm.llm_engine import LLMEngine
    from llmkernel.llm.outputs import CompletionOutput, RequestOutput
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.session import Session
    from llmkernel.protocol.pooling_params import PoolingParams
    from llmkernel.protocol.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )


def __getattr__(name: str) -> Any:
    """PEP 562: a public name is imported when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'llmkernel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def load_ipython_extension(ipython: Any) -> None:
    """Called by `%load_ext llmkernel`."""
    from llmkernel.notebook import extension  # lazy: ipywidgets and IPython cost time that a script need not pay

    extension.load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Called by `%unload_ext llmkernel`."""
    from llmkernel.notebook import extension  # lazy: see above

    extension.unload(ipython)
