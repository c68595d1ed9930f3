"""Rows from other systems, sorted by hash outside of memory, written as a full checkpoint."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.manifest import SCHEMA, Manifest, SavedFile, SavedTable, commit
from shoal.checkpoint.row_files import Columns, RowLayout, sketch_path, write_whole
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.table_match import saved_table
from shoal.checkpoint.writing_plan import TableRows, bits_for, bounds, histogram, write_tables
from shoal.errors import CheckpointError, DataError
from shoal.placement import hash_ids, sort_key
from shoal.table.rows import REAL_DTYPES, WEIGHT_DTYPES, real_dtype
from shoal.table.shard import HASHES, LAST_VERSION
from shoal.table.spec import TableSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """Some rows as a foreign file has them, in any order; what it does not have is None.

    ids int64 [N]; weights floating [N, D]; state floating [N, S]; versions, last_seen_s and counts
    int64 [N].
    """

    ids: Tensor
    weights: Tensor
    state: Tensor | None = None
    versions: Tensor | None = None
    last_seen_s: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A table that a source has: D columns. `saved` and `seed` where it says what they were."""

    name: str
    dim: int
    saved: SavedTable | None = None
    seed: int | None = None
    has_state: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ForeignSource:
    """An opened foreign file or folder.

    Args:
        tables: that it has.
        entries: (names) -> the rows of the tables of these names, a bounded number at a time. It
            raises a DataError where the file is damaged, or not what it seemed.
    """

    tables: tuple[Offered, ...]
    entries: Callable[[frozenset[str]], Iterator[tuple[str, Entries]]]


def source_of(tables: Sequence[tuple[Offered, Callable[[], Iterator[Entries]]]]) -> ForeignSource:
    """A source of tables that are each read on their own."""

    def entries(wanted: frozenset[str]) -> Iterator[tuple[str, Entries]]:
        for offered, read in tables:
            if offered.name in wanted:
                yield from ((offered.name, rows) for rows in read())

    return ForeignSource(tuple(offered for offered, _ in tables), entries)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableForm:
    """What rows become. `initial_state` [S] is of rows that come without; None: they may not."""

    table: SavedTable
    initial_state: Tensor | None


def form_of(collection: str, spec: TableSpec) -> TableForm:
    """The form of a table's rows; their state, where they have none, is the rules' initial one."""
    dtype = real_dtype(spec)
    parts = [segment.optimizer.init_state(segment.dim, dtype) for segment in spec.segments]
    return TableForm(
        table=saved_table(collection, spec, rows=0, deleted=0),
        initial_state=torch.cat([part.reshape(-1) for part in parts]),
    )


def need_file(path: Path, allowed: str) -> None:
    """Check that a path is there.

    Raises:
        DataError: it is not.
    """
    if not path.exists():
        raise malformed(path, "nothing", allowed, "Check the path.")


def malformed(where: object, got: object, allowed: object, remedy: str) -> DataError:
    """Build the error of a foreign file that cannot be read."""
    return DataError(f"rows of {where}", got=got, allowed=allowed, remedy=remedy)


_RUN_BYTES = 32 << 20
_PIECES = 256  # of the hash range, for what looks at all hashes
_LARGEST = (1 << 32) - 1
_Array = Any  # a NumPy array of records


class CollectedRows:
    """A row source of whole tables: add rows, `finish`, then read.

    Args:
        forms: the tables.
        last_seen_s: of rows that do not say when they were seen.
        run_bytes: rows in memory before some go to a file; None: 32 MiB.
    """

    def __init__(
        self, forms: Sequence[TableForm], *, last_seen_s: int = 0, run_bytes: int | None = None
    ) -> None:
        self._forms = tuple(forms)
        self._last_seen_s = last_seen_s
        self._run_bytes = _RUN_BYTES if run_bytes is None else run_bytes
        self._dtypes = [_record(form) for form in self._forms]
        self._waiting: list[list[_Array]] = [[] for _ in self._forms]
        self._bytes = [0] * len(self._forms)
        self._latest = [1] * len(self._forms)
        # Of each run its sort keys, and its rows or the file that they are in.
        self._runs: list[list[tuple[_Array, _Array | Path]]] = [[] for _ in self._forms]
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-import-")

    def __enter__(self) -> CollectedRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the rows and remove the runs."""
        self._runs = [[] for _ in self._forms]
        self._folder.cleanup()

    def add(self, table: int, entries: Entries) -> None:
        """Take some rows of a table.

        Raises:
            DataError: other columns or state than the table has, state missing, or versions that no
            table has.
        """
        form, dtype = self._forms[table], self._dtypes[table]
        self._check(form, entries)
        rows = np.empty(entries.ids.numel(), dtype=dtype)
        rows["h"] = sort_key(hash_ids(form.table.hash_name, entries.ids)).numpy()
        rows["id"] = entries.ids.numpy()
        defaults = {"version": 1, "last_seen_s": self._last_seen_s, "count": 1}
        given = (entries.versions, entries.last_seen_s, entries.counts)
        for (name, default), values in zip(defaults.items(), given, strict=True):
            rows[name] = default if values is None else values.clamp(0, _LARGEST).numpy()
        self._latest[table] = max(self._latest[table], int(rows["version"].max(initial=1)))
        rows["weights"] = _stored(form.table, entries)
        if form.table.state_width:
            state = form.initial_state if entries.state is None else entries.state
            assert state is not None
            rows["state"] = state.to(REAL_DTYPES[form.table.dtype]).numpy()
        self._waiting[table].append(rows)
        self._bytes[table] += rows.nbytes
        if sum(self._bytes) > self._run_bytes:
            self._spill(self._bytes.index(max(self._bytes)))

    def finish(self) -> None:
        """End adding.

        Raises:
            DataError: an id came twice.
        """
        for table, waiting in enumerate(self._waiting):
            if waiting:
                rows = self._sorted(table)
                self._runs[table].append((rows["h"].copy(), rows))
        for table, form in enumerate(self._forms):
            self._check_distinct(table, form)

    def rows(self, table: int) -> int:
        """Rows of a table."""
        return sum(len(keys) for keys, _ in self._runs[table])

    def latest(self, table: int) -> int:
        """The largest version of a row, 1 or more."""
        return self._latest[table]

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top bits of their hash: int64 [2^bits]."""
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        for keys, _ in self._runs[table]:
            for piece in torch.split(torch.from_numpy(keys), 1 << 20):
                counts += histogram(piece, bits)
        return counts

    def read(self, table: int, start: int, stop: int) -> Columns:
        """Rows with start <= h < stop, ordered by h."""
        form = self._forms[table].table
        rows = self._merged(table, start, stop)
        words = (rows[name].astype(np.int64) for name in ("id", "version", "last_seen_s", "count"))
        weights = torch.from_numpy(rows["weights"].copy())
        state = torch.empty(len(rows), 0, dtype=REAL_DTYPES[form.dtype], device="cpu")
        return (
            *map(torch.from_numpy, words),
            weights.view(torch.bfloat16) if form.dtype == "bfloat16" else weights,
            torch.from_numpy(rows["state"].copy()) if form.state_width else state,
        )

    def _merged(self, table: int, start: int, stop: int) -> _Array:
        found = [np.empty(0, dtype=self._dtypes[table])]
        for keys, rows in self._runs[table]:
            low, high = bounds(torch.from_numpy(keys), start, stop)
            if low < high:
                found.append(self._of_run(table, rows, low, high))
        merged = np.concatenate(found)
        return merged[np.argsort(merged["h"], kind="stable")] if len(found) > 2 else merged

    def _of_run(self, table: int, rows: _Array | Path, low: int, high: int) -> _Array:
        if not isinstance(rows, Path):
            return rows[low:high]
        dtype = self._dtypes[table]
        return np.fromfile(rows, dtype=dtype, count=high - low, offset=low * dtype.itemsize)

    def _sorted(self, table: int) -> _Array:
        rows = np.concatenate(self._waiting[table])
        self._waiting[table], self._bytes[table] = [], 0
        return rows[np.argsort(rows["h"], kind="stable")]

    def _spill(self, table: int) -> None:
        rows = self._sorted(table)
        stem = Path(self._folder.name) / f"{table}-{len(self._runs[table])}"
        try:
            rows["h"].tofile(f"{stem}.keys")
            rows.tofile(f"{stem}.rows")
        except OSError as error:
            raise CheckpointError(
                f"rows on their way, in {self._folder.name}",
                got=error.strerror or error,
                allowed="room for the weights and state of all rows",
                remedy="Set TMPDIR to a folder with more room.",
            ) from error
        mapped = np.memmap(f"{stem}.keys", dtype=np.int64, mode="c")
        self._runs[table].append((mapped, Path(f"{stem}.rows")))

    def _check(self, form: TableForm, entries: Entries) -> None:
        table = form.table
        what = f"table {table.name!r} that come in"
        if entries.weights.shape[1] != table.dim:
            got = f"vectors of {entries.weights.shape[1]} columns"
            remedy = "Give the table the columns of the vectors."
            raise malformed(what, got, f"{table.dim}, as the table has", remedy)
        if entries.state is None and form.initial_state is None and table.state_width:
            remedy = "Name the optimizer whose initial state they take: --optimizer or --config."
            raise malformed(what, "no optimizer state", f"{table.state_width} floats", remedy)
        if entries.state is not None and entries.state.shape[1] != table.state_width:
            got = f"state of {entries.state.shape[1]} floats"
            raise malformed(what, got, table.state_width, "Leave the state out: --weights-only.")
        if entries.versions is not None and entries.versions.numel():
            low, high = (int(one) for one in entries.versions.aminmax())
            if low < 0 or high > LAST_VERSION:
                # Its tables could have no later version: no load would take the checkpoint.
                remedy = "Leave the column of versions out: rows begin with version 1."
                raise malformed(what, f"versions {low}..{high}", f"0..{LAST_VERSION}", remedy)

    def _check_distinct(self, table: int, form: TableForm) -> None:
        twice: list[int] = []
        count, width = 0, HASHES // _PIECES
        for piece in range(_PIECES):
            start, stop = piece * width, (piece + 1) * width
            runs = [
                keys[slice(*bounds(torch.from_numpy(keys), start, stop))]
                for keys, _ in self._runs[table]
            ]
            ordered = np.sort(np.concatenate(runs)) if runs else np.empty(0, dtype=np.int64)
            again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
            count += len(again)
            named = (key + (HASHES >> 1) for key in again[: 5 - len(twice)].tolist())
            twice.extend(int(self._merged(table, h, h + 1)["id"][0]) for h in named)
        if count:
            more = f" and {count - len(twice)} more" if count > len(twice) else ""
            raise malformed(
                f"table {form.table.name!r} that come in",
                f"ids {', '.join(map(str, twice))}{more} more than once",
                "each id once",
                "Keep one row for each id.",
            )


def _record(form: TableForm) -> np.dtype[Any]:
    weights = {"float32": "f4", "float16": "f2", "bfloat16": "i2", "float64": "f8"}
    table = form.table
    fields: list[tuple[Any, ...]] = [("h", "i8"), ("id", "i8"), ("version", "u4")]
    fields += [("last_seen_s", "u4"), ("count", "u4")]
    fields += [("weights", weights[table.dtype], (table.dim,))]
    if table.state_width:
        real = "f8" if table.dtype == "float64" else "f4"
        fields += [("state", real, (table.state_width,))]
    return np.dtype(fields)


def _stored(table: SavedTable, entries: Entries) -> Any:
    """Weights in the table's dtype; bfloat16 as the int16 of its bits."""
    stored = entries.weights.to(WEIGHT_DTYPES[table.dtype])
    lost = (entries.weights.isfinite() & ~stored.isfinite()).any(1)
    if lost.any():
        row = int(lost.nonzero()[0])
        raise malformed(
            f"table {table.name!r} that come in",
            f"a weight of {float(entries.weights[row].abs().max()):.4g} at id {entries.ids[row]}",
            f"numbers that {table.dtype} holds",
            "Choose a wider dtype.",
        )
    return (stored.view(torch.int16) if table.dtype == "bfloat16" else stored).numpy()


def receive(
    url: str,
    source: ForeignSource,
    forms: Mapping[str, TableForm],
    *,
    created_s: int,
    seed: int = 0,
    last_seen_s: int = 0,
    weights_only: bool = False,
) -> tuple[Manifest, str]:
    """Write tables of a source as the first checkpoint of a new store: a full one, of step 0.

    All rows are read and checked before the first is written. On their way they lie in files of
    the folder of temporary files.

    Args:
        url: the store's folder, new or empty.
        forms: name of a table in the source -> what its rows become.
        created_s: Unix time in seconds.
        seed: of initial values of rows to come.
        last_seen_s: of rows that do not say when they were seen.
        weights_only: leave out state that the source has.

    Returns:
        the manifest, and the checkpoint's URL.

    Raises:
        DataError: the source is damaged, has an id twice, or rows of another form.
        CheckpointError: the folder is not empty or cannot be written.
    """
    store = CheckpointStore(url)
    if store.storage.files() or store.storage.folders():
        raise CheckpointError(
            "folder of a new checkpoint",
            got=f"{store.url}, which is not empty",
            allowed="a new or empty folder",
            remedy="Choose another one.",
        )
    store.storage.make()
    order = {name: index for index, name in enumerate(forms)}
    folder = store.folder(store.name(0, "full"))
    with CollectedRows(tuple(forms.values()), last_seen_s=last_seen_s) as rows:
        for name, entries in source.entries(frozenset(forms)):
            taken = replace(entries, state=None) if weights_only else entries
            rows.add(order[name], taken)
        rows.finish()
        try:
            manifest = _write(
                folder, rows, [form.table for form in forms.values()], seed, created_s
            )
        except BaseException:
            folder.remove_tree()
            raise
    return manifest, folder.url


def _write(
    folder: Storage, rows: CollectedRows, tables: Sequence[SavedTable], seed: int, created_s: int
) -> Manifest:
    tables = [replace(table, rows=rows.rows(k), deleted=0) for k, table in enumerate(tables)]
    bits = bits_for(sum(table.rows for table in tables))
    counted = [
        TableRows(table.key, RowLayout.of(table), rows.histogram(k, bits))
        for k, table in enumerate(tables)
    ]
    files = [*write_tables(folder, counted, rows.read), *_sketches(folder, tables)]
    manifest = Manifest(
        schema=SCHEMA,
        id=secrets.token_hex(16),
        kind="full",
        step=0,
        position=0,
        version=max((rows.latest(k) for k in range(len(tables))), default=1),
        seed=seed,
        last_steps=dict.fromkeys((table.collection for table in tables), 0),
        world_size=1,
        created_s=created_s,
        packages={"torch": str(torch.__version__)},
        tables=tuple(tables),
        files=tuple(files),
    )
    commit(folder, manifest)
    return manifest


def _sketches(folder: Storage, tables: Sequence[SavedTable]) -> Iterator[SavedFile]:
    """Empty counters, which sketches need; exact ones need no file."""
    for table in tables:
        if table.admission and table.admission.startswith("sketch"):
            width, depth = table.admission.split()[1].split("x")
            path = sketch_path(table.collection, table.name)
            yield write_whole(
                folder, path, "sketch", bytes(4 * int(width) * int(depth)), [table.key]
            )
