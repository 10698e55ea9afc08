"""The load of a model, from its name to a runner: files, checks, weights, KV pool, proof. Importing this imports torch.

What is refused is refused as early as it can be known: architecture and memory before any weight is read.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from llmkernel.config import EngineArgs
from llmkernel.engine.executor_facts import ExecutorFacts, ReportProgress
from llmkernel.engine.worker.attention import ATTENTION, LayerSpec
from llmkernel.engine.worker.hardware import resolve_device, resolve_dtype, resolve_num_threads
from llmkernel.engine.worker.kv_store import KVStore, PagedKVStore
from llmkernel.engine.worker.memory import KVPlan, available_memory, plan_kv_cache, weight_files, weights_need
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_loader import LoadedModel, load_model, read_config
from llmkernel.engine.worker.model_runner import ModelRunner
from llmkernel.engine.worker.model_source import resolve_model
from llmkernel.engine.worker.models.architecture import (
    architecture_name,
    cache_row_estimate,
    check_architecture,
    context_limit,
)
from llmkernel.engine.worker.models.probe import PROMPT_TOKENS, Probe
from llmkernel.engine.worker.models.transformers_model import TransformersModel
from llmkernel.engine.worker.sampler.sampler import Sampler
from llmkernel.engine.worker.tokenizer_facts import read_tokenizer_facts
from llmkernel.protocol.handshake import ModelFacts, TokenizerFacts

__all__ = ["ReadyModel", "load"]

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PROOF_BLOCK = 4
"""Block size of the proof's own small pool, so that its short prompt crosses blocks."""


@dataclasses.dataclass(frozen=True)
class ReadyModel:
    """What a load ends with."""

    runner: ModelRunner
    store: KVStore
    facts: ExecutorFacts


@torch.inference_mode()
def load(args: EngineArgs, report: ReportProgress) -> ReadyModel:
    """Load, check and prove the model of `args`. Sets the number of torch threads of this process."""
    machine = _Machine(args)
    torch.set_num_threads(machine.num_threads)
    files = resolve_model(args, report)
    report("weights", 0, 0, files.name)
    memory = _check(files, args, machine)
    loaded = load_model(files, args, report, attn_implementation=ATTENTION)
    report("kv cache", 0, 0, "")
    model = TransformersModel(loaded.model)
    probe = Probe(model, loaded.config, machine.device)
    layers = probe.inspect()
    plan = memory.plan(sum(layer.row_size for layer in layers), loaded.weights_bytes)
    store = machine.make_store(layers, plan.num_blocks, plan.block_size)
    report("warm-up", 0, 0, "")
    probe.verify(machine.make_store(layers, 1 + -(-PROMPT_TOKENS // _PROOF_BLOCK), _PROOF_BLOCK))
    sampler = Sampler(model.vocab_size, machine.device, default_seed=args.seed)
    runner = ModelRunner(model, probe.layers, store, sampler, dtype=machine.dtype, device=machine.device)
    tokenizer = read_tokenizer_facts(files, args)
    notes = [*files.notes, *(note for note in (memory.note, plan.note) if note)]
    facts = ExecutorFacts(
        model=_model_facts(files, loaded, model, machine, tokenizer, memory.limit, notes),
        tokenizer=tokenizer,
        num_blocks=store.num_blocks,
        block_size=store.block_size,
        max_model_len=plan.max_model_len,
        kv_cache_bytes=store.num_bytes,
        num_threads=machine.num_threads,
    )
    return ReadyModel(runner, store, facts)


class _Machine:
    """The settings of `args` that depend on the machine, settled."""

    def __init__(self, args: EngineArgs) -> None:
        self.device = resolve_device(args)
        self.dtype = resolve_dtype(args, self.device)
        self.num_threads = resolve_num_threads(args)

    def free_memory(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return available_memory()

    def make_store(self, layers: Sequence[LayerSpec], num_blocks: int, block_size: int) -> PagedKVStore:
        return PagedKVStore(layers, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device)


class _Memory:
    """Sizes the KV pool against what was free before the load; asked twice, with estimates and with measured rows."""

    def __init__(self, name: str, config: PreTrainedConfig, args: EngineArgs, machine: _Machine) -> None:
        self._name = name
        self._args = args
        self._item = machine.dtype.itemsize
        self._free = machine.free_memory()
        self.limit, self.note = context_limit(config)

    def plan(self, row_size: int, weights: int) -> KVPlan:
        return plan_kv_cache(
            self._args,
            name=self._name,
            max_position=self.limit,
            bytes_per_token=row_size * self._item,
            weights=weights,
            available=self._free,
        )


def _check(files: ModelFiles, args: EngineArgs, machine: _Machine) -> _Memory:
    """Refuse what config.json and the headers of the weights rule out."""
    config = read_config(files, args)
    check_architecture(config)
    memory = _Memory(files.name, config, args, machine)
    memory.plan(cache_row_estimate(config), weights_need(weight_files(files.folder), machine.dtype.itemsize))
    return memory


def _model_facts(
    files: ModelFiles,
    loaded: LoadedModel,
    model: TransformersModel,
    machine: _Machine,
    tokenizer: TokenizerFacts,
    max_position: int,
    notes: list[str],
) -> ModelFacts:
    defaults = loaded.generation_config
    return ModelFacts(
        name=files.name,
        source=files.source,
        architecture=architecture_name(loaded.config),
        implementation=model.implementation,
        dtype=str(machine.dtype).removeprefix("torch."),
        device=str(machine.device),
        vocab_size=min(model.vocab_size, model.num_embeddings),
        max_position=max_position,
        quantization=files.quantization,
        num_parameters=loaded.num_parameters,
        weights_bytes=loaded.weights_bytes,
        generation_defaults={name: defaults[name] for name in _SAMPLING_DEFAULTS if defaults.get(name) is not None},
        stop_token_ids=_stop_token_ids(defaults, tokenizer.eos_token_id),
        notes=notes,
    )


def _stop_token_ids(generation_config: dict[str, Any], eos_token_id: int | None) -> list[int]:
    """End tokens of the generation defaults beyond the tokenizer's own."""
    stops = generation_config.get("eos_token_id")
    if stops is None:
        return []
    stops = stops if isinstance(stops, list) else [stops]
    return [token_id for token_id in dict.fromkeys(stops) if token_id != eos_token_id]
