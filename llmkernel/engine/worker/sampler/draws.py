"""Counter-based random numbers: the uniform of (seed, position) is a function, not a state.

splitmix64 (Steele, Lea, Flood 2014): the seed is mixed once, so that neighbouring seeds start far apart, then position
p takes output p of that stream. Nothing is drawn in order, so batch, preemption and chunking cannot change it.
"""

import torch

__all__ = ["seed_key", "uniforms"]

_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = 2**64 - 1


def seed_key(seed: int) -> int:
    """The key of the stream of `seed`, as a signed 64-bit integer. Computed once per request."""
    z = (seed + _GOLDEN) & _MASK
    for shift, multiplier in _ROUNDS:
        z = ((z ^ (z >> shift)) * multiplier) & _MASK
    return _signed(z ^ (z >> _LAST_SHIFT))


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1) with 53 random bits, one for each pair of int64 `keys` (see seed_key) and `positions`."""
    z = keys + (positions + 1) * _signed(_GOLDEN)
    for shift, multiplier in _ROUNDS:
        z = (z ^ _shift_right(z, shift)) * _signed(multiplier)
    z = z ^ _shift_right(z, _LAST_SHIFT)
    return _shift_right(z, 11).to(torch.float64) * 2.0**-53


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
