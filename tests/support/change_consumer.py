"""A consumer of a shard: it keeps a copy of all rows, by one snapshot after another."""

from __future__ import annotations

from torch import Tensor

from shoal.errors import InputError
from shoal.table.shard import HASHES, Shard, Snapshot
from shoal.table.values import Cursor, RowChunk

__all__ = ["Consumer", "contents", "cursor_of"]

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


def cursor_of(shard: Shard, snapshot: Snapshot) -> Cursor:
    """Of a consumer that has read a snapshot whole."""
    return Cursor(shard.incarnation, snapshot.version)


class Consumer:
    """What one consumer holds; `restarts` counts full passes."""

    def __init__(self) -> None:
        self.cursor: Cursor | None = None
        self.held: Held = {}
        self.restarts = 0

    def drain(self, shard: Shard) -> set[tuple[str, int]]:
        """Take what changed: delete, then upsert. Returns which ids were named."""
        self.open(shard)
        return self.finish(shard)

    def open(self, shard: Shard) -> None:
        """Set the snapshot point up to which `finish` takes what changed."""
        self.snapshot = self._opened(shard)
        self.next = cursor_of(shard, self.snapshot)

    def finish(self, shard: Shard) -> set[tuple[str, int]]:
        """Take it, and close the snapshot."""
        with self.snapshot as snapshot:
            tables = range(len(shard.specs))
            chunks = [snapshot.read(k, 0, HASHES) for k in tables]
            gone = {
                (shard.specs[k].name, id_) for k in tables for id_ in snapshot.deleted(k).tolist()
            }
            self.cursor = self.next
            for chunk in chunks:
                assert (
                    (chunk.versions > snapshot.since) & (chunk.versions <= snapshot.version)
                ).all()
        rows = contents(*chunks)
        assert not gone & rows.keys()
        for key in gone:
            self.held.pop(key, None)
        self.held.update(rows)
        return gone | rows.keys()

    def _opened(self, shard: Shard) -> Snapshot:
        """A snapshot of what changed, or of everything where that cannot be served."""
        if self.cursor is not None:
            try:
                return shard.snapshot(self.cursor)
            except InputError:
                pass
        self.restarts += 1
        self.held.clear()
        return shard.snapshot()
