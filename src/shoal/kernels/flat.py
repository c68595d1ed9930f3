"""Rows of several widths in one flat buffer on CUDA: all tables in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of, power_of_2
from shoal.kernels.rows import sum_runs
from shoal.kernels.transfer import sent

__all__ = ["fill_offsets", "gather_flat", "scatter_flat", "sum_offsets"]


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
    flat,
    size,
    offsets,
    blocks,
    items,
    dims,
    steps,
    out,
    lists,
    FLOATS: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        _gather_flat,
        (blocks[-1],),
        flat_E,
        flat_E.numel(),
        torch.cat(list(offsets)),
        table,
        table[lists + 1 :],
        table[2 * lists + 2 :],
        table[3 * lists + 2 :],
        rows[0],
        lists,
        FLOATS=flat_E.is_floating_point(),
        LISTS=power_of_2(lists),
        BLOCK=block,
    )
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
    value,
    rows,
    starts,
    widths,
    offsets,
    buffer,
    n,
    length,
    size,
    widest,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
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
        _copy_to_offsets,
        (blocks_of(v, block_n),),
        value,
        row_V,
        start_N,
        width_N,
        offsets_V.contiguous(),
        buffer_E,
        v,
        value.numel(),
        buffer_E.numel(),
        widest,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
    )


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
