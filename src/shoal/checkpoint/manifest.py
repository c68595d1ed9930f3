"""What a checkpoint holds, as values; `manifest.json` is their only other form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "SCHEMA",
    "FileKind",
    "Kind",
    "Manifest",
    "Parent",
    "SavedFile",
    "SavedSegment",
    "SavedTable",
]

SCHEMA = 2

Kind = Literal["full", "delta"]
FileKind = Literal["rows", "deleted", "sights", "sketch", "dense", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSegment:
    """Columns of a saved table. `optimizer` is the rule's kind; `state_width` its floats a row."""

    name: str
    dim: int
    state_width: int
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTable:
    """A whole table as it was saved.

    Args:
        collection, name: "collection/name" is its key.
        hash_name: what salts its hashes, by which row files are ordered and cut.
        dtype: of weights; state is float64 for float64 tables, else float32.
        rows: rows in this checkpoint's files; of a delta the changed ones.
        deleted: ids in this checkpoint's files of deletions.
        admission: kind of its admission counters, None without.
    """

    collection: str
    name: str
    hash_name: str
    dtype: str
    segments: tuple[SavedSegment, ...]
    rows: int
    deleted: int
    admission: str | None

    @property
    def key(self) -> str:
        """What options and files call it."""
        return f"{self.collection}/{self.name}"

    @property
    def dim(self) -> int:
        """Columns D."""
        return sum(segment.dim for segment in self.segments)

    @property
    def state_width(self) -> int:
        """Floats of optimizer state S."""
        return sum(segment.state_width for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file, its path below the checkpoint's folder.

    Args:
        tables: keys of the tables it has rows, deletions or sights of, in the file's order.
        start, stop: hashes [start, stop) of those rows; all of them: 0 and 2^64.
        rows: rows, ids or counters in it; 0 for other kinds.
    """

    path: str
    kind: FileKind
    tables: tuple[str, ...]
    start: int
    stop: int
    rows: int
    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What a delta is relative to: another checkpoint beside it."""

    folder: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint.

    Args:
        schema: of this form.
        id: 32 hexadecimal digits, random.
        kind: "full", or "delta": what changed since `parent`, with what was deleted.
        step: optimizer steps done.
        position: global samples consumed.
        epoch: closed epoch that it shows.
        seed: of initial values.
        last_steps: global step of the last update, by collection.
        world_size: ranks that wrote it; says nothing about who may load it.
        created_s: Unix time in seconds.
        versions: of packages that wrote it.
        modules, optimizers: names of what `dense/` has.
    """

    schema: int
    id: str
    kind: Kind
    step: int
    position: int
    epoch: int
    parent: Parent | None
    seed: int
    last_steps: dict[str, int]
    world_size: int
    created_s: int
    versions: dict[str, str]
    tables: tuple[SavedTable, ...]
    modules: tuple[str, ...]
    optimizers: tuple[str, ...]
    files: tuple[SavedFile, ...]
