"""A consumer of a shard's changes: it keeps a copy of all rows, by page after page."""

from __future__ import annotations

from torch import Tensor

from shoal.table.values import ChangeFeed, Changes, Cursor, RowChunk

__all__ = ["Consumer", "contents"]

Held = dict[tuple[str, int], tuple[float, ...]]


def contents(*chunks: RowChunk) -> Held:
    """Weights and state by (table, id)."""
    return {
        (chunk.table, id_): (*_floats(chunk.weights[i]), *_floats(chunk.state[i]))
        for chunk in chunks
        for i, id_ in enumerate(chunk.ids.tolist())
    }


def _floats(row_D: Tensor) -> list[float]:
    return [float(value) for value in row_D]


class Consumer:
    """What one consumer holds; `restarts` counts full passes, `pages` all pages.

    Its cursor travels as JSON between pages, as it would between processes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.cursor = Cursor()
        self.held: Held = {}
        self.pages = 0
        self.restarts = 0
        self.sent: set[tuple[str, int]] = set()

    def page(self, shard: ChangeFeed) -> Changes:
        """Take one page: delete, then upsert."""
        page = shard.changes(Cursor.from_json(self.cursor.to_json()), self.limit)
        deleted = [(part.table, id_) for part in page.deleted for id_ in part.ids.tolist()]
        rows = contents(*page.rows)
        assert len(deleted) + len(rows) <= self.limit
        span = page.cursor
        for chunk in page.rows:
            assert chunk.versions.max() <= span.to_epoch
            if not page.done:
                assert chunk.versions.min() > span.from_epoch
        if page.restarted:
            self.restarts += 1
            self.held.clear()
            assert not deleted
        for key in deleted:
            self.held.pop(key, None)
        self.held.update(rows)
        self.sent |= rows.keys() | set(deleted)
        self.pages += 1
        self.cursor = page.cursor
        return page

    def drain(self, shard: ChangeFeed) -> set[tuple[str, int]]:
        """Take pages up to the end of the scan; returns which ids they named."""
        self.sent = set()
        while not self.page(shard).done:
            pass
        return self.sent
