"""Ids of one or many tables made distinct and packed by shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.ops.dispatch import one_device
from shoal.ops.ids import (
    check_ids,
    check_out,
    dedup,
    shape_error,
    value_error,
    value_rowids,
)
from shoal.ops.reference import FusedReorder, Reorder, ShardBy, UniqueKeys, ValueOffset
from shoal.ops.reorder_operators import fused_reorder, fused_reorder_into
from shoal.ops.splits import check_lengths, check_num, check_shards, partition
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import Ragged

__all__ = [
    "fused_reorder_by_indices",
    "fused_reorder_by_indices_into",
    "reorder_by_indices",
    "unique_key_with_value_and_offset",
]

Tables = tuple[list[Tensor], Tensor | None, list[int]]


def reorder_by_indices(ids_N: Tensor, shards_N: Tensor, num_of_shards: int) -> Reorder:
    """Distinct ids grouped by shard, inside a shard in reverse order of first appearance.

    ids_N int64 [N], or [N, C] where a whole row is an id; shards_N int32 or int64 [N] in
    [0, num_of_shards), of which an id's first counts -> `Reorder(ids_U, sizes_W)`, [U] or [U, C].

    On CUDA it waits for the device, because U depends on the ids. No gradient. Monolith:
    `reorder_by_indices`, which took rows with the same first column for the same id.

    Raises:
        DTypeError, ShapeError: ids not int64 [N] or [N, C], shards not int32 or int64 [N].
        InputError: on two devices, num_of_shards below 1, a shard out of range.
    """
    op = "reorder_by_indices"
    check_ids(op, "ids_N", ids_N, dims=(1, 2))
    check_shards(op, "shards_N", shards_N, num_of_shards)
    check_lengths(op, "shards_N", shards_N, "ids_N", ids_N)
    keys_N = ids_N if ids_N.ndim == 1 else _row_keys(ids_N)
    shards_N = shards_N.long()
    found = fused_reorder([keys_N], None, [1], num_of_shards, "given", shards_N, f"{op}: shards_N")
    keys_U, _, sizes_W, _ = found
    size = keys_U.numel()
    # Place p of a shard that spans [start, end) goes to start + end - 1 - p.
    ends_W = sizes_W.cumsum(0)
    mirror_U = (2 * ends_W - sizes_W - 1).repeat_interleave(sizes_W, output_size=size)
    keys_U = keys_U[mirror_U - torch.arange(size, device=keys_U.device)]
    if ids_N.ndim == 1:
        return Reorder(keys_U, sizes_W)
    rows_U = ids_N.new_empty(size, ids_N.shape[1])
    rows_U[keys_N] = ids_N  # equal rows where two land in one place
    return Reorder(rows_U[keys_U], sizes_W)


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
    parts, offsets_K1, dims = _tables(op, ids, dim_sizes)
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
    parts, offsets_K1, dims = _tables(op, ids, dim_sizes)
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


def unique_key_with_value_and_offset(
    key: Ragged, dims: Sequence[int], generate_buffer: bool = True
) -> UniqueKeys:
    """Distinct keys of each of K slots, and where the row of each occurrence goes.

    key: a ragged of K rows, one per slot; dims: K row widths -> `UniqueKeys(unique_key,
    value_offset, value_buffer)`. value_buffer float32 [sum n_k * d_k] holds one row per
    occurrence, slot after slot, to be filled by `fill_with_offset_map`; it is not initialised.
    None without generate_buffer.

    On CUDA it waits for the device, because U depends on the keys. No gradient. Monolith:
    `unique_key_with_value_and_offset`.

    Raises:
        ShapeError: dims and slots of different number; offsets that do not start at 0, fall, or
            do not end at N.
        InputError: no slots, or a width below 1.
    """
    op = "unique_key_with_value_and_offset"
    parts, _, widths = _tables(op, key, dims)
    rows_N = value_rowids(op, key)
    device = rows_N.device
    keys_U, counts_U, sizes_K, inverse_N = fused_reorder(
        parts, key.offsets_B1, [1] * len(widths), 1, "floormod", None
    )
    # N, not U, bounds the numbers: it is known when the graph is compiled.
    order_N, _ = partition(inverse_N, max(rows_N.numel(), 1))
    dims_K = torch.tensor(widths, device=device)
    floats_K = key.lengths * dims_K
    # Occurrence i of slot k starts at (floats before the slot) + d_k * (i - first of the slot).
    bases_K = floats_K.cumsum(0) - floats_K - dims_K * key.offsets_B1[:-1]
    places_N = torch.arange(rows_N.numel(), device=device)
    starts_N = bases_K[rows_N] + dims_K[rows_N] * places_N
    unique_key = Ragged.from_lengths(keys_U, sizes_K)
    splits_U1 = torch.nn.functional.pad(counts_U.cumsum(0), (1, 0))
    value_offset = ValueOffset(starts_N[order_N], splits_U1, unique_key.offsets_B1)
    buffer = None
    if generate_buffer:
        buffer = torch.empty(int(floats_K.sum()), dtype=torch.float32, device=device)
    return UniqueKeys(unique_key, value_offset, buffer)


def _tables(op: str, ids: Sequence[Tensor] | Ragged, dims: Sequence[int] | None) -> Tables:
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
        offset_sizes_K = torch.tensor([part.numel() for part in ids], dtype=torch.int64)
    shard_sizes_W = sizes_WK.view(-1, len(dims)).sum(1)
    return FusedReorder(ids_U, counts_U, shard_sizes_W, sizes_WK, offset_sizes_K, offsets_N)


def _row_keys(rows_NC: Tensor) -> Tensor:
    """int64 [N]: equal for equal rows, 0..U-1 in order of first appearance."""
    if rows_NC.shape[1] < 1:
        shape = tuple(rows_NC.shape)
        raise shape_error("reorder_by_indices", "shape of ids_N", shape, "1 column or more")
    n = rows_NC.shape[0]
    keys_N = dedup(rows_NC[:, 0]).inverse_N
    for column_N in rows_NC.unbind(1)[1:]:
        keys_N = dedup(keys_N * n + dedup(column_N).inverse_N).inverse_N
    return keys_N
