"""load_logits_processors: the classes that EngineArgs.import_paths names."""

import importlib
import os
import sys

import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.logits_processors.seat import ProcessorSeat
from llmkernel.errors import EngineStartupError

__all__ = ["load_logits_processors"]

_METHODS = ("apply", "is_argmax_invariant", "update_state")


def load_logits_processors(args: EngineArgs, device: torch.device) -> list[ProcessorSeat]:
    """Folders among the import paths are put at the end of sys.path; "module:Class" are imported, in order."""
    for path in args.import_paths:
        if os.path.isabs(path) and path not in sys.path:
            sys.path.append(path)
    return [_load(path, args, device) for path in args.import_paths if not os.path.isabs(path)]


def _load(path: str, args: EngineArgs, device: torch.device) -> ProcessorSeat:
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs code of the user's
        raise EngineStartupError(
            f"import_paths: {path!r} cannot be imported ({type(error).__name__}: {error}); give its folder, too, as an"
            " absolute path in import_paths."
        ) from error
    lacking = [method for method in _METHODS if not callable(getattr(cls, method, None))]
    if not isinstance(cls, type) or lacking:
        raise EngineStartupError(
            f"import_paths: {path!r} is no logits processor (no {', '.join(lacking) or 'class'}); see"
            " llmkernel.engine.worker.logits_processors.LogitsProcessor."
        )
    try:
        return ProcessorSeat(name, cls, lambda: cls(args, device, False))
    except Exception as error:  # user code
        raise EngineStartupError(
            f"import_paths: {path!r} raised {type(error).__name__} when it was made: {error}."
        ) from error
