"""Chains of a full checkpoint and deltas end, on any ranks, as their last link."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.manifest import Parent
from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables, hosted_specs, joined_chunk, plan_placement
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk
from support.hand_tables import (
    BIAS,
    HASHES,
    ITEMS,
    QUARTERS,
    TAGS,
    USERS,
    VEC,
    OneOf,
    check_equal,
    check_state,
    hosted,
    trained,
)
from support.saved_by_hand import HandTable, chunk_where, write_by_hand


def chain(root: Path, spec: TableSpec = TAGS) -> dict[int, RowChunk]:
    """A full one and three deltas: rows change, go, come back; the last state by id."""
    base = trained(spec, 400).export()
    state: dict[int, RowChunk] = {}

    def put(chunk: RowChunk) -> None:
        for k, id_ in enumerate(chunk.ids.tolist()):
            state[id_] = chunk_where(chunk, torch.tensor([k]))

    def changed(chunk: RowChunk, version: int) -> RowChunk:
        return dataclasses.replace(
            chunk,
            weights=chunk.weights + version,
            versions=torch.full_like(chunk.versions, version),
            counts=chunk.counts + version,
        )

    put(base)
    storage = Storage(root)
    parent = write_by_hand(storage, {"b": [HandTable(spec, base, cuts=QUARTERS)]}, version=4)
    everything = torch.arange(400)
    steps: list[tuple[int, torch.Tensor, torch.Tensor, Sequence[int]]] = [
        (5, everything[:90], everything[100:140], ()),
        (6, everything[80:130], everything[:30], (HASHES // 2,)),
        (7, everything[10:20], everything[125:128], QUARTERS),
    ]
    for epoch, upserted, deleted, cuts in steps:
        rows = changed(chunk_where(base, upserted), epoch)
        put(rows)
        for id_ in base.ids[deleted].tolist():
            state.pop(id_, None)
        table = HandTable(spec, rows, deleted=base.ids[deleted], cuts=cuts)
        parent = write_by_hand(
            storage,
            {"b": [table]},
            step=epoch,
            version=epoch,
            parent=parent,
            last_steps={"b": epoch},
        )
    return state


def test_a_chain_ends_as_its_last_link(tmp_path: Path) -> None:
    state = chain(tmp_path)
    tables = hosted(TAGS)
    found = load(tmp_path, Contents(tables={"b": tables}))
    check_state(tables.shard.export(0), state)
    assert found.rows == {"b/tags": len(state)}
    assert (found.manifest.version, tables.shard.last_step) == (7, 7)


def test_a_chain_without_its_parent_is_refused(tmp_path: Path) -> None:
    chain(tmp_path)
    (tmp_path / "step-000000000005-delta").rename(tmp_path / "elsewhere")
    tables = hosted(TAGS)
    with pytest.raises(CheckpointError, match="no checkpoint step-000000000005-delta"):
        load(tmp_path, Contents(tables={"b": tables}))
    assert tables.shard.size(0) == 0


def test_a_chain_has_one_form(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    parent = write_by_hand(storage, {"b": [HandTable(TAGS, trained(TAGS, 5).export())]})
    other = dataclasses.replace(TAGS, segments=(dataclasses.replace(VEC, dim=2),))
    rows = trained(other, 5).export()
    write_by_hand(storage, {"b": [HandTable(other, rows)]}, step=2, version=9, parent=parent)
    with pytest.raises(CheckpointError, match="as in the newest link of its chain"):
        load(tmp_path, Contents(tables={"b": hosted(other)}))


KINDS = ("row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_keeps_its_part(tmp_path: Path, kind: str, world_size: int) -> None:
    spec = TableSpec(
        name="tags",
        segments=(dataclasses.replace(VEC, dim=8), dataclasses.replace(BIAS, dim=2)),
    )
    state = chain(tmp_path, spec)
    placement = plan_placement((spec,), world_size, default=kind, local_world_size=2)
    parts, counted = [], 0
    for rank in range(world_size):
        shard = CpuShard(hosted_specs((spec,), placement, rank))
        tables = HostedTables(specs=(spec,), shard=shard, placement=placement)
        alone = OneOf(rank, world_size)
        found = load(tmp_path, Contents(tables={"b": tables}), collectives=alone)
        counted += found.rows["b/tags"]
        here = [one for one in placement.of("tags") if rank in one.ranks]
        parts += [
            (one, shard.export(k))
            for k, one in enumerate(here)
            if not one.replicated or rank == world_size - 1
        ]
    assert counted == len(state)
    check_state(joined_chunk(spec, parts), state)


def test_a_table_may_be_new_in_the_middle_of_a_chain(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    first, second = trained(TAGS, 30).export(), trained(USERS, 20).export()
    parent: Parent = write_by_hand(storage, {"b": [HandTable(TAGS, first)]}, version=4)
    none = chunk_where(first, torch.zeros(30, dtype=torch.bool))
    write_by_hand(
        storage,
        {"b": [HandTable(TAGS, none), HandTable(USERS, second)]},
        step=2,
        version=5,
        parent=parent,
    )
    tables = hosted(TAGS, USERS)
    assert load(tmp_path, Contents(tables={"b": tables})).rows == {"b/tags": 30, "b/users": 20}
    check_equal(tables.shard.export(0), first)
    check_equal(tables.shard.export(1), second)


def test_a_table_gone_in_the_middle_of_a_chain_is_not_asked_for(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    first, gone = trained(TAGS, 30).export(), trained(ITEMS, 20).export()
    plain = dataclasses.replace(ITEMS, admission=None)
    parent = write_by_hand(
        storage,
        {"b": [HandTable(plain, gone), HandTable(TAGS, first)]},
        version=4,
        grouped=("b/items", "b/tags"),
    )
    none = chunk_where(first, torch.zeros(30, dtype=torch.bool))
    write_by_hand(storage, {"b": [HandTable(TAGS, none)]}, step=2, version=5, parent=parent)
    tables = hosted(TAGS)
    assert load(tmp_path, Contents(tables={"b": tables})).rows == {"b/tags": 30}
    check_equal(tables.shard.export(0), first)


@pytest.mark.parametrize("seed", range(6))
def test_random_chains_end_as_a_dictionary_says(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    base = {"tags": trained(TAGS, 150).export(), "more": trained(TAGS, 120).export()}
    specs = {name: dataclasses.replace(TAGS, name=name) for name in base}
    state: dict[str, dict[int, RowChunk]] = {name: {} for name in base}
    parent: Parent | None = None
    for link in range(5):
        tables = []
        for name, rows in base.items():
            order = rng.sample(range(len(rows.ids)), rng.randrange(100))
            cut = rng.randrange(len(order) + 1) if link else len(order)
            put = chunk_where(rows, torch.tensor(order[:cut], dtype=torch.int64))
            put = dataclasses.replace(
                put, weights=put.weights + link, versions=torch.full_like(put.versions, 5 + link)
            )
            for k, id_ in enumerate(put.ids.tolist()):
                state[name][id_] = chunk_where(put, torch.tensor([k]))
            gone = rows.ids[torch.tensor(order[cut:], dtype=torch.int64)]
            for id_ in gone.tolist():
                state[name].pop(id_, None)
            bits = rng.randrange(4)
            cuts = [k << (64 - bits) for k in range(1, 1 << bits)]
            tables.append(HandTable(specs[name], put, deleted=gone, cuts=cuts))
        parent = write_by_hand(
            Storage(tmp_path),
            {"b": tables},
            step=link,
            version=5 + link,
            parent=parent,
            grouped=("b/tags", "b/more") if rng.random() < 0.4 else (),
        )
    found = hosted(*specs.values())
    load(tmp_path, Contents(tables={"b": found}))
    for k, name in enumerate(specs):
        check_state(found.shard.export(k), state[name])
