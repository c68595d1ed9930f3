"""From one Arrow column to tensors: ids, lists of ids, numbers, times.

What is missing, and what becomes of it, is the same for every format and said in
docs/guide/missing-values-and-ids.md. Text becomes ids by `shoal.ids.ids_of_text` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DataError, did_you_mean
from shoal.ids import TEXT_TYPES, ids_of_text
from shoal.ragged import Ragged

if TYPE_CHECKING:
    import pyarrow as pa


_LAST_SECOND = (1 << 32) - 1
_LISTED = 50
_LIST_TYPES = ("is_list", "is_large_list", "is_fixed_size_list")
_CORRECT = "Correct the file, or name another column."
_DROP = "Drop these rows, or write a value that stands for 'unknown'."


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are read together, as messages name them.

    Args:
        where: the file, or another name of the table.
        first: number of the first row, from 0; a header line is no row.
        spelled: numbers and lists are text, and empty text is missing, as in CSV.
        ends: of values that are not one a row: the values until each row's end.
        feature: the feature that they are read for, if it computes something.
    """

    where: str
    first: int = 0
    spelled: bool = False
    ends: np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)
    feature: str = ""

    def error(self, what: str, place: int, got: object, allowed: str, remedy: str) -> DataError:
        """An error of a value, counted from 0 within these rows."""
        row = place
        if self.ends is not None:
            row = int(np.searchsorted(self.ends, place, side="right"))
        at = f"{what}{self._for} in row {self.first + row} of {self.where}"
        return DataError(at, got=got, allowed=allowed, remedy=remedy)

    def wrong_type(self, name: str, column: pa.Array, allowed: str) -> DataError:
        """An error of a column's type."""
        return DataError(
            f"type of column {name!r}{self._for} of {self.where}",
            got=column.type,
            allowed=allowed,
            remedy="Convert the column, or name another.",
        )

    @property
    def _for(self) -> str:
        return f" for feature {self.feature!r}" if self.feature else ""

    def refuse_nulls(self, column: pa.Array, what: str, remedy: str = _DROP) -> None:
        """Raise for the first null."""
        if column.null_count:
            row = _first(as_numpy(column.is_null()))
            raise self.error(what, row, "null", "none missing", remedy)


def decoded(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column in one piece, without a dictionary that holds a null, which nobody would count.

    Views become text or bytes: Arrow has few functions of them.
    """
    import pyarrow as pa

    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    elif pa.types.is_binary_view(column.type):
        column = column.cast(pa.large_binary())
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks == 1:  # to combine them copies even one
            column = column.chunk(0)
        else:
            column = column.unify_dictionaries().combine_chunks()
    if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
        column = column.dictionary_decode()
    return column


def check_present(
    names: Iterable[str], present: Iterable[str], where: str, named_in: str = "data.source"
) -> None:
    """Check that columns are there, each once; `named_in` says who wants them.

    Raises:
        DataError: one is missing, and the nearest that are there; or there twice, and where.
    """
    have = list(present)
    for name in names:
        if have.count(name) > 1:
            places = [str(place) for place, other in enumerate(have) if other == name]
            raise DataError(
                f"columns of {where}",
                got=f"{name!r} at places {', '.join(places)} (from 0)",
                allowed="each name once",
                remedy="Rename one of them, or leave it out.",
            )
        if name not in have:
            listed = ", ".join(have[:_LISTED]) + (" and more" if len(have) > _LISTED else "")
            raise DataError(
                f"column {name!r} of {where}",
                got="no such column",
                allowed=listed or "no columns at all",
                remedy=did_you_mean(name, have) or f"Correct its name in {named_in}.",
            )


def ids(column: pa.Array, name: str, rows: Rows) -> Tensor:
    """One id per value, int64 [N].

    Raises:
        DataError: a missing value, or a type that is neither integers, text nor booleans.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if rows.spelled and is_text(column):
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    rows.refuse_nulls(column, f"id column {name!r}")
    return words(column, name, rows)


def lists(column: pa.Array, name: str, rows: Rows, *, max_length: int | None = None) -> Ragged:
    """A list of ids per row; a null is an empty one.

    Raises:
        DataError: a null inside a list, a list that is too long, or a type that is no list of ids.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if rows.spelled and is_text(column):
        column = _split(column)
    if pa.types.is_null(column.type):
        column = column.cast(pa.list_(pa.null()))
    if not is_list(column.type):
        raise rows.wrong_type(name, column, "lists of ids")
    lengths_N = as_numpy(pc.fill_null(column.value_lengths(), 0).cast(pa.int64()))
    if max_length is not None and (lengths_N > max_length).any():
        row = _first(lengths_N > max_length)
        remedy = "Shorten the lists, or raise max_length."
        got = f"{lengths_N[row]} ids"
        raise rows.error(f"list column {name!r}", row, got, f"at most {max_length}", remedy)
    values = decoded(column.flatten())
    if values.null_count:
        ends_N = np.cumsum(lengths_N)
        place = _first(as_numpy(values.is_null()))
        row = int(np.searchsorted(ends_N, place, side="right"))
        got = f"null at place {place - (ends_N[row] - lengths_N[row])} of the list"
        remedy = "Leave it out of the list, or write a value that stands for 'unknown'."
        raise rows.error(f"list column {name!r}", row, got, "no null in a list", remedy)
    return Ragged.from_lengths(words(values, name, rows), torch.from_numpy(lengths_N))


def numbers(
    column: pa.Array,
    name: str,
    rows: Rows,
    *,
    fill: float | None = None,
    low: float = -np.inf,
    high: float = np.inf,
    remedy: str = _CORRECT,
    kind: pa.DataType | None = None,
) -> Tensor:
    """float32 (or `kind`) [N], finite, from `low` to `high`; null and NaN become `fill`, if given.

    Raises:
        DataError: a value that is not so, text that is no number, or another type.
    """
    import pyarrow as pa

    values = floats(column, name, rows, kind or pa.float32())
    if fill is None:
        rows.refuse_nulls(values, f"column {name!r}", remedy)
    values_N = as_numpy(values)  # null is NaN now
    if fill is not None:
        np.copyto(values_N, fill, where=np.isnan(values_N))
    least, most = values_N.min(initial=np.inf), values_N.max(initial=-np.inf)
    fits = low <= least and most <= high and -np.inf < least and most < np.inf
    if len(values_N) and not fits:  # NaN does not, either
        bad_N = ~((values_N >= low) & (values_N <= high) & np.isfinite(values_N))
        if fill is not None and np.isnan(fill):
            bad_N &= ~np.isnan(values_N)
            if not bad_N.any():
                return torch.from_numpy(values_N)
        row = _first(bad_N)
        remedy = remedy if np.isnan(values_N[row]) else _CORRECT
        allowed = f"{low:g}..{high:g}" if np.isfinite(high) else f"finite {values_N.dtype}"
        allowed += f" of at least {low:g}" if np.isfinite(low) and not np.isfinite(high) else ""
        raise rows.error(f"column {name!r}", row, column[row].as_py(), allowed, remedy)
    return torch.from_numpy(values_N)


def floats(column: pa.Array, name: str, rows: Rows, kind: pa.DataType) -> pa.Array:
    """Numbers and booleans as a floating type, and text where that is spelled; nulls stay.

    Raises:
        DataError: text that is no number, or another type.
    """
    import pyarrow as pa

    if rows.spelled and is_text(column):
        column = parsed(column, name, rows, [pa.float64()], "a number")
    types = pa.types
    if types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif not any(
        is_one(column.type)
        for is_one in (types.is_floating, types.is_integer, types.is_decimal, types.is_null)
    ):
        raise rows.wrong_type(name, column, "numbers")
    return column.cast(kind, safe=False)


def times(column: pa.Array, name: str, rows: Rows) -> Tensor:
    """Event times, int64 [N], whole seconds since 1970.

    Raises:
        DataError: not a time, missing, or outside 0..2^32-1 seconds.
    """
    import pyarrow as pa

    if rows.spelled and is_text(column):
        kinds = [pa.int64(), pa.timestamp("ns"), pa.timestamp("ns", tz="UTC")]
        allowed = "whole seconds, or ISO 8601 times with an offset in all or in none"
        column = parsed(column, name, rows, kinds, allowed)
    rows.refuse_nulls(column, f"time column {name!r}")
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        zone = column.type.tz if pa.types.is_timestamp(column.type) else None
        column = column.cast(pa.timestamp("s", tz=zone), safe=False).cast(pa.int64())
    if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise rows.wrong_type(name, column, "a timestamp or whole seconds")
    times_N = as_numpy(column.cast(pa.int64()))
    bad_N = (times_N < 0) | (times_N > _LAST_SECOND)
    if bad_N.any():
        row = _first(bad_N)
        allowed = f"0..{_LAST_SECOND} seconds"
        raise rows.error(f"time column {name!r}", row, times_N[row], allowed, _CORRECT)
    return torch.from_numpy(times_N)


def words(column: pa.Array, name: str, rows: Rows) -> Tensor:
    """The id of each value, int64 [N]: integers as they are, text by its rule; no nulls.

    Raises:
        DataError: a type that is neither integers, text nor booleans.
    """
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_null(kind):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if is_text(column):
        return ids_of_text(column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_uint64(kind):
        return torch.from_numpy(as_numpy(column).view(np.int64))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return torch.from_numpy(as_numpy(column.cast(pa.int64())))
    raise rows.wrong_type(name, column, "integers, text or booleans")


def is_text(column: pa.Array) -> bool:
    """Whether a column holds text or bytes, maybe by a dictionary."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return pa.types.is_fixed_size_binary(kind) or (
        str(kind) in TEXT_TYPES and not pa.types.is_null(kind)
    )


def _split(column: pa.Array) -> pa.Array:
    """Text like "3 17 US" as lists of words; none for text that is empty or blank."""
    import pyarrow.compute as pc

    # ASCII blanks, as in `ids_of_text`: a no-break space is part of a word.
    text = pc.ascii_trim_whitespace(column)
    return without_empty(text, pc.ascii_split_whitespace(text))


def without_empty(text: pa.Array, parts: pa.Array) -> pa.Array:
    """Lists that were split from text; empty ones for empty text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(pc.equal(text, ""), pa.scalar([], parts.type), parts)


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is of lists."""
    import pyarrow as pa

    return any(getattr(pa.types, is_one)(kind) for is_one in _LIST_TYPES)


def parsed(
    column: pa.Array, name: str, rows: Rows, kinds: Sequence[pa.DataType], allowed: str
) -> pa.Array:
    """Text as the first of some types that all of it spells.

    True and false are 1 and 0, and what CSV readers take for null is null.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    found = _cast(column, kinds)
    if found is not None:
        return found
    text = pc.utf8_trim_whitespace(column)
    for spellings, meant in (
        (csv.ConvertOptions().null_values, None),
        (["true", "True", "TRUE"], "1"),
        (["false", "False", "FALSE"], "0"),
    ):
        is_one = pc.is_in(text, value_set=pa.array(spellings, text.type))
        text = pc.if_else(is_one, pa.scalar(meant, text.type), text)
    found = _cast(text, kinds)
    if found is not None:
        return found
    row = max(_first_unreadable(text, kind) for kind in kinds)
    raise rows.error(f"column {name!r}", row, repr(column[row].as_py()), allowed, _CORRECT)


def _cast(text: pa.Array, kinds: Sequence[pa.DataType]) -> pa.Array | None:
    """None where some of it spells none of the types."""
    import pyarrow as pa

    for kind in kinds:
        with suppress(pa.ArrowInvalid):
            return text.cast(kind)
    return None


def _first_unreadable(text: pa.Array, kind: pa.DataType) -> int:
    """The row of the first text that does not spell a type; there is one."""
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        if _cast(text[low:middle], [kind]) is None:
            high = middle
        else:
            low = middle
    return low


def _first(marks_N: np.ndarray[Any, Any]) -> int:
    return int(np.flatnonzero(marks_N)[0])


def as_numpy(array: pa.Array) -> np.ndarray[Any, Any]:
    """A copy that may be written."""
    # Arrow's buffers are read-only; torch wants memory it may write.
    return np.require(array.to_numpy(zero_copy_only=False), requirements="W")
