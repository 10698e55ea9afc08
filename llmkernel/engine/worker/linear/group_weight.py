"""GroupWeight: weights as small integers with a scale for each 32 of a row, as GGUF's Q4_0, Q4_1 and Q8_0 have them."""

import dataclasses

import torch

__all__ = ["GROUP", "GroupWeight", "quantize_int4", "quantize_int8"]

GROUP = 32

_LEAST_SCALE = 2.0**-24
"""The least number that float16 has."""


@dataclasses.dataclass(frozen=True)
class GroupWeight:
    """w = scale * (code - 2^(bits - 1)), or with minima scale * code + minimum.

    codes: uint8 [out, in], of 4 or 8 bits. scales, minima: float32 [out, in / GROUP], of numbers that float16 has.
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    def rows(self, chosen: torch.Tensor | slice) -> "GroupWeight":
        """These rows, in this order."""
        minima = None if self.minima is None else self.minima[chosen]
        return GroupWeight(self.bits, self.codes[chosen].contiguous(), self.scales[chosen], minima)

    def lowest(self) -> torch.Tensor:
        """float32 [out, in / GROUP]: what code 0 stands for."""
        return self.scales * -(2 ** (self.bits - 1)) if self.minima is None else self.minima

    def dense(self) -> torch.Tensor:
        """The weight that it stands for, float32 [out, in]."""
        grouped = self.codes.float().unflatten(1, (-1, GROUP))
        return (grouped * self.scales[..., None] + self.lowest()[..., None]).flatten(1)

    @staticmethod
    def join(parts: "list[GroupWeight]") -> "GroupWeight":
        """One below the other; all of the same number of bits."""
        plain = all(part.minima is None for part in parts)
        return GroupWeight(
            parts[0].bits,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            None if plain else torch.cat([part.lowest() for part in parts]),
        )


def quantize_int4(weight: torch.Tensor) -> GroupWeight:
    """Round each group of a row [out, in] to 16 steps between its least and its greatest weight."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1).half().float(), grouped.amax(-1)
    scales = ((high - low) / 15).clamp_min(_LEAST_SCALE).half().float()
    codes = ((grouped - low[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    return GroupWeight(4, codes.to(torch.uint8).flatten(1), scales, low)


def quantize_int8(weight: torch.Tensor) -> GroupWeight:
    """Round each group of a row [out, in] to 255 steps, as many below zero as above."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(-1) / 127).clamp_min(_LEAST_SCALE).half().float()
    codes = (grouped / scales[..., None]).round_().clamp_(-127, 127).add_(128)
    return GroupWeight(8, codes.to(torch.uint8).flatten(1), scales)
