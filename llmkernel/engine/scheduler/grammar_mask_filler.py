"""GrammarMaskFiller: the masks of a step, a row for each token that a request with a grammar may get."""

import numpy as np

from llmkernel.engine.scheduler.output import GrammarMasks
from llmkernel.engine.scheduler.step_plan import StepPlan

__all__ = ["GrammarMaskFiller"]


class GrammarMaskFiller:
    """Owns the memory of the masks, which the next step uses again."""

    def __init__(self) -> None:
        self._words = np.zeros((0, 0), np.int32)

    def fill(self, plan: StepPlan) -> GrammarMasks | None:
        """The masks for a step whose computed counts were advanced; None if no grammar is concerned."""
        due = [
            (request, request.structured, plan.drafts(request))
            for request in plan.requests()
            if request.structured is not None and not request.is_prefill_chunk
        ]
        if not due:
            return None
        num_rows = len(due) + sum(len(drafts) for _, _, drafts in due)
        masks = GrammarMasks({}, self._rows(num_rows, max(structured.num_words for _, structured, _ in due)))
        row = 0
        for request, structured, drafts in due:
            masks.rows[request.request_id] = row
            structured.fill_bitmask(masks.bitmask[row])
            if structured.error is not None:
                masks.errors[request.request_id] = structured.error
            elif drafts:
                structured.fill_bitmasks_ahead(drafts, masks.bitmask[row + 1 : row + 1 + len(drafts)])
            row += 1 + len(drafts)
        return masks

    def _rows(self, count: int, num_words: int) -> np.ndarray:
        if self._words.shape[0] < count or self._words.shape[1] != num_words:
            self._words = np.zeros((count, num_words), np.int32)
        return self._words[:count]
