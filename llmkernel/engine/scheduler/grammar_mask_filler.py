"""GrammarMaskFiller: the masks of a step, one row for each request that has a grammar and is due a token."""

from collections.abc import Iterable

import numpy as np

from llmkernel.engine.request import Request
from llmkernel.engine.scheduler.output import GrammarMasks

__all__ = ["GrammarMaskFiller"]


class GrammarMaskFiller:
    """Owns the memory of the masks, which the next step uses again."""

    def __init__(self) -> None:
        self._words = np.zeros((0, 0), np.int32)

    def fill(self, requests: Iterable[Request]) -> GrammarMasks | None:
        """The masks for requests of a step whose computed counts were advanced; None if no grammar is concerned."""
        due = [request for request in requests if request.structured is not None and not request.is_prefill_chunk]
        if not due:
            return None
        bitmask = self._rows(len(due), max(request.structured.num_words for request in due if request.structured))
        masks = GrammarMasks({}, bitmask)
        for row, request in enumerate(due):
            assert request.structured is not None
            masks.rows[request.request_id] = row
            request.structured.fill_bitmask(bitmask[row])
            if request.structured.error is not None:
                masks.errors[request.request_id] = request.structured.error
        return masks

    def _rows(self, count: int, num_words: int) -> np.ndarray:
        if self._words.shape[0] < count or self._words.shape[1] != num_words:
            self._words = np.zeros((count, num_words), np.int32)
        return self._words[:count]
