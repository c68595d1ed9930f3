"""How many distinct ids of a call were refused a row: one lane an id counts it."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from shoal.kernels.launching import launch
from shoal.kernels.row_tiles import blocks_of, power_of_2
from shoal.kernels.table_layout import (
    COUNT_REFUSED,
    COUNT_WORDS,
    CallGroups,
    ShardLayout,
    group_of,
    mix64,
    search_steps,
)

__all__ = ["count_refused"]

_BLOCK = 128
_COUNT_WORDS, _REFUSED = tl.constexpr(COUNT_WORDS), tl.constexpr(COUNT_REFUSED)


@triton.jit  # type: ignore[untyped-decorator]
def _table_of(splits_ptr, groups_ptr, groups, at, live, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    group = group_of(splits_ptr, groups, at, live, STEPS)
    return tl.load(groups_ptr + group, mask=live, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["n", "groups", "mask"])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    ids_ptr,
    splits_ptr,
    groups_ptr,
    wanted_ptr,
    admitted_ptr,
    owner_ptr,
    counters_ptr,
    n,
    groups,
    mask,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seeking = at < n
    seeking = seeking & (tl.load(wanted_ptr + at, mask=seeking, other=0) != 0)
    seeking = seeking & (tl.load(admitted_ptr + at, mask=seeking, other=1) == 0)
    if tl.max(seeking.to(tl.int32), axis=0) > 0:
        id_ = tl.load(ids_ptr + at, mask=seeking, other=0)
        table = _table_of(splits_ptr, groups_ptr, groups, at, seeking, STEPS)
        slot = mix64(id_ ^ mix64(table)) & mask
        key = (at + 1).to(tl.int32)
        first = seeking & (seeking == 0)
        while tl.max(seeking.to(tl.int32), axis=0) > 0:
            # No slot ever holds -1: lanes with nothing to claim compare against it.
            held = tl.atomic_cas(
                owner_ptr + slot, tl.where(seeking, 0, -1).to(tl.int32), key, sem="relaxed"
            )
            first = first | (seeking & (held == 0))
            taken = seeking & (held > 0)
            other = (tl.where(taken, held, 1) - 1).to(tl.int64)
            same = taken & (tl.load(ids_ptr + other, mask=taken, other=0) == id_)
            same = same & (_table_of(splits_ptr, groups_ptr, groups, other, taken, STEPS) == table)
            seeking = taken & (same == 0)
            slot = tl.where(seeking, (slot + 1) & mask, slot)
        refused = counters_ptr + table * _COUNT_WORDS + _REFUSED
        tl.atomic_add(refused, first.to(tl.int64), mask=first, sem="relaxed")


def count_refused(
    layout: ShardLayout, call: CallGroups, wanted_N: Tensor, admitted_N: Tensor
) -> None:
    """Add to `COUNT_REFUSED` the distinct ids at positions wanted, but not admitted; bool [N]."""
    n = call.ids_N.numel()
    if n == 0:
        return
    capacity = power_of_2(2 * n)
    owner = torch.zeros(capacity, dtype=torch.int32, device=call.ids_N.device)
    launch(
        _count,
        (blocks_of(n, _BLOCK),),
        call.ids_N,
        call.splits_G1,
        call.tables_G,
        wanted_N.view(torch.int8),
        admitted_N.view(torch.int8),
        owner,
        layout.counters_KC,
        n,
        call.tables_G.numel(),
        capacity - 1,
        STEPS=search_steps(call.tables_G.numel()),
        BLOCK=_BLOCK,
    )
