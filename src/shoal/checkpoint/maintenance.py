"""What is done with checkpoints that lie there: verify, compare, compact."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint import job_state
from shoal.checkpoint.chain import Chain, Link
from shoal.checkpoint.dense import DenseReader
from shoal.checkpoint.manifest import MANIFEST, Manifest, SavedFile, commit
from shoal.checkpoint.row_files import (
    ReadBuffer,
    RowLayout,
    check_streaming,
    checked_pieces,
    damaged,
    selected,
)
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import WRITER, CheckpointStore, folder_name, locate
from shoal.checkpoint.writing_plan import ascends, bounds, write_tables
from shoal.errors import CheckpointError
from shoal.placement import hash_ids, sort_key


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a file: the checkpoint's folder, the file's path in it, and why."""

    checkpoint: str
    file: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found.

    Args:
        url: of the checkpoint.
        checkpoints: folders that were looked at, the full one first.
        files, bytes: that were read; `manifest.json` not counted.
        rows: rows and ids whose order was checked.
        problems: empty where all is well.
        unlisted: files in the folders that no manifest names, as "folder/path"; harmless.
    """

    url: str
    checkpoints: tuple[str, ...]
    files: int
    bytes: int
    rows: int
    problems: tuple[Problem, ...]
    unlisted: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No problems."""
        return not self.problems


def verify(url: str | Path, *, chain: bool = True, rows: bool = True) -> Report:
    """Read every file of a checkpoint and compare it with what was saved.

    Sizes and checksums first; then, of files that are well, that rows and ids are ordered by
    hash, lie in their file's range, and add up to what the manifest counts.

    Args:
        url: a checkpoint's folder, that of a store, or a run's folder: its newest checkpoint.
        chain: of a delta, look at all it is made of.
        rows: look into row files and files of ids; False: sizes and checksums only.

    Raises:
        CheckpointError: there is no checkpoint at `url`.
    """
    store, name = locate(url)
    problems: list[Problem] = []
    links = _links(store, name, chain, problems)
    unlisted = []
    buffer = ReadBuffer()
    for link in links:
        folder = link.storage.name
        problems.extend(Problem(folder, *why) for why in _look(link, rows, buffer))
        named = {file.path for file in link.manifest.files} | {MANIFEST, WRITER}
        unlisted += [f"{folder}/{path}" for path in link.storage.files() if path not in named]
    files = [file for link in links for file in link.manifest.files]
    return Report(
        url=store.folder(name).url,
        checkpoints=tuple(link.storage.name for link in links) or (name,),
        files=len(files),
        bytes=sum(file.bytes for file in files),
        rows=sum(file.rows for file in files if file.kind in _HASHED) if rows else 0,
        problems=tuple(problems),
        unlisted=tuple(unlisted),
    )


def _links(store: CheckpointStore, name: str, chain: bool, problems: list[Problem]) -> list[Link]:
    """The full one first; those that cannot be read are problems."""
    links: list[Link] = []
    folder: str | None = name
    while folder is not None:
        try:
            manifest = store.manifest(folder)
        except CheckpointError as error:
            problems.append(Problem(folder, MANIFEST, str(error)))
            break
        links.insert(0, Link(store.folder(folder), manifest))
        folder = manifest.parent.folder if chain and manifest.parent else None
        if len(links) > 1 and folder in {link.storage.name for link in links}:
            break  # a circle, which the chain below refuses
    if chain and not problems:
        try:
            Chain(store, name)
        except CheckpointError as error:
            problems.append(Problem(name, MANIFEST, str(error)))
    return links


def _look(link: Link, rows: bool, buffer: ReadBuffer) -> list[tuple[str, str]]:
    """(file, what is wrong with it) of one checkpoint."""
    storage, manifest = link.storage, link.manifest
    wrong: list[tuple[str, str]] = []
    found: Counter[tuple[str, str]] = Counter()

    def tried(path: str, look: Callable[..., object], *arguments: object) -> None:
        try:
            look(*arguments)
        except CheckpointError as error:
            wrong.append((path, str(error)))

    def inside(file: SavedFile) -> None:
        for key, count in _ordered(link, file, buffer):
            found[file.kind, key] += count

    for file in manifest.files:
        if rows and file.kind in _HASHED:
            tried(file.path, inside, file)
        else:
            tried(file.path, check_streaming, storage, file)
    sound = rows and not wrong
    wrong += _overlaps(manifest)
    if not sound:
        return wrong
    # What is dense, and the state of the job, read as a load would.
    paths = {file.kind: file.path for file in manifest.files}
    if "dense" in paths:
        tried(paths["dense"], lambda: DenseReader(storage).every())
    if "state" in paths:
        tried(paths["state"], job_state.read, storage, manifest)
    for table in manifest.tables:
        for kind, wanted in (("rows", table.rows), ("deleted", table.deleted)):
            if (got := found[kind, table.key]) != wanted:
                text = f"{wanted} {kind} of table {table.key!r}, but {got} in its files"
                wrong.append((MANIFEST, text))
    return wrong


def _ordered(link: Link, file: SavedFile, buffer: ReadBuffer) -> Iterator[tuple[str, int]]:
    """Tables of a file and their rows, batch after batch, which are by hash in its range."""
    storage, manifest = link.storage, link.manifest
    names = {table.key: table.hash_name for table in manifest.tables}
    last_table, last_key = -1, 0
    for table, columns in link.read(file, buffer):
        key = file.tables[table]
        keys = sort_key(hash_ids(names[key], columns[0]))
        follows = last_key < int(keys[0]) if table == last_table else table > last_table
        got, wanted = f"rows of table {key!r}", "rows by hash"
        if not follows or not ascends(keys):
            got = f"{got} that are not in the order of their hashes"
            raise damaged(storage, file.path, got, wanted)
        if bounds(keys, file.start, file.stop) != (0, len(keys)):
            got = f"{got} outside the file's hashes [{file.start}, {file.stop})"
            raise damaged(storage, file.path, got, wanted)
        yield key, len(keys)
        last_table, last_key = table, int(keys[-1])


def _overlaps(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Files of one kind and table whose ranges meet, so that a row could be there twice."""
    stops: dict[tuple[str, str], tuple[int, str]] = {}
    ordered = [file for file in manifest.files if file.kind in _HASHED]
    for file in sorted(ordered, key=lambda file: file.start):
        for key in file.tables:
            stop, other = stops.get((file.kind, key), (0, ""))
            if file.start < stop:
                yield file.path, f"its hashes meet those of {other} of table {key!r}"
            stops[file.kind, key] = (max(stop, file.stop), file.path)


_PIECE_BYTES = 8 << 20
_HASHED = ("rows", "deleted", "admission")  # kinds of files that are in order of hash


@dataclass(frozen=True, slots=True)
class TableDiff:
    """Rows of one table in two checkpoints.

    Args:
        key: "collection/table".
        only_a, only_b: rows that the other one lacks.
        equal: rows with the same weights, state, last-seen time and count.
        changed: rows whose weights or state differ.
        touched: rows that differ in their last-seen time or count only.
        weights_difference, state_difference: the largest |a - b| of changed rows; infinite where
            one of the two is not a number.
    """

    key: str
    only_a: int
    only_b: int
    equal: int
    changed: int
    touched: int
    weights_difference: float
    state_difference: float

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.changed or self.touched)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDiffs:
    """What `diff` found.

    Args:
        tables: that are in both, in the order of a.
        only_a, only_b: keys of tables that the other one lacks.
        reshaped: keys of tables whose rows have another layout or hash in b; not compared.
    """

    tables: tuple[TableDiff, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    reshaped: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether the tables of both hold the same rows."""
        others = self.only_a or self.only_b or self.reshaped
        return not others and all(table.same for table in self.tables)


def diff(a: str | Path, b: str | Path, *, tables: Collection[str] | None = None) -> TableDiffs:
    """Compare the rows of two checkpoints, deltas with their whole chain.

    Row versions, which count snapshot points, are not compared. Rows stream: memory does not grow
    with them.

    Args:
        a, b: a checkpoint's folder, that of a store, or a run's folder: its newest checkpoint.
        tables: keys of the tables to look at; None: all.

    Raises:
        CheckpointError: no checkpoint there, or a file of it is missing or damaged.
    """
    rows_a, rows_b = (Chain(*locate(url)) for url in (a, b))
    keys_a, keys_b = (
        [table.key for table in rows.tables if tables is None or table.key in tables]
        for rows in (rows_a, rows_b)
    )
    compared, reshaped = [], []
    for key in keys_a:
        if key not in keys_b:
            continue
        one, other = rows_a.tables[rows_a.index(key)], rows_b.tables[rows_b.index(key)]
        if (RowLayout.of(one), one.hash_name) == (RowLayout.of(other), other.hash_name):
            compared.append(_compared(key, rows_a, rows_b))
        else:
            reshaped.append(key)
    return TableDiffs(
        tables=tuple(compared),
        only_a=tuple(key for key in keys_a if key not in keys_b),
        only_b=tuple(key for key in keys_b if key not in keys_a),
        reshaped=tuple(reshaped),
    )


def _compared(key: str, rows_a: Chain, rows_b: Chain) -> TableDiff:
    a, b = rows_a.index(key), rows_b.index(key)
    table = rows_a.tables[a]
    piece = max(1, _PIECE_BYTES // table.row_bytes)
    ranges = max(list(rows_a.ranges(a, piece)), list(rows_b.ranges(b, piece)), key=len)
    counts = [0] * 5
    largest = [0.0, 0.0]
    for start, stop in ranges:
        one, other = rows_a.read(a, start, stop), rows_b.read(b, start, stop)
        in_a, in_b = torch.isin(one[0], other[0]), torch.isin(other[0], one[0])
        one, other = selected(one, in_a), selected(other, in_b)  # each in order of hash
        far = [_largest(one[k], other[k]) for k in (4, 5)]
        changed_R = (far[0] > 0) | (far[1] > 0)
        touched_R = ~changed_R & ((one[2] != other[2]) | (one[3] != other[3]))
        found = (~in_a, ~in_b, ~changed_R & ~touched_R, changed_R, touched_R)
        counts = [count + int(part.sum()) for count, part in zip(counts, found, strict=True)]
        if len(one[0]):
            largest = [
                max(was, float(now_R.max())) for was, now_R in zip(largest, far, strict=True)
            ]
    return TableDiff(key, *counts, *largest)


def apart(a: Tensor, b: Tensor) -> Tensor:
    """float64: |a - b|; 0 where they are alike, also as NaN; infinite where one is not a number."""
    a, b = a.double(), b.double()
    difference = (a - b).abs().nan_to_num_(nan=float("inf"))
    difference[(a == b) | (a.isnan() & b.isnan())] = 0.0
    return difference


def _largest(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    """float64 [R]: of each row."""
    if not a_RD.shape[1]:
        return torch.zeros(len(a_RD), dtype=torch.float64, device="cpu")
    return apart(a_RD, b_RD).amax(1)


def compact(store: CheckpointStore, name: str) -> Manifest:
    """Write what a delta and its chain stand for as a full checkpoint of the same step.

    Row files have the bytes that a full save at that step would have given them; dense weights,
    state and admission counters are the delta's. The manifest is written last: until then
    nothing but leftovers for `CheckpointStore.clean` are there. The chain stays.

    Args:
        name: folder of the delta.

    Raises:
        CheckpointError: a full checkpoint, one of that step exists already, a link of the chain
            is missing or damaged, or no space; nothing is left behind then.
    """
    last = store.manifest(name)
    target = folder_name(last.step, "full")
    taken = any(entry.name == target for entry in store.list())
    if last.kind == "full" or taken:
        raise CheckpointError(
            f"checkpoint {name} to compact in {store.url}",
            got="a full one" if last.kind == "full" else f"a delta, with {target} in its store",
            allowed="a delta without a full checkpoint of its step",
            remedy="Nothing is left to do: load the full one.",
        )
    chain = Chain(store, name)
    folder, held = store.folder(target), store.claim(target)
    try:
        manifest = _write_full(folder, chain)
        commit(folder, manifest)
    except BaseException:
        folder.remove_tree()
        held.release()
        raise
    held.release(keep=False)
    return manifest


def _write_full(folder: Storage, chain: Chain) -> Manifest:
    """All files of the full checkpoint, and its manifest yet to be committed."""
    folder.make()
    last = chain.last.manifest
    tables, files = write_tables(folder, chain.tables, chain)
    copied = ("admission", "sketch", "dense", "state")
    files += [_copied(chain.last.storage, folder, one) for one in last.files if one.kind in copied]
    return replace(
        last,
        id=secrets.token_hex(16),
        kind="full",
        parent=None,
        created_s=int(time.time()),
        tables=tuple(tables),
        files=tuple(files),
    )


def _copied(source: Storage, folder: Storage, saved: SavedFile) -> SavedFile:
    """The same bytes in another folder, compared with the manifest on their way."""
    with folder.create(saved.path) as new:
        for piece in checked_pieces(source, saved):
            new.write(piece)
    return saved
