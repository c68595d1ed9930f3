"""Distinct keys of several slots, and where the row of each occurrence lies in one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels.transfer import sent
from shoal.ops.dispatch import one_device
from shoal.ops.id_checks import check_out
from shoal.ops.ids import value_rowids
from shoal.ops.reference import UniqueKeys, ValueOffset
from shoal.ops.reorder import tables_of
from shoal.ops.reorder_operators import fused_reorder, fused_reorder_into
from shoal.ops.splits import partition
from shoal.ragged import Ragged

__all__ = ["unique_key_with_value_and_offset", "unique_key_with_value_and_offset_into"]


def unique_key_with_value_and_offset(
    key: Ragged, dims: Sequence[int], generate_buffer: bool = True
) -> UniqueKeys:
    """Distinct keys of each of K slots, and where the row of each occurrence goes.

    key: a ragged of K rows, one per slot; dims: K row widths -> `UniqueKeys(unique_key,
    value_offset, value_buffer)`. value_buffer float32 [sum n_k * d_k] holds one row per
    occurrence, slot after slot, to be filled by `fill_with_offset_map`; it is not initialised.
    None without generate_buffer.

    On CUDA it waits for the device, because U depends on the keys;
    `unique_key_with_value_and_offset_into` does not. No gradient. Monolith:
    `unique_key_with_value_and_offset`.

    Raises:
        ShapeError: dims and slots of different number; offsets that do not start at 0, fall, or
            do not end at N.
        InputError: no slots, or a width below 1.
    """
    op = "unique_key_with_value_and_offset"
    parts, _, widths = tables_of(op, key, dims)
    starts_N, floats_K = _row_starts(op, key, widths)
    keys_U, counts_U, sizes_K, inverse_N = fused_reorder(
        parts, key.offsets_B1, [1] * len(widths), 1, "floormod", None
    )
    unique_key = Ragged.from_lengths(keys_U, sizes_K)
    splits_U1 = torch.nn.functional.pad(counts_U.cumsum(0), (1, 0))
    value_offset = ValueOffset(_by_key(starts_N, inverse_N), splits_U1, unique_key.offsets_B1)
    buffer = None
    if generate_buffer:
        buffer = torch.empty(int(floats_K.sum()), dtype=torch.float32, device=keys_U.device)
    return UniqueKeys(unique_key, value_offset, buffer)


def unique_key_with_value_and_offset_into(
    key: Ragged,
    dims: Sequence[int],
    *,
    keys_out_N: Tensor,
    key_splits_out_K1: Tensor,
    offsets_out_N: Tensor,
    splits_out_N1: Tensor,
    size_out_1: Tensor,
) -> None:
    """`unique_key_with_value_and_offset` into given tensors; nothing waits for the device.

    All int64. keys_out_N [N]: its first U entries are written, the distinct keys of slot k from
    key_splits_out_K1[k] to [k+1]. offsets_out_N [N] is `value_offset`'s, and so are the first U+1
    entries of splits_out_N1 [N+1]; the others become N. size_out_1 [1] receives U. The outputs
    share no memory with each other or with the key. The buffer, sum n_k * d_k, is the caller's.

    Raises:
        as `unique_key_with_value_and_offset`; DTypeError and ShapeError also for outputs that are
        not so, InputError for some on another device.
    """
    op = "unique_key_with_value_and_offset_into"
    parts, _, widths = tables_of(op, key, dims)
    n, slots = key.values.numel(), len(widths)
    check_out(op, "keys_out_N", keys_out_N, n)
    check_out(op, "key_splits_out_K1", key_splits_out_K1, slots + 1)
    check_out(op, "offsets_out_N", offsets_out_N, n)
    check_out(op, "splits_out_N1", splits_out_N1, n + 1)
    check_out(op, "size_out_1", size_out_1, 1)
    splits = {"key_splits_out_K1": key_splits_out_K1, "splits_out_N1": splits_out_N1}
    outs = {"keys_out_N": keys_out_N, "offsets_out_N": offsets_out_N, "size_out_1": size_out_1}
    one_device(op, key=parts[0], **splits, **outs)
    starts_N, _ = _row_starts(op, key, widths)
    counts_N = torch.zeros_like(keys_out_N)  # behind the last key there are none
    sizes_K, inverse_N = keys_out_N.new_empty(slots), torch.empty_like(keys_out_N)
    fused_reorder_into(
        parts,
        key.offsets_B1,
        [1] * slots,
        1,
        "floormod",
        None,
        keys_out_N,
        counts_N,
        sizes_K,
        inverse_N,
        size_out_1,
    )
    offsets_out_N.copy_(_by_key(starts_N, inverse_N))
    for out, sizes in ((key_splits_out_K1, sizes_K), (splits_out_N1, counts_N)):
        out[:1].zero_()
        out[1:].copy_(sizes.cumsum(0))


def _row_starts(op: str, key: Ragged, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where each occurrence's row starts in the buffer [N], and floats of each slot [K]."""
    rows_N = value_rowids(op, key)
    device = rows_N.device
    if torch.compiler.is_compiling():  # a constant of the graph
        dims_K = torch.tensor(widths, device=device)
    else:
        dims_K = sent(widths, device)
    floats_K = key.lengths * dims_K
    # Occurrence i of slot k starts at (floats before the slot) + d_k * (i - first of the slot).
    bases_K = floats_K.cumsum(0) - floats_K - dims_K * key.offsets_B1[:-1]
    places_N = torch.arange(rows_N.numel(), device=device)
    return bases_K[rows_N] + dims_K[rows_N] * places_N, floats_K


def _by_key(starts_N: Tensor, inverse_N: Tensor) -> Tensor:
    # N, not U, bounds the numbers: it is known when the graph is compiled.
    order_N, _ = partition(inverse_N, max(inverse_N.numel(), 1))
    return starts_N[order_N]
