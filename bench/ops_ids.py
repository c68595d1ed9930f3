"""Inputs and contenders of the id operations: dedup, partition, splits, fused reorder."""

from __future__ import annotations

import torch
from torch import Tensor

from ids import index_batches, to_ids
from ops_work import Work, equal
from shoal import ops

__all__ = ["dedup", "fused_reorder", "partition", "split_by_indices"]

WORD = 8  # bytes of an id or an index
FLOAT = 4


def dedup(*, device: str, ids: int, distribution: str, into: bool = False) -> Work:
    """Ids drawn from half as many."""
    (index_N,) = index_batches(ids // 2, 1, ids, distribution)
    ids_N = to_ids(index_N).to(device)
    outs = {
        "ids_out_N": torch.empty_like(ids_N),
        "counts_out_N": torch.empty_like(ids_N),
        "inverse_out_N": torch.empty_like(ids_N),
        "size_out_1": ids_N.new_empty(1),
    }

    def filled() -> None:
        ops.dedup_into(ids_N, **outs)

    def check() -> None:
        if into:
            filled()
            size = int(outs["size_out_1"])
            ids_U, counts_U = outs["ids_out_N"][:size], outs["counts_out_N"][:size]
            inverse_N = outs["inverse_out_N"]
        else:
            ids_U, counts_U, inverse_N = ops.dedup(ids_N)
        equal(ids_U[inverse_N], ids_N, "inverse")
        equal(ids_U.sort().values, torch.unique(ids_N), "distinct ids")
        equal(counts_U, torch.bincount(inverse_N, minlength=ids_U.numel()), "counts")

    unique = torch.unique(ids_N).numel()
    return Work(
        ours=filled if into else lambda: ops.dedup(ids_N),
        peers={"unique": lambda: torch.unique(ids_N, return_inverse=True)},
        moved=WORD * (2 * ids + 2 * unique),
        check=check,
    )


def partition(*, device: str, ids: int, shards: int) -> Work:
    """A shard per id, drawn evenly."""
    shards_N = torch.randint(shards, (ids,), device=device)
    values_N, order_N = torch.empty_like(shards_N), torch.empty_like(shards_N)

    def by_sort() -> tuple[Tensor, Tensor]:
        torch.sort(shards_N, stable=True, out=(values_N, order_N))
        return order_N, torch.bincount(shards_N, minlength=shards)

    def check() -> None:
        found, (theirs_N, sizes_W) = ops.partition(shards_N, shards), by_sort()
        equal(found.order_N, theirs_N, "order")
        equal(found.sizes_W, sizes_W, "sizes")

    return Work(
        ours=lambda: ops.partition(shards_N, shards),
        peers={"sort": by_sort},
        moved=2 * WORD * ids,
        check=check,
    )


def split_by_indices(*, device: str, rows: int, dim: int, splits: int) -> Work:
    """A split per row, drawn evenly."""
    index_N = torch.randint(splits, (rows,), device=device)
    rows_ND = torch.rand(rows, dim, device=device)
    values_N, order_N = torch.empty_like(index_N), torch.empty_like(index_N)
    out_ND = torch.empty_like(rows_ND)

    def by_mask() -> list[Tensor]:
        return [rows_ND[index_N == split] for split in range(splits)]

    def by_sort() -> list[Tensor]:
        torch.sort(index_N, stable=True, out=(values_N, order_N))
        torch.index_select(rows_ND, 0, order_N, out=out_ND)
        sizes = torch.bincount(index_N, minlength=splits).tolist()
        return list(torch.split(out_ND, sizes))

    return Work(
        ours=lambda: ops.split_by_indices(index_N, rows_ND, splits),
        peers={"masks": by_mask, "sort": by_sort},
        moved=rows * (WORD + 2 * FLOAT * dim),
    )


def fused_reorder(*, device: str, tables: int, ids: int, shards: int, dim: int) -> Work:
    """Ids of each table drawn from ten times as many, all rows equally wide."""
    parts = [torch.randint(10 * ids, (ids,), device=device) for _ in range(tables)]
    dims = [dim] * tables
    packed = _Packed(parts, shards, dim)

    def check() -> None:
        found = ops.fused_reorder_by_indices(parts, shards, dims)
        ids_N = torch.cat(parts)
        equal(found.ids_U[found.offsets_N // dim], ids_N, "offsets")
        for peer in (packed.per_table, packed.at_once):
            ids_U, sizes_WK, offsets_N = peer()
            equal(found.slot_sizes_WK, sizes_WK, "slot sizes")
            equal(found.ids_U.sort().values, ids_U.sort().values, "distinct ids")
            equal(ids_U[offsets_N // dim], ids_N, "the baseline's offsets")
        equal(found.counts_U.sum(), torch.tensor(ids_N.numel(), device=device), "counts")

    unique = ops.fused_reorder_by_indices(parts, shards, dims).ids_U.numel()
    return Work(
        ours=lambda: ops.fused_reorder_by_indices(parts, shards, dims),
        peers={"unique per table": packed.per_table, "unique of packed ids": packed.at_once},
        moved=WORD * (2 * tables * ids + 2 * unique),
        check=check,
    )


class _Packed:
    """The reorder by torch alone: distinct ids, then one sort by shard and table."""

    def __init__(self, parts: list[Tensor], shards: int, dim: int) -> None:
        self.parts, self.shards, self.dim = parts, shards, dim
        self.tables = len(parts)
        device = parts[0].device
        # Ids below 2^48 leave bits for the number of the table.
        numbers_K = torch.arange(self.tables, device=device) << 48
        lengths_K = torch.tensor([part.numel() for part in parts], device=device)
        self.table_N = numbers_K.repeat_interleave(lengths_K)

    def per_table(self) -> tuple[Tensor, Tensor, Tensor]:
        ids, places, tables, first = [], [], [], 0
        for table, part in enumerate(self.parts):
            ids_U, inverse_N = torch.unique(part, return_inverse=True)
            ids.append(ids_U)
            places.append(inverse_N + first)
            tables.append(torch.full_like(ids_U, table))
            first += ids_U.numel()
        return self._ordered(torch.cat(ids), torch.cat(tables), torch.cat(places))

    def at_once(self) -> tuple[Tensor, Tensor, Tensor]:
        keys_N = torch.cat(self.parts) | self.table_N
        keys_U, inverse_N = torch.unique(keys_N, return_inverse=True)
        return self._ordered(keys_U & ((1 << 48) - 1), keys_U >> 48, inverse_N)

    def _ordered(
        self, ids_U: Tensor, table_U: Tensor, place_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        slot_U = torch.remainder(ids_U, self.shards) * self.tables + table_U
        order_U = torch.argsort(slot_U, stable=True)
        rank_U = torch.empty_like(order_U)
        rank_U[order_U] = torch.arange(order_U.numel(), device=order_U.device)
        sizes_WK = torch.bincount(slot_U, minlength=self.shards * self.tables)
        return ids_U[order_U], sizes_WK, rank_U[place_N] * self.dim
