"""Slots: which row of a processor's batch belongs to whom, and what changes from step to step."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from llmkernel.engine.worker.logits_processors.interface import AddedRequest, BatchUpdate, MoveDirectionality
from llmkernel.protocol.sampling_params import SamplingParams

__all__ = ["SlotRequest", "Slots"]


class SlotRequest(NamedTuple):
    """A request as processors see it. key: its own, as long as it lives."""

    key: Hashable
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    def added_at(self, row: int) -> AddedRequest:
        return row, self.params, self.prompt_token_ids, self.output_token_ids


class Slots:
    """Rows keep their places while their requests go on; newcomers take the places of those who left."""

    def __init__(self) -> None:
        self._keys: list[Hashable] = []

    def arrange(self, requests: Sequence[SlotRequest]) -> tuple[BatchUpdate | None, list[int]]:
        """For the requests of a step: what has changed, and for each row the position in `requests` that it shows."""
        positions = {request.key: position for position, request in enumerate(requests)}
        removed = [index for index, key in enumerate(self._keys) if key not in positions]
        known = set(self._keys)
        newcomers = [request for request in requests if request.key not in known]
        if not removed and not newcomers:
            return None, [positions[key] for key in self._keys]
        places = removed[: len(newcomers)] + list(
            range(len(self._keys), len(self._keys) + len(newcomers) - len(removed))
        )
        added = []
        for place, request in zip(places, newcomers, strict=True):
            if place == len(self._keys):
                self._keys.append(request.key)
            self._keys[place] = request.key
            added.append(request.added_at(place))
        moved = self._close_gaps(removed[len(newcomers) :])
        update = BatchUpdate(len(requests), removed[::-1], added, moved)
        return update, [positions[key] for key in self._keys]

    def _close_gaps(self, gaps: Sequence[int]) -> list[tuple[int, int, MoveDirectionality]]:
        """Rows from the end move into the gaps."""
        empty = set(gaps)
        moved = []
        for gap in sorted(gaps):
            while self._keys and len(self._keys) - 1 in empty:
                empty.discard(len(self._keys) - 1)
                self._keys.pop()
            if gap >= len(self._keys):
                break
            source = len(self._keys) - 1
            self._keys[gap] = self._keys.pop()
            empty.discard(gap)
            moved.append((source, gap, MoveDirectionality.UNIDIRECTIONAL))
        return moved
