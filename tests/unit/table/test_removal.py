"""Rows dropped by id."""

from __future__ import annotations

import torch

from shoal import Segment, TableSpec
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import IdGroups, StepContext
from shoal.table.values import Cursor

SPECS = tuple(TableSpec(name=name, segments=(Segment(dim=2),)) for name in "ab")
CTX = StepContext()


def groups(*ids: list[int]) -> IdGroups:
    """Ids of the first tables."""
    splits = torch.tensor([0, *map(len, ids)]).cumsum(0)
    flat = torch.tensor([one for some in ids for one in some], dtype=torch.int64)
    return IdGroups(flat, splits, torch.arange(len(ids), dtype=torch.int32))


def test_rows_are_gone_and_start_again() -> None:
    shard = CpuShard(SPECS)
    lowest = -(1 << 63)
    everything = groups([1, 2, lowest], [1])
    first = shard.gather(shard.find_or_init(everything, ctx=CTX), ctx=CTX)
    shard.assign_add(everything, [torch.ones(3, 2), torch.ones(1, 2)], ctx=CTX)
    assert shard.remove(groups([1, 1, 7, lowest])) == 2
    assert shard.find(everything).found_N.tolist() == [False, True, False, True]
    assert [shard.size(0), shard.size(1)] == [1, 1]
    again = shard.gather(shard.find_or_init(everything, ctx=CTX), ctx=CTX)
    assert torch.equal(again[0][[0, 2]], first[0][[0, 2]])
    assert torch.equal(again[1], first[1] + 1)
    assert shard.remove(groups([], [])) == 0


def test_rows_of_a_ticket_stay() -> None:
    shard = CpuShard(SPECS)
    ticket = shard.find_or_init(groups([1]), ctx=CTX)
    shard.find_or_init(groups([2], [1]), ctx=CTX).end()
    assert shard.remove(groups([1, 2], [1])) == 2
    assert shard.find(groups([1, 2], [1])).found_N.tolist() == [True, False, False]
    ticket.end()
    assert shard.remove(groups([1])) == 1


def test_consumers_hear_of_it() -> None:
    shard = CpuShard(SPECS)
    shard.assign(groups([1, 2]), [torch.ones(2, 2)], ctx=CTX)
    with shard.snapshot() as before:
        shard.remove(groups([2]))
        assert before.read(0, 0, 1 << 64).ids.tolist().count(2) == 1
        since = Cursor(shard.incarnation, before.version)
    with shard.snapshot(since) as after:
        assert after.deleted(0).tolist() == [2]
