"""What differs between two checkpoints, table by table, row by row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.row_layout import RowLayout
from shoal.checkpoint.row_sources import ChainRows
from shoal.checkpoint.store import locate
from shoal.placement import hash_ids, sort_key
from shoal.table.shard import RowChunk

__all__ = ["TableDiff", "TableDiffs", "diff"]

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
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

    Row versions, which count cuts, are not compared. Rows stream: memory does not grow with them.

    Args:
        a, b: a checkpoint's folder, or that of a store: its newest checkpoint.
        tables: keys of the tables to look at; None: all.

    Raises:
        CheckpointError: no checkpoint there, or a file of it is missing or damaged.
    """
    rows_a, rows_b = _opened(a), _opened(b)
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


def _opened(url: str | Path) -> ChainRows:
    store, name = locate(url)
    return ChainRows(store.storage, store.chain(name), name)


def _compared(key: str, rows_a: ChainRows, rows_b: ChainRows) -> TableDiff:
    a, b = rows_a.index(key), rows_b.index(key)
    hash_name = rows_a.tables[a].hash_name
    piece = max(1, _PIECE_BYTES // RowLayout.of(rows_a.tables[a]).row_bytes)
    ranges = max(list(rows_a.ranges(a, piece)), list(rows_b.ranges(b, piece)), key=len)
    only_a = only_b = equal = changed = touched = 0
    weights = state = 0.0
    for start, stop in ranges:
        one, other = rows_a.read(a, start, stop), rows_b.read(b, start, stop)
        in_a, in_b = _common(hash_name, one.ids, other.ids)
        only_a += len(one.ids) - len(in_a)
        only_b += len(other.ids) - len(in_b)
        weights_R = _differences(one.weights[in_a], other.weights[in_b])
        state_R = _differences(one.state[in_a], other.state[in_b])
        changed_R = (weights_R > 0) | (state_R > 0)
        touched_R = ~changed_R & _touched(one, in_a, other, in_b)
        changed += int(changed_R.sum())
        touched += int(touched_R.sum())
        equal += int((~changed_R & ~touched_R).sum())
        if len(in_a):
            weights = max(weights, float(weights_R.max()))
            state = max(state, float(state_R.max()))
    return TableDiff(
        key=key,
        only_a=only_a,
        only_b=only_b,
        equal=equal,
        changed=changed,
        touched=touched,
        weights_difference=weights,
        state_difference=state,
    )


def _common(hash_name: str, ids_a: Tensor, ids_b: Tensor) -> tuple[Tensor, Tensor]:
    """Where the ids that are in both lie in each."""
    keys_a, keys_b = (sort_key(hash_ids(hash_name, ids)) for ids in (ids_a, ids_b))
    if not len(keys_a) or not len(keys_b):
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return none, none
    at = torch.searchsorted(keys_b, keys_a).clamp_(max=len(keys_b) - 1)
    in_a = (keys_b[at] == keys_a).nonzero().squeeze(1)
    return in_a, at[in_a]


def _differences(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    """float64 [R]: the largest |a - b| of each row; infinite where one is not a number."""
    if not a_RD.shape[1]:
        return torch.zeros(len(a_RD), dtype=torch.float64, device="cpu")
    a_RD, b_RD = a_RD.double(), b_RD.double()
    difference = (a_RD - b_RD).abs().nan_to_num_(nan=float("inf"))
    difference[(a_RD == b_RD) | (a_RD.isnan() & b_RD.isnan())] = 0.0
    return difference.amax(1)


def _touched(one: RowChunk, in_a: Tensor, other: RowChunk, in_b: Tensor) -> Tensor:
    seen_R = one.last_seen_s[in_a] != other.last_seen_s[in_b]
    return seen_R | (one.counts[in_a] != other.counts[in_b])
