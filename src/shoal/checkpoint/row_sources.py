"""Where rows come from when a checkpoint is written or read: whole tables at a cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.checkpoint.manifest import FileKind, Manifest, SavedFile, SavedTable
from shoal.checkpoint.ranged_files import OpenFiles, RangedFile, concatenated
from shoal.checkpoint.row_files import HASHES
from shoal.checkpoint.row_layout import ROW_FIELDS, RowLayout
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import folder_name
from shoal.errors import CheckpointError, describe
from shoal.table.shard import RowChunk

__all__ = ["ChainRows", "RowSource"]

_IDS_AT_ONCE = 1 << 18


class RowSource(Protocol):
    """Rows of whole tables at a cut, by table index and hash range; `Snapshot` is one."""

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash: int64 [2^bits], bits in [0, 20]."""
        ...

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows with `start <= h < stop`, ordered by h."""
        ...

    def deleted(self, table: int) -> Tensor:
        """Ids int64 [U], ordered by h, that were deleted and have no row."""
        ...


class ChainRows:
    """The rows that a chain of checkpoints stands for: deltas on top of the first.

    Of each delta in turn, deletions are taken out and rows put in. A chain that starts with a
    delta shows what all its links together change. Ids of a range are merged first; of each link
    only rows that count are kept, so memory is some rows of the asked range beside the result.

    Args:
        storage: the folder that the checkpoints lie in.
        manifests: first link first, as `CheckpointStore.chain` returns them.
        name: folder of the last one; None: by its step and kind.

    Attributes:
        tables: of the last link, in its order; a table's index is that into this.

    Raises:
        CheckpointError: no manifest, or a table whose layout changed along the chain.
    """

    def __init__(
        self, storage: Storage, manifests: Sequence[Manifest], name: str | None = None
    ) -> None:
        if not manifests:
            raise ValueError("a chain has one checkpoint at least")
        last = manifests[-1]
        folders = [child.parent.folder for child in manifests[1:] if child.parent is not None]
        folders.append(name or folder_name(last.step, last.kind))
        self.tables: tuple[SavedTable, ...] = last.tables
        self._starts_whole = manifests[0].kind == "full"
        opened = OpenFiles()
        self._links = [
            _Link(storage.child(folder), manifest, opened)
            for folder, manifest in zip(folders, manifests, strict=True)
        ]
        for table in self.tables:
            for link in self._links:
                link.check(table)

    def index(self, key: str) -> int:
        """Index of a table by its key, "collection/table"."""
        return [table.key for table in self.tables].index(key)

    def most_rows(self, table: int) -> int:
        """Rows that the table has at most: those of all links together."""
        key = self.tables[table].key
        return sum(link.rows_of(key) for link in self._links)

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash, int64 [2^bits]; reads ids only."""
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        for start, stop in self.ranges(table, _IDS_AT_ONCE):
            keys, _, _ = self._merged(table, start, stop)
            cells = (keys >> (64 - bits)) + (1 << (bits - 1)) if bits else keys * 0
            counts += torch.bincount(cells, minlength=1 << bits)
        return counts

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows with `start <= h < stop`, ordered by h."""
        saved = self.tables[table]
        layout = RowLayout.of(saved)
        keys, links, rows = self._merged(table, start, stop)
        counting = [k for k in range(len(self._links)) if bool((links == k).any())]
        if len(counting) == 1:
            link = self._links[counting[0]]
            chunk = concatenated(layout, saved.key, list(link.rows(saved.key, start, stop)))
            return chunk if len(chunk.ids) == len(keys) else _taken(chunk, rows)
        result = layout.empty(len(keys), saved.key)
        for k in counting:
            places = (links == k).nonzero().squeeze(1)
            wanted, at, done = rows[places], 0, 0
            for chunk in self._links[k].rows(saved.key, start, stop):
                upto = at + len(chunk.ids)
                end = int(torch.searchsorted(wanted, upto))
                if end > done:
                    for name in ROW_FIELDS:
                        source = getattr(chunk, name)[wanted[done:end] - at]
                        getattr(result, name)[places[done:end]] = source
                at, done = upto, end
        return result

    def chunks(self, table: int, *, piece_bytes: int = 8 << 20) -> Iterator[RowChunk]:
        """All rows of a table, ordered by h, in pieces of about that many bytes."""
        layout = RowLayout.of(self.tables[table])
        for start, stop in self.ranges(table, max(1, piece_bytes // layout.row_bytes)):
            chunk = self.read(table, start, stop)
            if len(chunk.ids):
                yield chunk

    def deleted(self, table: int) -> Tensor:
        """Ids that the chain deletes from what it starts on, ordered by h; none of a full one."""
        parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
        if not self._starts_whole:
            for start, stop in self.ranges(table, _IDS_AT_ONCE):
                parts.append(self._gone(table, start, stop))
        return torch.cat(parts)

    def ranges(self, table: int, rows: int) -> Iterator[tuple[int, int]]:
        """Ascending ranges of hashes that have about that many rows, or fewer, of all links."""
        key = self.tables[table].key
        total = sum(link.size(key) for link in self._links)
        if total:
            # A hash is a mix of the id's bits, so that even ranges have about even numbers.
            bits = max(0, (-(-total // rows) - 1).bit_length())
            width = HASHES >> bits
            for k in range(1 << bits):
                yield k * width, (k + 1) * width

    def _merged(self, table: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort keys of the rows of a range; of each, its link and its number in that range."""
        key = self.tables[table].key
        keys = links = rows = torch.empty(0, dtype=torch.int64, device="cpu")
        for k, link in enumerate(self._links):
            at, found = _places(keys, link.ids("deleted", key, start, stop)[1])
            if len(found := at[found]):
                stays = torch.ones(len(keys), dtype=torch.bool, device="cpu")
                stays[found] = False
                keys, links, rows = keys[stays], links[stays], rows[stays]
            new = link.ids("rows", key, start, stop)[1]
            numbers = torch.arange(len(new), device="cpu")
            at, known = _places(keys, new)
            links[at[known]] = k
            rows[at[known]] = numbers[known]
            if not bool(known.all()):
                new, numbers, at = new[~known], numbers[~known], at[~known]
                # Each goes before the key at its place, after the new ones before it.
                new_at = at + torch.arange(len(new), device="cpu")
                old_at = torch.ones(len(keys) + len(new), dtype=torch.bool, device="cpu")
                old_at[new_at] = False
                keys = _woven(old_at, keys, new_at, new)
                links = _woven(old_at, links, new_at, torch.full_like(new, k))
                rows = _woven(old_at, rows, new_at, numbers)
        return keys, links, rows

    def _gone(self, table: int, start: int, stop: int) -> Tensor:
        """Ids of a range that a link deletes and no later one puts in again."""
        key = self.tables[table].key
        ids = keys = torch.empty(0, dtype=torch.int64, device="cpu")
        for link in self._links:
            more, its = link.ids("deleted", key, start, stop)
            new = ~_within(its, keys)
            ids, keys = torch.cat([ids, more[new]]), torch.cat([keys, its[new]])
            keys, order = keys.sort()
            ids = ids[order]
        stays = ~_within(keys, self._merged(table, start, stop)[0])
        return ids[stays]


class _Link:
    """The row files and deletions of one checkpoint."""

    def __init__(self, storage: Storage, manifest: Manifest, opened: OpenFiles) -> None:
        self._tables = {table.key: table for table in manifest.tables}
        self._where = storage.url
        self._files: dict[tuple[FileKind, str], list[tuple[int, RangedFile]]] = {}
        for saved in sorted(manifest.files, key=_start):
            if saved.kind in ("rows", "deleted"):
                tables = [self._tables[key] for key in saved.tables]
                layout = RowLayout.of(tables[0]) if saved.kind == "rows" else None
                names = [table.hash_name for table in tables]
                file = RangedFile(storage, saved, names, layout, opened)
                for k, key in enumerate(saved.tables):
                    self._files.setdefault((saved.kind, key), []).append((k, file))

    def check(self, table: SavedTable) -> None:
        own = self._tables.get(table.key, table)
        if _form(own) != _form(table):
            raise CheckpointError(
                describe(
                    f"rows of table {table.key!r} in {self._where}",
                    got=_form(own),
                    allowed=f"{_form(table)}, as in the newest link of its chain",
                    remedy="After a change of a table, deltas start from a new full checkpoint.",
                )
            )

    def rows_of(self, key: str) -> int:
        table = self._tables.get(key)
        return table.rows if table else 0

    def size(self, key: str) -> int:
        table = self._tables.get(key)
        return table.rows + table.deleted if table else 0

    def ids(self, kind: FileKind, key: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        parts = [file.ids(k, start, stop) for k, file in self._meeting(kind, key, start, stop)]
        if len(parts) == 1:
            return parts[0]
        ids, keys = [none, *(one[0] for one in parts)], [none, *(one[1] for one in parts)]
        return torch.cat(ids), torch.cat(keys)

    def rows(self, key: str, start: int, stop: int) -> Iterator[RowChunk]:
        for k, file in self._meeting("rows", key, start, stop):
            yield from file.rows(k, start, stop)

    def _meeting(
        self, kind: FileKind, key: str, start: int, stop: int
    ) -> list[tuple[int, RangedFile]]:
        files = self._files.get((kind, key), [])
        return [one for one in files if one[1].saved.start < stop and one[1].saved.stop > start]


def _form(table: SavedTable) -> str:
    """What rows of one table must have in common to be merged."""
    segments = (f"{s.name}[{s.dim}+{s.state_width} {s.optimizer}]" for s in table.segments)
    return f"{table.dtype} {', '.join(segments)}, hashed as {table.hash_name!r}"


def _start(saved: SavedFile) -> int:
    return saved.start


def _places(keys: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of the others lies or would lie among the keys, and whether it is there."""
    at = torch.searchsorted(keys, others)
    if not len(keys):
        return at, torch.zeros(len(others), dtype=torch.bool, device="cpu")
    return at, keys[at.clamp(max=len(keys) - 1)] == others


def _within(keys: Tensor, others: Tensor) -> Tensor:
    """bool: which keys are among the others; both ascending."""
    return _places(others, keys)[1]


def _woven(old_at: Tensor, old: Tensor, new_at: Tensor, new: Tensor) -> Tensor:
    """Old and new numbers at their places: a mask of the old ones', the new ones' indices."""
    result = torch.empty(len(old) + len(new), dtype=torch.int64, device="cpu")
    result[old_at] = old
    result[new_at] = new
    return result


def _taken(chunk: RowChunk, rows: Tensor) -> RowChunk:
    parts = {name: getattr(chunk, name)[rows] for name in ROW_FIELDS}
    return RowChunk(table=chunk.table, **parts)
