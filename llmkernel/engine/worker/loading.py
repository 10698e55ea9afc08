"""The load of a model, from its files to a runner: checks, weights, KV pool, proof. Importing this imports torch.

What is refused is refused as early as it can be known: architecture, tokenizer and memory before any weight is read.
transformers is imported only for models that the fused decoder does not run.
"""

import dataclasses
import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.executor_facts import ExecutorFacts, ReportProgress
from llmkernel.engine.worker.attention import LayerSpec
from llmkernel.engine.worker.cpu_share import read_cpu_share
from llmkernel.engine.worker.fingerprint import fingerprint
from llmkernel.engine.worker.generation_config import read_generation_config
from llmkernel.engine.worker.hardware import keep_freed_memory, resolve_device, resolve_dtype, resolve_num_threads
from llmkernel.engine.worker.kv_store import KVStore, PagedKVStore
from llmkernel.engine.worker.logits_processors.loader import load_logits_processors
from llmkernel.engine.worker.memory import KVPlan, available_memory, plan_kv_cache
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_runner import ModelRunner
from llmkernel.engine.worker.models.decoder_config import NotFused
from llmkernel.engine.worker.models.fused_load import FusedLoad
from llmkernel.engine.worker.models.runnable import Runnable
from llmkernel.engine.worker.models.weight_choice import fused_dtype
from llmkernel.engine.worker.sampler.sampler import Sampler
from llmkernel.engine.worker.thread_governor import ThreadGovernor, thread_rules
from llmkernel.engine.worker.tokenizer_facts import read_tokenizer_facts
from llmkernel.errors import UnsupportedFeatureError
from llmkernel.protocol.handshake import ModelFacts, TokenizerFacts

if TYPE_CHECKING:
    from llmkernel.engine.worker.models.transformers_load import TransformersLoad

__all__ = ["ReadyModel", "load"]

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class ReadyModel:
    """What a load ends with."""

    runner: ModelRunner
    store: KVStore
    facts: ExecutorFacts
    governor: ThreadGovernor


@torch.inference_mode()
def load(files: ModelFiles, args: EngineArgs, report: ReportProgress) -> ReadyModel:
    """Load, check and prove the model in `files` as `args` say. Sets the number of torch threads of this process."""
    machine = _Machine(args)
    torch.set_num_threads(machine.num_threads)
    processors = load_logits_processors(args, machine.device)
    way = _choose(files, args, machine, report)
    tokenizer = read_tokenizer_facts(files, args)
    report("weights", 0, 0, files.name)
    memory = _Memory(files.name, way.limit, args, machine)
    memory.plan(way.row_size, way.weights_estimate, way.load_copies)
    loaded = way.load(report)
    report("kv cache", 0, 0, "")
    layers = list(loaded.layers.values())
    plan = memory.plan(sum(layer.row_size for layer in layers), loaded.weights_bytes)
    store = machine.make_store(layers, plan.num_blocks, plan.block_size)
    report("warm-up", 0, 0, "")
    keep_freed_memory()  # not before: what the load frees goes back
    loaded.prove(lambda num_blocks, block_size: machine.make_store(layers, num_blocks, block_size))
    sampler = Sampler(
        loaded.model.vocab_size,
        machine.device,
        default_seed=args.seed,
        logprobs_mode=args.logprobs_mode,
        processors=processors,
    )
    runner = ModelRunner(
        loaded.model,
        loaded.layers,
        store,
        sampler,
        dtype=machine.dtype,
        device=machine.device,
        dense_bytes=plan.dense_bytes,
        kernels=loaded.kernels,
    )
    notes = [*loaded.notes, *(note for note in (way.note, plan.note) if note)]
    facts = ExecutorFacts(
        model=_model_facts(files, loaded, machine, tokenizer, way.limit, notes),
        tokenizer=tokenizer,
        num_blocks=store.num_blocks,
        block_size=store.block_size,
        max_model_len=plan.max_model_len,
        kv_cache_bytes=store.num_bytes,
        num_threads=machine.num_threads,
    )
    return ReadyModel(runner, store, facts, machine.make_governor(args))


class _Machine:
    """The settings of `args` that depend on the machine, settled."""

    def __init__(self, args: EngineArgs) -> None:
        self.device = resolve_device(args)
        self.dtype = resolve_dtype(args, self.device)
        self.num_threads = resolve_num_threads(args)

    def make_governor(self, args: EngineArgs) -> ThreadGovernor:
        """Of the steps on a CPU, unless the number was asked for; beside another device the threads hardly matter."""
        governed = args.num_threads == "auto" and self.device.type == "cpu" and self.num_threads > 1
        rules = thread_rules(read_cpu_share()) if governed else []
        return ThreadGovernor(self.num_threads, rules, torch.set_num_threads)

    def free_memory(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return available_memory()

    def make_store(self, layers: Iterable[LayerSpec], num_blocks: int, block_size: int) -> PagedKVStore:
        return PagedKVStore(
            list(layers), num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device
        )


class _Memory:
    """Sizes the KV pool against what was free before the load; asked twice, with estimates and with measured rows."""

    def __init__(self, name: str, limit: int, args: EngineArgs, machine: _Machine) -> None:
        self._name = name
        self._limit = limit
        self._args = args
        self._item = machine.dtype.itemsize
        self._free = machine.free_memory()

    def plan(self, row_size: int, weights: int, load_copies: int = 0) -> KVPlan:
        return plan_kv_cache(
            self._args,
            name=self._name,
            max_position=self._limit,
            bytes_per_token=row_size * self._item,
            weights=weights,
            available=self._free,
            load_copies=load_copies,
        )


def _choose(
    files: ModelFiles, args: EngineArgs, machine: _Machine, report: ReportProgress
) -> "FusedLoad | TransformersLoad":
    """The fused decoder where it is built for the model, transformers otherwise; or what `implementation` says.

    The machine's dtype is settled with it.
    """
    if args.implementation != "transformers":
        dtype = fused_dtype(files, args, machine.device)
        try:
            fused = FusedLoad(files, args, dtype, machine.device)
        except NotFused as reason:
            if args.implementation == "fused":
                raise UnsupportedFeatureError(
                    f"{files.name} cannot run with implementation = 'fused': {reason}; use 'auto' or 'transformers'.",
                    parameter="implementation",
                    value=args.implementation,
                ) from None
        else:
            machine.dtype = dtype
            return fused
    report("importing", 0, 0, "transformers")
    from llmkernel.engine.worker.models.transformers_load import TransformersLoad  # 2 s that a fused model saves

    return TransformersLoad(files, args, machine.dtype, machine.device)


def _model_facts(
    files: ModelFiles,
    loaded: Runnable,
    machine: _Machine,
    tokenizer: TokenizerFacts,
    max_position: int,
    notes: list[str],
) -> ModelFacts:
    defaults = read_generation_config(files.folder)
    return ModelFacts(
        name=files.name,
        source=files.source,
        architecture=loaded.architecture,
        implementation=loaded.model.implementation,
        dtype=str(machine.dtype).removeprefix("torch."),
        device=str(machine.device),
        vocab_size=min(loaded.model.vocab_size, loaded.model.num_embeddings),
        max_position=max_position,
        quantization=files.quantization,
        num_parameters=loaded.num_parameters,
        weights_bytes=loaded.weights_bytes,
        generation_defaults={name: defaults[name] for name in _SAMPLING_DEFAULTS if defaults.get(name) is not None},
        stop_token_ids=_stop_token_ids(defaults, tokenizer.eos_token_id),
        notes=notes,
        identity={"weights": fingerprint(files), "python": platform.python_version(), **_versions()},
    )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("llmkernel", "torch", "transformers", "tokenizers", "numpy")}


def _stop_token_ids(generation_config: dict[str, Any], eos_token_id: int | None) -> list[int]:
    """End tokens of the generation defaults beyond the tokenizer's own."""
    stops = generation_config.get("eos_token_id")
    if stops is None:
        return []
    stops = stops if isinstance(stops, list) else [stops]
    return [token_id for token_id in dict.fromkeys(stops) if token_id != eos_token_id]
