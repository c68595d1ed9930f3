"""Every operator of `torch.ops.shoal` in plain torch, on any device and dtype.

`with forced(PLAIN):` runs them in the place of core and kernels, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.placement import BUCKET_BITS, buckets_of, floormod, mix64, unsigned_mod
from support import plain_ids, plain_layout, plain_rows

__all__ = ["PLAIN"]


def _into_heads(found: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Results into the heads of given tensors, and the length of the first into the last."""
    for part, out in zip(found, outs, strict=False):
        out[: part.numel()] = part
    outs[-1].fill_(found[0].numel())


def _fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    what: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = list(ids)
    if offsets_K1 is not None:
        spans = list(torch.split(ids[0], offsets_K1.diff().tolist()))
    if rule == "hash_ranges" and shards_N is not None:
        owners = [_range_shards(span, line) for span, line in zip(spans, shards_N, strict=True)]
    elif shards_N is not None:
        owners = list(torch.split(shards_N, [span.numel() for span in spans]))
    else:
        shard_by = floormod if rule == "floormod" else unsigned_mod
        owners = [shard_by(span, num) for span in spans]
    return plain_ids.fused_reorder_given(spans, num, dims, owners)


def _range_shards(ids_N: Tensor, line: Tensor) -> Tensor:
    shares_N = (buckets_of(mix64(ids_N ^ line[0])) * line[1]) >> BUCKET_BITS
    return line[2 + shares_N]


def _fused_reorder_into(*arguments: Any) -> None:
    _into_heads(_fused_reorder(*arguments[:6]), arguments[6:11])


def _fill_offsets(buffer_E: Tensor, value: Tensor, *offset_map: Any) -> None:
    source, target = plain_rows.offset_map_places(*offset_map)
    buffer_E[target] = value[source]


def _move_rows(rows_N: Tensor, order_N: Tensor, take: bool) -> Tensor:
    move = plain_ids.permute_rows if take else plain_ids.unpermute_rows
    return move(rows_N, order_N)


def _first_n(source: Tensor, offsets_B1: Tensor, length: int, rows: int, back: bool) -> Tensor:
    if not back:
        return plain_rows.segment_first_n(source, offsets_B1, length)
    ids_N = plain_rows.row_ids(offsets_B1, rows)
    steps_N = torch.arange(rows, device=ids_N.device) - offsets_B1[ids_N]
    kept_N = steps_N < length
    return source[ids_N, steps_N.where(kept_N, 0)].masked_fill(~kept_N.unsqueeze(1), 0)


def _group_index(
    index_M: Tensor, length: int, indices_sorted: bool, op: str
) -> tuple[Tensor, Tensor]:
    sorted_M, order_M = torch.sort(index_M, stable=True)
    return plain_rows.segment_offsets(sorted_M, length), order_M[: 0 if indices_sorted else None]


def _sorted_offsets(indices: list[Tensor], lengths: list[int], op: str) -> list[Tensor]:
    return [
        plain_rows.segment_offsets(index, length)
        for index, length in zip(indices, lengths, strict=True)
    ]


def _reduce(
    values_ND: Tensor, offsets_B1: Tensor, order: Tensor | None, index_N: Tensor | None, mode: str
) -> Tensor:
    if index_N is None:
        index_N = plain_rows.row_ids(offsets_B1, values_ND.shape[0])
    return plain_rows.grouped(values_ND, index_N, offsets_B1.diff(), mode)


def _spread(grads_BD: Tensor, offsets_B1: Tensor, *rest: Any) -> Tensor:
    _, index_N, values_ND, pooled_BD, mode, rows = rest
    if index_N is None:
        index_N = plain_rows.row_ids(offsets_B1, rows)
    if values_ND is not None and pooled_BD is not None:
        share_BD = (grads_BD / pooled_BD).masked_fill(pooled_BD == 0, 0)
        return values_ND * share_BD[index_N]
    over_B1 = plain_rows.divisors(offsets_B1.diff(), mode).to(grads_BD.dtype).unsqueeze(1)
    return (grads_BD / over_B1)[index_N]


def _index_reduce(
    values_ND: Tensor, index_N: Tensor, length: int, in_order: bool, mode: str, op: str
) -> tuple[Tensor, Tensor, Tensor]:
    offsets_B1, order_N = _group_index(index_N, length, in_order, op)
    return _reduce(values_ND, offsets_B1, order_N, index_N, mode), offsets_B1, order_N


def _sums(values: list[Tensor], offsets: list[Tensor], *how: Any) -> list[Tensor]:
    order_N, index_N, widths, parts, _ = how
    outs, rest = [], list(widths)
    for rows_ND, offsets_B1, count in zip(values, offsets, parts, strict=True):
        sums_BD = _reduce(rows_ND, offsets_B1, order_N, index_N, "sum")
        outs += [part_BD.clone() for part_BD in torch.split(sums_BD, rest[:count], dim=1)]
        rest = rest[count:]
    return outs


def _sums_backward(
    grads: list[Tensor], offsets: list[Tensor], rows: list[int], parts: list[int], op: str
) -> list[Tensor]:
    outs, rest = [], list(grads)
    for offsets_B1, count, number in zip(offsets, rows, parts, strict=True):
        outs.append(torch.cat(rest[:number], dim=1)[plain_rows.row_ids(offsets_B1, count)])
        rest = rest[number:]
    return outs


PLAIN: dict[str, Callable[..., Any]] = {
    "dedup": plain_ids.dedup,
    "dedup_into": lambda ids_N, *outs: _into_heads(plain_ids.dedup(ids_N), outs),
    "fill_offsets_": _fill_offsets,
    "fused_reorder": _fused_reorder,
    "fused_reorder_into": _fused_reorder_into,
    "gather_flat": plain_rows.gather_flat,
    "gather_rows": lambda shards, index_N, *_: torch.cat(list(shards))[index_N],
    "group_index": _group_index,
    "index_reduce": _index_reduce,
    "layout_backward": plain_layout.layout_backward,
    "layout_forward": plain_layout.layout_forward,
    "match_rows": lambda ids, query_N, *_: plain_rows.match_rows(torch.cat(list(ids)), query_N),
    "move_rows": _move_rows,
    "normalize_merged_split": plain_ids.normalize_merged_split,
    "partition": lambda shards_N, num, what="": plain_ids.partition(shards_N, num),
    "row_ids": lambda offsets, rows, op: plain_rows.row_ids(offsets, rows),
    "scatter_flat": plain_rows.scatter_flat,
    "scatter_rows": lambda grad_ND, index_N, rows, _: plain_rows.scatter_rows(
        grad_ND, index_N, rows
    ),
    "segment_first_n": _first_n,
    "segment_reduce": _reduce,
    "segment_spread": _spread,
    "segment_sums": _sums,
    "segment_sums_backward": _sums_backward,
    "sorted_offsets": _sorted_offsets,
    "sum_offsets": plain_rows.sum_offsets,
}
