"""Distinct ids, row numbers of jagged values, joined row splits."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.errors import ShapeError
from shoal.ops import reference
from shoal.ops.checks import check_ids, check_out, shape_error
from shoal.ops.dispatch import fresh, one_device, operator
from shoal.ops.reference import Dedup
from shoal.ragged import Ragged

_GOOD = -1  # what the core returns when it found nothing wrong
_ROWIDS = "fused_value_rowids"


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
    outs = {
        "ids_out_N": ids_out_N,
        "counts_out_N": counts_out_N,
        "inverse_out_N": inverse_out_N,
        "size_out_1": size_out_1,
    }
    check_ids("dedup_into", "ids_N", ids_N)
    n = ids_N.numel()
    for name, out in outs.items():
        check_out("dedup_into", name, out, 1 if name == "size_out_1" else n)
    one_device("dedup_into", ids_N=ids_N, **outs)
    _dedup_into(ids_N, ids_out_N, counts_out_N, inverse_out_N, size_out_1)


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
    return value_rowids(_ROWIDS, ragged)


def value_rowids(op: str, ragged: Ragged) -> Tensor:
    """`fused_value_rowids` for an operation whose errors name it."""
    return _rowids_cache.of(op, ragged.offsets_B1, ragged.values.numel())


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
    one_device(op, row_splits_T=row_splits_T, sizes_P=sizes_P)
    if not 1 <= sizes_P.numel() <= row_splits_T.numel():
        got = f"{row_splits_T.numel()} splits in {sizes_P.numel()} parts"
        raise shape_error(op, "lengths", got, "1 or more parts of 1 or more splits")
    return _normalize_merged_split(row_splits_T, sizes_P)  # type: ignore[no-any-return]


class _RowidsCache:
    """Row numbers by identity of the offsets tensor; an entry dies with its tensor."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, int, Tensor]] = {}

    def of(self, op: str, offsets_B1: Tensor, n: int) -> Tensor:
        if not _may_keep(offsets_B1):
            return _value_rowids(offsets_B1, n, op)  # type: ignore[no-any-return]
        key, stream = id(offsets_B1), _stream_of(offsets_B1)
        kept = self._kept.get(key)
        if kept is not None:
            ref, version, kept_stream, kept_N = kept
            unwritten = version == offsets_B1._version and kept_N._version == 0
            same = ref() is offsets_B1 and kept_stream == stream and kept_N.numel() == n
            if same and unwritten:
                return kept_N
        rowids_N: Tensor = _value_rowids(offsets_B1, n, op)
        gone = weakref.ref(offsets_B1, lambda _: self._kept.pop(key, None))
        self._kept[key] = (gone, offsets_B1._version, stream, rowids_N)
        return rowids_N


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


def _core_dedup(ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids_N = ids_N.contiguous()
    inverse_N = fresh(ids_N.numel(), dtype=torch.int64)
    found = _core.Dedup(address(ids_N), ids_N.numel(), address(inverse_N), torch.get_num_threads())
    ids_U, counts_U = (fresh(found.unique, dtype=torch.int64) for _ in range(2))
    found.write(address(ids_U), address(counts_U))
    return ids_U, counts_U, inverse_N


def _core_dedup_into(
    ids_N: Tensor, ids_out: Tensor, counts_out: Tensor, inverse_out: Tensor, size_out: Tensor
) -> None:
    ids_N = ids_N.contiguous()
    found = _core.Dedup(
        address(ids_N), ids_N.numel(), address(inverse_out), torch.get_num_threads()
    )
    found.write(address(ids_out), address(counts_out))
    size_out.fill_(found.unique)


def _reference_dedup_into(
    ids_N: Tensor, ids_out: Tensor, counts_out: Tensor, inverse_out: Tensor, size_out: Tensor
) -> None:
    reference.dedup_into(
        ids_N,
        ids_out_N=ids_out,
        counts_out_N=counts_out,
        inverse_out_N=inverse_out,
        size_out_1=size_out,
    )


def _fake_dedup(ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return ids_N.new_empty(size), ids_N.new_empty(size), ids_N.new_empty(ids_N.numel())


_dedup = operator(
    "dedup(Tensor ids_N) -> (Tensor, Tensor, Tensor)",
    reference=reference.dedup,
    core=_core_dedup,
    triton="ids:dedup",
    fake=_fake_dedup,
)

_dedup_into = operator(
    "dedup_into(Tensor ids_N, Tensor(a!) ids_out_N, Tensor(b!) counts_out_N, "
    "Tensor(c!) inverse_out_N, Tensor(d!) size_out_1) -> ()",
    reference=_reference_dedup_into,
    core=_core_dedup_into,
    triton="ids:dedup_into",
    fake=lambda *_: None,
)


def _offsets_error(op: str, offsets_B1: Tensor, n: int, at: int) -> ShapeError:
    got, before = int(offsets_B1[at]), int(offsets_B1[max(at - 1, 0)])
    if at == 0 and got != 0:
        allowed = "0"
    elif got < before:
        allowed = f"{before} (the offset before it) or more"
    else:
        allowed = f"{n}, the number of values"
    return shape_error(op, f"offsets_B1[{at}]", got, allowed)


def check_offsets_values(op: str, offsets_B1: Tensor, n: int) -> None:
    """Raise unless offsets start at 0, never fall and end at n; reads them."""
    bad_B1 = offsets_B1.diff(prepend=offsets_B1.new_zeros(1)) < 0
    bad_B1[0] = offsets_B1[0] != 0
    places = bad_B1.nonzero()
    if places.numel():
        raise _offsets_error(op, offsets_B1, n, int(places[0]))
    if int(offsets_B1[-1]) != n:
        raise _offsets_error(op, offsets_B1, n, offsets_B1.numel() - 1)


def _core_value_rowids(offsets_B1: Tensor, n: int, op: str = _ROWIDS) -> Tensor:
    offsets_B1, out_N = offsets_B1.contiguous(), fresh(n, dtype=torch.int64)
    rows = offsets_B1.numel() - 1
    bad = _core.value_rowids(address(offsets_B1), rows, n, address(out_N), torch.get_num_threads())
    if bad != _GOOD:
        raise _offsets_error(op, offsets_B1, n, bad)
    return out_N


_value_rowids = operator(
    f"value_rowids(Tensor offsets_B1, SymInt n, str op='{_ROWIDS}') -> Tensor",
    reference=lambda offsets_B1, n, op=_ROWIDS: reference.row_ids(offsets_B1),
    core=_core_value_rowids,
    triton="ids:value_rowids",
    fake=lambda offsets_B1, n, op=_ROWIDS: offsets_B1.new_empty(n),
    check=lambda offsets_B1, n, op=_ROWIDS: check_offsets_values(op, offsets_B1, n),
)


def _split_error(splits_T: Tensor, sizes_P: Tensor, bad: int) -> ShapeError:
    op, total = "normalize_merged_split", splits_T.numel()
    if bad >= total:
        allowed = f"1 or more, {total} in all"
        return shape_error(op, f"sizes_P at {bad - total}", sizes_P.tolist(), allowed)
    starts = (sizes_P.cumsum(0) - sizes_P).tolist()
    allowed = "0 at the start of a part" if bad in starts else "the split before it, or more"
    return shape_error(op, f"row_splits_T[{bad}]", splits_T[bad].item(), allowed)


def _check_normalize_merged_split(splits_T: Tensor, sizes_P: Tensor) -> None:
    total, ends_P = splits_T.numel(), sizes_P.cumsum(0)
    bad_P = (sizes_P < 1) | (ends_P > total)
    bad_P[-1] |= ends_P[-1] != total
    places = bad_P.nonzero()
    if places.numel():
        raise _split_error(splits_T, sizes_P, total + int(places[0]))
    bad_T = splits_T.diff(prepend=splits_T.new_zeros(1)) < 0
    starts_P = ends_P - sizes_P
    bad_T[starts_P] = splits_T[starts_P] != 0
    places = bad_T.nonzero()
    if places.numel():
        raise _split_error(splits_T, sizes_P, int(places[0]))


def _core_normalize_merged_split(splits_T: Tensor, sizes_P: Tensor) -> Tensor:
    splits_T, sizes_P = splits_T.contiguous(), sizes_P.contiguous()
    total, parts = splits_T.numel(), sizes_P.numel()
    out = torch.empty(total + 1 - parts, dtype=torch.int64, device="cpu")
    bad = _core.normalize_merged_split(
        address(splits_T), total, address(sizes_P), parts, address(out)
    )
    if bad != _GOOD:
        raise _split_error(splits_T, sizes_P, bad)
    return out


_normalize_merged_split = operator(
    "normalize_merged_split(Tensor row_splits_T, Tensor sizes_P) -> Tensor",
    reference=reference.normalize_merged_split,
    core=_core_normalize_merged_split,
    triton="ids:normalize_merged_split",
    fake=lambda splits_T, sizes_P: splits_T.new_empty(splits_T.numel() + 1 - sizes_P.numel()),
    check=_check_normalize_merged_split,
)

_rowids_cache = _RowidsCache()
