"""DashboardRows: the requests of a model as rows of a dashboard's table."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.row_feed import RowFeed
from llmkernel.notebook.widgets.messages import Counters, RequestRow

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["DashboardRows"]

_PROMPT_LENGTH = 200
_ENDED = ("done", "stopped", "failed")


class DashboardRows:
    """Follows what a session remembers of the requests of `slot`; what has ended is looked at once more, then never."""

    def __init__(self, slot: "ModelSlot") -> None:
        self._slot = slot
        self._followed: dict[str, _Followed] = {}

    def all(self, generations: Iterable["Generation"]) -> list[RequestRow]:
        """Every row, oldest first."""
        self.changed(generations)
        return [row for followed in self._followed.values() for row in followed.rows.values()]

    def changed(self, generations: Iterable["Generation"]) -> list[RequestRow]:
        """Rows that are not as they were at the last call; what the session has forgotten is forgotten here."""
        self._follow(generations)
        return [row for followed in self._followed.values() if not followed.ended for row in followed.changed()]

    def find(self, generations: Iterable["Generation"], request_id: str) -> RowFeed | None:
        """The request that a row of the table is about."""
        self._follow(generations)
        feeds = (feed for followed in self._followed.values() for feed in followed.feeds)
        return next((feed for feed in feeds if feed.request_id == request_id), None)

    def _follow(self, generations: Iterable["Generation"]) -> None:
        self._followed = {
            generation.id: self._followed.get(generation.id) or _Followed(generation, self._slot)
            for generation in generations
        }


class _Followed:
    """The answers of one generation that are of one model. ended: all rows were told when they could change no more."""

    def __init__(self, generation: "Generation", slot: "ModelSlot") -> None:
        self._cell = generation.cell
        self.feeds = [feed for feed in RowFeed.of(generation) if feed.row.slot is slot]
        self.rows: dict[str, RequestRow] = {}
        self.ended = False

    def changed(self) -> list[RequestRow]:
        live = [feed for feed in self.feeds if self._is_live(feed)]
        news = [row for feed in live if (row := self._row(feed)) != self.rows.get(row.id)]
        self.rows |= {row.id: row for row in news}
        self.ended = not live
        return news

    def _is_live(self, feed: RowFeed) -> bool:
        told = self.rows.get(feed.request_id)
        return told is None or told.state not in _ENDED

    def _row(self, feed: RowFeed) -> RequestRow:
        counters, stats = feed.counters(), feed.metrics
        return RequestRow(
            **{name: getattr(counters, name) for name in Counters.__struct_fields__},
            id=feed.request_id,
            cell=self._cell,
            model=feed.row.slot.name,
            position=feed.wait.position if feed.wait is not None else 0,
            itl=stats.inter_token_latency if stats is not None and stats.num_generation_tokens > 1 else None,
            preemptions=stats.num_preemptions if stats is not None else None,
            prompt=clean_text(feed.row.prompt.text[:_PROMPT_LENGTH]),
        )
