"""Rotary position embedding: frequencies from the configuration (none, linear, llama3, yarn scaling), and the turning.

Pairs lie side by side (x0 y0 x1 y1 ...), so that a pair is a complex number and turning is one product. Checkpoints in
transformers' order pair halves (x0 x1 ... y0 y1 ...): `interleaved` is the order in which their rows are read.
Formulas: RoPE (arXiv:2104.09864), linear scaling (2306.15595), YaRN (2309.00071), Llama 3.1's as its release has it.
"""

import dataclasses
import math
from typing import Any

import torch

__all__ = ["SCALINGS", "Rotary", "RotaryConfig", "interleaved"]

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """size: dimensions of a head that turn, even. scaling: what config.json says beside theta."""

    size: int
    theta: float
    max_position: int
    kind: str = "default"
    scaling: dict[str, Any] = dataclasses.field(default_factory=dict)


class Rotary:
    """Angles of positions. Computed anew for each step: a table for 128k positions would take 64 MB."""

    def __init__(self, config: RotaryConfig, device: torch.device) -> None:
        frequencies, factor = _frequencies(config)
        self.size = config.size
        self._frequencies = frequencies.to(device)
        self._factor = torch.tensor(factor, dtype=torch.float32, device=device)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] -> complex64 [T, 1, size / 2], to multiply pairs with."""
        angles = positions.float()[:, None, None] * self._frequencies
        return torch.polar(self._factor.expand_as(angles), angles)

    def turn(self, heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Heads [T, n, D] turned by rotation [T, 1, size / 2], float32; in place if they are. The rest of D stays."""
        wide = heads if heads.dtype == torch.float32 else heads.float()
        part = wide if self.size == wide.shape[2] else wide[..., : self.size]
        torch.view_as_complex(part.view(*part.shape[:2], -1, 2)).mul_(rotation)
        return wide


def interleaved(head_dim: int, rotary: int) -> torch.Tensor:
    """Of a head's rows in transformers' order, the indices in ours: int64 [head_dim]."""
    pairs = torch.arange(rotary).view(2, -1).t().flatten()
    return torch.cat((pairs, torch.arange(rotary, head_dim)))


def _frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """Frequencies, float32 [size / 2], and the factor of turned queries and keys."""
    powers = torch.arange(0, config.size, 2, dtype=torch.float32) / config.size
    plain = 1.0 / (config.theta**powers)
    if config.kind == "linear":
        return plain / config.scaling["factor"], 1.0
    if config.kind == "llama3":
        return _llama3(plain, config), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config)
    return plain, 1.0


def _llama3(plain: torch.Tensor, config: RotaryConfig) -> torch.Tensor:
    """Low frequencies are divided by factor, high ones stay, between them it blends."""
    scaling = config.scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / scaling["factor"] + keep * plain


def _yarn(plain: torch.Tensor, config: RotaryConfig) -> tuple[torch.Tensor, float]:
    scaling = config.scaling
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_position / original

    def dimension(turns: float) -> float:
        """The dimension that turns so many times within the original context."""
        return config.size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.size - 1)
    ramp = (torch.arange(config.size // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep, _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1)
