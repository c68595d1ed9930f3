"""Ids of one or many tables made distinct and packed by shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.ops.dispatch import one_device
from shoal.ops.id_checks import check_ids, check_out, shape_error, value_error
from shoal.ops.ids import dedup_into
from shoal.ops.reference import FusedReorder, Reorder, ShardBy
from shoal.ops.reorder_operators import fused_reorder, fused_reorder_into
from shoal.ops.splits import check_lengths, check_num, check_shards
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import Ragged

__all__ = [
    "fused_reorder_by_indices",
    "fused_reorder_by_indices_into",
    "reorder_by_indices",
    "reorder_by_indices_into",
]

Tables = tuple[list[Tensor], Tensor | None, list[int]]


def reorder_by_indices(ids_N: Tensor, shards_N: Tensor, num_of_shards: int) -> Reorder:
    """Distinct ids grouped by shard, inside a shard in reverse order of first appearance.

    ids_N int64 [N], or [N, C] where a whole row is an id; shards_N int32 or int64 [N] in
    [0, num_of_shards), of which an id's first counts -> `Reorder(ids_U, sizes_W)`, [U] or [U, C].

    On CUDA it waits for the device, because U depends on the ids; `reorder_by_indices_into` does
    not. No gradient. Monolith: `reorder_by_indices`, which took rows with the same first column
    for the same id.

    Raises:
        DTypeError, ShapeError: ids not int64 [N] or [N, C], shards not int32 or int64 [N].
        InputError: on two devices, num_of_shards below 1, a shard out of range.
    """
    op = "reorder_by_indices"
    keys_N = _keys(op, ids_N, shards_N, num_of_shards)
    shards_N = shards_N.long()
    found = fused_reorder([keys_N], None, [1], num_of_shards, "given", shards_N, f"{op}: shards_N")
    keys_U, _, sizes_W, _ = found
    keys_U = keys_U[_mirrored(sizes_W, keys_U.numel())]
    if ids_N.ndim == 1:
        return Reorder(keys_U, sizes_W)
    return Reorder(_rows_by_key(ids_N, keys_N)[keys_U], sizes_W)


def reorder_by_indices_into(
    ids_N: Tensor,
    shards_N: Tensor,
    num_of_shards: int,
    *,
    ids_out_N: Tensor,
    sizes_out_W: Tensor,
    size_out_1: Tensor,
) -> None:
    """`reorder_by_indices` into given tensors; nothing waits for the device.

    ids_out_N int64 of the shape of ids_N: only its first U entries, or rows, are written.
    sizes_out_W int64 [W]; size_out_1 int64 [1] receives U. The outputs share no memory with each
    other or with the inputs.

    Raises:
        as `reorder_by_indices`; DTypeError and ShapeError also for outputs that are not so.
    """
    op = "reorder_by_indices_into"
    keys_N = _keys(op, ids_N, shards_N, num_of_shards)
    check_out(op, "ids_out_N", ids_out_N, *ids_N.shape)
    check_out(op, "sizes_out_W", sizes_out_W, num_of_shards)
    check_out(op, "size_out_1", size_out_1, 1)
    outs = {"ids_out_N": ids_out_N, "sizes_out_W": sizes_out_W, "size_out_1": size_out_1}
    one_device(op, ids_N=ids_N, **outs)
    found_N, counts_N, offsets_N = (torch.empty_like(keys_N) for _ in range(3))
    fused_reorder_into(
        [keys_N],
        None,
        [1],
        num_of_shards,
        "given",
        shards_N.long(),
        found_N,
        counts_N,
        sizes_out_W,
        offsets_N,
        size_out_1,
        f"{op}: shards_N",
    )
    inside_N = torch.arange(keys_N.numel(), device=keys_N.device) < size_out_1
    found_N = torch.where(inside_N, found_N[_mirrored(sizes_out_W, keys_N.numel())], 0)
    if ids_N.ndim == 2:
        found_N, inside_N = _rows_by_key(ids_N, keys_N)[found_N], inside_N.unsqueeze(1)
    ids_out_N.copy_(torch.where(inside_N, found_N, ids_out_N))


def fused_reorder_by_indices(
    ids: Sequence[Tensor] | Ragged,
    num_of_shards: int,
    dim_sizes: Sequence[int] | None = None,
    *,
    shard_by: ShardBy = floormod,
) -> FusedReorder:
    """Distinct ids of K tables, packed for an exchange between W shards.

    ids: K int64 tensors, N ids in all, or a ragged of K rows. dim_sizes: K row widths, 1 if left
    out (then offsets number rows). shard_by: `placement.floormod` (Monolith's rule),
    `placement.unsigned_mod`, or any function from ids and W to shards int64 in [0, W).
    -> `FusedReorder(ids_U, counts_U, shard_sizes_W, slot_sizes_WK, offset_sizes_K, offsets_N)`,
    all int64; offsets into the received buffer do not end at 2^31, as Monolith's did.

    On CUDA it waits for the device, because U depends on the ids; `fused_reorder_by_indices_into`
    does not. No gradient. Monolith: `fused_reorder_by_indices`.

    Raises:
        DTypeError, ShapeError: ids not int64 [N], or dims and tables of different number.
        InputError: no tables, on several devices, num_of_shards or a width below 1, a shard of
            shard_by's out of range.
    """
    op = "fused_reorder_by_indices"
    parts, offsets_K1, dims = tables_of(op, ids, dim_sizes)
    check_num(op, "num_of_shards", num_of_shards)
    rule, shards_N = _shard_rule(op, parts, num_of_shards, shard_by)
    ids_U, counts_U, sizes_WK, offsets_N = fused_reorder(
        parts, offsets_K1, dims, num_of_shards, rule, shards_N
    )
    return _reordered(ids, dims, ids_U, counts_U, sizes_WK, offsets_N)


def fused_reorder_by_indices_into(
    ids: Sequence[Tensor] | Ragged,
    num_of_shards: int,
    dim_sizes: Sequence[int] | None = None,
    *,
    ids_out_N: Tensor,
    counts_out_N: Tensor,
    slot_sizes_out_WK: Tensor,
    offsets_out_N: Tensor,
    size_out_1: Tensor,
    shard_by: ShardBy = floormod,
) -> None:
    """`fused_reorder_by_indices` into given tensors; nothing waits for the device.

    ids_out_N, counts_out_N, offsets_out_N int64 [N]: of the first two only the first U entries
    are written. slot_sizes_out_WK int64 [W*K]; size_out_1 int64 [1] receives U. The outputs share
    no memory with each other or with the ids.

    Raises:
        as `fused_reorder_by_indices`; ShapeError also for outputs of other shapes.
    """
    op = "fused_reorder_by_indices_into"
    parts, offsets_K1, dims = tables_of(op, ids, dim_sizes)
    check_num(op, "num_of_shards", num_of_shards)
    n = sum(part.numel() for part in parts)
    outs = {"ids_out_N": ids_out_N, "counts_out_N": counts_out_N, "offsets_out_N": offsets_out_N}
    for name, out in outs.items():
        check_out(op, name, out, n)
    check_out(op, "slot_sizes_out_WK", slot_sizes_out_WK, num_of_shards * len(dims))
    check_out(op, "size_out_1", size_out_1, 1)
    outs |= {"slot_sizes_out_WK": slot_sizes_out_WK, "size_out_1": size_out_1}
    one_device(op, ids=parts[0], **outs)
    rule, shards_N = _shard_rule(op, parts, num_of_shards, shard_by)
    fused_reorder_into(
        parts,
        offsets_K1,
        dims,
        num_of_shards,
        rule,
        shards_N,
        ids_out_N,
        counts_out_N,
        slot_sizes_out_WK,
        offsets_out_N,
        size_out_1,
        f"{op}: shard_by's result",
    )


def tables_of(op: str, ids: Sequence[Tensor] | Ragged, dims: Sequence[int] | None) -> Tables:
    """Ids, offsets where they are a ragged's, and row widths of the tables, checked."""
    if isinstance(ids, Ragged):
        parts, offsets_K1, tables = [ids.values], ids.offsets_B1, ids.batch_size
    else:
        parts, offsets_K1, tables = list(ids), None, len(ids)
    if tables < 1:
        raise value_error(op, "number of tables", tables, "1 or more")
    for place, part in enumerate(parts):
        check_ids(op, f"ids[{place}]", part)
    one_device(op, **{f"ids_{place}": part for place, part in enumerate(parts)})
    widths = [1] * tables if dims is None else [int(dim) for dim in dims]
    if len(widths) != tables:
        raise shape_error(op, "number of row widths", len(widths), f"{tables}, one per table")
    if min(widths) < 1:
        raise value_error(op, "row widths", widths, "1 or more each")
    return parts, offsets_K1, widths


def _shard_rule(
    op: str, parts: Sequence[Tensor], num: int, shard_by: ShardBy
) -> tuple[str, Tensor | None]:
    """The name of a rule the kernels know, or "given" and what another rule says of each id."""
    if shard_by is floormod:
        return "floormod", None
    if shard_by is unsigned_mod:
        return "unsigned_mod", None
    given = [shard_by(part, num) for part in parts]
    for part, shards_N in zip(parts, given, strict=True):
        check_shards(op, "shard_by's result", shards_N, num)
        check_lengths(op, "ids", part, "shards", shards_N)
    return "given", torch.cat(given).long()


def _reordered(
    ids: Sequence[Tensor] | Ragged,
    dims: Sequence[int],
    ids_U: Tensor,
    counts_U: Tensor,
    sizes_WK: Tensor,
    offsets_N: Tensor,
) -> FusedReorder:
    if isinstance(ids, Ragged):
        offset_sizes_K = ids.lengths
    else:
        offset_sizes_K = torch.tensor(
            [part.numel() for part in ids], dtype=torch.int64, device="cpu"
        )
    shard_sizes_W = sizes_WK.view(-1, len(dims)).sum(1)
    return FusedReorder(ids_U, counts_U, shard_sizes_W, sizes_WK, offset_sizes_K, offsets_N)


def _keys(op: str, ids_N: Tensor, shards_N: Tensor, num: int) -> Tensor:
    """The ids, or int64 [N] that are equal for equal rows: 0..U-1 in order of first appearance."""
    check_ids(op, "ids_N", ids_N, dims=(1, 2))
    check_shards(op, "shards_N", shards_N, num)
    check_lengths(op, "shards_N", shards_N, "ids_N", ids_N)
    if ids_N.ndim == 1:
        return ids_N.contiguous()
    n, columns = ids_N.shape
    if columns < 1:
        raise shape_error(op, "shape of ids_N", (n, columns), "1 column or more")
    keys_N = _inverse(ids_N[:, 0])
    for column_N in ids_N.unbind(1)[1:]:
        keys_N = _inverse(keys_N * n + _inverse(column_N))
    return keys_N


def _inverse(ids_N: Tensor) -> Tensor:
    """`inverse_N` of `dedup`, without waiting for the device."""
    ids_N = ids_N.contiguous()
    ids_out_N, counts_N, inverse_N = (torch.empty_like(ids_N) for _ in range(3))
    dedup_into(
        ids_N,
        ids_out_N=ids_out_N,
        counts_out_N=counts_N,
        inverse_out_N=inverse_N,
        size_out_1=ids_N.new_empty(1),
    )
    return inverse_N


def _mirrored(sizes_W: Tensor, length: int) -> Tensor:
    """Where each of `length` places is in the reverse of its shard; behind the last: where it is.

    Place p of a shard that spans [start, end) goes to start + end - 1 - p.
    """
    ends_W = sizes_W.cumsum(0)
    places = torch.arange(length, device=sizes_W.device)
    shards = torch.searchsorted(ends_W, places, right=True).clamp(max=sizes_W.numel() - 1)
    mirrored = (2 * ends_W - sizes_W - 1)[shards] - places
    return torch.where(places < ends_W[-1], mirrored, places)


def _rows_by_key(ids_NC: Tensor, keys_N: Tensor) -> Tensor:
    """A row of each key at its place, [N, C]; equal rows where two land in one."""
    rows_NC = torch.empty_like(ids_NC, memory_format=torch.contiguous_format)
    rows_NC[keys_N] = ids_NC
    return rows_NC
