"""Distinct ids, row numbers of jagged values, joined row splits."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from shoal._core import ops as core
from shoal.address import address
from shoal.errors import ShapeError
from shoal.ops.checks import check_devices, check_ids, check_outs, shape_error
from shoal.ops.dispatch import by_core, fresh, operator
from shoal.ops.segments import all_row_ids
from shoal.ragged import Ragged

GOOD = -1  # what the core returns when it found nothing wrong

# Row numbers by identity of their offsets, and what state these were in; gone with the offsets.
_kept_rowids: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...], Tensor]] = {}


class Dedup(NamedTuple):
    """Distinct ids in order of first appearance.

    ids_U int64 [U]; counts_U int64 [U], occurrences of each; inverse_N int64 [N] with
    `ids_U[inverse_N] == ids_N`.
    """

    ids_U: Tensor
    counts_U: Tensor
    inverse_N: Tensor


def dedup(ids_N: Tensor) -> Dedup:
    """Distinct ids, in order of first appearance.

    ids_N int64 [N], any of the 2^64 values -> `Dedup(ids_U, counts_U, inverse_N)`, int64.

    On CUDA it waits for the device, because U depends on the ids; `dedup_into` does not.
    No gradient. Monolith: `unique` with counts, which orders likewise.

    Raises:
        DTypeError: not int64.
        ShapeError: not one-dimensional.
    """
    check_ids("dedup", "ids_N", ids_N)
    return Dedup(*_dedup(ids_N))


def dedup_into(
    ids_N: Tensor,
    *,
    ids_out_N: Tensor,
    counts_out_N: Tensor,
    inverse_out_N: Tensor,
    size_out_1: Tensor,
) -> None:
    """`dedup` into given tensors; nothing waits for the device.

    ids_N int64 [N]. ids_out_N, counts_out_N, inverse_out_N int64 [N]: of the first two only the
    first U entries are written. size_out_1 int64 [1] receives U. The outputs share no memory with
    each other or with the ids.

    Raises:
        DTypeError: a tensor that is not int64.
        ShapeError: lengths other than N, N, N and 1; an output that is not contiguous.
        InputError: tensors on several devices.
    """
    check_ids("dedup_into", "ids_N", ids_N)
    check_outs(
        "dedup_into",
        ids_N,
        ids_out_N=(ids_out_N, ids_N.shape),
        counts_out_N=(counts_out_N, ids_N.shape),
        inverse_out_N=(inverse_out_N, ids_N.shape),
        size_out_1=(size_out_1, (1,)),
    )
    dedup_heads(ids_N, ids_out_N, counts_out_N, inverse_out_N, size_out_1)


def fused_value_rowids(ragged: Ragged) -> Tensor:
    """Row of each value of a ragged: offsets [0, 2, 2, 3] give [0, 0, 2].

    Ragged of N values in B rows -> int64 [N].

    The result is kept until the ragged's offsets tensor is gone, and handed out again on the same
    stream while neither has been written to; so do not write to it. Nothing is kept under
    `torch.compile`, in inference mode or while a CUDA graph is captured.
    No gradient. Monolith: `ragged_utils.fused_value_rowids`.

    Raises:
        ShapeError: offsets that do not start at 0, fall, or do not end at N.
    """
    return value_rowids("fused_value_rowids", ragged)


def value_rowids(op: str, ragged: Ragged) -> Tensor:
    """`fused_value_rowids` for an operation whose errors name it."""
    offsets_B1, n = ragged.offsets_B1, ragged.values.numel()
    if not _may_keep(offsets_B1):
        return all_row_ids(offsets_B1, n, op)  # type: ignore[no-any-return]
    key, state = id(offsets_B1), (offsets_B1._version, _stream_of(offsets_B1), n)
    kept = _kept_rowids.get(key)
    if kept and kept[0]() is offsets_B1 and kept[1] == state and kept[2]._version == 0:
        return kept[2]
    rowids_N: Tensor = all_row_ids(offsets_B1, n, op)
    gone = weakref.ref(offsets_B1, lambda _: _kept_rowids.pop(key, None))
    _kept_rowids[key] = gone, state, rowids_N
    return rowids_N


def normalize_merged_split(row_splits_T: Tensor, sizes_P: Tensor) -> Tensor:
    """Join the row splits of P ragged tensors into the row split of their concatenation.

    row_splits_T int64 [T], the splits one after another; sizes_P int64 [P], the length of each
    -> int64 [T+1-P].

    No gradient. Monolith: `normalize_merged_split`.

    Raises:
        DTypeError, ShapeError: not int64 [T] and [P], T below P, or no parts.
        ShapeError: a part that does not start at 0, or falls; sizes below 1 or of another sum.
        InputError: on two devices.
    """
    op = "normalize_merged_split"
    check_ids(op, "row_splits_T", row_splits_T)
    check_ids(op, "sizes_P", sizes_P)
    check_devices(op, row_splits_T=row_splits_T, sizes_P=sizes_P)
    if not 1 <= sizes_P.numel() <= row_splits_T.numel():
        got = f"{row_splits_T.numel()} splits in {sizes_P.numel()} parts"
        raise shape_error(op, "lengths", got, "1 or more parts of 1 or more splits")
    return _normalize_merged_split(row_splits_T, sizes_P)  # type: ignore[no-any-return]


def _may_keep(offsets_B1: Tensor) -> bool:
    if torch.compiler.is_compiling() or type(offsets_B1) is not Tensor:
        return False
    if torch.is_inference_mode_enabled() or offsets_B1.is_inference():
        return False
    return not (offsets_B1.is_cuda and torch.cuda.is_current_stream_capturing())


def _stream_of(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def _core_dedup(ids_N: Tensor, *out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Into new tensors, or into the heads of those given."""
    ids_N, n = ids_N.contiguous(), ids_N.numel()
    inverse_N = out[2] if out else fresh(n, dtype=torch.int64)
    found = core.Dedup(address(ids_N), n, address(inverse_N), torch.get_num_threads())
    if out:
        ids_U, counts_U = out[:2]
        out[3].fill_(found.unique)
    else:
        ids_U, counts_U = (fresh(found.unique, dtype=torch.int64) for _ in range(2))
    found.write(address(ids_U), address(counts_U))
    return ids_U, counts_U, inverse_N


def _core_dedup_into(*arguments: Tensor) -> None:
    _core_dedup(*arguments)


def _fake_dedup(ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return ids_N.new_empty(size), ids_N.new_empty(size), ids_N.new_empty(ids_N.numel())


_dedup = operator(
    "dedup(Tensor ids_N) -> (Tensor, Tensor, Tensor)",
    core=_core_dedup,
    triton="ids:dedup",
    fake=_fake_dedup,
)

dedup_heads = operator(
    "dedup_into(Tensor ids_N, Tensor(a!) ids_out_N, Tensor(b!) counts_out_N, "
    "Tensor(c!) inverse_out_N, Tensor(d!) size_out_1) -> ()",
    core=_core_dedup_into,
    triton="ids:dedup_into",
    fake=lambda *_: None,
)


def _split_error(splits_T: Tensor, sizes_P: Tensor, bad: int) -> ShapeError:
    op, total = "normalize_merged_split", splits_T.numel()
    if bad >= total:
        allowed = f"1 or more, {total} in all"
        return shape_error(op, f"sizes_P at {bad - total}", sizes_P.tolist(), allowed)
    starts = (sizes_P.cumsum(0) - sizes_P).tolist()
    allowed = "0 at the start of a part" if bad in starts else "the split before it, or more"
    return shape_error(op, f"row_splits_T[{bad}]", splits_T[bad].item(), allowed)


def _core_normalize_merged_split(splits_T: Tensor, sizes_P: Tensor) -> Tensor:
    splits_T, sizes_P = splits_T.contiguous(), sizes_P.contiguous()
    total, parts = splits_T.numel(), sizes_P.numel()
    out = torch.empty(total + 1 - parts, dtype=torch.int64, device="cpu")
    bad = core.normalize_merged_split(
        address(splits_T), total, address(sizes_P), parts, address(out)
    )
    if bad != GOOD:
        raise _split_error(splits_T, sizes_P, bad)
    return out


_normalize_merged_split = operator(
    "normalize_merged_split(Tensor row_splits_T, Tensor sizes_P) -> Tensor",
    core=_core_normalize_merged_split,
    triton="ids:normalize_merged_split",
    fake=lambda splits_T, sizes_P: splits_T.new_empty(splits_T.numel() + 1 - sizes_P.numel()),
    check=by_core(_core_normalize_merged_split),
)
