"""Rows loaded in order of hash, as files have them, take a shorter way into a CPU table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal import Segment, TableSpec, optimizers
from shoal.errors import DTypeError, InputError, TableFull
from shoal.placement import hash_ids, sort_key
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import IdGroups, StepContext
from shoal.table.values import RowChunk

DIM = 3


def spec(**given: object) -> TableSpec:
    segment = Segment(dim=DIM, optimizer=optimizers.Adagrad(lr=0.1))
    return TableSpec(name="t", segments=(segment,), **given)  # type: ignore[arg-type]


def by_hash(rows: int) -> Tensor:
    ids = torch.arange(rows, dtype=torch.int64) * 7919 - 5
    return ids[sort_key(hash_ids("t", ids)).argsort()].contiguous()


def chunk(ids: Tensor, add: float = 0.0) -> RowChunk:
    ones = torch.ones_like(ids)
    weights = (ids % 1000).float().repeat(DIM, 1).T.contiguous() + add
    return RowChunk("t", ids, weights, weights * 2, ones, ones * 3, ones * 4)


def assign(shard: CpuShard, ids: Tensor) -> None:
    groups = IdGroups(ids, torch.tensor([0, len(ids)]), torch.zeros(1, dtype=torch.int32))
    shard.assign(groups, [torch.zeros(len(ids), DIM)], ctx=StepContext())


def holds(shard: CpuShard, expected: RowChunk) -> None:
    got = shard.export(0)
    for name in ("ids", "weights", "state", "last_seen_s", "counts"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert shard.size(0) == len(expected.ids)


@pytest.mark.parametrize("threads", [1, 2, 6])
@pytest.mark.parametrize("expected", [0, 1000, 40_000, 90_000])
def test_parts_in_order(threads: int, expected: int) -> None:
    shard, ids = CpuShard([spec()], threads=threads), by_hash(40_000)
    shard.expect(0, expected)
    for part in ids.split(7_000):
        shard.load(0, chunk(part))
    holds(shard, chunk(ids))


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_the_same_and_earlier_rows_again(threads: int) -> None:
    shard, ids = CpuShard([spec()], threads=threads), by_hash(20_000)
    for part in (ids[5_000:10_000], ids[:5_000], ids[10_000:], ids[9_000:11_000], ids[-1:]):
        shard.load(0, chunk(part))
    holds(shard, chunk(ids))
    shard.load(0, chunk(ids, add=1.0))
    holds(shard, chunk(ids, add=1.0))


def test_rows_that_came_otherwise_are_found() -> None:
    shard, ids = CpuShard([spec()], threads=2), by_hash(9_000)
    shard.load(0, chunk(ids[:3_000]))
    assign(shard, ids[4_000:5_000])
    for part in (ids[3_000:6_000], ids[6_000:]):
        shard.load(0, chunk(part))
    holds(shard, chunk(ids))


def test_after_a_clear_they_start_anew() -> None:
    shard, ids = CpuShard([spec()], threads=2), by_hash(9_000)
    assign(shard, ids)
    shard.clear(0)
    for part in ids.split(4_000):
        shard.load(0, chunk(part))
    holds(shard, chunk(ids))
    shard.clear(0)
    shard.load(0, chunk(ids[:10]))
    holds(shard, chunk(ids[:10]))


def test_a_refused_part_changes_nothing() -> None:
    shard, ids = CpuShard([spec(capacity_rows=5_000)], threads=2), by_hash(9_000)
    shard.expect(0, 9_000)
    shard.load(0, chunk(ids[:3_000]))
    with pytest.raises(TableFull):
        shard.load(0, chunk(ids[3_000:6_000]))
    holds(shard, chunk(ids[:3_000]))
    shard.load(0, chunk(ids[3_000:5_000]))
    holds(shard, chunk(ids[:5_000]))


def test_expected_rows_grow_nothing() -> None:
    shard, ids = CpuShard([spec()], threads=2), by_hash(200_000)
    shard.expect(0, len(ids))
    before = shard.stats()[0].bytes_index
    for part in ids.split(30_000):
        shard.load(0, chunk(part))
    assert shard.stats()[0].bytes_index == before


@pytest.mark.parametrize(
    ("rows", "error"), [(-1, InputError), (1.5, DTypeError), (True, DTypeError)]
)
def test_what_is_no_number_of_rows(rows: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="rows to expect"):
        CpuShard([spec()]).expect(0, rows)
