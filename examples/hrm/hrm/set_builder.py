"""Collects the examples of a set, in memory or, where they do not fit, on disk as they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hrm.dataset import PuzzleSet

__all__ = ["SetBuilder"]

Array = NDArray[Any]


class _Rows:
    """uint8 [N, S] that grows: in memory, or as an .npy file."""

    def __init__(self, seq_len: int, path: Path | None) -> None:
        self._seq_len, self._path, self._count = seq_len, path, 0
        self._parts: list[Array] = []
        self._file: BinaryIO | None = None
        self._first = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w+b")
            self._first = self._write_header(self._file)

    def add(self, rows_NS: Array) -> None:
        rows_NS = np.ascontiguousarray(rows_NS, dtype=np.uint8)
        if self._file is None:
            self._parts.append(rows_NS)
        else:
            self._file.write(rows_NS.data)
        self._count += len(rows_NS)

    def finish(self) -> Array:
        if self._file is None or self._path is None:
            empty = np.zeros((0, self._seq_len), dtype=np.uint8)
            return np.concatenate([empty, *self._parts])
        with self._file as file:
            file.seek(0)
            again = self._write_header(file)
        assert again == self._first, "numpy's headers have space for any number of rows"
        # An empty file cannot be mapped.
        found: Array = np.load(self._path, mmap_mode="r" if self._count else None)
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_header(self, file: BinaryIO) -> int:
        """As `np.save` does; the header has space for any number of rows."""
        shape = (self._count, self._seq_len)
        said = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, said)
        return file.tell()


class SetBuilder:
    """Collects examples, puzzles and groups, in that nesting.

    Args:
        seq_len: tokens an example, S.
        spool: a folder in which inputs and labels are written as they come, for sets that do not
            fit into memory; `write_split` moves them from there, `close` ends it. None: they stay
            in memory.
    """

    def __init__(self, seq_len: int, *, spool: Path | None = None) -> None:
        paths = [None if spool is None else spool / f"{name}.npy" for name in ("inputs", "labels")]
        self._inputs, self._labels = (_Rows(seq_len, path) for path in paths)
        self._ids: list[int] = []
        self._puzzles, self._groups, self._examples = [0], [0], 0

    def add_puzzle(self, puzzle_id: int, inputs_NS: Array, labels_NS: Array) -> None:
        """One puzzle with its examples."""
        self.add_puzzles([puzzle_id], inputs_NS, labels_NS, len(inputs_NS))

    def add_puzzles(
        self, puzzle_ids: Sequence[int], inputs_NS: Array, labels_NS: Array, each: int = 1
    ) -> None:
        """Puzzles of `each` examples."""
        self._inputs.add(inputs_NS)
        self._labels.add(labels_NS)
        for puzzle_id in puzzle_ids:
            self._examples += each
            self._ids.append(puzzle_id)
            self._puzzles.append(self._examples)

    def end_group(self) -> None:
        """The puzzles since the last call are a group."""
        self._groups.append(len(self._ids))

    def build(self) -> PuzzleSet:
        """The arrays; nothing can be added after."""
        return PuzzleSet(
            self._inputs.finish(),
            self._labels.finish(),
            np.array(self._ids, dtype=np.int32),
            np.array(self._puzzles, dtype=np.int32),
            np.array(self._groups, dtype=np.int32),
        )

    def close(self) -> None:
        """Close the files of a spool; needed where `build` is not called."""
        self._inputs.close()
        self._labels.close()
