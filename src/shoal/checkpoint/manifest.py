"""What a checkpoint holds, as values; `manifest.json` is their only other form."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError
from shoal.table.rows import REAL_DTYPES, WEIGHT_DTYPES

_STRICT = ConfigDict(extra="forbid", strict=True)
_Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # what a file name may have
_Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
_Hash = Annotated[int, Field(ge=0, le=1 << 64)]


class NotThat(ValueError):
    """A value that is not what its place asks for."""

    def __init__(self, where: str, got: object, allowed: str) -> None:
        super().__init__(f"{where} is {str(got)[:200]!r}, not {allowed}")


MANIFEST = "manifest.json"

SCHEMA = 3

Kind = Literal["full", "delta"]
FileKind = Literal["rows", "deleted", "admission", "sketch", "dense", "state"]
"""Of ids without a row "admission" has exact counts, "sketch" a table's sketch of them."""


@dataclass(frozen=True, slots=True)
class SavedSegment:
    """Columns of a saved table. `optimizer` is the rule's kind; `state_width` its floats a row."""

    __pydantic_config__ = _STRICT
    name: _Text
    dim: Annotated[int, Field(ge=0, le=1 << 20)]
    state_width: Annotated[int, Field(ge=0, le=1 << 22)]
    optimizer: _Text


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A whole table as it was saved.

    Args:
        collection, name: "collection/name" is its key.
        hash_name: what salts its hashes, by which row files are ordered and split.
        dtype: of weights; state is float64 for float64 tables, else float32.
        rows: rows in this checkpoint's files; of a delta the changed ones.
        deleted: ids in this checkpoint's files of deletions.
        admission: kind of its admission counters, None without.
    """

    __pydantic_config__ = _STRICT
    collection: _Text
    name: _Text
    hash_name: _Text
    dtype: _Text
    segments: tuple[SavedSegment, ...]
    rows: _Count
    deleted: _Count
    admission: _Text | None

    @property
    def key(self) -> str:
        """What options and files call it."""
        return f"{self.collection}/{self.name}"

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes in a file, the number of its table left out."""
        weight, real = WEIGHT_DTYPES[self.dtype].itemsize, REAL_DTYPES[self.dtype].itemsize
        return _ID_BYTES + 3 * _WORD_BYTES + self.dim * weight + self.state_width * real

    @property
    def dim(self) -> int:
        """Columns D."""
        return sum(segment.dim for segment in self.segments)

    @property
    def state_width(self) -> int:
        """Floats of optimizer state S."""
        return sum(segment.state_width for segment in self.segments)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file, its path below the checkpoint's folder.

    Args:
        tables: keys of the tables it has rows, deletions or counters of, in the file's order.
        start, stop: hashes [start, stop) of those rows; all of them: 0 and 2^64.
        rows: rows, ids or counters in it; 0 for other kinds.
    """

    __pydantic_config__ = _STRICT
    path: _Text
    kind: FileKind
    tables: tuple[_Text, ...]
    start: _Hash
    stop: _Hash
    rows: _Count
    bytes: _Count
    crc32: Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class Parent:
    """What a delta is relative to: another checkpoint in the same store."""

    __pydantic_config__ = _STRICT
    folder: _Text
    id: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint.

    Args:
        schema: of this form.
        id: 32 hexadecimal digits, random.
        kind: "full", or "delta": what changed since `parent`, with what was deleted.
        step: optimizer steps done.
        position: global samples consumed.
        version: of its snapshot point; no row is of a later one.
        seed: of initial values.
        last_steps: global step of the last update, by collection.
        world_size: ranks that wrote it; says nothing about who may load it.
        created_s: Unix time in seconds.
        packages: versions of those that wrote it.
        modules, optimizers: names of what `dense/` has.
    """

    __pydantic_config__ = _STRICT
    schema: int
    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    kind: Kind
    step: _Count
    position: _Count
    version: Annotated[int, Field(ge=0, le=(1 << 32) - 2)]
    parent: Parent | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
    last_steps: dict[str, _Count]
    world_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    created_s: _Count
    packages: dict[str, str]
    tables: tuple[SavedTable, ...] = ()
    modules: tuple[_Text, ...] = ()
    optimizers: tuple[_Text, ...] = ()
    files: tuple[SavedFile, ...] = ()


_ID_BYTES, _WORD_BYTES = 8, 4
_SKETCH = re.compile(r"sketch (\d{1,12})x(\d{1,3})( by bucket)?")
_FORM = TypeAdapter(Manifest)

_TAIL = ',\n  "crc32": "{:08x}"\n}}\n'
_TAIL_BYTES = len(_TAIL.format(0))


def to_json(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`; they end with the checksum of all before it."""
    head = json.dumps(asdict(manifest), indent=2, ensure_ascii=True).removesuffix("\n}")
    return (head + _TAIL.format(zlib.crc32(head.encode()))).encode()


def from_json(data: bytes, where: str = MANIFEST) -> Manifest:
    """The manifest that `to_json` made these bytes of; `where` is for errors.

    Raises:
        CheckpointError: other bytes than were written, another schema, or values that no
            checkpoint has.
    """
    head, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    whole = tail == _TAIL.format(zlib.crc32(head)).encode()
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"no JSON ({error})") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if type(schema) is int and schema != SCHEMA and (whole or "crc32" not in raw):
        got = f"{schema}, a {'newer' if schema > SCHEMA else 'older'} form"
        remedy = "Load it with the version that wrote it."
        raise CheckpointError(f"schema of {where}", got, SCHEMA, remedy)
    if not whole:
        raise _damaged(where, "another checksum than its last line says")
    try:
        manifest = _FORM.validate_json(head + b"}")
        _check(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in first["loc"])
        told = first["type"] in ("missing", "json_invalid")
        got = "" if told else f", not {str(first['input'])[:200]!r}"
        raise _damaged(where, f"manifest{at}: {first['msg']}{got}") from error
    except NotThat as error:
        raise _damaged(where, str(error)) from error
    return manifest


def read_manifest(storage: Storage | str | Path) -> Manifest:
    """Read the manifest of a checkpoint's folder.

    Raises:
        CheckpointError: the folder holds no finished checkpoint, its manifest is damaged, or it
            is of a form that this version does not know.
    """
    if not isinstance(storage, Storage):
        storage = Storage(storage)
    if not storage.exists(MANIFEST):
        got, allowed = f"{storage.url} without {MANIFEST}", "a folder that a finished save wrote"
        remedy = "Check the path; an interrupted save leaves no manifest."
        raise CheckpointError("checkpoint", got, allowed, remedy)
    return from_json(storage.read(MANIFEST), f"{storage.url}/{MANIFEST}")


def commit(storage: Storage, manifest: Manifest) -> None:
    """Write the manifest: from here on the folder is a checkpoint. All it names must be durable.

    Raises:
        CheckpointError: the folder is a checkpoint already, a file that it names is not there, or
            values that no checkpoint has.
    """
    if storage.exists(MANIFEST):
        raise occupied(storage)
    data = to_json(manifest)
    from_json(data, f"{storage.url}/{MANIFEST}")
    # A save of another process takes a folder without a manifest for leftovers, and ranks of
    # several machines may each have written to a disk of their own.
    if gone := sorted({file.path for file in manifest.files} - set(storage.files())):
        raise CheckpointError(
            f"files of checkpoint {storage.url}",
            got=f"{len(gone)} that were written are not there, {gone[0]} first",
            allowed="all of them, in one folder that all ranks share",
            remedy="They were removed by another save into this store, or lie on "
            "the disks of other machines: use a shared folder, one writer at a time.",
        )
    storage.replace(MANIFEST, data)


def occupied(storage: Storage) -> CheckpointError:
    """A folder to write a checkpoint into that holds one."""
    return CheckpointError(
        "checkpoint folder",
        got=f"{storage.url}, which holds a checkpoint",
        allowed="a folder without one",
        remedy="Save at another step or into another folder; a checkpoint is never overwritten.",
    )


def _damaged(where: str, why: str) -> CheckpointError:
    allowed = "the file as it was written"
    remedy = "It is damaged: load an earlier checkpoint, or copy it again."
    return CheckpointError(f"checkpoint file {where}", why, allowed, remedy)


def _check(manifest: Manifest) -> None:
    """What types do not say."""
    if (manifest.kind == "delta") != (manifest.parent is not None):
        raise NotThat("parent", manifest.parent, "one of a delta, none of a full checkpoint")
    if manifest.parent is not None and set("/\\") & set(manifest.parent.folder):
        raise NotThat("folder of the parent", manifest.parent.folder, "one in the same store")
    tables = {table.key: table for table in manifest.tables}
    if len(tables) != len(manifest.tables):
        raise NotThat("tables", "two of one name", "one of each name")
    for table in manifest.tables:
        _check_table(table)
    paths = set()
    for file in manifest.files:
        parts = file.path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\\" in file.path:
            raise NotThat("path of a file", file.path, "a path below the folder")
        if file.path in paths or file.path == MANIFEST:
            raise NotThat("files", f"{file.path} twice", "each path once")
        paths.add(file.path)
        if file.start >= file.stop:
            raise NotThat(f"hashes of {file.path}", (file.start, file.stop), "a range")
        if unknown := set(file.tables) - tables.keys():
            raise NotThat(f"tables of {file.path}", sorted(unknown), "tables of the manifest")
        _check_content(file, [tables[key] for key in file.tables])
        if manifest.kind == "full" and file.kind == "deleted":
            raise NotThat("files", file.path, "no deletions in a full checkpoint")
    for table in manifest.tables:
        for kind, rows in (("rows", table.rows), ("deleted", table.deleted)):
            files = [f for f in manifest.files if f.kind == kind and table.key in f.tables]
            alone = all(len(f.tables) == 1 for f in files)
            held = sum(f.rows for f in files)
            if held != rows if alone else held < rows:
                raise NotThat(f"{kind} of table {table.key!r}", rows, f"{held}, as in its files")


def _check_table(table: SavedTable) -> None:
    names = [segment.name for segment in table.segments]
    if table.dtype not in WEIGHT_DTYPES or not names or len(set(names)) != len(names):
        got = f"{table.dtype} of segments {names}"
        allowed = f"{', '.join(WEIGHT_DTYPES)}, and a segment or more, each of its own name"
        raise NotThat(f"form of table {table.key!r}", got, allowed)
    _within(f"columns of {table.key}", table.dim + table.state_width, 0, 1 << 24)
    if table.admission not in (None, "exact") and not _SKETCH.fullmatch(table.admission):
        raise NotThat(
            f"admission of {table.key}", table.admission, "exact, or sketch WIDTHxDEPTH by bucket"
        )


def _check_content(file: SavedFile, tables: Sequence[SavedTable]) -> None:
    """What a file of this kind can hold: a row has a size, so that bytes bound rows."""
    rows = {"rows": 0, "deleted": _ID_BYTES + _WORD_BYTES, "admission": _ID_BYTES + 2 * _WORD_BYTES}
    lists, number = file.kind in rows, len(set(file.tables))
    wanted = number > 0 if lists else number == (file.kind == "sketch")
    layouts = {(table.dtype, table.dim, table.state_width) for table in tables}
    alike = file.kind != "rows" or len(layouts) == 1
    if not wanted or not alike or number != len(file.tables):
        raise NotThat(
            f"tables of {file.path}", list(file.tables), f"those of a {file.kind} file, alike"
        )
    if lists:
        size = tables[0].row_bytes if file.kind == "rows" else rows[file.kind]
        _within(f"rows of {file.path}", file.rows, 0, file.bytes // size)
    if file.kind == "sketch":
        sketch = _SKETCH.fullmatch(tables[0].admission or "")
        cells = int(sketch[1]) * int(sketch[2]) if sketch else 0
        _within(f"bytes of {file.path}", file.bytes, cells * _WORD_BYTES, cells * _WORD_BYTES)
    if file.kind == "admission" and any(table.admission != "exact" for table in tables):
        raise NotThat(f"tables of {file.path}", list(file.tables), "tables that count exactly")


def _within(where: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise NotThat(where, value, f"{low}..{high}")
