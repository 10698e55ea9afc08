"""TransformersLoad: a model of any architecture that transformers runs with our attention. Importing this takes 2 s."""

import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.executor_facts import ReportProgress
from llmkernel.engine.worker.memory import weight_files, weights_need
from llmkernel.engine.worker.model_files import ModelFiles
from llmkernel.engine.worker.model_loader import load_model, read_config
from llmkernel.engine.worker.models.architecture import (
    architecture_name,
    cache_row_estimate,
    check_architecture,
    context_limit,
)
from llmkernel.engine.worker.models.probe import PROMPT_TOKENS, Probe
from llmkernel.engine.worker.models.registered_attention import ATTENTION
from llmkernel.engine.worker.models.runnable import MakeStore, Runnable
from llmkernel.engine.worker.models.transformers_model import TransformersModel

__all__ = ["TransformersLoad"]

_PROOF_BLOCK = 4
"""Block size of the proof's own small pool, so that its short prompt crosses blocks."""


class TransformersLoad:
    """Refuses at once what the configuration rules out; `load` reads the weights and inspects the attention."""

    def __init__(self, files: ModelFiles, args: EngineArgs, dtype: torch.dtype, device: torch.device) -> None:
        config = read_config(files, args)
        check_architecture(config)
        self.limit, self.note = context_limit(config)
        self.row_size = cache_row_estimate(config)
        self.weights_estimate = weights_need(weight_files(files.folder), dtype.itemsize)
        self.load_copies = 0
        self._files = files
        self._args = args
        self._device = device

    def load(self, report: ReportProgress) -> Runnable:
        """The model, proved as far as it can be without a cache."""
        loaded = load_model(self._files, self._args, report, attn_implementation=ATTENTION)
        model = TransformersModel(loaded.model)
        probe = Probe(model, loaded.config, self._device)
        layers = probe.inspect()
        self.row_size = sum(layer.row_size for layer in layers)

        def prove(make_store: MakeStore) -> None:
            probe.verify(make_store(1 + -(-PROMPT_TOKENS // _PROOF_BLOCK), _PROOF_BLOCK))

        return Runnable(
            model=model,
            layers=probe.layers,
            architecture=architecture_name(loaded.config),
            weights_bytes=loaded.weights_bytes,
            num_parameters=loaded.num_parameters,
            prove=prove,
            notes=list(self._files.notes),
        )
