"""Loading checkpoints that were written by hand: exact, wholly or not at all."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.checkpoint import job_state
from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import Loaded, load
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.table_match import LoadOptions
from shoal.errors import CheckpointError, InputError, TableFull
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import SGD
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table
from shoal.table.hosting import HostedTables, hosted_specs, plan_placement
from shoal.table.shard import Shard
from shoal.table.values import RowChunk
from support.hand_tables import (
    ITEMS,
    QUARTERS,
    TAGS,
    USERS,
    VEC,
    OneOf,
    check_equal,
    hosted,
    trained,
)
from support.saved_by_hand import HandTable, chunk_where, write_by_hand


class Job:
    """A small job: three tables in two collections, a module, an optimizer."""

    def __init__(self, seed: int) -> None:
        self.first, self.second = hosted(USERS, ITEMS), hosted(TAGS)
        torch.manual_seed(seed)
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1 + seed)

    def contents(self) -> Contents:
        return Contents(
            tables={"a": self.first, "b": self.second},
            modules={"net": self.net},
            optimizers={"net": self.optimizer},
        )

    def shards(self) -> list[Shard]:
        return [self.first.shard, self.second.shard]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, RowChunk], Job]:
    job = Job(0)
    job.net(torch.ones(2, 3)).sum().backward()
    job.optimizer.step()
    rows = {
        "a/users": trained(USERS, 500).export(),
        "a/items": trained(ITEMS, 70).export(),
        "b/tags": trained(TAGS, 30).export(),
    }
    counting = CpuShard((ITEMS,))
    table = Table(ITEMS, shard=counting)
    table.find_or_init(torch.arange(40), counts=torch.arange(40) % 2 + 1).end()
    write_by_hand(
        Storage(tmp_path),
        {
            "a": [
                HandTable(USERS, rows["a/users"], cuts=QUARTERS),
                HandTable(ITEMS, rows["a/items"], admission=counting.admission_state(0)),
            ],
            "b": [HandTable(TAGS, rows["b/tags"])],
        },
        step=7,
        version=5,
        grouped=("a/items", "b/tags"),
        modules={"net": job.net},
        optimizers={"net": job.optimizer},
        state={"step": 7, "nested": {"rates": [0.5, 1.0]}},
        rank_states=({"rng": torch.arange(3)},),
        last_steps={"a": 6, "b": 7},
    )
    return tmp_path, rows, job


def test_everything_comes_back(saved: tuple[Path, dict[str, RowChunk], Job]) -> None:
    root, rows, old = saved
    job = Job(1)
    found = load(root, job.contents())
    assert isinstance(found, Loaded)
    check_equal(job.first.shard.export(0), rows["a/users"])
    check_equal(job.first.shard.export(1), rows["a/items"])
    check_equal(job.second.shard.export(0), rows["b/tags"])
    assert found.rows == {"a/users": 500, "a/items": 70, "b/tags": 30}
    assert found.expired == {"a/users": 0, "a/items": 0, "b/tags": 0}
    admission = job.first.shard.admission_state(1)
    pairs = dict(zip(admission.ids.tolist(), admission.counts.tolist(), strict=True))
    assert pairs == {id_: id_ % 2 + 1 for id_ in range(40)}
    assert torch.equal(job.net.weight, old.net.weight)
    assert job.optimizer.param_groups[0]["lr"] == 0.1
    assert found.state == {"step": 7, "nested": {"rates": [0.5, 1.0]}}
    assert found.rank_state is not None and found.rank_state["rng"].tolist() == [0, 1, 2]
    assert (found.manifest.step, found.manifest.position) == (7, 70)
    assert [shard.last_step for shard in job.shards()] == [6, 7]
    # A delta may go on top of it, of what changes from the next version on.
    assert found.cursors is not None
    assert {key: one.version for key, one in found.cursors.items()} == {"a": 5, "b": 5}
    assert [shard.close_version() for shard in job.shards()] == [6, 6]


def test_without_the_state_of_optimizers(saved: tuple[Path, dict[str, RowChunk], Job]) -> None:
    root, rows, old = saved
    job = Job(1)
    fresh = copy.deepcopy(job.optimizer.state_dict())
    found = load(root, job.contents(), options=LoadOptions(state=False))
    users, was = job.first.shard.export(0), rows["a/users"]
    assert torch.equal(users.weights, was.weights)
    assert bool((users.state == users.state[0]).all()) and not torch.equal(users.state, was.state)
    assert torch.equal(job.net.weight, old.net.weight) and job.optimizer.state_dict() == fresh
    assert found.cursors is None, "a delta would lack what was left out"


def test_one_checkpoint_or_the_newest_of_a_store(tmp_path: Path) -> None:
    for step, rows in ((1, 10), (2, 20)):
        chunk = trained(TAGS, rows).export()
        write_by_hand(Storage(tmp_path), {"b": [HandTable(TAGS, chunk)]}, step=step, version=9)
    (tmp_path / "step-000000000003-full").mkdir()  # was not committed
    newest, older = hosted(TAGS), hosted(TAGS)
    assert load(tmp_path, Contents(tables={"b": newest})).rows == {"b/tags": 20}
    folder = tmp_path / "step-000000000001-full"
    assert load(str(folder), Contents(tables={"b": older})).rows == {"b/tags": 10}
    with pytest.raises(CheckpointError, match="neither is one nor holds one"):
        load(tmp_path / "nothing", Contents(tables={"b": hosted(TAGS)}))


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "short":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[{"first": 0, "middle": len(data) // 2, "last": -1}[how]] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["first", "middle", "last", "short", "gone"])
def test_nothing_is_half_loaded(saved: tuple[Path, dict[str, RowChunk], Job], how: str) -> None:
    root, _, _ = saved
    folder = root / "step-000000000007-full"
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    assert len(files) >= 10
    if how == "gone":  # without a manifest it is no checkpoint: that is said otherwise
        files.remove(folder / "manifest.json")
    for file in files:
        kept = file.read_bytes()
        damage(file, how)
        job = Job(1)
        before = copy.deepcopy(job.net.state_dict())
        with pytest.raises(CheckpointError, match=str(file.relative_to(folder))):
            load(root, job.contents())
        for shard in job.shards():
            assert [shard.size(k) for k in range(len(shard.specs))] == [0] * len(shard.specs)
            assert shard.last_step == 0
        assert job.first.shard.admission_state(1).ids.numel() == 0
        assert all(torch.equal(v, before[k]) for k, v in job.net.state_dict().items())
        assert not job.optimizer.state and job.optimizer.param_groups[0]["lr"] == 1.1
        file.write_bytes(kept)
        # The same job may load what is whole.
        assert load(root, job.contents()).rows["a/users"] == 500


def test_tables_must_be_empty(saved: tuple[Path, dict[str, RowChunk], Job]) -> None:
    job = Job(1)
    Table(TAGS, shard=job.second.shard).assign([1], [[1.0] * 4])
    with pytest.raises(CheckpointError, match="rows in 'b/tags'"):
        load(saved[0], job.contents())
    assert job.second.shard.size(0) == 1 and job.first.shard.size(0) == 0


def test_options_reach_tables_and_dense_parts(
    saved: tuple[Path, dict[str, RowChunk], Job],
) -> None:
    root, rows, _ = saved
    people = dataclasses.replace(USERS, name="people", dtype="float16", capacity_rows=501)
    tables = hosted(people)
    options = LoadOptions(
        renames={"x/people": "a/users"},
        allow_unknown=frozenset({"a/items", "b/tags"}),
        dense=False,
    )
    found = load(root, Contents(tables={"x": tables}), options=options)
    assert found.rows == {"x/people": 500} and found.cursors is None
    assert tables.shard.last_step == 6
    by_id = {int(i): k for k, i in enumerate(rows["a/users"].ids.tolist())}
    export = tables.shard.export(0)
    order = torch.tensor([by_id[i] for i in export.ids.tolist()])
    assert torch.equal(export.weights, rows["a/users"].weights[order].half())
    assert torch.equal(export.state, rows["a/users"].state[order])


def test_expired_rows_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = trained(TAGS, 60).export()  # half seen at 15, half at 10
    write_by_hand(Storage(tmp_path), {"b": [HandTable(TAGS, rows)]}, version=9)
    tables = hosted(dataclasses.replace(TAGS, expiry=Expiry(ttl_s=8)))
    found = load(tmp_path, Contents(tables={"b": tables}), options=LoadOptions(now_s=20))
    old = int((rows.last_seen_s <= 12).sum())
    assert 0 < old < 60
    assert (found.rows["b/tags"], found.expired["b/tags"]) == (60 - old, old)
    check_equal(tables.shard.export(0), chunk_where(rows, rows.last_seen_s > 12))
    assert found.cursors is None  # a delta would not say that they are gone
    every = hosted(dataclasses.replace(TAGS, expiry=Expiry(ttl_s=8)))
    assert load(tmp_path, Contents(tables={"b": every})).rows == {"b/tags": 60}


def test_numbers_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    rows = trained(TAGS, 60).export()
    rows.weights[::2, 1] = 1e6
    write_by_hand(Storage(tmp_path), {"b": [HandTable(TAGS, rows, cuts=QUARTERS)]}, version=9)
    tables = hosted(dataclasses.replace(TAGS, dtype="float16"))
    with pytest.raises(CheckpointError, match="30 that are too large for table 'b/tags'"):
        load(tmp_path, Contents(tables={"b": tables}))
    assert tables.shard.size(0) == 0
    load(tmp_path, Contents(tables={"b": hosted(dataclasses.replace(TAGS, dtype="bfloat16"))}))


def test_capacity(tmp_path: Path) -> None:
    rows = trained(TAGS, 60).export()
    write_by_hand(Storage(tmp_path), {"b": [HandTable(TAGS, rows)]}, version=9)
    full = hosted(dataclasses.replace(TAGS, capacity_rows=59))
    with pytest.raises(TableFull):
        load(tmp_path, Contents(tables={"b": full}))
    assert full.shard.size(0) == 0


@pytest.mark.parametrize(("policy", "capacity"), [("lru", 20), ("lru", 45), ("lfu", 33)])
def test_an_evicting_table_keeps_the_rows_in_use(
    tmp_path: Path, policy: Any, capacity: int
) -> None:
    rows = trained(TAGS, 60).export()
    rows.counts[:] = torch.arange(60) % 7
    cut = chunk_where(rows, torch.arange(60) < 50)
    parent = write_by_hand(
        Storage(tmp_path), {"b": [HandTable(TAGS, cut, cuts=QUARTERS)]}, version=8
    )
    late = chunk_where(rows, torch.arange(60) >= 45)
    write_by_hand(
        Storage(tmp_path), {"b": [HandTable(TAGS, late)]}, step=2, version=9, parent=parent
    )
    tables = hosted(dataclasses.replace(TAGS, capacity_rows=capacity, on_full=policy))
    found = load(tmp_path, Contents(tables={"b": tables}))
    kept = tables.shard.export(0)
    assert found.rows == {"b/tags": capacity} and kept.ids.numel() == capacity
    assert found.cursors is None
    used = (lambda one: one.last_seen_s) if policy == "lru" else (lambda one: one.counts)
    best = used(rows).sort(descending=True).values[:capacity]
    assert torch.equal(used(kept).sort(descending=True).values, best)
    by_id = {id_: k for k, id_ in enumerate(rows.ids.tolist())}
    order = torch.tensor([by_id[id_] for id_ in kept.ids.tolist()])
    check_equal(kept, chunk_where(rows, order))


def test_a_table_at_its_budget_may_be_split_otherwise(tmp_path: Path) -> None:
    rows = trained(TAGS, 90).export()
    spec = dataclasses.replace(TAGS, capacity_rows=90, on_full="lru")
    write_by_hand(Storage(tmp_path), {"b": [HandTable(spec, rows)]}, version=9)
    placement = plan_placement((spec,), 3)
    kept = 0
    for rank in range(3):
        shard = CpuShard(hosted_specs((spec,), placement, rank))
        tables = HostedTables(specs=(spec,), shard=shard, placement=placement)
        load(tmp_path, Contents(tables={"b": tables}), collectives=OneOf(rank, 3))
        kept += shard.size(0)
        assert shard.size(0) <= 30
    assert 80 <= kept < 90  # the hash does not split evenly


def test_sketches_go_to_every_rank(tmp_path: Path) -> None:
    admission = Admission(threshold=3, counter="sketch", sketch_width=64, sketch_depth=2)
    spec = dataclasses.replace(TAGS, admission=admission)
    shard = CpuShard((spec,))
    Table(spec, shard=shard).find_or_init(torch.arange(9)).end()
    admission = shard.admission_state(0)
    table = HandTable(spec, trained(TAGS, 5).export(), admission=admission)
    write_by_hand(Storage(tmp_path), {"b": [table]}, version=9)
    placement = plan_placement((spec,), 2)
    for rank in range(2):
        own = CpuShard(hosted_specs((spec,), placement, rank))
        tables = HostedTables(specs=(spec,), shard=own, placement=placement)
        load(tmp_path, Contents(tables={"b": tables}), collectives=OneOf(rank, 2))
        assert own.admission_state(0).cells == admission.cells != bytes(len(admission.cells))


def test_another_optimizer_is_named(saved: tuple[Path, dict[str, RowChunk], Job]) -> None:
    job = Job(1)
    other = dataclasses.replace(TAGS, segments=(dataclasses.replace(VEC, optimizer=SGD()),))
    job.second = hosted(other)
    with pytest.raises(CheckpointError, match=r"'b/tags\.vec\.state' is of adagrad"):
        load(saved[0], job.contents())
    assert all(shard.size(0) == 0 for shard in job.shards())


def test_state_of_ranks_is_for_as_many_ranks(tmp_path: Path) -> None:
    rows = HandTable(TAGS, trained(TAGS, 5).export())
    two = ({"rng": 1}, {"rng": 2})
    write_by_hand(Storage(tmp_path), {"b": [rows]}, version=9, state={"a": 1}, rank_states=two)
    found = load(tmp_path, Contents(tables={"b": hosted(TAGS)}))
    assert found.rank_state is None and found.state == {"a": 1}
    assert found.rank_states == tuple(two)
    again = load(tmp_path, Contents(tables={"b": second_of_two()}), collectives=OneOf(1, 2))
    assert again.rank_state == {"rng": 2}


def test_tables_placed_on_other_ranks_are_refused(tmp_path: Path) -> None:
    write_by_hand(Storage(tmp_path), {"b": [HandTable(TAGS, trained(TAGS, 5).export())]}, version=9)
    part = second_of_two()
    with pytest.raises(InputError, match="got one on 2 ranks; allowed: one on 1"):
        load(tmp_path, Contents(tables={"b": part}))
    with pytest.raises(InputError, match="got one on 1 ranks; allowed: one on 2"):
        load(tmp_path, Contents(tables={"b": hosted(TAGS)}), collectives=OneOf(1, 2))
    assert part.shard.size(0) == 0


def second_of_two() -> HostedTables:
    placement = plan_placement((TAGS,), 2)
    shard = CpuShard(hosted_specs((TAGS,), placement, 1))
    return HostedTables(specs=(TAGS,), shard=shard, placement=placement)


def test_cursors_are_of_the_version_of_the_checkpoint(tmp_path: Path) -> None:
    """A delta on top of it could not be told from one that lacks what came between."""
    write_by_hand(Storage(tmp_path), {"b": [HandTable(TAGS, trained(TAGS, 5).export())]}, version=3)
    for cuts, whole in ((2, True), (3, False)):
        tables = hosted(TAGS)
        for _ in range(cuts):
            tables.shard.close_version()
        found = load(tmp_path, Contents(tables={"b": tables}))
        assert found.rows == {"b/tags": 5} and (found.cursors is not None) == whole
        assert found.cursors is None or found.cursors["b"].version == 3


def test_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    for bad in (Storage(tmp_path), lambda: None, np.float32(1)):
        with pytest.raises(CheckpointError, match="state of a job"):
            job_state.write(Storage(tmp_path), {"deep": [{"here": bad}]}, ({},))
    assert not (tmp_path / "state.pt").exists()


def test_collections_may_share_a_shard(tmp_path: Path) -> None:
    users, tags = trained(USERS, 40).export(), trained(TAGS, 30).export()
    tables = {"a": [HandTable(USERS, users)], "b": [HandTable(TAGS, tags)]}
    write_by_hand(Storage(tmp_path), tables, version=9, last_steps={"a": 3, "b": 5})
    shard = CpuShard((USERS, TAGS))
    contents = Contents(
        tables={
            "a": HostedTables(specs=(USERS,), shard=shard),
            "b": HostedTables(specs=(TAGS,), shard=shard),
        }
    )
    load(tmp_path, contents)
    check_equal(shard.export(0), users)
    check_equal(shard.export(1), tags)
    assert (shard.last_step, shard.close_version()) == (5, 10)
