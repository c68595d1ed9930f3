"""Rows by id and by index, and rows of several widths in one flat buffer, on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.host_copies import sent
from shoal.kernels.launch import blocks_of, launch, power_of_2

_PIECE = 128  # items of a run that one program adds in turn
_SCRATCH = 1 << 14  # where idle lanes of an insert swap: spread, so that they do not queue


@triton.jit
def _slot_of(id, slots):  # type: ignore[no-untyped-def]
    h = id.to(tl.uint64, bitcast=True)
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    h = h ^ (h >> 31)
    return (h & (slots - 1).to(tl.uint64)).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _insert(ids, table, m, slots, scratch, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seeking = row < m
    id = tl.load(ids + row, mask=seeking, other=0)
    slot = _slot_of(id, slots)
    idle = slots + (row & (scratch - 1))
    free = tl.full([BLOCK], -1, tl.int64)
    never = tl.full([BLOCK], -3, tl.int64)
    while tl.max(seeking.to(tl.int32), 0) > 0:
        # A slot that holds a row keeps its id for good; only a smaller row of that id replaces it.
        held = tl.atomic_cas(
            table + tl.where(seeking, slot, idle), tl.where(seeking, free, never), row
        )
        taken = seeking & (held >= 0)
        same = taken & (tl.load(ids + held, mask=taken, other=0) == id)
        tl.atomic_min(table + slot, row, mask=same)
        seeking = taken & (same == 0)
        slot = (slot + 1) & (slots - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _probe(  # type: ignore[no-untyped-def]
    ids, table, query, index, n, slots,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    wanted = tl.load(query + i, mask=inside, other=0)
    slot = _slot_of(wanted, slots)
    found = tl.full([BLOCK], -1, tl.int64)
    seeking = inside
    while tl.max(seeking.to(tl.int32), 0) > 0:
        row = tl.load(table + slot, mask=seeking, other=-1)
        taken = seeking & (row >= 0)
        same = taken & (tl.load(ids + row, mask=taken, other=0) == wanted)
        found = tl.where(same, row, found)
        seeking = taken & (same == 0)
        slot = (slot + 1) & (slots - 1)
    tl.store(index + i, found, mask=inside)


def match_rows(
    ids: Sequence[Tensor], query_N: Tensor, missing_ok: bool, multi_threads: bool, what: str
) -> Tensor:
    """First row of each id, -1 where there is none."""
    ids_M = ids[0] if len(ids) == 1 else torch.cat(list(ids))
    m, n = ids_M.numel(), query_N.numel()
    index_N = torch.empty_like(query_N)
    if n == 0:
        return index_N
    if m == 0:
        return index_N.fill_(-1)
    ids_M, query_N = ids_M.contiguous(), query_N.contiguous()
    slots = power_of_2(2 * m)
    scratch = min(_SCRATCH, power_of_2(m))
    table = torch.full((slots + scratch,), -1, dtype=torch.int64, device=ids_M.device)
    block = 256
    launch(_insert, (blocks_of(m, block),), ids_M, table, m, slots, scratch, BLOCK=block)
    launch(_probe, (blocks_of(n, block),), ids_M, table, query_N, index_N, n, slots, BLOCK=block)
    return index_N


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    rows, index, out, n, m, d,
    FLOATS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(index + i, mask=i < n, other=-1)
    there = (row >= 0) & (row < m)
    source = rows + row[:, None] * d + c[None, :]
    mask = there[:, None] & (c < d)[None, :]
    if FLOATS:
        value = tl.load(source, mask=mask, other=float("nan"))
    else:
        value = tl.load(source, mask=mask, other=0)
    tl.store(out + i[:, None] * d + c[None, :], value, mask=(i < n)[:, None] & (c < d)[None, :])


def gather_rows(
    shards: Sequence[Tensor], index_N: Tensor, multi_threads: bool, what: str
) -> Tensor:
    """Rows by index; an index outside reads as NaN, or 0 for integers."""
    rows_MD = shards[0] if len(shards) == 1 else torch.cat(list(shards))
    if rows_MD.is_complex():
        pairs = gather_rows(
            [torch.view_as_real(rows_MD).flatten(1)], index_N, multi_threads, what
        ).view(index_N.numel(), rows_MD.shape[1], 2)
        return torch.view_as_complex(pairs)
    if rows_MD.dtype is torch.bool:
        return gather_rows([rows_MD.view(torch.uint8)], index_N, multi_threads, what).view(
            torch.bool
        )
    rows_MD, index_N = rows_MD.contiguous(), index_N.contiguous()
    (m, d), n = rows_MD.shape, index_N.numel()
    out_ND = rows_MD.new_empty(n, d)
    if out_ND.numel() == 0:
        return out_ND
    block_d = min(power_of_2(d), 256)
    block_n = max(1, 2048 * 4 // rows_MD.element_size() // block_d)
    grid = (blocks_of(n, block_n), blocks_of(d, block_d))
    launch(
        _gather, grid,
        rows_MD, index_N, out_ND, n, m, d,
        FLOATS=rows_MD.is_floating_point(), BLOCK_N=block_n, BLOCK_D=block_d,
    )  # fmt: skip
    return out_ND


@triton.jit  # type: ignore[untyped-decorator]
def _add_runs(  # type: ignore[no-untyped-def]
    source, place, stride, begins, ends, target, width, out, runs, d, longest,
    PLACED: tl.constexpr, SUM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out of run r = sum of the source rows at place[begins[r]:ends[r]], in order.

    Runs longer than `longest` are left alone. With PLACED, run r has width[r] columns, goes to
    target[r], and goes nowhere when it is empty; else it is row r of out.
    """
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    here = r < runs
    begin = tl.load(begins + r, mask=here, other=0)
    count = tl.load(ends + r, mask=here, other=0) - begin
    here = here & (count <= longest)
    count = tl.where(here, count, 0)
    if PLACED:
        here = here & (count > 0)
        to = tl.load(target + r, mask=here, other=0)
        columns = tl.load(width + r, mask=here, other=0)
    else:
        to = r * d
        columns = tl.where(here, d, 0).to(tl.int64)
    inside = c[None, :] < columns[:, None]
    total = tl.zeros([BLOCK_R, BLOCK_D], dtype=SUM)
    for j in range(tl.max(count, 0)):
        going = j < count
        at = tl.load(place + begin + j, mask=going, other=0) * stride
        row = tl.load(source + at[:, None] + c[None, :], mask=going[:, None] & inside, other=0.0)
        total += row.to(SUM)
    tl.store(
        out + to[:, None] + c[None, :],
        total.to(out.dtype.element_ty),
        mask=here[:, None] & inside,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_pieces(  # type: ignore[no-untyped-def]
    partial, lengths, runs, target, width, out, d,
    PLACED: tl.constexpr, SUM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A long run's sum: rows q .. q + lengths[q] - 1 of partial, where q is its first piece."""
    q = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    length = tl.load(lengths + q)
    if length > 0:
        run = tl.load(runs + q)
        to = run * d
        columns = c * 0 + d
        if PLACED:
            to = tl.load(target + run)
            columns = c * 0 + tl.load(width + run)
        total = tl.zeros([BLOCK_R, BLOCK_D], dtype=SUM)
        r = tl.arange(0, BLOCK_R).to(tl.int64)
        for j in range(0, length, BLOCK_R):
            total += tl.load(
                partial + (q + j + r)[:, None] * d + c[None, :],
                mask=((j + r) < length)[:, None] & (c < columns)[None, :],
                other=0.0,
            )
        tl.store(out + to + c, tl.sum(total, 0).to(out.dtype.element_ty), mask=c < columns)


def sum_runs(
    source: Tensor,
    place_N: Tensor,
    stride: int,
    begins_R: Tensor,
    ends_R: Tensor,
    out: Tensor,
    width: int,
    *,
    placed: tuple[Tensor, Tensor] | None = None,
    cut: bool = True,
) -> None:
    """Write to `out` the sum of each run of rows; every sum in a fixed order.

    Row j of the runs lies `place_N[j] * stride` elements after the start of `source`. Run r is rows
    begins_R[r] to ends_R[r]. It has `width` columns and is row r of `out`; or, with placed =
    (target_R, width_R), it has width_R[r] <= width columns, starts at element target_R[r], and an
    empty run is not written. `cut`: the runs do not overlap, so long ones may be cut into pieces.
    """
    runs, n = begins_R.numel(), place_N.numel()
    if runs == 0 or width == 0:
        return
    target_R, width_R = placed if placed is not None else (begins_R, begins_R)
    total = torch.float64 if source.dtype is torch.float64 else torch.float32
    sum_type = tl.float64 if total is torch.float64 else tl.float32
    block_d = min(power_of_2(width), 128)
    block_r = max(1, 1024 // block_d)
    tiles = blocks_of(width, block_d)
    kinds = {"SUM": sum_type, "BLOCK_R": block_r, "BLOCK_D": block_d}
    pieces = 2 * n // _PIECE if cut else 0
    longest = _PIECE if pieces > 0 else n + 1
    launch(
        _add_runs, (blocks_of(runs, block_r), tiles),
        source, place_N, stride, begins_R, ends_R, target_R, width_R, out, runs, width,
        longest, PLACED=placed is not None, **kinds,
    )  # fmt: skip
    if pieces == 0:
        return
    run_Q, begin_Q, end_Q, length_Q = _pieces(begins_R, ends_R, pieces)
    partial_QD = torch.empty(pieces, width, dtype=total, device=out.device)
    target_Q, width_Q = begin_Q, end_Q
    if placed is not None:  # a piece is as wide as its run: no reads behind a narrow row
        target_Q, width_Q = torch.arange(pieces, device=out.device) * width, width_R[run_Q]
    launch(
        _add_runs, (blocks_of(pieces, block_r), tiles),
        source, place_N, stride, begin_Q, end_Q, target_Q, width_Q, partial_QD, pieces, width,
        longest, PLACED=placed is not None, **kinds,
    )  # fmt: skip
    kinds["BLOCK_R"] = 16
    launch(
        _add_pieces, (pieces, tiles),
        partial_QD, length_Q, run_Q, target_R, width_R, out, width,
        PLACED=placed is not None, **kinds,
    )  # fmt: skip


def _pieces(begins_R: Tensor, ends_R: Tensor, pieces: int) -> tuple[Tensor, ...]:
    """Cuts of the long runs: run, begin and end of each piece, and pieces of a run at its first."""
    counts_R = ends_R - begins_R
    cuts_R = ((counts_R + _PIECE - 1) // _PIECE).masked_fill(counts_R <= _PIECE, 0)
    stops_R = cuts_R.cumsum(0)
    piece_Q = torch.arange(pieces, device=begins_R.device)
    run_Q = torch.searchsorted(stops_R, piece_Q, right=True)
    used_Q = run_Q < counts_R.numel()
    run_Q = run_Q.clamp(max=counts_R.numel() - 1)
    within_Q = piece_Q - (stops_R - cuts_R)[run_Q]
    begin_Q = begins_R[run_Q] + within_Q * _PIECE
    end_Q = torch.minimum(begin_Q + _PIECE, ends_R[run_Q])
    begin_Q, end_Q = begin_Q.where(used_Q, 0), end_Q.where(used_Q, 0)
    length_Q = cuts_R[run_Q].where(used_Q & (within_Q == 0), 0)
    return run_Q, begin_Q, end_Q, length_Q


def scatter_rows(grad_ND: Tensor, index_N: Tensor, rows: int, what: str) -> Tensor:
    """Sum of the gradients of each row."""
    d = grad_ND.shape[1]
    out_MD = grad_ND.new_empty(rows, d)
    if out_MD.numel() == 0:
        return out_MD
    if index_N.numel() == 0:
        return out_MD.zero_()
    sorted_N, order_N = torch.sort(index_N, stable=True)
    edges = torch.arange(rows + 1, device=index_N.device)
    bounds = torch.searchsorted(sorted_N, edges)
    sum_runs(grad_ND.contiguous(), order_N, d, bounds[:-1], bounds[1:], out_MD, d)
    return out_MD


def _steps(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor starts, in elements after the first one's start."""
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    return [(tensor.data_ptr() - first) // size for tensor in tensors]


def _splits(counts: Sequence[int]) -> list[int]:
    splits = [0]
    for count in counts:
        splits.append(splits[-1] + count)
    return splits


@triton.jit  # type: ignore[untyped-decorator]
def _gather_flat(  # type: ignore[no-untyped-def]
    flat, size, offsets, blocks, items, dims, steps, out, lists,
    FLOATS: tl.constexpr, LISTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program copies BLOCK elements of one list; blocks says where each list's programs end."""
    p = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, LISTS)
    ends = tl.load(blocks + 1 + each, mask=each < lists, other=0)
    k = tl.sum(((ends <= p) & (each < lists)).to(tl.int32), 0)
    d = tl.load(dims + k)
    begin = tl.load(items + k)
    count = tl.load(items + k + 1) - begin
    first = (p - tl.load(blocks + k)) * BLOCK
    row = first // d
    # 32 bits are enough inside a block, and their division is much cheaper.
    local = (first - row * d).to(tl.int32) + tl.arange(0, BLOCK)
    narrow = d.to(tl.int32)
    i = row + local // narrow
    c = local % narrow
    here = i < count
    offset = tl.load(offsets + begin + i, mask=here, other=0)
    there = here & (offset >= 0) & (offset + d <= size)
    if FLOATS:
        value = tl.load(flat + offset + c, mask=there, other=float("nan"))
    else:
        value = tl.load(flat + offset + c, mask=there, other=0)
    tl.store(out + tl.load(steps + k) + i * d + c, value, mask=here)


def gather_flat(flat_E: Tensor, offsets: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Rows of each list; one that leaves the buffer reads as NaN, or 0 for integers."""
    flat_E = flat_E.contiguous()
    if flat_E.is_complex():
        twice = [2 * part for part in offsets]
        pairs = gather_flat(torch.view_as_real(flat_E).flatten(), twice, [2 * dim for dim in dims])
        return [torch.view_as_complex(part.view(*part.shape[:1], -1, 2)) for part in pairs]
    rows = [flat_E.new_empty(part.numel(), dim) for part, dim in zip(offsets, dims, strict=True)]
    if not any(part.numel() for part in rows):
        return rows
    block, device = 1024, flat_E.device
    blocks = _splits([blocks_of(part.numel(), block) for part in rows])
    items = _splits([part.numel() for part in offsets])
    lists = len(dims)
    table = sent([*blocks, *items, *dims, *_steps(rows)], device)
    launch(
        _gather_flat, (blocks[-1],),
        flat_E, flat_E.numel(), torch.cat(list(offsets)), table, table[lists + 1 :],
        table[2 * lists + 2 :], table[3 * lists + 2 :], rows[0], lists,
        FLOATS=flat_E.is_floating_point(), LISTS=power_of_2(lists), BLOCK=block,
    )  # fmt: skip
    return rows


def scatter_flat(
    grads: Sequence[Tensor], offsets: Sequence[Tensor], size: int, scale: float
) -> Tensor:
    """Sum of the rows over each element, times scale. Rows that meet share offset and width."""
    grads = [grad.contiguous() for grad in grads]
    flat_E = grads[0].new_zeros(size)
    counts = [part.numel() for part in offsets]
    n, lists, device = sum(counts), len(grads), flat_E.device
    if n == 0:
        return flat_E
    dims = [grad.shape[1] for grad in grads]
    table = sent([*counts, *_splits(counts)[:-1], *dims, *_steps(grads)], device)
    counts_K, start_K, dims_K, step_K = table.view(4, lists)
    owner_N = torch.repeat_interleave(counts_K, output_size=n)
    place_N = torch.arange(n, device=device) - start_K[owner_N]
    width_N = dims_K[owner_N]
    place_N = step_K[owner_N] + place_N * width_N
    sorted_N, order_N = torch.sort(torch.cat(list(offsets)), stable=True)
    first_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=first_N[1:])
    begin_N = torch.arange(n, device=device)
    end_N = torch.searchsorted(sorted_N, sorted_N, right=True).where(first_N, begin_N)
    width_N = width_N[order_N]
    inside_N = (sorted_N >= 0) & (sorted_N + width_N <= size)
    end_N = end_N.where(inside_N, begin_N)
    placed = (sorted_N, width_N)
    sum_runs(grads[0], place_N[order_N], 1, begin_N, end_N, flat_E, max(dims), placed=placed)
    return flat_E if scale == 1 else flat_E.mul_(scale)


def _value_rows(splits_K1: Tensor, dims: Sequence[int], n: int) -> tuple[Tensor, Tensor]:
    """First element and width of each of n value rows, int64 [n]."""
    dims_K = sent(dims, splits_K1.device)
    sizes_K = splits_K1.diff() * dims_K
    row_N = torch.arange(n, device=splits_K1.device)
    k_N = torch.searchsorted(splits_K1[1:].contiguous(), row_N, right=True)
    k_N = k_N.clamp(max=len(dims) - 1)
    start_N = (sizes_K.cumsum(0) - sizes_K)[k_N] + (row_N - splits_K1[k_N]) * dims_K[k_N]
    return start_N, dims_K[k_N]


@triton.jit  # type: ignore[untyped-decorator]
def _copy_to_offsets(  # type: ignore[no-untyped-def]
    value, rows, starts, widths, offsets, buffer, n, length, size, widest,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(rows + i, mask=i < n, other=-1)
    here = row >= 0
    start = tl.load(starts + row, mask=here, other=0)
    width = tl.load(widths + row, mask=here, other=0)
    offset = tl.load(offsets + i, mask=here, other=0)
    here = here & (offset >= 0) & (offset + width <= size) & (start + width <= length)
    for first in range(0, widest, BLOCK_D):
        c = first + tl.arange(0, BLOCK_D)
        mask = here[:, None] & (c[None, :] < width[:, None])
        copied = tl.load(value + start[:, None] + c[None, :], mask=mask)
        tl.store(buffer + offset[:, None] + c[None, :], copied, mask=mask)


def fill_offsets(
    buffer_E: Tensor,
    value: Tensor,
    positions_N: Tensor,
    splits_K1: Tensor,
    offsets_V: Tensor,
    offset_splits_U1: Tensor,
    dims: Sequence[int],
) -> None:
    """Copies each value row to all offsets of its key, in place."""
    n, v, keys = positions_N.numel(), offsets_V.numel(), offset_splits_U1.numel() - 1
    if n == 0 or v == 0 or keys == 0:
        return
    device, value = buffer_E.device, value.contiguous()
    if value.is_complex():
        buffer_E, value = (torch.view_as_real(part).view(-1) for part in (buffer_E, value))
        offsets_V, dims = 2 * offsets_V, [2 * dim for dim in dims]
    start_N, width_N = _value_rows(splits_K1, dims, n)
    row_of_key_U = torch.full((keys,), -1, dtype=torch.int64, device=device)
    row_of_key_U.scatter_(0, positions_N, torch.arange(n, device=device))
    entry_V = torch.arange(v, device=device)
    key_V = torch.searchsorted(offset_splits_U1, entry_V, right=True) - 1
    row_V = row_of_key_U[key_V.clamp(0, keys - 1)]
    widest = max(dims)
    block_d = min(power_of_2(widest), 128)
    block_n = max(1, 2048 // block_d)
    launch(
        _copy_to_offsets, (blocks_of(v, block_n),),
        value, row_V, start_N, width_N, offsets_V.contiguous(), buffer_E, v, value.numel(),
        buffer_E.numel(), widest,
        BLOCK_N=block_n, BLOCK_D=block_d,
    )  # fmt: skip


def sum_offsets(
    buffer_E: Tensor,
    positions_N: Tensor,
    splits_K1: Tensor,
    offsets_V: Tensor,
    offset_splits_U1: Tensor,
    dims: Sequence[int],
    length: int,
) -> Tensor:
    """Each value row = the sum of the buffer at its key's offsets."""
    value = buffer_E.new_zeros(length)
    n = positions_N.numel()
    if n == 0 or length == 0 or offsets_V.numel() == 0:
        return value
    placed = _value_rows(splits_K1, dims, n)
    begin_N, end_N = offset_splits_U1[positions_N], offset_splits_U1[positions_N + 1]
    # A key may be asked for twice, so runs may overlap: they are not cut.
    sum_runs(
        buffer_E.contiguous(), offsets_V.contiguous(), 1, begin_N, end_N, value, max(dims),
        placed=placed, cut=False,
    )  # fmt: skip
    return value
