"""The gradient of a pooled lookup for each position, in plain torch, and its sum per id.

What a shard does inside `apply` for the rows under a ticket; here for lookups without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.ops import segment_sum
from shoal.table.read_ticket import ReadTicket
from shoal.table.shard import GradRecord, Pool, SummedGrads, Ticket

__all__ = ["position_grads", "sum_by_id", "sums_finite"]


def position_grads(record: GradRecord, dims_G: Sequence[int]) -> list[Tensor]:
    """One [n_g, D_g] per group: what each looked-up row gets; the record's scale is in it.

    dims_G: row dim of each group's table.
    """
    if record.plan is None or record.offsets_GB1 is None:
        return [grad * record.scale for grad in record.grads]
    offsets_GB1, pools = record.offsets_GB1, record.plan.pools
    batch_size = (offsets_GB1.numel() - 1) // len(pools)
    cuts = record.ticket.groups.splits_G1.tolist()
    parts = []
    for g, (pool, dim) in enumerate(zip(pools, dims_G, strict=True)):
        offsets_B1 = offsets_GB1[g * batch_size : (g + 1) * batch_size + 1]
        rows = _rows_of(pool, record.grads, offsets_B1, (cuts[g + 1] - cuts[g], dim))
        if record.weights_N is not None:
            weights = record.weights_N[cuts[g] : cuts[g + 1]]
            rows = rows * weights.to(rows.dtype)[:, None]
        parts.append(rows * record.scale if record.scale != 1.0 else rows)
    return parts


def _rows_of(
    pool: Pool, grads: Sequence[Tensor], offsets_B1: Tensor, shape: tuple[int, int]
) -> Tensor:
    count, device = shape[0], offsets_B1.device
    lengths_B = offsets_B1.diff()
    bags_B = torch.arange(lengths_B.numel(), device=device)
    # The size is known on the host: a device need not be asked for it.
    bags_N = bags_B.repeat_interleave(lengths_B, output_size=count)
    # Outputs differ in dtype where tables do.
    like = next((part.output for part in pool.slices), 0)
    rows = grads[like].new_zeros(shape)
    for part in pool.slices:
        width = part.stop - part.start
        floats = width * (pool.length if pool.pooling == "first_n" else 1)
        block = grads[part.output][:, part.column : part.column + floats]
        if pool.pooling == "first_n":
            lane_N = torch.arange(count, device=device) + offsets_B1[0] - offsets_B1[bags_N]
            lanes = block.reshape(-1, pool.length, width)
            taken = lanes[bags_N, lane_N.clamp(max=pool.length - 1)]
            rows[:, part.start : part.stop] += taken.where(lane_N[:, None] < pool.length, 0)
        else:
            rows[:, part.start : part.stop] += block[bags_N]
    if pool.pooling == "mean":
        rows = rows / lengths_B[bags_N, None]
    return rows


def sum_by_id(records: Sequence[GradRecord], dims_K: Sequence[int]) -> SummedGrads:
    """Sums and counts per id over all records, whether the id has a row or not.

    Every table a record names is in the result, also with no ids. Ids come in rising order.
    dims_K: row dim of each table of the shard.
    """
    ids: dict[int, list[Tensor]] = {}
    grads: dict[int, list[Tensor]] = {}
    counts: dict[int, list[Tensor]] = {}
    counted: set[int] = set()
    for record in records:
        groups = record.ticket.groups
        tables, cuts = groups.tables_G.tolist(), groups.splits_G1.tolist()
        rows = position_grads(record, [dims_K[k] for k in tables])
        # One lookup is one sight of its ids, however many losses read it.
        sights = 0 if id(record.ticket) in counted else 1
        counted.add(id(record.ticket))
        counts_N = _counts(record.ticket) if sights else None
        for g, k in enumerate(tables):
            ids.setdefault(k, []).append(groups.ids_N[cuts[g] : cuts[g + 1]])
            grads.setdefault(k, []).append(rows[g])
            seen = slice(cuts[g], cuts[g + 1])
            counts.setdefault(k, []).append(
                torch.full_like(ids[k][-1], sights) if counts_N is None else counts_N[seen]
            )
    order = tuple(sorted(ids))
    summed = [_sum(torch.cat(ids[k]), torch.cat(grads[k]), torch.cat(counts[k])) for k in order]
    return SummedGrads(
        tables=order,
        ids=tuple(part[0] for part in summed),
        sums=tuple(part[1] for part in summed),
        counts=tuple(part[2] for part in summed),
    )


def sums_finite(records: Sequence[GradRecord]) -> bool | None:
    """Whether sums per row over records are finite, whatever rows their ids have; fast.

    False where a gradient is not finite, None where it is not sure: then form the sums.
    """
    total, limit = 0.0, torch.finfo(torch.float64).max
    for record in records:
        factor = abs(record.scale) * record.ticket.groups.ids_N.numel()
        if record.weights_N is not None and record.weights_N.numel():
            factor *= max(1.0, float(record.weights_N.abs().max()))
        pools = () if record.plan is None else record.plan.pools
        factor *= max([1, *(len(pool.slices) for pool in pools)])
        grads = [grad for grad in record.grads if grad.numel()]
        found = [float(torch.linalg.vector_norm(grad, torch.inf)) for grad in grads]
        if not all(map(math.isfinite, found)):
            return False
        total += factor * max([1.0, *found])
        limit = min([limit, *(torch.finfo(grad.dtype).max for grad in grads)])
    # A quarter: rounding may add to a sum as it grows.
    return True if total <= limit / 4 else None


def _counts(ticket: Ticket) -> Tensor | None:
    """Occurrences that each position of a lookup without rows stands for; None: 1 each."""
    return ticket.counts_N if isinstance(ticket, ReadTicket) else None


def _sum(ids_N: Tensor, rows_ND: Tensor, counts_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Sorted runs instead of atomic adds: the order of a sum is that of the positions.
    order_N = ids_N.argsort(stable=True)
    ids_U, lengths_U = torch.unique_consecutive(ids_N[order_N], return_counts=True)
    offsets_U1 = pad(lengths_U.cumsum(0), (1, 0))
    sums_UD = segment_sum(rows_ND[order_N], offsets_U1)
    counts_U = pad(counts_N[order_N].cumsum(0), (1, 0))[offsets_U1].diff()
    return ids_U, sums_UD, counts_U
