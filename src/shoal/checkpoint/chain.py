"""Rows of a chain of checkpoints: the order of its files, whole tables, ranges of hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.manifest import FileKind, Manifest, SavedFile, SavedTable
from shoal.checkpoint.row_files import HASHES, check_streaming, damaged, parsing, table_of
from shoal.checkpoint.row_layout import ROW_FIELDS, IdLayout, RowLayout
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import folder_name
from shoal.errors import CheckpointError
from shoal.placement import hash_ids, sort_key
from shoal.table.values import RowChunk

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ChainFile:
    """A file of rows or of deletions; `link` counts checkpoints of the chain, the full one is 0."""

    link: int
    file: SavedFile


def windows(
    chain: Sequence[Manifest], wanted: Callable[[SavedFile], bool]
) -> list[tuple[ChainFile, ...]]:
    """Files of rows and deletions in runs that share no row: each run newest first.

    What was met is remembered within a run only, so that a long chain of a large table needs
    little memory: a run is as many hashes as the widest of its files.

    Args:
        chain: the full checkpoint first.
        wanted: whether a file is read at all.
    """
    files = [
        ChainFile(link, file)
        for link, manifest in enumerate(chain)
        for file in manifest.files
        if file.kind in ("rows", "deleted") and wanted(file)
    ]
    found: list[tuple[ChainFile, ...]] = []
    for together in _by_tables(files):
        run: list[ChainFile] = []
        stop = 0
        for one in sorted(together, key=lambda each: (each.file.start, each.file.path)):
            if run and one.file.start >= stop:
                found.append(_newest_first(run))
                run = []
            stop = max(stop, one.file.stop) if run else one.file.stop
            run.append(one)
        if run:
            found.append(_newest_first(run))
    return found


class Newer:
    """Ids of one table that newer checkpoints of a run had, alive or deleted."""

    def __init__(self) -> None:
        self._known_U = torch.empty(0, dtype=torch.int64, device="cpu")  # sorted
        self._link: int | None = None
        self._parts: list[Tensor] = []

    def unseen(self, link: int, ids_R: Tensor) -> Tensor:
        """bool [R]: ids that no newer link had. Links come newest first."""
        if link != self._link:
            if self._parts:
                self._known_U = torch.cat([self._known_U, *self._parts]).sort().values
            self._link, self._parts = link, []
        if not self._known_U.numel():
            return torch.ones_like(ids_R, dtype=torch.bool)
        at_R = torch.searchsorted(self._known_U, ids_R).clamp_(max=self._known_U.numel() - 1)
        return self._known_U[at_R] != ids_R

    def add(self, ids_R: Tensor) -> None:
        """Remember ids of the link that `unseen` was last asked about; they are copied."""
        self._parts.append(ids_R.clone())


def _newest_first(run: Iterable[ChainFile]) -> tuple[ChainFile, ...]:
    return tuple(sorted(run, key=lambda one: (-one.link, one.file.start, one.file.path)))


def _by_tables(files: Iterable[ChainFile]) -> list[list[ChainFile]]:
    """Files apart by table; tables that share a file stay together."""
    groups: list[tuple[set[str], list[ChainFile]]] = []
    for one in files:
        tables, members = set(one.file.tables), [one]
        apart = []
        for names, others in groups:
            if names & tables:
                tables, members = tables | names, others + members
            else:
                apart.append((names, others))
        groups = [*apart, (tables, members)]
    return [members for _, members in groups]


_OPEN = 32  # readers


def bounds(keys: Tensor, start: int, stop: int) -> tuple[int, int]:
    """Where the hashes [start, stop) lie in ascending sort keys."""
    first = int(torch.searchsorted(keys, start - (1 << 63))) if start else 0
    last = len(keys)
    if stop < HASHES:
        last = int(torch.searchsorted(keys, stop - (1 << 63)))
    return first, last


@dataclass(frozen=True, slots=True)
class _Batch:
    """Table, first and last sort key of a record batch."""

    number: int
    table: int
    first: int
    last: int


class OpenFiles:
    """Readers of files that were read last; opening one costs more than reading a batch."""

    def __init__(self) -> None:
        self._readers: OrderedDict[object, tuple[Any, Any]] = OrderedDict()

    def reader(self, key: object, opened: Callable[[], tuple[Any, Any]]) -> Any:
        """The reader of that key; `opened` makes it, with the file to close after it."""
        if key not in self._readers:
            self._readers[key] = opened()
            while len(self._readers) > _OPEN:
                self._readers.popitem(last=False)[1][1].close()
        self._readers.move_to_end(key)
        return self._readers[key][0]


class RangedFile:
    """A file of rows (`layout` given) or of ids.

    Its checksum is compared before it is parsed for the first time.

    Args:
        hash_names: of its tables, in the order of `saved.tables`.
        opened: where it stays open between two reads.
    """

    def __init__(
        self,
        storage: Storage,
        saved: SavedFile,
        hash_names: Sequence[str],
        layout: RowLayout | None,
        opened: OpenFiles,
    ) -> None:
        self.saved = saved
        self._opened_files = opened
        self._storage = storage
        self._hash_names = tuple(hash_names)
        self._layout = layout
        self._named = layout is None or len(saved.tables) > 1
        self._index: list[_Batch] | None = None
        ids = IdLayout(counted=saved.kind == "sights")
        self._schema = layout.schema(self._named) if layout else ids.schema()

    def ids(self, table: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Ids and ascending sort keys of the hashes [start, stop) of a table of the file."""
        with self._parsing():
            parts = [self._ids_of(batch) for batch in self._read(table, start, stop, ids_only=True)]
        ids = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
        keys = sort_key(hash_ids(self._hash_names[table], ids))
        if not bool((keys[1:] > keys[:-1]).all()):
            raise damaged(self._storage, self.saved.path, "rows out of order", "rows by hash")
        first, last = bounds(keys, start, stop)
        return ids[first:last], keys[first:last]

    def rows(self, table: int, start: int, stop: int) -> Iterator[RowChunk]:
        """Rows of the hashes [start, stop) of a table of the file, batch after batch."""
        layout, key = self._layout, self.saved.tables[table]
        assert layout is not None, "a file of ids has no rows"
        for batch in self._read(table, start, stop, ids_only=False):
            with self._parsing():
                chunk = layout.to_chunk(batch, key, _copied)
            keys = sort_key(hash_ids(self._hash_names[table], chunk.ids))
            first, last = bounds(keys, start, stop)
            if (first, last) != (0, len(keys)):
                parts = {name: getattr(chunk, name)[first:last] for name in ROW_FIELDS}
                chunk = RowChunk(table=key, **parts)
            yield chunk

    def _read(
        self, table: int, start: int, stop: int, *, ids_only: bool
    ) -> Iterator[pa.RecordBatch]:
        if self._index is None:
            check_streaming(self._storage, self.saved)
            with self._parsing():
                self._index = list(self._indexed())
        low, high = start - (1 << 63), stop - 1 - (1 << 63)
        wanted = [
            one.number
            for one in self._index
            if one.table == table and one.first <= high and one.last >= low
        ]
        for number in wanted:
            with self._parsing():
                batch = self._reader(ids_only=ids_only).get_batch(number)
                batch.validate()
            yield batch

    def _indexed(self) -> Iterator[_Batch]:
        rows = 0
        self._check_schema()
        reader = self._reader(ids_only=True)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            batch.validate()
            rows += batch.num_rows
            if batch.num_rows:
                table = table_of(self._storage, self.saved, batch) if self._named else 0
                ends = self._ids_of(batch)[[0, -1]]
                keys = sort_key(hash_ids(self._hash_names[table], ends)).tolist()
                yield _Batch(number, table, keys[0], keys[1])
        if rows != self.saved.rows:
            got = f"{rows} rows"
            raise damaged(self._storage, self.saved.path, got, f"{self.saved.rows} rows")

    def _reader(self, *, ids_only: bool) -> Any:
        def opened() -> tuple[Any, Any]:
            import pyarrow as pa

            options = None
            if ids_only:
                names = enumerate(self._schema.names)
                columns = [k for k, name in names if name in ("table", "id")]
                options = pa.ipc.IpcReadOptions(included_fields=columns)
            file = self._storage.open_arrow(self.saved.path)
            return pa.ipc.open_file(file, options=options), file

        return self._opened_files.reader((self, ids_only), opened)

    def _check_schema(self) -> None:
        schema = self._reader(ids_only=False).schema
        if not schema.equals(self._schema):
            got, wanted = (" ".join(str(one).split()) for one in (schema, self._schema))
            raise damaged(self._storage, self.saved.path, got, wanted)

    def _ids_of(self, batch: pa.RecordBatch) -> Tensor:
        return torch.from_numpy(batch.column("id").to_numpy().copy())

    def _parsing(self) -> AbstractContextManager[None]:
        return parsing(self._storage, self.saved.path, "an Arrow IPC file")


def concatenated(layout: RowLayout, table: str, chunks: Sequence[RowChunk]) -> RowChunk:
    """Rows of several chunks in one."""
    if len(chunks) == 1:
        return chunks[0]
    if not chunks:
        return layout.empty(0, table)
    parts = {name: torch.cat([getattr(one, name) for one in chunks]) for name in ROW_FIELDS}
    return RowChunk(table=table, **parts)


def _copied(buffer: pa.Buffer, dtype: torch.dtype, first: int, count: int) -> Tensor:
    size = dtype.itemsize
    memory = np.frombuffer(buffer, dtype=np.uint8, count=count * size, offset=first * size)
    return torch.from_numpy(memory.copy()).view(dtype)


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
                f"rows of table {table.key!r} in {self._where}",
                got=_form(own),
                allowed=f"{_form(table)}, as in the newest link of its chain",
                remedy="After a change of a table, deltas start from a new full checkpoint.",
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
