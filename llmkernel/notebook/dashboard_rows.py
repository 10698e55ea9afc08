"""DashboardRows: the requests of a model as rows of a dashboard's table."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from llmkernel.notebook.plain_text import clean_text
from llmkernel.notebook.row_feed import RowFeed
from llmkernel.notebook.widgets.messages import Counters, RequestRow

if TYPE_CHECKING:
    from llmkernel.notebook.generation import Generation
    from llmkernel.notebook.generation_row import GenerationRow
    from llmkernel.notebook.model_slot import ModelSlot

__all__ = ["DashboardRows"]

_PROMPT_LENGTH = 200
_ENDED = ("done", "stopped", "failed")


class DashboardRows:
    """Follows what a session remembers of the requests of `slot`."""

    def __init__(self, slot: "ModelSlot") -> None:
        self._slot = slot
        self._feeds: dict[str, RowFeed] = {}
        self._told: dict[str, RequestRow] = {}

    def all(self, generations: Iterable["Generation"]) -> list[RequestRow]:
        """Every row, oldest first."""
        self.changed(generations)
        return list(self._told.values())

    def changed(self, generations: Iterable["Generation"]) -> list[RequestRow]:
        """Rows that are not as they were at the last call; what the session has forgotten is forgotten here."""
        rows = {row.id: row for row in self._rows(generations)}
        news = [row for id, row in rows.items() if self._told.get(id) != row]
        self._feeds = {id: feed for id, feed in self._feeds.items() if id in rows}
        self._told = rows
        return news

    def find(self, generations: Iterable["Generation"], request_id: str) -> "GenerationRow | None":
        """The request that a row of the table is about."""
        for feed in self._follow(generations):
            if feed.request_id == request_id:
                return feed.row
        return None

    def _follow(self, generations: Iterable["Generation"]) -> Iterator[RowFeed]:
        for generation in generations:
            for row in generation.rows:
                if row.slot is self._slot:
                    for index in range(len(row.answers)):
                        feed = RowFeed(row, index)
                        yield self._feeds.setdefault(feed.request_id, feed)

    def _rows(self, generations: Iterable["Generation"]) -> Iterator[RequestRow]:
        waiting = 0
        for feed in self._follow(generations):
            told = self._told.get(feed.request_id)
            if told is not None and told.state in _ENDED:
                yield told
                continue
            counters = feed.counters()
            waiting += counters.state == "queued"
            yield self._row(feed, counters, waiting if counters.state == "queued" else 0)

    def _row(self, feed: RowFeed, counters: Counters, position: int) -> RequestRow:
        stats = feed.row.output.metrics if feed.row.output is not None else None
        return RequestRow(
            **{name: getattr(counters, name) for name in Counters.__struct_fields__},
            id=feed.request_id,
            cell=0,
            model=self._slot.name,
            position=position,
            itl=stats.inter_token_latency if stats is not None and stats.num_generation_tokens > 1 else None,
            preemptions=stats.num_preemptions if stats is not None else None,
            prompt=clean_text(feed.row.prompt.text)[:_PROMPT_LENGTH],
        )
