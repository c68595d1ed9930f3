"""Checkpoints saved by some ranks and loaded by others: the same rows, state and sights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint.loading import load
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.writing import begin, save
from shoal.comm import launch
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.torch_collectives import TorchCollectives
from support.ranks import run_ranks
from support.saved_jobs import KINDS, SPECS, Job, check_part, placed_job, row_bytes, small_files

pytestmark = pytest.mark.multiproc

TIMEOUT_S = 280  # ranks that are not in a group wait for those that are
STEPS = 3  # before the full checkpoint; one more, and an eviction, before the delta
SAVERS = (1, 2, 4)
LOADERS = (1, 2, 3, 4)
LINKS = ((2, "column_wise"), (4, "row_wise"), (1, "row_wise"), (3, "grid"))
Case = tuple[str, str]  # the folder of a store, and the sharding type of who loads it


def test_files_do_not_show_who_wrote_them(stores: dict[int, list[Path]]) -> None:
    for name in ("step-000000000003-full", "step-000000000004-delta"):
        want = row_bytes(stores[1][0] / name)
        assert len(want) > 8
        if name.endswith("delta"):
            assert "deleted/00000.arrow" in want
        for root in itertools.chain.from_iterable(stores.values()):
            assert row_bytes(root / name) == want, root
            manifest = CheckpointStore(root).manifest(name)
            files = [one for one in manifest.files if one.path in want]
            first = CheckpointStore(stores[1][0]).manifest(name)
            assert files == [one for one in first.files if one.path in want]
            assert manifest.tables == first.tables
            assert manifest.last_steps == first.last_steps == {"main": int(name[16:17]) - 1}


def test_any_ranks_load_what_any_saved(stores: dict[int, list[Path]]) -> None:
    """Each number of ranks with every one that saved, and with each type on either side."""
    roots = list(itertools.chain.from_iterable(stores.values()))
    cases = {
        world_size: [
            (str(root), KINDS[(number + world_size) % len(KINDS)])
            for number, root in enumerate(roots)
        ]
        for world_size in LOADERS
    }
    run_ranks(4, on_ranks, load_all, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", LOADERS)
def test_all_ranks_load_all_that_was_saved(stores: dict[int, list[Path]], world_size: int) -> None:
    roots = list(itertools.chain.from_iterable(stores.values()))
    every = [(str(root), kind) for root, kind in itertools.product(roots, KINDS)]
    run_ranks(4, on_ranks, load_all, {world_size: every}, timeout_s=TIMEOUT_S)


def test_a_chain_may_change_its_ranks(tmp_path: Path) -> None:
    """Each link is written by another number of ranks, which loaded the one before."""
    run_ranks(4, on_ranks, write_chain, str(tmp_path))
    whole, alone = trained(STEPS + len(LINKS)), Job()
    load(tmp_path, alone.contents())
    for k in range(len(SPECS)):
        got, want = alone.shard.export(k), whole.shard.export(k)
        assert torch.equal(got.ids, want.ids) and torch.equal(got.state, want.state)
    chain = CheckpointStore(tmp_path).chain("step-000000000007-delta")
    assert [link.world_size for link in chain] == [world_size for world_size, _ in LINKS]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Path]]:
    """A full checkpoint and a delta, by ranks, of each sharding type."""
    root = tmp_path_factory.mktemp("stores")
    found = {size: [root / f"{size}-{kind}" for kind in KINDS] for size in SAVERS}
    run_ranks(4, on_ranks, save_all, found)
    return found


class Groups:
    """Collectives of the first 1, 2, 3 or 4 ranks of a job."""

    def __init__(self) -> None:
        made = {size: dist.new_group(list(range(size)), backend="gloo") for size in (2, 3, 4)}
        self._rank = dist.get_rank()
        self._groups = {
            size: TorchCollectives(group, torch.device("cpu"), TIMEOUT_S)
            for size, group in made.items()
            if self._rank < size
        }

    def of(self, size: int) -> Collectives | None:
        """None on ranks that are not in it."""
        if size == 1:
            return LocalCollectives() if self._rank == 0 else None
        return self._groups.get(size)


def on_ranks(act: Callable[..., None], *args: Any) -> None:
    launch.init(device="cpu", timeout_s=TIMEOUT_S)
    try:
        with small_files():
            act(Groups(), *args)
        dist.barrier()
    finally:
        launch.shutdown()


def save_all(groups: Groups, stores: Mapping[int, Sequence[Path]]) -> None:
    for size, roots in stores.items():
        ranks = groups.of(size)
        for root, kind in zip(roots, KINDS, strict=True):
            if ranks is not None:
                save_two(ranks, root, kind)


def save_two(ranks: Collectives, root: Path, kind: str) -> None:
    """A full checkpoint while training goes on, then a delta."""
    job = placed_job(kind, ranks.world_size, ranks.rank)
    for _ in range(STEPS):
        job.step()
    saving = begin(root, job.contents(), step=STEPS, position=30, collectives=ranks)
    job.step()
    job.evict()
    manifest = saving.wait()
    later = begin(
        root,
        job.contents(),
        step=STEPS + 1,
        position=40,
        kind="delta",
        parent=manifest,
        since=saving.cursors,
        collectives=ranks,
    )
    delta = later.wait()
    assert delta.parent is not None and delta.parent.id == manifest.id
    later.release()


def load_all(groups: Groups, cases: Mapping[int, Sequence[Case]]) -> None:
    """Both checkpoints of each store, into tables of a type."""
    wanted = {"step-000000000003-full": STEPS, "step-000000000004-delta": STEPS + 1}
    for size, stores in cases.items():
        ranks = groups.of(size)
        for (root, kind), (name, steps) in itertools.product(stores, wanted.items()):
            if ranks is not None:
                check_loaded(ranks, f"{root}/{name}", kind, steps)


def check_loaded(ranks: Collectives, url: str, kind: str, steps: int) -> None:
    job = placed_job(kind, ranks.world_size, ranks.rank)
    found = load(url, job.contents(), collectives=ranks)
    whole = trained(steps)
    check_part(job.outcome(), job, whole)
    assert found.rows == {f"main/{spec.name}": whole.shard.size(k) for k, spec in enumerate(SPECS)}
    assert found.state == {"steps": steps}
    assert job.shard.last_step == steps - 1
    assert torch.equal(job.net.weight, whole.net.weight)
    if ranks.world_size == found.manifest.world_size:
        assert found.rank_state is not None and found.rank_state["rank"] == ranks.rank
    else:
        assert found.rank_state is None


def write_chain(groups: Groups, root: str) -> None:
    for number, (size, kind) in enumerate(LINKS):
        if (ranks := groups.of(size)) is not None:
            add_link(ranks, root, kind, number)
        dist.barrier()
    if (two := groups.of(2)) is not None:
        check_loaded(two, root, "table_wise", STEPS + len(LINKS))


def add_link(ranks: Collectives, root: str, kind: str, number: int) -> None:
    job = placed_job(kind, ranks.world_size, ranks.rank)
    if number == 0:
        for _ in range(STEPS + 1):
            job.step()
        job.evict()
        save(root, job.contents(), step=STEPS + 1, position=0, collectives=ranks)
        return
    found = load(root, job.contents(), collectives=ranks)
    job.steps = found.state["steps"]
    job.step()
    job.evict()
    save(
        root,
        job.contents(),
        step=job.steps,
        position=number,
        kind="delta",
        parent=found.manifest,
        since=found.cursors,
        collectives=ranks,
    )


@functools.cache
def trained(steps: int) -> Job:
    """The whole job after so many steps, and evictions after those beyond `STEPS`."""
    job = Job()
    for _ in range(steps):
        job.step()
        if job.steps > STEPS:
            job.evict()
    return job

