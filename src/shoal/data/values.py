"""Values by example, and what kinds of features have in common: lists, pairs, joins, products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.data import columns
from shoal.data.columns import Rows, as_numpy

if TYPE_CHECKING:
    import pyarrow as pa

IntArray = np.ndarray[Any, np.dtype[np.int64]]
MOST_COMBINATIONS = 1 << 16
"""Of one example, unless a feature's max_length says otherwise."""
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Values of N examples: one each (null where missing), or lists.

    Args:
        array: Arrow array [N], or of lists the joined values [M], without nulls.
        lengths: int64 [N] of lists; None: one value each.
        weights: float32 [M] of lists, or None.
    """

    array: pa.Array
    lengths: IntArray | None = None
    weights: np.ndarray[Any, Any] | None = None

    def listed(self) -> tuple[pa.Array, IntArray]:
        """As lists: a missing value is an empty one."""
        if self.lengths is not None:
            return self.array, self.lengths
        return self.array.drop_null(), as_numpy(self.array.is_valid()).astype(np.int64)

    def to_arrow(self) -> pa.Array:
        """As a column, [N]."""
        import pyarrow as pa

        if self.lengths is None:
            return self.array
        return pa.LargeListArray.from_arrays(starts_of(self.lengths), self.array)


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Columns that a feature is computed from.

    Args:
        columns: Arrow arrays [N] by name.
        size: N.
        separator: what text of several values is split at; None: it is one value.
        rows: N rows, as messages name them.
        most: combinations of an example's values.
        fill: replaces what is missing by the feature's default; None: nothing is left out.
    """

    columns: dict[str, pa.Array]
    size: int
    separator: str | None
    rows: Rows
    most: int = MOST_COMBINATIONS
    fill: Callable[[Values, str], Values] | None = None

    def values(self, name: str) -> Values:
        """A column's values: lists, and text that is split, as lists."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self.columns[name]
        if columns.is_text(column):
            if pa.types.is_dictionary(column.type) and (self.separator or self.rows.spelled):
                column = column.dictionary_decode()
            if self.separator is not None:
                column = pc.fill_null(column, "")
                column = columns.without_empty(column, pc.split_pattern(column, self.separator))
            elif self.rows.spelled:
                column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
        if not columns.is_list(column.type):
            return Values(column)
        lengths = lengths_of(column)
        array = columns.decoded(column.flatten())
        within(self.rows, lengths).refuse_nulls(array, f"list column {name!r}")
        return Values(array, lengths)

    def floats(self, name: str) -> FloatArray:
        """One number an example, float64 [N]; NaN where it is missing."""
        values = self.values(name)
        if values.lengths is not None:
            raise self.rows.wrong_type(name, self.columns[name], "one number an example")
        return floats(values.array, name, self.rows)

    def pairs(self, name: str, delimiter: str = ":") -> tuple[pa.Array, pa.Array, IntArray]:
        """Keys [M], values [M] (null where a key stands alone) and lengths [N].

        They are a map column's, or of lists or split text: each text's parts at the delimiter.
        """
        import pyarrow as pa

        column = self.columns[name]
        if pa.types.is_map(column.type):
            flat = column.drop_null()
            offsets = as_numpy(flat.offsets)
            span = int(offsets[0]), int(offsets[-1] - offsets[0])
            return flat.keys.slice(*span), flat.items.slice(*span), lengths_of(column)
        array, lengths = self.values(name).listed()
        keys, items = parted(as_text(array), delimiter)
        return keys, items, lengths


def lengths_of(column: pa.Array) -> IntArray:
    """int64 [N]: lengths of lists or maps; 0 for nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_map(column.type):
        lengths = np.diff(as_numpy(column.offsets)).astype(np.int64)
        return np.where(as_numpy(column.is_valid()), lengths, 0)
    return as_numpy(pc.fill_null(column.value_lengths(), 0).cast(pa.int64()))


def starts_of(lengths: IntArray) -> IntArray:
    """int64 [N+1]: places where lists begin, and the end."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def rows_of(lengths: IntArray) -> IntArray:
    """int64 [M]: the example of each value of lists."""
    return np.repeat(np.arange(len(lengths)), lengths)


def within(rows: Rows, lengths: IntArray | None) -> Rows:
    """Rows of the values of lists."""
    if lengths is None:
        return rows
    starts = starts_of(lengths)
    return replace(rows, ends=starts[1:] if rows.ends is None else starts[rows.ends])


def as_text(array: pa.Array) -> pa.Array:
    """Text of text or numbers."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.large_string())


def floats(array: pa.Array, name: str, rows: Rows) -> FloatArray:
    """float64 [N] of numbers, booleans or text that spells them; NaN where it is missing.

    Raises:
        DataError: text that is no number, or another type.
    """
    import pyarrow as pa

    if columns.is_text(array):
        array = as_text(array)
    return as_numpy(columns.floats(array, name, replace(rows, spelled=True), pa.float64()))


def parted(text: pa.Array, delimiter: str) -> tuple[pa.Array, pa.Array]:
    """What stands before the first delimiter, and what after; null without one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = pc.split_pattern(text, delimiter, max_splits=1)
    lengths = lengths_of(parts)
    flat, starts = parts.flatten(), starts_of(lengths)[:-1]
    after = pa.array(starts + 1, mask=lengths < 2)
    return flat.take(pa.array(starts)), flat.take(after)


def codes(*arrays: pa.Array) -> tuple[list[IntArray], int]:
    """Numbers that are equal where the texts of values are, and how many there are."""
    import pyarrow as pa

    encoded = pa.concat_arrays([as_text(array) for array in arrays]).dictionary_encode()
    every = as_numpy(encoded.indices).astype(np.int64)
    cuts = np.cumsum([len(array) for array in arrays])[:-1]
    return np.split(every, cuts), len(encoded.dictionary)


def product(
    lengths: Sequence[IntArray], rows: Rows, most: int = MOST_COMBINATIONS
) -> tuple[list[IntArray], IntArray]:
    """All combinations of one value of each of K lists, by example.

    Returns:
        for each list the places [M] of its values, and how many combinations [N] there are.

    Raises:
        DataError: an example with more than `most`.
    """
    exact = np.prod(np.stack(lengths).astype(np.float64), axis=0)  # int64 would overflow
    if (exact > most).any():
        row = int(np.flatnonzero(exact > most)[0])
        remedy = "Shorten the lists, or raise max_length."
        raise rows.error("combinations", row, f"{exact[row]:.0f} ids", f"at most {most}", remedy)
    counts = exact.astype(np.int64)
    at = rows_of(counts)
    left = np.arange(len(at)) - starts_of(counts)[at]
    places: list[IntArray] = []
    for own in reversed(lengths):
        size = own[at]
        places.insert(0, starts_of(own)[at] + left % size)
        left //= size
    return places, counts


def matches(have: IntArray, wanted: IntArray) -> tuple[IntArray, IntArray]:
    """Where wanted numbers are among those at hand.

    Returns:
        places in `have`, for one wanted number after the other, and how many each has.
    """
    order = np.argsort(have, kind="stable")
    ordered = have[order]
    first = np.searchsorted(ordered, wanted, side="left")
    counts = np.searchsorted(ordered, wanted, side="right") - first
    starts = starts_of(counts)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    return order[np.repeat(first, counts) + within], counts


def reduced(numbers: FloatArray, lengths: IntArray, how: str) -> FloatArray:
    """One number of each list, float64 [N]: "sum", "mean", "min" or "max"; NaN of none."""
    result = np.full(len(lengths), np.nan)
    some = lengths > 0
    starts = starts_of(lengths)[:-1][some]
    if len(starts):
        ufunc = {"min": np.minimum, "max": np.maximum}.get(how, np.add)
        result[some] = ufunc.reduceat(numbers, starts)
    return result / lengths if how == "mean" else result
