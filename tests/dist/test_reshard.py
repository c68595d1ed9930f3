"""Checkpoints saved by some ranks and loaded by others: the same rows, state and occurrences."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import save
from shoal.checkpoint.store import CheckpointStore
from shoal.comm.collectives import Collectives
from support.ranks import run_ranks
from support.resharding import (
    STEPS,
    TIMEOUT_S,
    Groups,
    Part,
    check_loaded,
    check_same_files,
    load_all,
    on_ranks,
    save_all,
    trained,
)
from support.saved_jobs import KINDS, SPECS, Job, placed_job

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

SAVERS = (1, 2, 4)
LOADERS = (1, 2, 3, 4)
LINKS = ((2, "column_wise"), (4, "row_wise"), (1, "row_wise"), (3, "grid"))


def test_files_do_not_show_who_wrote_them(stores: dict[int, list[Path]]) -> None:
    first, *others = itertools.chain.from_iterable(stores.values())
    for root in others:
        check_same_files(root, first)


def test_any_ranks_load_what_any_saved(stores: dict[int, list[Path]]) -> None:
    """Each number of ranks with every one that saved, and with each type on either side."""
    roots = list(itertools.chain.from_iterable(stores.values()))
    cases = {
        world_size: [
            Part(str(root), KINDS[(number + world_size) % len(KINDS)])
            for number, root in enumerate(roots)
        ]
        for world_size in LOADERS
    }
    run_ranks(4, on_ranks, load_all, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", LOADERS)
def test_all_ranks_load_all_that_was_saved(stores: dict[int, list[Path]], world_size: int) -> None:
    roots = list(itertools.chain.from_iterable(stores.values()))
    every = [Part(str(root), kind) for root, kind in itertools.product(roots, KINDS)]
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
    cases = {
        size: [Part(str(path), kind) for path, kind in zip(paths, KINDS, strict=True)]
        for size, paths in found.items()
    }
    run_ranks(4, on_ranks, save_all, cases)
    return found


def write_chain(groups: Groups, root: str) -> None:
    for number, (size, kind) in enumerate(LINKS):
        if (ranks := groups.of(size)) is not None:
            add_link(ranks, root, kind, number)
        dist.barrier()
    if (two := groups.of(2)) is not None:
        check_loaded(two, root, Part(root, "table_wise"), STEPS + len(LINKS))


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
