"""Chains of deltas under mass changes: evictions, ids that come back, tables at their capacity."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import CheckpointStore, Contents, Manifest, compact, diff, verify
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import begin
from shoal.checkpoint.table_match import LoadOptions
from shoal.errors import TableFull
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import Adagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from shoal.table.values import Cursor, RowChunk
from support.hand_tables import check_equal

SPEC = TableSpec(
    name="users", segments=(Segment(dim=4, optimizer=Adagrad()),), expiry=Expiry(ttl_s=100)
)


class Chain:
    """A table, and the checkpoints of it."""

    def __init__(self, root: Path, spec: TableSpec = SPEC) -> None:
        self.root, self.spec = root, spec
        self.shard = CpuShard((spec,), seed=2)
        self.parent: Manifest | None = None
        self.since: dict[str, Cursor] = {}
        self.step = 0

    def contents(self) -> Contents:
        return Contents(tables={"m": HostedTables(specs=(self.spec,), shard=self.shard)})

    def train(self, ids: range, now_s: int) -> None:
        ids_U = torch.tensor(list(ids)) * 7919 - 77
        groups = IdGroups(ids_U, torch.tensor([0, len(ids)]), torch.zeros(1, dtype=torch.int32))
        ctx = StepContext(global_step=self.step, event_time_s=now_s)
        self.shard.apply_ids(groups, [torch.full((len(ids), 4), 0.5 + self.step)], ctx=ctx)

    def save(self) -> Manifest:
        self.step += 1
        saving = begin(
            self.root,
            self.contents(),
            step=self.step,
            position=self.step,
            kind="full" if self.parent is None else "delta",
            parent=self.parent,
            since=self.since or None,
        )
        self.parent = saving.wait()
        self.since = dict(saving.cursors)
        saving.release()
        return self.parent

    def check(self, spec: TableSpec | None = None) -> CpuShard:
        """What loads is what is here, versions too; the chain is well."""
        report = verify(self.root)
        assert report.ok, report.problems
        found = loaded(self.root, spec or self.spec)
        check_equal(found.export(0), self.rows())
        return found

    def rows(self) -> RowChunk:
        return self.shard.export(0)


def loaded(root: Path, spec: TableSpec, options: LoadOptions | None = None) -> CpuShard:
    shard = CpuShard((spec,), seed=2)
    hosting = HostedTables(specs=(spec,), shard=shard)
    load(root, Contents(tables={"m": hosting}), options=options)
    return shard


def of(manifest: Manifest) -> tuple[int, int]:
    return manifest.tables[0].rows, manifest.tables[0].deleted


def test_most_rows_are_evicted(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.train(range(5000), now_s=0)
    chain.train(range(100), now_s=90)
    assert of(chain.save()) == (5000, 0)
    assert chain.shard.evict(150) == 4900
    assert of(chain.save()) == (0, 4900)
    chain.check()
    chain.train(range(4000, 4010), now_s=160)
    assert of(chain.save()) == (10, 0)
    chain.check()
    assert chain.shard.evict(10_000) == 110
    assert of(chain.save()) == (0, 110)
    assert chain.check().size(0) == 0
    assert of(chain.save()) == (0, 0)
    assert chain.check().size(0) == 0


def test_ids_that_are_deleted_and_come_back(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.train(range(1000), now_s=0)
    chain.save()
    old = chain.rows()
    # In one epoch; and once more, so that their rows have been through several lives.
    for now_s in (200, 400):
        assert chain.shard.evict(now_s) == (1000 if now_s == 200 else 500)
        chain.train(range(500), now_s=now_s)
    assert of(chain.save()) == (500, 500)
    chain.check()
    assert chain.rows().counts.max() == 1 < old.counts.max() + 1
    # Deleted in one delta, back in the next one, deleted again in the last.
    assert chain.shard.evict(600) == 500
    assert of(chain.save()) == (0, 500)
    chain.train(range(300), now_s=700)
    assert of(chain.save()) == (300, 0)
    chain.check()
    assert chain.shard.evict(900) == 300
    chain.train(range(900, 901), now_s=900)
    assert of(chain.save()) == (1, 300)
    assert chain.check().size(0) == 1


def test_a_loaded_job_goes_on_with_the_chain(tmp_path: Path) -> None:
    """Also deletions right after a load are in the next delta."""
    chain = Chain(tmp_path)
    chain.train(range(300), now_s=0)
    chain.train(range(30), now_s=90)
    chain.save()
    again = Chain(tmp_path)
    found = load(tmp_path, again.contents())
    assert found.cursors is not None
    again.parent, again.since, again.step = found.manifest, dict(found.cursors), chain.step
    assert again.shard.evict(150) == 270
    again.train(range(200, 210), now_s=150)
    assert of(again.save()) == (10, 260)
    again.check()


def test_compaction_after_mass_changes(tmp_path: Path) -> None:
    """A compacted chain has the bytes of a full save at its cut."""
    chain = Chain(tmp_path / "a")
    chain.train(range(3000), now_s=0)
    chain.save()
    chain.shard.evict(200)
    chain.train(range(1000, 1500), now_s=200)
    chain.save()
    chain.train(range(1400, 1600), now_s=250)
    last = chain.save()
    store = CheckpointStore(tmp_path / "a")
    compact(store, f"step-{last.step:012d}-delta")
    saved = begin(tmp_path / "b", chain.contents(), step=last.step, position=last.step)
    saved.wait()
    name = f"step-{last.step:012d}-full"
    for path in ("a", "b"):
        assert verify(tmp_path / path / name).ok
    files = [sorted((tmp_path / path / name / "rows").iterdir()) for path in ("a", "b")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]] != []
    assert diff(tmp_path / "a" / name, tmp_path / "b" / name).same
    chain.check()


@pytest.mark.parametrize("on_full", ["raise", "lru", "lfu"])
def test_a_table_at_its_capacity(tmp_path: Path, on_full: str) -> None:
    """At no time had it more rows than it may, though the chain has twice as many ids."""
    spec = dataclasses.replace(SPEC, capacity_rows=400, on_full=on_full)
    chain = Chain(tmp_path, spec)
    chain.train(range(400), now_s=0)
    chain.save()
    chain.check()
    for now_s in (200, 400, 600):
        assert chain.shard.evict(now_s) == 400
        first = 2 * now_s
        chain.train(range(first, first + 400), now_s=now_s)
        assert of(chain.save()) == (400, 400)
        assert chain.check().size(0) == 400
    smaller = dataclasses.replace(spec, capacity_rows=399)
    if on_full == "raise":
        with pytest.raises(TableFull):
            loaded(tmp_path, smaller)
        larger = dataclasses.replace(spec, capacity_rows=401)
        check_equal(loaded(tmp_path, larger).export(0), chain.rows())
    else:
        assert loaded(tmp_path, smaller).size(0) == 399


@pytest.mark.parametrize("on_full", ["lru", "lfu"])
def test_rows_that_make_room_are_deleted(tmp_path: Path, on_full: str) -> None:
    """Rows that a full table drops for new ones are deletions like any other."""
    spec = dataclasses.replace(SPEC, capacity_rows=200, on_full=on_full, expiry=None)
    chain = Chain(tmp_path, spec)
    chain.train(range(200), now_s=0)
    chain.save()
    for first in (100, 150, 300, 90):
        chain.train(range(first, first + 150), now_s=first)
        rows, deleted = of(chain.save())
        assert rows <= 200 and deleted <= 200
        chain.check()
    assert chain.shard.size(0) <= 200
