"""Whether checkpoints are what they were when they were saved, and whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shoal.checkpoint import job_state
from shoal.checkpoint.claiming import WRITER
from shoal.checkpoint.dense_files import DenseReader
from shoal.checkpoint.manifest import MANIFEST, Manifest, SavedFile
from shoal.checkpoint.row_files import ReadBuffer, check_streaming, read_ids, read_rows
from shoal.checkpoint.row_layout import RowLayout
from shoal.checkpoint.row_sources import ChainRows
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore, locate
from shoal.errors import CheckpointError
from shoal.placement import hash_ids, sort_key

__all__ = ["Problem", "Report", "verify"]


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
        url: a checkpoint's folder, or that of a store: its newest checkpoint.
        chain: of a delta, look at all it is made of.
        rows: look into row files and files of ids; False: sizes and checksums only.

    Raises:
        CheckpointError: there is no checkpoint at `url`.
    """
    store, name = locate(url)
    problems: list[Problem] = []
    links = _links(store, name, chain, problems)
    looked, unlisted = _Looked(), []
    buffer = ReadBuffer()
    for folder, manifest in links:
        storage = store.folder(folder)
        wrong = _look(storage, manifest, rows, buffer, looked)
        problems.extend(Problem(folder, *why) for why in wrong)
        named = {file.path for file in manifest.files} | {MANIFEST, WRITER}
        unlisted += [f"{folder}/{path}" for path in storage.files() if path not in named]
    return Report(
        url=store.folder(name).url,
        checkpoints=tuple(folder for folder, _ in links) or (name,),
        files=looked.files,
        bytes=looked.bytes,
        rows=looked.rows,
        problems=tuple(problems),
        unlisted=tuple(unlisted),
    )


@dataclass(slots=True)
class _Looked:
    files: int = 0
    bytes: int = 0
    rows: int = 0


def _links(
    store: CheckpointStore, name: str, chain: bool, problems: list[Problem]
) -> list[tuple[str, Manifest]]:
    """Folders and manifests, the full one first; those that cannot be read are problems."""
    links: list[tuple[str, Manifest]] = []
    folder: str | None = name
    while folder is not None:
        try:
            manifest = store.manifest(folder)
        except CheckpointError as error:
            problems.append(Problem(folder, MANIFEST, str(error)))
            break
        links.insert(0, (folder, manifest))
        folder = manifest.parent.folder if chain and manifest.parent else None
        if len(links) > 1 and folder in {one for one, _ in links}:
            break  # a circle, which the chain below tells of
    if chain and not problems:
        try:
            ChainRows(store.storage, store.chain(name), name)
        except CheckpointError as error:
            problems.append(Problem(name, MANIFEST, str(error)))
    return links


def _look(
    storage: Storage, manifest: Manifest, rows: bool, buffer: ReadBuffer, looked: _Looked
) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it) of one checkpoint."""
    found: dict[str, Counter[str]] = {"rows": Counter(), "deleted": Counter()}
    sound = True
    for file in manifest.files:
        ordered = rows and file.kind in ("rows", "deleted", "sights")
        try:
            if ordered:
                own = found.get(file.kind, Counter())
                for why in _look_inside(storage, file, manifest, buffer, own):
                    sound = False
                    yield file.path, why
                looked.rows += file.rows
            else:
                check_streaming(storage, file)
        except CheckpointError as error:
            sound = False
            yield file.path, str(error)
        looked.files += 1
        looked.bytes += file.bytes
    yield from _overlaps(manifest)
    if rows and sound:
        yield from _look_at_values(storage, manifest)
    for table in manifest.tables if rows and sound else ():
        for kind, wanted in (("rows", table.rows), ("deleted", table.deleted)):
            if (got := found[kind][table.key]) != wanted:
                yield MANIFEST, f"{wanted} {kind} of table {table.key!r}, but {got} in its files"


def _look_at_values(storage: Storage, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What is dense, and the state of the job, read as a load would."""

    def dense() -> None:
        reader = DenseReader(storage)
        for name in reader.names():
            reader.value(name)

    paths = {file.kind: file.path for file in manifest.files}
    if "dense" in paths:
        yield from _told(paths["dense"], dense)
    if "state" in paths:
        yield from _told(paths["state"], lambda: job_state.read(storage, manifest))


def _told(path: str, read: Callable[[], object]) -> Iterator[tuple[str, str]]:
    try:
        read()
    except CheckpointError as error:
        yield path, str(error)


def _look_inside(
    storage: Storage,
    file: SavedFile,
    manifest: Manifest,
    buffer: ReadBuffer,
    found: Counter[str],
) -> Iterator[str]:
    names = {table.key: table.hash_name for table in manifest.tables}
    last_table, last_key = -1, 0
    low, high = file.start - (1 << 63), file.stop - 1 - (1 << 63)
    for table, ids_U in _ids(storage, file, manifest, buffer):
        key = file.tables[table]
        keys = sort_key(hash_ids(names[key], ids_U))
        first, last = int(keys[0]), int(keys[-1])
        follows = last_key < first if table == last_table else table > last_table
        if not follows or not bool((keys[1:] > keys[:-1]).all()):
            yield f"rows of table {key!r} are not in the order of their hashes"
            return
        if first < low or last > high:
            yield f"rows of table {key!r} outside the file's hashes [{file.start}, {file.stop})"
            return
        found[key] += len(ids_U)
        last_table, last_key = table, last


def _ids(
    storage: Storage, file: SavedFile, manifest: Manifest, buffer: ReadBuffer
) -> Iterator[tuple[int, Tensor]]:
    if file.kind == "rows":
        layout = next(RowLayout.of(table) for table in manifest.tables if table.key in file.tables)
        for table, chunk in read_rows(storage, file, layout, buffer, epoch=manifest.epoch):
            yield table, chunk.ids
    else:
        for table, ids_U, _ in read_ids(storage, file, buffer):
            yield table, ids_U


def _overlaps(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Files of one kind and table whose ranges meet, so that a row could be there twice."""
    stops: dict[tuple[str, str], tuple[int, str]] = {}
    ordered = [file for file in manifest.files if file.kind in ("rows", "deleted", "sights")]
    for file in sorted(ordered, key=lambda file: file.start):
        for key in file.tables:
            stop, other = stops.get((file.kind, key), (0, ""))
            if file.start < stop:
                yield file.path, f"its hashes meet those of {other} of table {key!r}"
            stops[file.kind, key] = (max(stop, file.stop), file.path)
