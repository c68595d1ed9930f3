"""What operations refuse: metadata before they are called, values inside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import DTypeError, InputError, ShapeError


def check_ids(op: str, name: str, tensor: Tensor, *, dims: Sequence[int] | None = (1,)) -> None:
    """Require int64 with one of these numbers of dimensions; None: with any.

    Raises:
        DTypeError, ShapeError: it is not so.
    """
    check_dense(f"{op}: {name}", tensor)
    if tensor.dtype != torch.int64:
        what, remedy = f"{op}: dtype of {name}", "Call .long()."
        raise DTypeError(what, got=tensor.dtype, allowed="int64", remedy=remedy)
    if dims is not None and tensor.ndim not in dims:
        allowed = " or ".join(f"{ndim} dimension{'s' * (ndim > 1)}" for ndim in dims)
        raise shape_error(op, f"shape of {name}", tuple(tensor.shape), allowed)


def check_outs(op: str, like: Tensor, **outs: tuple[Tensor, Sequence[int]]) -> None:
    """Require contiguous int64 tensors of these shapes to write to, on the input's device.

    Raises:
        DTypeError, ShapeError, InputError: it is not so.
    """
    for name, (out, wanted) in outs.items():
        shape = tuple(wanted)
        check_ids(op, name, out, dims=(len(shape),))
        if out.shape != shape or not out.is_contiguous():
            got = f"{tuple(out.shape)}, strides {tuple(out.stride())}"
            raise shape_error(op, f"shape of {name}", got, f"{shape}, contiguous")
    check_devices(op, input=like, **{name: out for name, (out, _) in outs.items()})


def shape_error(op: str, what: str, got: object, allowed: object) -> ShapeError:
    """A `ShapeError` of an operator's argument."""
    remedy = "Give tensors of lengths and offsets that fit together."
    return ShapeError(f"{op}: {what}", got=got, allowed=allowed, remedy=remedy)


def value_error(op: str, what: str, got: object, allowed: object) -> InputError:
    """An `InputError` of a value in an operator's argument."""
    remedy = "Check what made it."
    return InputError(f"{op}: {what}", got=got, allowed=allowed, remedy=remedy)


def check_rows(op: str, name: str, rows: Tensor, *, floating: bool = False) -> None:
    """Require two dimensions, and a floating dtype if that is asked.

    Raises:
        ShapeError, DTypeError: it is not so.
    """
    check_dense(f"{op}: {name}", rows)
    if rows.ndim != 2:
        what = f"{op}: shape of {name}"
        raise ShapeError(what, tuple(rows.shape), "[N, D]", "Give one row per id.")
    if floating:
        check_floating(op, name, rows)


_REALS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    """Require a floating dtype.

    Raises:
        DTypeError: it is another.
    """
    if tensor.dtype not in _REALS:
        what, allowed = f"{op}: dtype of {name}", "float16, bfloat16, float32 or float64"
        raise DTypeError(what, got=tensor.dtype, allowed=allowed, remedy="Call .float().")


def check_same_dtype(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Require one dtype.

    Raises:
        DTypeError: there are several.
    """
    for tensor in tensors:
        check_dense(f"{op}: {name}", tensor)
    dtypes = {str(tensor.dtype) for tensor in tensors}
    if len(dtypes) > 1:
        what, got = f"{op}: dtypes of {name}", ", ".join(sorted(dtypes))
        raise DTypeError(what, got=got, allowed="one dtype for all", remedy="Call .to().")


def check_lists(op: str, *, least: int = 0, **lists: Sequence[object]) -> int:
    """Require one length of all lists, `least` or more; returns it.

    Raises:
        ShapeError: it is not so.
    """
    lengths = {name: len(entries) for name, entries in lists.items()}
    count = next(iter(lengths.values()))
    if set(lengths.values()) != {count} or count < least:
        got = ", ".join(f"{name} {length}" for name, length in lengths.items())
        allowed = "one length for all" + (f", {least} or more" if least else "")
        remedy = "Give one entry of each per table."
        raise ShapeError(f"{op}: lengths of lists", got, allowed, remedy)
    return count


def check_devices(op: str, **tensors: Tensor | Sequence[Tensor]) -> None:
    """Require one device of all tensors.

    Raises:
        InputError: there are several.
    """
    named = {name: entry for name, entry in tensors.items() if isinstance(entry, Tensor)}
    for name, entry in tensors.items():
        if name not in named:
            named |= {f"{name}[{i}]": tensor for i, tensor in enumerate(entry)}
    if len({tensor.device for tensor in named.values()}) > 1:
        got = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        allowed = "one device for all arguments"
        raise InputError(f"{op}: devices", got, allowed, remedy="Move them with .to().")


def missing_id(what: str, at: int, got: int) -> InputError:
    """An id that no row has."""
    remedy = "Look up every id of the input, or drop this one."
    return InputError(f"{what}[{at}]", f"id {got}", "an id that ids holds", remedy)


def bad_row_index(what: str, at: int, got: int, size: int) -> InputError:
    """An index or offset outside its range."""
    allowed = f"0 to {size - 1}" if size > 0 else "none: there is nothing to name"
    return InputError(f"{what}[{at}]", got, allowed, remedy="Check what made the indices.")


Length = int | torch.SymInt | Sequence[int]


def check_segments(op: str, rows_ND: Tensor, offsets_B1: Tensor) -> None:
    """Rows [N, D] of a floating dtype and offsets int64 [B+1] on one device.

    Raises:
        ShapeError, DTypeError, InputError: they are not.
    """
    check_rows(op, "rows", rows_ND, floating=True)
    check_offsets(op, offsets_B1)
    if rows_ND.device != offsets_B1.device:
        check_devices(op, rows=rows_ND, offsets=offsets_B1)


def check_offsets(op: str, offsets_B1: Tensor) -> None:
    """Offsets int64 [B+1].

    Raises:
        ShapeError, DTypeError: they are not.
    """
    check_ids(op, "offsets", offsets_B1)
    if offsets_B1.shape[0] < 1:
        raise ShapeError(
            f"{op}: shape of offsets", (0,), "[B+1]", "Start them at 0, one more each."
        )


def check_grouped(op: str, indices_M1: Tensor, values_MD: Tensor) -> Tensor:
    """Indices int64 [M] or [M, 1] and values [M, D] of a floating dtype; the indices as [M].

    Raises:
        ShapeError, DTypeError, InputError: they are not.
    """
    check_rows(op, "values", values_MD, floating=True)
    check_ids(op, "indices", indices_M1, dims=(1, 2))
    if indices_M1.shape[1:] not in ((), (1,)):
        remedy = "Give the row of the result for each value."
        raise ShapeError(
            f"{op}: shape of indices", tuple(indices_M1.shape), "[M] or [M, 1]", remedy
        )
    if indices_M1.shape[0] != values_MD.shape[0]:
        allowed = f"{values_MD.shape[0]}, the number of values"
        remedy = "Give one index per value."
        raise ShapeError(f"{op}: number of indices", indices_M1.shape[0], allowed, remedy)
    if indices_M1.device != values_MD.device:
        check_devices(op, indices=indices_M1, values=values_MD)
    return indices_M1.reshape(-1)


def length_of(op: str, length: Length) -> int:
    """Rows of the result, from B or [B].

    Raises:
        ShapeError: more than one number, or negative.
    """
    if not isinstance(length, int | torch.SymInt):
        sizes = tuple(length)
        if len(sizes) != 1:
            remedy = "Give the number of rows of the result."
            raise ShapeError(f"{op}: length", sizes, "B or [B]", remedy)
        length = sizes[0]
    check_length(op, length, least=0)
    return length  # type: ignore[return-value]


def check_length(op: str, length: int | torch.SymInt, *, least: int) -> None:
    """A length of `least` or more.

    Raises:
        ShapeError: it is less.
    """
    if length < least:
        remedy = "Give the number of rows to keep." if least else "Give the number of segments."
        raise ShapeError(f"{op}: length", length, f"{least} or more", remedy)


def check_widths(op: str, widths: Sequence[int], dim: int) -> None:
    """One or more column widths that sum to the row's.

    Raises:
        ShapeError: they do not.
    """
    if not widths or min(widths) < 0 or sum(widths) != dim:
        allowed = f"one or more widths that sum to {dim}"
        raise ShapeError(f"{op}: split widths", list(widths), allowed, "Split the whole row.")


def read_offsets(op: str, offsets_B1: Tensor, rows: int) -> None:
    """Offsets that start at 0, never fall, and end at the number of rows.

    Raises:
        ShapeError: they do not.
    """
    cuts = offsets_B1.detach().cpu()
    wrong = (cuts[1:] < cuts[:-1]) | (cuts[1:] > rows)
    if int(cuts[0]) != 0:
        raise bad_offset(op, cuts, rows, 0)
    if int(cuts[-1]) != rows:
        raise bad_offset(op, cuts, rows, cuts.numel() - 1)
    if bool(wrong.any()):
        raise bad_offset(op, cuts, rows, int(wrong.nonzero()[0]) + 1)


def bad_offset(op: str, offsets_B1: Tensor, rows: int, at: int) -> ShapeError:
    """The error for the first offset that is not allowed."""
    got = int(offsets_B1[at])
    if at == 0 and got != 0:
        return ShapeError(f"{op}: first offset", got, "0", "Start offsets at 0.")
    if at == offsets_B1.numel() - 1 and got != rows:
        allowed = f"{got}, the last offset"
        return ShapeError(f"{op}: number of rows", rows, allowed, "Give one row per id.")
    before = int(offsets_B1[at - 1])
    allowed = f"{before} to {rows}" if before <= rows else f"at most {rows}"
    return ShapeError(
        f"{op}: offset {at}", got, allowed, "Offsets rise from 0 to the number of rows."
    )


def bad_segment_index(op: str, index_M: Tensor, length: int, at: int) -> InputError:
    """The error for the first index that is not allowed."""
    got = int(index_M[at])
    if 0 <= got < length:
        allowed = f"{int(index_M[at - 1])}, the index before, or more"
        remedy = "Sort the indices, with their values, or do not say that they are sorted."
    else:
        allowed = f"0 to {length - 1}" if length else "none: the result has no rows"
        remedy = "An index is a row of the result."
    return InputError(f"{op}: index {at}", got=got, allowed=allowed, remedy=remedy)


def table_of(op: str, table: int, tables: Sequence[object]) -> str:
    """How a message names one of several tables of an operation."""
    return f"{op}, table {table}" if len(tables) > 1 else op


_REMEDY = "Use the offsets that were made for this buffer."


def check_dims(op: str, name: str, dims: Sequence[int]) -> None:
    """Require widths of 1 or more.

    Raises:
        ShapeError: one is less.
    """
    for k, dim in enumerate(dims):
        if dim < 1:
            raise ShapeError(f"{op}: {name}[{k}]", dim, "1 or more", "Leave empty tables out.")


def check_flat(op: str, name: str, flat_E: Tensor) -> None:
    """Require one dimension.

    Raises:
        ShapeError: there are others.
    """
    check_dense(f"{op}: {name}", flat_E)
    if flat_E.ndim != 1:
        raise ShapeError(f"{op}: {name}", tuple(flat_E.shape), "[E]", "Call .flatten().")


def check_gradients(
    op: str, grads: Sequence[Tensor], offsets: Sequence[Tensor], dims: Sequence[int]
) -> None:
    """Require one floating gradient [n, dim] per list of n offsets, of one dtype.

    Raises:
        DTypeError, ShapeError: it is not so.
    """
    for k, (grad, offsets_N, dim) in enumerate(zip(grads, offsets, dims, strict=True)):
        check_ids(op, f"embedding_offsets[{k}]", offsets_N)
        check_rows(op, f"grads[{k}]", grad, floating=True)
        if tuple(grad.shape) != (offsets_N.shape[0], dim):
            allowed = f"[{offsets_N.shape[0]}, {dim}]"
            raise ShapeError(f"{op}: grads[{k}]", tuple(grad.shape), allowed, "One row per offset.")
    check_same_dtype(op, "grads", grads)


def bad_flat_offset(what: str, k: int, at: int, got: int, dim: int, size: int) -> InputError:
    """A row that leaves the flat buffer."""
    allowed = f"0 to {size - dim}, so that {dim} of {size} elements follow"
    if dim > size:
        allowed = f"none: the {size} elements hold no row of {dim}"
    return InputError(f"{what}[{k}][{at}]", got=got, allowed=allowed, remedy=_REMEDY)


def check_flat_offsets(
    what: str, offsets: Sequence[Tensor], dims: Sequence[int], size: int
) -> None:
    """Require every row to lie inside the buffer.

    Raises:
        InputError: one does not; names the first.
    """
    for k, (offsets_N, dim) in enumerate(zip(offsets, dims, strict=True)):
        bad_N = (offsets_N < 0) | (offsets_N > size - dim)
        if bool(bad_N.any()):
            at = int(bad_N.int().argmax())
            raise bad_flat_offset(what, k, at, int(offsets_N[at]), dim, size)


def map_error(
    fault: int, at: int, positions_N: Tensor, offsets_V: Tensor, keys: int, length: int, size: int
) -> InputError:
    """Words for a fault of an offset map, by the core's number."""
    op = "fill_with_offset_map"
    if fault == 3:
        return bad_row_index(f"{op}: pos.values", at, int(positions_N[at]), keys)
    if fault == 5:
        got, allowed = int(offsets_V[at]), f"a row inside the {size} elements of the buffer"
        what = f"{op}: value_offset values[{at}]"
        return InputError(what, got=got, allowed=allowed, remedy=_REMEDY)
    if fault == 2:
        remedy = "Give the rows of pos, in its order, each as wide as its table."
        return ShapeError(f"{op}: length of value", length, f"{at}, rows of pos by dims", remedy)
    ends = positions_N.numel() if fault == 1 else offsets_V.numel()
    name = "pos.offsets_B1" if fault == 1 else "value_offset splits"
    allowed = f"0, never falling, {ends} at the end"
    return ShapeError(f"{op}: {name}", got=f"a break at [{at}]", allowed=allowed, remedy=_REMEDY)


_OP = "fused_embedding_to_layout"


def check_layout(
    buffers: Sequence[Tensor] | Sequence[int],
    rows_N: Tensor,
    buffer_N: Tensor,
    cell_splits: Tensor,
    cells: Tensor,
    features: Tensor,
    slices: Tensor,
    sums: Tensor,
    batch_sizes: Sequence[int] | None = None,
    *_: object,
) -> None:
    """Raise for offsets, cells or rows out of range. `buffers` may be their numbers of floats.

    Raises:
        ShapeError: cell_splits that do not start at 0, fall, or do not end at the number of ids.
        InputError: cells that do not exist or are too few, a buffer that does not exist, or a row
            that leaves its buffer.
    """
    read_offsets(f"{_OP}: cell_splits_C1", cell_splits, rows_N.shape[0])
    sizes = [b if isinstance(b, int) else b.numel() for b in buffers]
    cells_RF, own_F6 = cells.cpu(), features.cpu()
    _check_cells(cells_RF, cell_splits.shape[0] - 1, batch_sizes)
    for request in cells_RF:
        _check_rows(rows_N.cpu(), buffer_N.cpu(), cell_splits.cpu(), request, own_F6, sizes)


def _check_cells(cells: Tensor, total: int, batch_sizes: Sequence[int] | None) -> None:
    sizes = [None] * cells.shape[0] if batch_sizes is None else batch_sizes
    for request, size in zip(range(cells.shape[0]), sizes, strict=True):
        first, count, shared = cells[request].unbind(1)
        wrong = (first < 0) | (count < 0) | (first > total - count)
        if size is not None:
            wrong |= (count != 0) & (count != torch.where(shared != 0, 1, size))
        if bool(wrong.any()):
            feature = int(wrong.nonzero()[0])
            cell, many = int(first[feature]), int(count[feature])
            what = f"{_OP}: cells of feature {feature} of request {request}"
            wanted = "none, or one" if bool(shared[feature]) else f"none, or {size}"
            allowed = f"{wanted}, within the {total} cells"
            raise _bad(InputError, what, f"{many} from cell {cell}", allowed)


def _check_rows(
    rows_N: Tensor,
    buffer_N: Tensor,
    splits: Tensor,
    cells_F3: Tensor,
    features_F: Tensor,
    sizes: Sequence[int],
) -> None:
    """Rows of ids that a feature with slices reads must lie in their buffers."""
    sizes_M = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    reach_N = torch.full_like(rows_N, -1)
    for row, (cell, count, _) in zip(features_F.tolist(), cells_F3.tolist(), strict=True):
        if count and row[0] < row[1]:
            reach_N[int(splits[cell]) : int(splits[cell + count])] = row[5]
    read_N = reach_N >= 0
    missing = (read_N & ((buffer_N < 0) | (buffer_N >= len(sizes)))).nonzero()
    if missing.numel():
        at = int(missing[0])
        what = f"{_OP}: buffer_N[{at}], the buffer of an id"
        raise _bad(InputError, what, int(buffer_N[at]), f"0..{len(sizes) - 1}")
    room_N = sizes_M[torch.where(read_N, buffer_N, 0).long()] - reach_N
    outside = (read_N & ((rows_N < 0) | (rows_N > room_N))).nonzero()
    if outside.numel():
        at = int(outside[0])
        what = f"{_OP}: rows_N[{at}], the place of a row of {int(reach_N[at])} floats"
        allowed = f"0..{int(room_N[at])} in buffer {int(buffer_N[at])}"
        raise _bad(InputError, what, int(rows_N[at]), allowed)


def _bad(kind: type[InputError], what: str, got: object, allowed: object) -> InputError:
    remedy = "Pass the offsets that were made with these rows."
    return kind(what, got=got, allowed=allowed, remedy=remedy)
