"""Rows from other systems, sorted by hash outside of memory, written as a full checkpoint."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.manifest import SCHEMA, Manifest, SavedFile, SavedTable, commit
from shoal.checkpoint.row_files import Columns, selected, sketch_path, write_whole
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.table_match import saved_table
from shoal.checkpoint.writing_plan import bounds, histogram, write_tables
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


def source_of(tables: Iterable[tuple[Offered, Callable[[], Iterator[Entries]]]]) -> ForeignSource:
    """A source of tables that are each read on their own."""
    tables = tuple(tables)

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
        # Sort keys and columns of rows: as they came, and in sorted runs, in memory or in files.
        self._waiting: list[list[Columns]] = [[] for _ in self._forms]
        self._runs: list[list[Columns]] = [[] for _ in self._forms]
        self._bytes = [0] * len(self._forms)
        self._latest = [1] * len(self._forms)
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-import-")

    def __enter__(self) -> CollectedRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs = [[] for _ in self._forms]
        self._folder.cleanup()

    def add(self, table: int, entries: Entries) -> None:
        """Take some rows of a table.

        Raises:
            DataError: other columns or state than the table has, state missing, or versions that no
            table has.
        """
        form, ids = self._forms[table], entries.ids
        self._check(form, entries)
        state = form.initial_state if entries.state is None else entries.state
        state = torch.empty(0, device="cpu") if state is None else state
        versions, *others = (
            torch.full_like(ids, default) if given is None else given.clamp(0, _LARGEST)
            for given, default in (
                (entries.versions, 1),
                (entries.last_seen_s, self._last_seen_s),
                (entries.counts, 1),
            )
        )
        if len(ids):
            self._latest[table] = max(self._latest[table], int(versions.max()))
        rows = (
            sort_key(hash_ids(form.table.hash_name, ids)),
            *(ids, versions, *others),
            _stored(form.table, entries),
            state.to(REAL_DTYPES[form.table.dtype]).expand(len(ids), form.table.state_width),
        )
        self._waiting[table].append(rows)
        self._bytes[table] += sum(column.nbytes for column in rows)
        if sum(self._bytes) > self._run_bytes:
            self._spill(self._bytes.index(max(self._bytes)))

    def finish(self) -> None:
        """End adding.

        Raises:
            DataError: an id came twice.
        """
        for table, waiting in enumerate(self._waiting):
            if waiting:
                self._runs[table].append(self._sorted(table))
            if self._runs[table]:
                self._check_distinct(table)

    def most_rows(self, table: int) -> int:
        """Rows of a table."""
        return sum(len(run[0]) for run in self._runs[table])

    def latest(self, table: int) -> int:
        """The largest version of a row, 1 or more."""
        return self._latest[table]

    def histogram(self, table: int, bits: int) -> Tensor:
        """Rows by the top bits of their hash: int64 [2^bits]."""
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        for run in self._runs[table]:
            for keys in torch.split(run[0], 1 << 20):
                counts += histogram(keys, bits)
        return counts

    def read(self, table: int, start: int, stop: int) -> Columns:
        """Rows with start <= h < stop, ordered by h."""
        return self._merged(table, start, stop)[1:]

    def _merged(self, table: int, start: int, stop: int, wanted: slice = slice(None)) -> Columns:
        """Sort keys and columns, or those that are wanted, of a range."""
        parts = [
            selected(run[wanted], slice(*bounds(run[0], start, stop))) for run in self._runs[table]
        ]
        return parts[0] if len(parts) == 1 else _in_order(parts)

    def _sorted(self, table: int) -> Columns:
        waiting, self._waiting[table], self._bytes[table] = self._waiting[table], [], 0
        return _in_order(waiting)

    def _spill(self, table: int) -> None:
        path, rows = f"{self._folder.name}/{table}-{len(self._runs[table])}", self._sorted(table)
        try:
            with open(path, "wb") as file:
                torch.save(rows, file)
        except (OSError, RuntimeError) as error:  # torch's own, while it ends a file that is full
            cause = error if isinstance(error, OSError) else error.__context__
            got = (cause.strerror if isinstance(cause, OSError) else None) or error
            what = f"rows on their way, in {self._folder.name}"
            allowed = "room for the weights and state of all rows"
            remedy = "Set TMPDIR to a folder with more room."
            raise CheckpointError(what, got, allowed, remedy) from error
        self._runs[table].append(torch.load(path, weights_only=True, mmap=True))

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

    def _check_distinct(self, table: int) -> None:
        twice: list[int] = []
        count, width = 0, HASHES // _PIECES
        for start in range(0, HASHES, width):
            keys, ids = self._merged(table, start, start + width, slice(2))
            again = torch.unique_consecutive(ids[1:][keys[1:] == keys[:-1]])
            count += len(again)
            twice += again[: 5 - len(twice)].tolist()
        if count:
            more = f" and {count - len(twice)} more" if count > len(twice) else ""
            what = f"table {self._forms[table].table.name!r} that come in"
            got = f"ids {', '.join(map(str, twice))}{more} more than once"
            raise malformed(what, got, "each id once", "Keep one row for each id.")


def _in_order(parts: Sequence[Columns]) -> Columns:
    columns = tuple(map(torch.cat, zip(*parts, strict=True)))
    # By NumPy: threads of torch that sort wait for each other on a busy machine.
    return selected(columns, torch.from_numpy(columns[0].numpy().argsort(kind="stable")))


def _stored(table: SavedTable, entries: Entries) -> Tensor:
    """Weights in the table's dtype."""
    stored = entries.weights.to(WEIGHT_DTYPES[table.dtype])
    lost = (entries.weights.isfinite() & ~stored.isfinite()).any(1)
    if lost.any():
        row = int(lost.nonzero()[0])
        largest, what = entries.weights[row].abs().max(), f"table {table.name!r} that come in"
        got = f"a weight of {float(largest):.4g} at id {entries.ids[row]}"
        raise malformed(what, got, f"numbers that {table.dtype} holds", "Choose a wider dtype.")
    return stored


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
        what, got = "folder of a new checkpoint", f"{store.url}, which is not empty"
        raise CheckpointError(what, got, "a new or empty folder", "Choose another one.")
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
    tables, files = write_tables(folder, tables, rows)
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
        files=(*files, *_sketches(folder, tables)),
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
