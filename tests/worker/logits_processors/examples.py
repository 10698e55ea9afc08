"""Custom logits processors as a user writes them; the engine loads them by import path."""

import torch

from llmkernel.config import EngineArgs
from llmkernel.engine.worker.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
)
from llmkernel.protocol.sampling_params import SamplingParams


class OnlyToken(LogitsProcessor):
    """vLLM's own example: extra_args {"target_token": id} leaves that token alone. Raises on the id 13."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token = {target!r} must be a token id.")

    def __init__(self, args: EngineArgs, device: torch.device, is_pin_memory: bool) -> None:
        assert isinstance(args, EngineArgs)
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.targets.pop(index, None)
            target = (params.extra_args or {}).get("target_token")
            if target is not None:
                self.targets[index] = target
        for source, target, direction in batch_update.moved:
            kept, replaced = self.targets.pop(source, None), self.targets.pop(target, None)
            if kept is not None:
                self.targets[target] = kept
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self.targets[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert all(index < len(logits) for index in self.targets)
        for index, target in self.targets.items():
            if target == 13:
                raise RuntimeError("13 brings bad luck")
            kept = logits[index, target].clone()
            logits[index] = -torch.inf
            logits[index, target] = kept
        return logits


class Countdown(AdapterLogitsProcessor):
    """extra_args {"countdown": n}: the tokens n, n - 1, ... 0, then what the model says. Raises at the token 5."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        start = (params.extra_args or {}).get("countdown")
        if start is None:
            return None
        if start < 0:
            raise ValueError("countdown must not be negative")

        def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            assert prompt
            token = start - len(output)
            if token == 5:
                raise RuntimeError("five is not counted")
            if token >= 0:
                logits[:] = -torch.inf
                logits[token] = 0.0
            return logits

        return force


class Sharpen(LogitsProcessor):
    """Argmax-invariant: after temperature, everything that is not among the two best goes."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        second = logits.topk(2).values[:, 1:]
        return torch.where(logits >= second, logits, -torch.inf)


class Broken:
    """Has the methods, and returns the wrong thing."""

    def __init__(self, *_: object) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :2]


class Unmakeable(LogitsProcessor):
    def __init__(self, *_: object) -> None:
        raise OSError("no such file")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


NOT_A_CLASS = 3
