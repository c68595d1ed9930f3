"""A chain of checkpoints: its links, the order of its files, which rows count, ranges of hashes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from shoal.checkpoint import row_files
from shoal.checkpoint.manifest import Manifest, SavedFile, SavedTable
from shoal.checkpoint.row_files import Columns, ReadBuffer, RowLayout
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.writing_plan import ascends, bounds, histogram
from shoal.errors import CheckpointError
from shoal.placement import hash_ids, sort_key
from shoal.table.shard import HASHES

_OPEN = 32  # readers: to open a file costs more than to read a batch
_IDS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One checkpoint of a chain and the folder that it lies in."""

    storage: Storage
    manifest: Manifest

    def table(self, key: str) -> SavedTable | None:
        """A table of it."""
        return next((one for one in self.manifest.tables if one.key == key), None)

    def read(
        self, file: SavedFile, buffer: ReadBuffer | None = None
    ) -> Iterator[tuple[int, Columns]]:
        """Rows or ids of a file of it, read whole and checked: see `read_rows`."""
        newest, layout = self.manifest.version, row_files.layout_of(file, self.manifest.tables)
        return row_files.read_rows(self.storage, file, layout, buffer, version=newest)


@dataclass(eq=False)
class ChainFile:
    """A file of rows or of deletions, read whole (`Link.read`) or by ranges of hashes.

    Of ranges its checksum is compared before it is parsed for the first time.

    Args:
        number: of its checkpoint in the chain; the full one is 0.
        link: its checkpoint.
        saved: what the manifest says of it.
    """

    number: int
    link: Link
    saved: SavedFile
    _index: list[tuple[int, int, int, int]] | None = field(init=False, default=None)
    """Number, table, first and last sort key of each record batch."""

    def rows(
        self, opened: Callable[..., Any], table: int, start: int, stop: int, ids_only: bool
    ) -> Iterator[tuple[Tensor, Columns]]:
        """Ascending sort keys and columns of the hashes [start, stop) of a table of the file."""
        if self._index is None:
            row_files.check_streaming(self.link.storage, self.saved)
            with self._parsing():
                opened(self, False)
                self._index = list(self._indexed(opened(self, True)))
        low, high, before = start - (1 << 63), stop - 1 - (1 << 63), None
        for number, its, first, last in self._index:
            if its != table or first > high or last < low:
                continue
            with self._parsing():
                batch = opened(self, ids_only).get_batch(number)
                batch.validate()
                columns = self._layout.to_columns(batch, _copied)
            keys = self._keys(table, columns[0])
            if not ascends(keys) or (before is not None and before >= int(keys[0])):
                got = "rows out of order"
                raise row_files.damaged(self.link.storage, self.saved.path, got, "rows by hash")
            before = int(keys[-1])
            inside = slice(*bounds(keys, start, stop))
            yield keys[inside], row_files.selected(columns, inside)

    def reader(self, ids_only: bool) -> Any:
        """What reads its record batches, or only their ids."""
        storage = self.link.storage
        file = storage.open_arrow(self.saved.path)
        return row_files.open_batches(storage, self.saved, self._layout, file, ids_only=ids_only)

    def _indexed(self, reader: Any) -> Iterator[tuple[int, int, int, int]]:
        for number, table, batch in row_files.batches(self.link.storage, self.saved, reader):
            ends = self._layout.to_columns(batch, _copied)[0][[0, -1]]
            first, last = self._keys(table, ends).tolist()
            yield number, table, first, last

    def _keys(self, table: int, ids: Tensor) -> Tensor:
        its = self.link.table(self.saved.tables[table])
        assert its is not None
        return sort_key(hash_ids(its.hash_name, ids))

    @property
    def _layout(self) -> RowLayout:
        return row_files.layout_of(self.saved, self.link.manifest.tables)

    def _parsing(self) -> Any:
        return row_files.parsing(self.link.storage, self.saved.path, "an Arrow IPC file")


class Chain:
    """A full checkpoint and the deltas on top of it: the rows that they stand for.

    Of each delta in turn, deletions are taken out and rows put in. So, from the newest to the
    oldest, a row counts unless a newer link has its id, alive or deleted (`Newer`).

    Who reads all files, each once and whole, goes through `runs`. `read` and what is built on it
    are for ranges of hashes in order: memory is some rows of the asked range.

    Args:
        store, name: the last link.
        check: whether all tables must have one form along the chain; else see `check_forms`.

    Attributes:
        links: the full one first.
        tables: of the last link, in its order; a table's index is that into this.
        files: of rows and deletions, the newest link's first.

    Raises:
        CheckpointError: a link is missing or of another chain (`CheckpointStore.chain`), or a
            table has several forms along the chain.
    """

    def __init__(self, store: CheckpointStore, name: str, *, check: bool = True) -> None:
        manifests = store.chain(name)
        folders = [one.parent.folder for one in manifests if one.parent is not None]
        self.links = tuple(
            Link(store.folder(folder), manifest)
            for folder, manifest in zip([*folders, name], manifests, strict=True)
        )
        self.last = self.links[-1]
        self.tables = self.last.manifest.tables
        self.files = tuple(
            ChainFile(number, link, file)
            for number, link in reversed(tuple(enumerate(self.links)))
            for file in link.manifest.files
            if file.kind in ("rows", "deleted")
        )
        self._open = lru_cache(maxsize=_OPEN)(ChainFile.reader)
        if check:
            self.check_forms({table.key for table in self.tables})

    def check_forms(self, keys: Collection[str]) -> None:
        """Check that tables have one form along the chain.

        Raises:
            CheckpointError: one has several.
        """
        for table in self.tables:
            for link in self.links if table.key in keys else ():
                own = link.table(table.key) or table
                if _form(own) != _form(table):
                    raise CheckpointError(
                        f"form of table {table.key!r} in {link.storage.url}",
                        got=_form(own),
                        allowed=f"{_form(table)}, as in the newest link of its chain",
                        remedy="After a change of a table, deltas start from a new full "
                        "checkpoint: load an older one of the chain, or a full one.",
                    )

    def index(self, key: str) -> int:
        """Index of a table by its key, "collection/table"."""
        return [table.key for table in self.tables].index(key)

    def along(self, key: str) -> list[SavedTable]:
        """A table in each link that has it, the full one first."""
        return [table for link in self.links if (table := link.table(key)) is not None]

    def most_rows(self, table: int) -> int:
        """Rows that a table has at most: those of all links together."""
        return sum(one.rows for one in self.along(self.tables[table].key))

    def fewest_rows(self, key: str) -> int:
        """Rows that a table has at least."""
        fewest = 0
        for table in self.along(key):
            fewest = max(table.rows, fewest - table.deleted)
        return fewest

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top `bits` of their hash, int64 [2^bits]; reads ids only."""
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        for start, stop in self.ranges(table, _IDS_AT_ONCE):
            for keys, _ in self._counting(table, start, stop, ids_only=True):
                counts += histogram(keys, bits)
        return counts

    def read(self, table: int, start: int, stop: int) -> Columns:
        """Rows with `start <= h < stop`, ordered by h."""
        layout = RowLayout.of(self.tables[table])
        found = list(self._counting(table, start, stop, ids_only=False))
        columns = row_files.joined(layout, [columns for _, columns in found])
        keys = torch.cat([columns[0][:0], *(keys for keys, _ in found)])
        if ascends(keys):
            return columns
        keys, order = keys.sort()
        if not ascends(keys):
            where, key = self.last.storage, self.tables[table].key
            raise row_files.damaged(where, "rows", f"a row of table {key!r} twice", "each row once")
        return row_files.selected(columns, order)

    def chunks(self, table: int, *, piece_bytes: int = 8 << 20) -> Iterator[Columns]:
        """All rows of a table, ordered by h, in pieces of about that many bytes."""
        rows = max(1, piece_bytes // self.tables[table].row_bytes)
        for start, stop in self.ranges(table, rows):
            columns = self.read(table, start, stop)
            if len(columns[0]):
                yield columns

    def ranges(self, table: int, rows: int) -> Iterator[tuple[int, int]]:
        """Ascending ranges of hashes that have about that many rows, or fewer, of all links."""
        total = sum(one.rows + one.deleted for one in self.along(self.tables[table].key))
        if total:
            # A hash is a mix of the id's bits, so that even ranges have about even numbers.
            bits = max(0, (-(-total // rows) - 1).bit_length())
            width = HASHES >> bits
            for k in range(1 << bits):
                yield k * width, (k + 1) * width

    def _counting(
        self, table: int, start: int, stop: int, *, ids_only: bool
    ) -> Iterator[tuple[Tensor, Columns]]:
        """Sort keys and columns of the rows of a range that count, batch after batch."""
        key, newer = self.tables[table].key, Newer()
        for file in self.files:
            saved, alive = file.saved, file.saved.kind == "rows"
            if key not in saved.tables or saved.start >= stop or saved.stop <= start:
                continue
            index = saved.tables.index(key)
            for keys, columns in file.rows(self._open, index, start, stop, ids_only or not alive):
                fresh = newer.unseen(file.number, columns[0], remember=file.number > 0)
                if alive and fresh is not None:
                    keys, columns = keys[fresh], row_files.selected(columns, fresh)
                if alive:
                    yield keys, columns


def runs(files: Iterable[ChainFile]) -> list[tuple[ChainFile, ...]]:
    """Files of a chain in runs that share no row: each run newest first.

    What was met is remembered within a run only, so that a long chain of a large table needs
    little memory: a run is as many hashes as the widest of its files.
    """
    found: list[list[ChainFile]] = []
    for together in _by_tables(files):
        stop = 0
        for one in sorted(together, key=lambda each: (each.saved.start, each.saved.path)):
            if one.saved.start >= stop:
                found.append([])
            stop = max(stop, one.saved.stop)
            found[-1].append(one)
    return [
        tuple(sorted(run, key=lambda one: (-one.number, one.saved.start, one.saved.path)))
        for run in found
    ]


class Newer:
    """Ids of one table that newer links of a chain had, alive or deleted."""

    def __init__(self) -> None:
        self._known_U = torch.empty(0, dtype=torch.int64, device="cpu")  # sorted
        self._link: int | None = None
        self._parts: list[Tensor] = []

    def unseen(self, link: int, ids_R: Tensor, *, remember: bool) -> Tensor | None:
        """bool [R]: ids that no newer link had; None: all of them. Links come newest first.

        remember: these ids, which are copied, for the links to come.
        """
        if link != self._link:
            if self._parts:
                self._known_U = torch.cat([self._known_U, *self._parts]).sort().values
            self._link, self._parts = link, []
        if remember:
            self._parts.append(ids_R.clone())
        if not self._known_U.numel():
            return None
        at_R = torch.searchsorted(self._known_U, ids_R).clamp_(max=self._known_U.numel() - 1)
        fresh_R = self._known_U[at_R] != ids_R
        return None if bool(fresh_R.all()) else fresh_R


def _by_tables(files: Iterable[ChainFile]) -> list[list[ChainFile]]:
    """Files apart by table; tables that share a file stay together."""
    groups: list[tuple[set[str], list[ChainFile]]] = []
    for one in files:
        tables, members = set(one.saved.tables), [one]
        apart = []
        for names, others in groups:
            if names & tables:
                tables, members = tables | names, others + members
            else:
                apart.append((names, others))
        groups = [*apart, (tables, members)]
    return [members for _, members in groups]


def _form(table: SavedTable) -> str:
    """What rows of one table must have in common to be merged."""
    segments = (f"{s.name}[{s.dim}+{s.state_width} {s.optimizer}]" for s in table.segments)
    return f"{table.dtype} {', '.join(segments)}, hashed as {table.hash_name!r}"


def _copied(buffer: pa.Buffer, dtype: torch.dtype, first: int, count: int) -> Tensor:
    size = dtype.itemsize
    memory = np.frombuffer(buffer, dtype=np.uint8, count=count * size, offset=first * size)
    return torch.from_numpy(memory.copy()).view(dtype)
