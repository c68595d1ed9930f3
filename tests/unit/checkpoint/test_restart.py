"""What a restart keeps: counters of unadmitted ids go on where they stood."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from shoal import Admission, Segment, TableSpec
from shoal.checkpoint import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import save
from shoal.errors import ShapeError
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, StepContext
from shoal.table.values import AdmissionState

IDS = torch.tensor([5, 6, 2**62])


def shard_with(counter: Literal["exact", "sketch"], width: int = 1024) -> CpuShard:
    admission = Admission(threshold=3, counter=counter, sketch_width=width)
    return CpuShard([TableSpec(name="t", segments=(Segment(dim=2),), admission=admission)])


def occurrence(shard: CpuShard, ids: torch.Tensor) -> list[bool]:
    groups = IdGroups(ids, torch.tensor([0, ids.numel()]), torch.zeros(1, dtype=torch.int32))
    ticket = shard.find_or_init(groups, ctx=StepContext())
    admitted: list[bool] = ticket.admitted_N.tolist()
    ticket.end()
    return admitted


@pytest.mark.parametrize("counter", ["exact", "sketch"])
def test_occurrences_survive_a_checkpoint(
    tmp_path: Path, counter: Literal["exact", "sketch"]
) -> None:
    before = shard_with(counter)
    assert occurrence(before, IDS) == [False] * 3
    assert occurrence(before, IDS[:1]) == [False]
    save(tmp_path, Contents(tables={"s": HostedTables(before.specs, before)}), step=2, position=0)
    after = shard_with(counter)
    load(tmp_path, Contents(tables={"s": HostedTables(after.specs, after)}))
    assert occurrence(after, IDS) == [True, False, False]
    assert after.size(0) == 1


def test_counters_of_another_size_are_refused() -> None:
    small, large = shard_with("sketch"), shard_with("sketch", 4096)
    occurrence(small, IDS)
    with pytest.raises(ShapeError, match="sketch_width"):
        large.load_admission_state(0, small.admission_state(0))
    assert set(large.admission_state(0).cells) == {0}


def test_exact_counters_do_not_take_a_sketch() -> None:
    exact = shard_with("exact")
    with pytest.raises(ShapeError):
        exact.load_admission_state(
            0, AdmissionState(torch.empty(0), torch.empty(0), bytes(4 * 4096))
        )
