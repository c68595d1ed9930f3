"""From Arrow columns to ids, dense features and labels.

An id is the column's integer itself, or the 64-bit hash of its text (`shoal.fid.hash_strings`);
several columns crossed are one id that mixes theirs in order. A list column is a jagged feature.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.tensors import TensorSource
from shoal.errors import ConfigError, DataError, describe
from shoal.fid import hash_strings
from shoal.hashing import mix64
from shoal.ragged import Ragged

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["IdFeature", "Recipe", "cross", "encode", "encode_times"]

_LAST_SECOND = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IdFeature:
    """An id feature of a table.

    Args:
        name: of the feature.
        columns: where its ids come from; () is the column of its name. Several columns are
            crossed, in this order; none of them may hold lists.
        is_list: the column holds lists of ids.
        max_length: longest list that is allowed; None allows any.

    Raises:
        ConfigError: a crossed list, a limit without a list, or a limit below 1.
    """

    name: str
    columns: tuple[str, ...] = ()
    is_list: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", (self.name,))
        if self.is_list and len(self.columns) > 1:
            self._refuse("columns", self.columns, "one column for a list feature")
        if self.max_length is not None and (not self.is_list or self.max_length < 1):
            self._refuse("max_length", self.max_length, "None, or at least 1 for a list feature")

    def _refuse(self, what: str, got: object, allowed: str) -> None:
        remedy = "Set is_list=True for a column of lists; cross columns of single values only."
        raise ConfigError(
            describe(f"{what} of feature {self.name!r}", got=got, allowed=allowed, remedy=remedy)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which columns of a table are what.

    Args:
        ids: the id features, in batch order; at least one.
        label: a column of 0..1 or booleans.
        dense: columns of numbers, in batch order.
        dense_fill: what a null dense value becomes; None refuses nulls.
        time: a timestamp column, or one of whole seconds since 1970.
        weight: a column of numbers of at least 0.

    Raises:
        ConfigError: no id features, or a name twice.
    """

    ids: tuple[IdFeature, ...]
    label: str
    dense: tuple[str, ...] = ()
    dense_fill: float | None = None
    time: str | None = None
    weight: str | None = None

    def __post_init__(self) -> None:
        names = [feature.name for feature in self.ids]
        if not names or len(set(names)) != len(names):
            remedy = "Name each id feature once."
            raise ConfigError(
                describe("id features", got=names, allowed="1 or more names", remedy=remedy)
            )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the id features, in batch order."""
        return tuple(feature.name for feature in self.ids)

    @property
    def columns(self) -> list[str]:
        """Every column that is read, each once."""
        named = [column for feature in self.ids for column in feature.columns]
        named += [*self.dense, self.label]
        named += [name for name in (self.time, self.weight) if name is not None]
        return list(dict.fromkeys(named))

    def check_columns(self, present: Iterable[str], where: str) -> None:
        """Check that all columns are there.

        Raises:
            DataError: one is missing; names the nearest that are there.
        """
        have = list(present)
        for name in self.columns:
            if name not in have:
                near = difflib.get_close_matches(name, have, n=5, cutoff=0.4) or have[:10]
                remedy = "Change the name in the recipe, or add the column to the file."
                raise DataError(
                    describe(
                        f"column {name!r} of {where}",
                        got="no such column",
                        allowed=f"among others {', '.join(near)}" if near else "no columns at all",
                        remedy=remedy,
                    )
                )


def cross(parts: Sequence[Tensor]) -> Tensor:
    """One id of several, in order: int64 [N] each in, int64 [N] out.

    h = id_0, then h = mix64(mix64(h) ^ id_k): different pairs of ids give different bits for a
    fixed first or second id, and collide otherwise as 64-bit hashes do.
    """
    crossed = parts[0]
    for part in parts[1:]:
        crossed = mix64(mix64(crossed) ^ part)
    return crossed


def encode(table: pa.Table, recipe: Recipe, where: str) -> TensorSource:
    """Examples of an Arrow table (or record batch) in memory.

    Args:
        table: one row per example.
        recipe: which columns are what.
        where: names the table in messages.

    Raises:
        DataError: a column is missing or of a type that does not fit; an id, label or time is
            null; a list is longer than declared; a label is outside 0..1.
    """
    recipe.check_columns(table.schema.names, where)
    ids: dict[str, Tensor | Ragged] = {}
    for feature in recipe.ids:
        if feature.is_list:
            ids[feature.name] = _lists(_column(table, feature.columns[0]), feature, where)
        else:
            parts = [_ids(_column(table, name), name, where) for name in feature.columns]
            ids[feature.name] = cross(parts)
    dense = [_numbers(table, name, where, fill=recipe.dense_fill) for name in recipe.dense]
    weights = None if recipe.weight is None else _numbers(table, recipe.weight, where)
    if weights is not None:
        _check_range(weights, recipe.weight, where, low=0.0, high=float("inf"))
    labels = _numbers(table, recipe.label, where)
    _check_range(labels, recipe.label, where, low=0.0, high=1.0)
    return TensorSource(
        ids,
        labels,
        dense=torch.stack(dense, dim=1) if dense else None,
        times_s=None if recipe.time is None else encode_times(table, recipe, where),
        weights=weights,
    )


def encode_times(table: pa.Table, recipe: Recipe, where: str) -> Tensor:
    """Event times, int64 [N], whole seconds; 0 for a recipe without a time column.

    Raises:
        DataError: not a time, null, or outside 0..2^32-1 seconds.
    """
    import pyarrow as pa

    if recipe.time is None:
        return torch.zeros(table.num_rows, dtype=torch.int64)
    column = _column(table, recipe.time)
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        zone = column.type.tz if pa.types.is_timestamp(column.type) else None
        column = column.cast(pa.timestamp("s", tz=zone), safe=False).cast(pa.int64())
    if not pa.types.is_integer(column.type):
        raise _wrong_type(recipe.time, where, column, "a timestamp or whole seconds")
    _refuse_nulls(column, f"time {recipe.time!r}", where)
    times = torch.from_numpy(_numpy(column.cast(pa.int64())))
    _check_range(times, recipe.time, where, low=0, high=_LAST_SECOND)
    return times


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    return column


def _numpy(array: pa.Array) -> np.ndarray[Any, Any]:
    # Arrow's buffers are read-only; torch wants memory it may write.
    return np.array(array.to_numpy(zero_copy_only=False))


def _ids(column: pa.Array, name: str, where: str) -> Tensor:
    """One id per value, int64."""
    import pyarrow as pa

    _refuse_nulls(column, f"id column {name!r}", where)
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return hash_strings(column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_uint64(kind):
        return torch.from_numpy(_numpy(column).view(np.int64))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return torch.from_numpy(_numpy(column.cast(pa.int64())))
    raise _wrong_type(name, where, column, "integers, text or booleans")


def _lists(column: pa.Array, feature: IdFeature, where: str) -> Ragged:
    import pyarrow as pa

    name = feature.columns[0]
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise _wrong_type(name, where, column, "lists of ids")
    _refuse_nulls(column, f"list column {name!r}", where)
    lengths = torch.from_numpy(_numpy(column.value_lengths().cast(pa.int64())))
    limit = feature.max_length
    if limit is not None and lengths.numel() and int(lengths.max()) > limit:
        row = int((lengths > limit).nonzero()[0])
        raise DataError(
            describe(
                f"ids of {feature.name!r} in row {row} of {where}",
                got=int(lengths[row]),
                allowed=f"at most {limit}",
                remedy="Cut the lists, or raise max_length.",
            )
        )
    return Ragged.from_lengths(_ids(column.flatten(), name, where), lengths)


def _numbers(table: pa.Table, name: str, where: str, *, fill: float | None = None) -> Tensor:
    """float32 [N]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _column(table, name)
    kind = column.type
    if not (
        pa.types.is_floating(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    ):
        raise _wrong_type(name, where, column, "numbers")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    column = column.cast(pa.float32(), safe=False)
    if fill is not None:
        column = pc.fill_null(column, fill)
    _refuse_nulls(column, f"column {name!r}", where)
    return torch.from_numpy(_numpy(column))


def _refuse_nulls(column: pa.Array, what: str, where: str) -> None:
    if not column.null_count:
        return
    row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
    raise DataError(
        describe(
            f"{what} of {where}",
            got=f"{column.null_count} nulls, the first in row {row}",
            allowed="no nulls",
            remedy="Drop these rows, or write a value that stands for 'unknown'.",
        )
    )


def _check_range(values: Tensor, name: str | None, where: str, *, low: float, high: float) -> None:
    bad = ~((values >= low) & (values <= high))
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0])
    raise DataError(
        describe(
            f"column {name!r} in row {row} of {where}",
            got=values[row].item(),
            allowed=f"{low:g}..{high:.10g}",
            remedy="Correct the file, or name another column.",
        )
    )


def _wrong_type(name: str, where: str, column: pa.Array, allowed: str) -> DataError:
    remedy = "Convert the column, or name another."
    return DataError(
        describe(
            f"type of column {name!r} of {where}", got=column.type, allowed=allowed, remedy=remedy
        )
    )
