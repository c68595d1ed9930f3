"""A step with sums somebody changed stamps rows as a plain step does."""

from __future__ import annotations

import torch

from shoal import Segment, TableSpec
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import GradRecord, IdGroups, StepContext

GROUPS = IdGroups(torch.tensor([4]), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32))


def last_seen_after(summed: bool) -> int:
    shard = CpuShard([TableSpec(name="t", segments=(Segment(dim=2),))])
    shard.apply_ids(GROUPS, [torch.ones(1, 2)], ctx=StepContext(event_time_s=1))
    ticket = shard.find_or_init(GROUPS, ctx=StepContext(event_time_s=9))
    records = [GradRecord(ticket, (torch.ones(1, 2),))]
    late = StepContext(event_time_s=3)
    if summed:
        shard.apply_summed(shard.sum_grads(records), records, ctx=late)
    else:
        shard.apply(records, ctx=late)
    entry = shard.entry(0, 4)
    assert entry is not None
    return entry.last_seen_s


def test_the_latest_lookup_stamps_either_way() -> None:
    assert last_seen_after(summed=False) == last_seen_after(summed=True) == 9
