"""Rows and files that cannot be used: named, counted and written to a file, while others train."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("shoal.data")
_LONGEST = 1_000  # letters of a value or reason: a poisoned record may be huge

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, or some in a row: why, and its values as text, by column."""

    reason: str
    values: Mapping[str, str | None] = field(default_factory=dict)


class Quarantine:
    """What of a run's data cannot be used, and how much of it is too much. For several threads.

    Each row and file is counted once, and written to `path` as a line of JSON: `file`, `row` (from
    0; of a CSV the line after the header, without empty ones) or `rows` (the first, and the one
    behind the last), `reason`, and `values` as text. Another process starts from scratch, and adds
    its lines.

    Args:
        path: lines are added to it; rank r above 0 has a file of its own, NAME.rankR.SUFFIX.
        most_rows: of this rank and all its files; one more is an error.
        most_files: that are left out as a whole; one more is an error.
        same_columns: a file whose columns differ from the first file's in name or type is bad.
        rank: what every rank finds alike, rank 0 writes; anything else, the rank that finds it.

    Raises:
        ConfigError: the path is a folder's.

    Attributes:
        rows, files: counts so far.
        rows_alike: of `rows`, those that every rank finds.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        most_rows: int = 1_000,
        most_files: int = 0,
        same_columns: bool = False,
        rank: int = 0,
    ) -> None:
        path = Path(path)
        if not path.name or path.is_dir():
            what, remedy = "path of a quarantine", "Name a file: data.quarantine=bad.jsonl."
            raise ConfigError(what, f"the folder {path}", "a file, to add lines to", remedy)
        self.path = path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")
        self.most_rows, self.most_files, self.same_columns = most_rows, most_files, same_columns
        self.rows = self.rows_alike = self.files = 0
        self._rank = rank
        self._seen: set[tuple[str, int]] = set()
        self._written = False
        self._lock = threading.Lock()

    def file(self, path: Path, error: DataError) -> None:
        """Leave a file out.

        Args:
            path: of the file.
            error: why it cannot be used.

        Raises:
            DataError: more files than are allowed; that of the file itself, if none are.
        """
        if not self.most_files:
            raise error
        with self._lock:
            if not self._is_new(path, -1):
                return
            self.files += 1
            reason = str(error)[:_LONGEST]
            self._write({"file": str(path), "reason": reason}, alike=True)
            if self.files > self.most_files:
                raise _too_many("files", self.files, self.most_files, reason, self.path) from error

    def row(self, path: Path, row: int, bad: BadRow, *, size: int = 1, alike: bool = False) -> None:
        """Leave a row out, or several in a row that are one damaged span.

        Args:
            path: of its file.
            row: its number there; of several, the first.
            bad: why, and what it holds.
            size: rows.
            alike: every rank finds it.

        Raises:
            DataError: more rows than are allowed.
        """
        with self._lock:
            if not self._is_new(path, row):
                return
            at = {"row": row} if size == 1 else {"rows": [row, row + size]}
            held = {"values": dict(bad.values)} if bad.values else {}
            reason = bad.reason[:_LONGEST]
            self._write({"file": str(path), **at, "reason": reason, **held}, alike=alike)
            self.rows += size
            self.rows_alike += size * alike
            if self.rows > self.most_rows:
                raise _too_many("rows", self.rows, self.most_rows, reason, self.path)

    def _is_new(self, path: Path, row: int) -> bool:
        known = len(self._seen)
        self._seen.add((str(path), row))
        return len(self._seen) > known

    def _write(self, record: Mapping[str, Any], *, alike: bool) -> None:
        if alike and self._rank:
            return
        if not self._written:
            self._written = True
            _log.warning("quarantined in %s, and maybe others: %s", self.path, record["reason"])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:  # what was counted is counted
            _log.warning("%s cannot be written: %s", self.path, error)


def _too_many(what: str, got: int, most: int, last: str, path: Path) -> DataError:
    return DataError(
        f"bad {what} of the data",
        got=f"{got}, the last: {last}",
        allowed=f"{most} (data.quarantine.most_{what})",
        remedy=f"See {path}; correct the data, or raise the limit.",
    )


@dataclass(slots=True)
class Sorted(Generic[Made]):
    """What was made of good rows, as (first row, rows, what), and the bad ones by number."""

    parts: list[tuple[int, int, Made]] = field(default_factory=list)
    bad: dict[int, BadRow] = field(default_factory=dict)


def sort_out(table: pa.Table, make: Callable[[pa.Table, int], Made], most: int) -> Sorted[Made]:
    """Make something of all rows of a table that it can be made of.

    Halves what fails until the bad rows stand alone, so that what is allowed is said by `make` and
    nowhere else.

    Args:
        table: of N rows.
        make: takes consecutive rows, and the number of the first in the table.
        most: bad rows; one more is found too, and then no more is made.
    """
    found: Sorted[Made] = Sorted()
    waiting = [(0, table.num_rows)]
    while waiting and len(found.bad) <= most:
        first, size = waiting.pop()
        rows = table.slice(first, size)
        try:
            found.parts.append((first, size, make(rows, first)))
        except DataError as error:
            if size > 1:
                waiting += [(first + size // 2, size - size // 2), (first, size // 2)]
            else:
                found.bad[first] = BadRow(str(error)[:_LONGEST], _as_text(rows))
    return found


def _as_text(row: pa.Table) -> dict[str, str | None]:
    """Values of a table of one row."""
    texts = {}
    for name, column in zip(row.column_names, row.columns, strict=True):
        try:
            value = column[0].as_py()
        except ValueError as error:  # text that is no UTF-8, say
            value = f"{type(error).__name__}: {error}"
        if isinstance(value, bytes):
            value = value.decode(errors="backslashreplace")
        texts[name] = None if value is None else str(value)[:_LONGEST]
    return texts
