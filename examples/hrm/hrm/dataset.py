"""Puzzle data on disk, in HRM's form: `dataset.json` and five arrays a set.

    <root>/identifiers.json                    names of the puzzle ids; number 0 is "<blank>"
    <root>/<split>/dataset.json                `Metadata`
    <root>/<split>/<set>__inputs.npy           uint8 [N, S] tokens
    <root>/<split>/<set>__labels.npy           uint8 [N, S]
    <root>/<split>/<set>__puzzle_identifiers.npy  int32 [P]
    <root>/<split>/<set>__puzzle_indices.npy   int32 [P + 1] first example of each puzzle
    <root>/<split>/<set>__group_indices.npy    int32 [G + 1] first puzzle of each group

A group is a puzzle and its augmentations. Inputs and labels are mapped, not read.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError

__all__ = [
    "BLANK",
    "Metadata",
    "PuzzleData",
    "PuzzleSet",
    "read_split",
    "require_alike",
    "require_same",
    "write_split",
]

BLANK = "<blank>"
_ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
_MAPPED = ("inputs", "labels")
_SCANNED_BYTES = 1 << 28
# Of values in dataset.json; the others are whole numbers.
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "sets": list,
    "mean_puzzle_examples": (int, float),
    "ignore_label_id": (int, NoneType),
}

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """`dataset.json`.

    Args:
        pad_id: token of cells outside of the puzzle.
        ignore_label_id: label that counts for nothing; None if every label counts.
        blank_identifier_id: puzzle id of examples that only fill a batch.
        vocab_size: tokens are below.
        seq_len: tokens an example, S.
        num_puzzle_identifiers: puzzle ids are below.
        total_groups: groups of all sets.
        mean_puzzle_examples: examples over puzzles.
        sets: names of the sets.
    """

    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    sets: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PuzzleSet:
    """The arrays of one set."""

    inputs: Array
    labels: Array
    puzzle_identifiers: Array
    puzzle_indices: Array
    group_indices: Array

    @property
    def examples(self) -> int:
        """Examples, N."""
        return len(self.inputs)

    @property
    def groups(self) -> int:
        """Groups, G."""
        return len(self.group_indices) - 1

    def ids_of(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Puzzle ids of examples by number."""
        puzzles = np.searchsorted(self.puzzle_indices, examples, side="right") - 1
        return self.puzzle_identifiers[puzzles].astype(np.int64)


@dataclass(frozen=True, eq=False)
class PuzzleData:
    """A split: the content of `dataset.json`, and its sets by name.

    Args:
        identifiers: digest of the names of puzzle ids; "" if they have no file.
    """

    path: Path
    metadata: Metadata
    sets: Mapping[str, PuzzleSet]
    identifiers: str = ""

    @property
    def examples(self) -> int:
        """Examples of all sets."""
        return sum(found.examples for found in self.sets.values())


def write_split(
    root: str | Path,
    split: str,
    sets: Mapping[str, PuzzleSet],
    *,
    vocab_size: int,
    seq_len: int,
    names: Sequence[str] = (BLANK,),
    pad_id: int = 0,
    ignore_label_id: int | None = 0,
) -> Metadata:
    """Write a split and the names of its ids; replaces existing files.

    Arrays that a `SetBuilder` spooled are moved there.

    Raises:
        DataError: arrays that do not fit each other, before anything is written.
    """
    puzzles = sum(len(found.puzzle_identifiers) for found in sets.values())
    examples = sum(found.examples for found in sets.values())
    metadata = Metadata(
        pad_id=pad_id,
        ignore_label_id=ignore_label_id,
        blank_identifier_id=0,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_puzzle_identifiers=len(names),
        total_groups=sum(found.groups for found in sets.values()),
        mean_puzzle_examples=examples / max(1, puzzles),
        sets=tuple(sets),
    )
    folder = Path(root) / split
    _check(PuzzleData(folder, metadata, sets))
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in sets.items():
        for array in _ARRAYS:
            _place(getattr(found, array), folder / f"{name}__{array}.npy")
    # TRM asks for one key more, which HRM reads over.
    written = {**dataclasses.asdict(metadata), "total_puzzles": puzzles}
    (folder / "dataset.json").write_text(json.dumps(written))
    (Path(root) / "identifiers.json").write_text(json.dumps(list(names)))
    return metadata


def _place(array: Array, path: Path) -> None:
    if isinstance(array, np.memmap) and array.filename is not None:
        shutil.move(array.filename, path)
    else:
        np.save(path, array)


def read_split(root: str | Path, split: str) -> PuzzleData:
    """Open a split.

    Raises:
        DataError: files missing, or metadata that disagrees with the arrays.
    """
    folder = Path(root) / split
    metadata = _metadata(folder / "dataset.json")
    sets = {name: _open_set(folder, name) for name in metadata.sets}
    data = PuzzleData(folder, metadata, sets, _digest(Path(root) / "identifiers.json"))
    _check(data)
    return data


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def require_alike(
    data: PuzzleData, other: PuzzleData, *, remedy: str = "Evaluate on data of the same build."
) -> None:
    """Check that a model of one split can be evaluated on another.

    Raises:
        DataError: another vocabulary, length or other ids.
    """
    for name in ("vocab_size", "seq_len", "num_puzzle_identifiers", "blank_identifier_id"):
        _require_same(data, other, name, remedy)
    if data.identifiers and other.identifiers and data.identifiers != other.identifiers:
        what = f"names of the puzzle ids of {other.path}"
        allowed = f"those of {data.path} (identifiers.json): ids mean other puzzles"
        raise _wrong(what, "others", allowed, remedy)


def require_same(data: PuzzleData, other: PuzzleData) -> None:
    """Check that a run on one split can resume on another.

    Raises:
        DataError: the data differ from those of the run.
    """
    remedy = "Resume with the data that the run began with, or name another run."
    require_alike(data, other, remedy=remedy)
    for field in dataclasses.fields(Metadata):
        _require_same(data, other, field.name, remedy)


def _require_same(data: PuzzleData, other: PuzzleData, name: str, remedy: str) -> None:
    wanted, got = getattr(data.metadata, name), getattr(other.metadata, name)
    if wanted != got:
        raise _wrong(f"{name} of {other.path}", got, f"{wanted}, as at {data.path}", remedy)


def _metadata(path: Path) -> Metadata:
    if not path.is_file():
        remedy = "Build it with build_sudoku.py, build_maze.py, build_arc.py or build_rules.py."
        raise _wrong(f"file {path}", "none", "a dataset's folder with train/ and test/", remedy)
    try:
        raw = json.loads(path.read_text())
        fields = {field.name: raw[field.name] for field in dataclasses.fields(Metadata)}
        for name, value in fields.items():
            if not isinstance(value, _KINDS.get(name, int)) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}")
        return Metadata(**{**fields, "sets": tuple(fields["sets"])})
    except (ValueError, KeyError, TypeError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(Metadata))
        raise _wrong(
            f"file {path}", f"{error!r}", f"JSON with {names}", "Build it again."
        ) from error


def _open_set(folder: Path, name: str) -> PuzzleSet:
    arrays = {}
    for array in _ARRAYS:
        path = folder / f"{name}__{array}.npy"
        try:
            arrays[array] = np.load(path, mmap_mode="r" if array in _MAPPED else None)
        except (OSError, ValueError) as error:
            remedy = "Copy the whole folder, or build it again."
            raise _wrong(f"file {path}", str(error), "an array of numpy's", remedy) from error
    return PuzzleSet(**arrays)


def _check(data: PuzzleData) -> None:
    """Metadata against arrays."""
    meta, where = data.metadata, data.path
    for name, found in data.sets.items():
        _check_set(f"set {name!r} of {where}", meta, found)
    for key, end in (("pad_id", "vocab_size"), ("blank_identifier_id", "num_puzzle_identifiers")):
        if not 0 <= getattr(meta, key) < getattr(meta, end):
            got, top = getattr(meta, key), getattr(meta, end) - 1
            raise _wrong(f"{key} of {where}", got, f"0..{top}", f"See {end} in dataset.json.")
    groups = sum(found.groups for found in data.sets.values())
    puzzles = sum(len(found.puzzle_identifiers) for found in data.sets.values())
    mean = data.examples / max(1, puzzles)
    counted = (("total_groups", groups, 0.0), ("mean_puzzle_examples", mean, 1e-3))
    for key, value, slack in counted:  # a run's steps are counted by both
        if abs(getattr(meta, key) - value) > slack * value:
            allowed = f"{value:g}, as in the arrays"
            raise _wrong(f"{key} of {where}", getattr(meta, key), allowed, "Build it again.")


def _check_set(what: str, meta: Metadata, found: PuzzleSet) -> None:
    wanted = (found.examples, meta.seq_len)
    for array in _ARRAYS:
        kind = getattr(found, array).dtype
        if kind.kind not in "iu":
            raise _wrong(f"{array} of {what}", f"{kind} numbers", "whole ones", "Build again.")
    for array in _MAPPED:
        shape = getattr(found, array).shape
        if shape != wanted:
            raise _wrong(f"{array} of {what}", shape, wanted, "See seq_len in dataset.json.")
        top = _top(getattr(found, array))
        if top >= meta.vocab_size:
            allowed = f"tokens below {meta.vocab_size}"
            raise _wrong(f"{array} of {what}", f"token {top}", allowed, "See vocab_size.")
    puzzles = len(found.puzzle_identifiers)
    for array, last in (("puzzle_indices", found.examples), ("group_indices", puzzles)):
        edges = getattr(found, array)
        if not len(edges) or edges[0] != 0 or edges[-1] != last or (np.diff(edges) < 0).any():
            allowed = f"from 0 up to {last}, never down"
            raise _wrong(
                f"{array} of {what}", f"{edges[:1]}..{edges[-1:]}", allowed, "Build again."
            )
    if len(found.puzzle_indices) != puzzles + 1:
        got = f"{len(found.puzzle_indices)} for {puzzles} puzzles"
        raise _wrong(f"puzzle_indices of {what}", got, "one more than puzzles", "Build again.")
    ids = found.puzzle_identifiers
    if puzzles and not 0 <= ids.min() <= ids.max() < meta.num_puzzle_identifiers:
        got = f"{ids.min()}..{ids.max()}"
        allowed = f"0..{meta.num_puzzle_identifiers - 1}"
        raise _wrong(f"puzzle ids of {what}", got, allowed, "See num_puzzle_identifiers.")


def _top(tokens: Array) -> int:
    """The largest token; of large arrays, in rows evenly spaced over them."""
    stride = 1 + tokens.nbytes // _SCANNED_BYTES
    return int(tokens[::stride].max()) if tokens.size else 0


def _wrong(what: str, got: object, allowed: object, remedy: str) -> DataError:
    return DataError(what, got=got, allowed=allowed, remedy=remedy)
