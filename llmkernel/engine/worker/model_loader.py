"""load_model: a folder of safetensors as a torch module, ready to run.

transformers' from_pretrained does it: 0.15 s for SmolLM2 in float32, whose tensors stay views of the mapped file,
0.3 s in bfloat16; importing torch and transformers (2.8 s) is what a load costs. Its loader threads are switched off: a
torch operation in a second thread makes every later step of the engine slower.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from llmkernel.config import EngineArgs
from llmkernel.engine.executor_facts import ReportProgress
from llmkernel.engine.worker.generation_config import read_generation_config
from llmkernel.engine.worker.hardware import resolve_device, resolve_dtype
from llmkernel.engine.worker.model_files import ModelFiles, read_json
from llmkernel.errors import EngineStartupError, UnsupportedFeatureError

__all__ = ["LoadedModel", "load_model", "read_config"]


@dataclasses.dataclass
class LoadedModel:
    """A model in memory, in eval mode, without gradients.

    generation_config: the file's content, or what config.json says about end, start and padding ids.
    weights_bytes, num_parameters: shared tensors count once.
    """

    model: PreTrainedModel
    config: PretrainedConfig
    generation_config: dict[str, Any]
    weights_bytes: int
    num_parameters: int
    dtype: torch.dtype


def load_model(files: ModelFiles, args: EngineArgs, report: ReportProgress, *, attn_implementation: str) -> LoadedModel:
    """The causal language model in `files.folder`, on the device and in the number format of `args`.

    Progress is stage "weights", in tensors. What cannot be loaded raises EngineStartupError, or UnsupportedFeatureError
    where it may come later: one line.
    """
    if args.quantization in ("int8", "int4"):
        message = (
            f"quantization = {args.quantization!r} needs the fused decoder, but {files.name} runs through "
            "transformers; use 'auto' or 'none'."
        )
        raise UnsupportedFeatureError(message, parameter="quantization", value=args.quantization)
    device = resolve_device(args)
    dtype = resolve_dtype(args, device)
    config = read_config(files, args)
    report("weights", 0, 0, files.name)
    with _reporting(report, files.name), _single_threaded():
        model = _from_pretrained(files, args, config, dtype, attn_implementation)
    model.to(device).eval().requires_grad_(False)
    parameters = list(model.parameters())  # each shared one once
    return LoadedModel(
        model=model,
        config=model.config,
        generation_config=read_generation_config(files.folder),
        weights_bytes=sum(tensor.nbytes for tensor in [*parameters, *model.buffers()]),
        num_parameters=sum(tensor.numel() for tensor in parameters),
        dtype=dtype,
    )


def read_config(files: ModelFiles, args: EngineArgs) -> PretrainedConfig:
    """config.json as transformers reads it; EngineStartupError or UnsupportedFeatureError, one line, if it does not."""
    content = read_json(files.folder / "config.json")
    scheme = content.get("quantization_config")
    if scheme:
        method = scheme.get("quant_method", "an unnamed method") if isinstance(scheme, dict) else "an unnamed method"
        raise UnsupportedFeatureError(
            f"{files.source} is quantized with {method}, which is not supported; use its plain weights or a GGUF file.",
            parameter="model",
            value=files.name,
        )
    try:
        return AutoConfig.from_pretrained(files.folder, trust_remote_code=args.trust_remote_code, local_files_only=True)
    except Exception as error:  # a foreign config.json makes transformers raise nearly anything
        hint = "upgrade transformers, or use another model"
        if "auto_map" in content and not args.trust_remote_code:
            hint = "its own code would have to run: allow that with trust_remote_code=True if you trust it"
        kind = content.get("model_type")
        raise EngineStartupError(
            f"Cannot load {files.source}: config.json (model_type {kind!r}): {_first_line(error)}; {hint}."
        ) from error


def _from_pretrained(
    files: ModelFiles, args: EngineArgs, config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in getattr(
        config, "auto_map", {}
    ):
        name = (config.architectures or [config.model_type])[0]
        raise EngineStartupError(
            f"Cannot load {files.source}: {name} is not a language model that generates text; use one that does."
        )
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            files.folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=args.trust_remote_code,
            use_safetensors=None if args.trust_remote_code else True,
            local_files_only=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise EngineStartupError(
            f"Cannot load {_broken_file(files.folder)}: it is truncated or not a safetensors file "
            f"({_first_line(error)}); download or copy it again."
        ) from error
    except OSError as error:
        raise EngineStartupError(f"Cannot load {files.source}: {_first_line(error)}; check its files.") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error) and "size mismatch" not in str(error):
            raise
        raise EngineStartupError(
            f"Cannot load {files.source}: its weights do not have the shapes that config.json says; get both again."
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise EngineStartupError(
            f"Cannot load {files.source}: its weights lack {len(missing)} tensors (the first is {missing[0]}); "
            "config.json and weights do not belong together: get both again."
        )
    return model


@contextlib.contextmanager
def _reporting(report: ReportProgress, detail: str) -> Iterator[None]:
    """transformers' own progress bar becomes progress reports."""

    def hook(factory: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
        return _Reported(args[0] if args else kwargs.get("iterable", ()), report, detail)

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _Reported:
    """What transformers uses of a tqdm: an iterable; at most a hundred reports per load."""

    def __init__(self, items: Iterable[Any], report: ReportProgress, detail: str) -> None:
        self._items = list(items)
        self._report: Callable[[str, int, int, str], None] = report
        self._detail = detail

    def __iter__(self) -> Iterator[Any]:
        total = len(self._items)
        every = max(1, total // 100)
        for done, item in enumerate(self._items, start=1):
            yield item
            if done % every == 0 or done == total:
                self._report("weights", done, total, self._detail)

    def update(self, count: int = 1) -> None:
        """tqdm's; the loop above counts."""

    def close(self) -> None:
        """tqdm's; nothing to close."""


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """No loader threads, and one torch thread: hundreds of small casts wait for each other where a core is busy."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    previous = os.environ.get(name)
    threads = torch.get_num_threads()
    os.environ[name] = "1"
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def _broken_file(folder: Path) -> Path:
    """The first weight file that does not open, the folder if all do."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError):
            return path
    return folder


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__
