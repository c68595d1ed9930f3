"""Ids of one or many tables made distinct and packed by shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.ops import reference
from shoal.ops.dispatch import one_device, operator
from shoal.ops.ids import (
    check_ids,
    check_offsets_values,
    check_out,
    dedup,
    fused_value_rowids,
    shape_error,
    value_error,
)
from shoal.ops.reference import FusedReorder, Reorder, ShardBy, UniqueKeys, ValueOffset
from shoal.ops.splits import (
    check_lengths,
    check_num,
    check_shards,
    partition,
    raise_bad_shards,
    shard_error,
)
from shoal.placement import floormod, unsigned_mod
from shoal.ragged import Ragged

__all__ = [
    "fused_reorder_by_indices",
    "fused_reorder_by_indices_into",
    "reorder_by_indices",
    "unique_key_with_value_and_offset",
]

_GOOD = -1  # what the core returns when it found nothing wrong
_RULE_NUMBERS = {"given": 0, "floormod": 1, "unsigned_mod": 2}

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
    found = _fused_reorder([keys_N], None, [1], num_of_shards, "given", shards_N.long())
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
    ids_U, counts_U, sizes_WK, offsets_N = _fused_reorder(
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
    _fused_reorder_into(
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
    rows_N = fused_value_rowids(key)
    device = rows_N.device
    keys_U, counts_U, sizes_K, inverse_N = _fused_reorder(
        parts, key.offsets_B1, [1] * len(widths), 1, "floormod", None
    )
    order_N, _ = partition(inverse_N, max(keys_U.numel(), 1))
    dims_K = torch.tensor(widths, device=device)
    floats_K = key.lengths * dims_K
    # Occurrence i of slot k starts at (floats before the slot) + d_k * (i - first of the slot).
    bases_K = floats_K.cumsum(0) - floats_K - dims_K * key.offsets_B1[:-1]
    places_N = torch.arange(rows_N.numel(), device=device)
    starts_N = bases_K[rows_N] + dims_K[rows_N] * places_N
    unique_key = Ragged.from_lengths(keys_U, sizes_K)
    splits_U1 = torch.nn.functional.pad(counts_U.cumsum(0), (1, 0))
    value_offset = ValueOffset(starts_N[order_N], splits_U1, unique_key.offsets_B1)
    buffer = torch.empty(int(floats_K.sum()), device=device) if generate_buffer else None
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


def _spans(ids: Sequence[Tensor], offsets_K1: Tensor | None) -> list[Tensor]:
    """Ids of each table, contiguous."""
    if offsets_K1 is None:
        return [part.contiguous() for part in ids]
    check_offsets_values(offsets_K1, ids[0].numel())
    return list(torch.split(ids[0].contiguous(), offsets_K1.diff().tolist()))


def _core_started(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
    offsets_N: Tensor,
) -> tuple[_core.FusedReorder, list[Tensor]]:
    spans = _spans(ids, offsets_K1)
    if shards_N is not None:
        shards_N = shards_N.contiguous()
    found = _core.FusedReorder(
        [span.data_ptr() for span in spans],
        [span.numel() for span in spans],
        list(dims),
        num,
        _RULE_NUMBERS[rule],
        0 if shards_N is None else shards_N.data_ptr(),
        offsets_N.data_ptr(),
        torch.get_num_threads(),
    )
    if found.bad != _GOOD and shards_N is not None:
        raise shard_error("fused_reorder", shards_N, num, found.bad)
    return found, spans


def _core_fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = sum(part.numel() for part in ids)
    offsets_N = torch.empty(n, dtype=torch.int64)
    found, _spans_alive = _core_started(ids, offsets_K1, dims, num, rule, shards_N, offsets_N)
    ids_U = torch.empty(found.unique, dtype=torch.int64)
    counts_U = torch.empty(found.unique, dtype=torch.int64)
    sizes_WK = torch.empty(num * len(dims), dtype=torch.int64)
    found.write(ids_U.data_ptr(), counts_U.data_ptr(), sizes_WK.data_ptr())
    return ids_U, counts_U, sizes_WK, offsets_N


def _core_fused_reorder_into(*arguments: Any) -> None:
    ids_out_N, counts_out_N, sizes_out_WK, offsets_out_N, size_out_1 = arguments[6:]
    ids, offsets_K1, dims, num, rule, shards_N = arguments[:6]
    found, _spans_alive = _core_started(ids, offsets_K1, dims, num, rule, shards_N, offsets_out_N)
    found.write(ids_out_N.data_ptr(), counts_out_N.data_ptr(), sizes_out_WK.data_ptr())
    size_out_1.fill_(found.unique)


def _reference_fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = _spans(ids, offsets_K1)
    if shards_N is None:
        shard_by = floormod if rule == "floormod" else unsigned_mod
        found = reference.fused_reorder_by_indices(spans, num, dims, shard_by=shard_by)
    else:
        lengths = [span.numel() for span in spans]
        found = reference.fused_reorder_given(spans, num, dims, torch.split(shards_N, lengths))
    return found.ids_U, found.counts_U, found.slot_sizes_WK, found.offsets_N


def _reference_fused_reorder_into(*arguments: Any) -> None:
    ids_out_N, counts_out_N, sizes_out_WK, offsets_out_N, size_out_1 = arguments[6:]
    ids_U, counts_U, sizes_WK, offsets_N = _reference_fused_reorder(*arguments[:6])
    ids_out_N[: ids_U.numel()] = ids_U
    counts_out_N[: ids_U.numel()] = counts_U
    sizes_out_WK.copy_(sizes_WK)
    offsets_out_N.copy_(offsets_N)
    size_out_1.fill_(ids_U.numel())


def _fake_fused_reorder(
    ids: Sequence[Tensor],
    offsets_K1: Tensor | None,
    dims: Sequence[int],
    num: int,
    rule: str,
    shards_N: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size, like = torch.library.get_ctx().new_dynamic_size(), ids[0]
    n = sum(part.numel() for part in ids)
    return (
        like.new_empty(size),
        like.new_empty(size),
        like.new_empty(num * len(dims)),
        like.new_empty(n),
    )


def _check_fused_reorder(*arguments: Any) -> None:
    ids, offsets_K1, _, num, _, shards_N = arguments[:6]
    if shards_N is not None:
        raise_bad_shards("fused_reorder", shards_N, num)
    if offsets_K1 is not None:
        check_offsets_values(offsets_K1, ids[0].numel())


_ARGUMENTS = "Tensor[] ids, Tensor? offsets_K1, int[] dims_K, int num, str rule, Tensor? shards_N"

_fused_reorder = operator(
    f"fused_reorder({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_reference_fused_reorder,
    core=_core_fused_reorder,
    triton="ids:fused_reorder",
    fake=_fake_fused_reorder,
    check=_check_fused_reorder,
)

_fused_reorder_into = operator(
    f"fused_reorder_into({_ARGUMENTS}, Tensor(a!) ids_out_N, Tensor(b!) counts_out_N, "
    "Tensor(c!) sizes_out_WK, Tensor(d!) offsets_out_N, Tensor(e!) size_out_1) -> ()",
    reference=_reference_fused_reorder_into,
    core=_core_fused_reorder_into,
    triton="ids:fused_reorder_into",
    fake=lambda *_: None,
    check=_check_fused_reorder,
)
