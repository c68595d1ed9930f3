"""Checkpoints that some ranks of a job save and others load, on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import begin
from shoal.checkpoint.store import CheckpointStore
from shoal.comm import launch
from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.collectives import Collectives, LocalCollectives
from support.interpreting import patch_once
from support.saved_jobs import (
    MANY,
    SPECS,
    Home,
    Job,
    Sizes,
    check_part,
    placed_job,
    row_bytes,
    small_files,
)

__all__ = [
    "NAMES",
    "STEPS",
    "TIMEOUT_S",
    "Groups",
    "Part",
    "check_loaded",
    "check_same_files",
    "load_all",
    "on_ranks",
    "save_all",
    "trained",
]

# Ranks that are not in a group wait for those that are; GPUs compile their kernels first.
TIMEOUT_S = 480 if torch.cuda.is_available() else 280
STEPS = 3  # before the full checkpoint; one more, and an eviction, before the delta
NAMES = {"step-000000000003-full": STEPS, "step-000000000004-delta": STEPS + 1}


@dataclass(frozen=True)
class Part:
    """The folder of a store, and the tables of who saves or loads it."""

    root: str
    kind: str
    home: Home = "cpu"
    sizes: Sizes = MANY

    def job(self, ranks: Collectives) -> Job:
        """An untrained rank's."""
        if self.home != "cpu":
            prepare_kernels()
        return placed_job(self.kind, ranks.world_size, ranks.rank, home=self.home, sizes=self.sizes)


@functools.cache
def prepare_kernels() -> None:
    """Once in a rank: without a GPU its kernels are interpreted."""
    if not torch.cuda.is_available():
        patch_once()


class Groups:
    """Collectives of the first 1, 2, 3 or 4 ranks of a job."""

    def __init__(self) -> None:
        sizes = range(2, dist.get_world_size() + 1)
        made = {size: dist.new_group(list(range(size)), backend="gloo") for size in sizes}
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
    """Run `act(groups, *args)` on this rank."""
    launch.init(device="cpu", timeout_s=TIMEOUT_S)
    try:
        with small_files():
            act(Groups(), *args)
        dist.barrier()
    finally:
        launch.shutdown()


def save_all(groups: Groups, cases: Mapping[int, Sequence[Part]]) -> None:
    """A full checkpoint and a delta in each store, by so many ranks."""
    for size, parts in cases.items():
        for part in parts:
            if (ranks := groups.of(size)) is not None:
                save_two(ranks, part)


def save_two(ranks: Collectives, part: Part) -> None:
    """A full checkpoint during training, then a delta."""
    root, job = part.root, part.job(ranks)
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


def load_all(groups: Groups, cases: Mapping[int, Sequence[Part]]) -> None:
    """Both checkpoints of each store, into tables of a type."""
    for size, parts in cases.items():
        if (ranks := groups.of(size)) is not None:
            for part in parts:
                for name, steps in NAMES.items():
                    check_loaded(ranks, f"{part.root}/{name}", part, steps)


def check_loaded(ranks: Collectives, url: str, part: Part, steps: int) -> None:
    """What a rank loads from `url` is its part of the whole job after so many steps."""
    job = part.job(ranks)
    found = load(url, job.contents(), collectives=ranks)
    whole = trained(steps, part.sizes)
    check_part(job.outcome(), job, whole)
    assert found.rows == {f"main/{spec.name}": whole.shard.size(k) for k, spec in enumerate(SPECS)}
    assert found.state == {"steps": steps}
    assert job.shard.last_step == steps - 1
    assert torch.equal(job.net.weight, whole.net.weight)
    if ranks.world_size == found.manifest.world_size:
        assert found.rank_state is not None and found.rank_state["rank"] == ranks.rank
    else:
        assert found.rank_state is None


def check_same_files(root: Path, first: Path, *, least: int = 9) -> None:
    """Row files, deletions and admission counts, at `least` this many, have equal bytes in both."""
    for name in NAMES:
        want = row_bytes(first / name)
        assert len(want) >= least
        if name.endswith("delta"):
            assert "deleted/00000.arrow" in want
        assert row_bytes(root / name) == want, root
        manifest, before = (CheckpointStore(one).manifest(name) for one in (root, first))
        files = [one for one in manifest.files if one.path in want]
        assert files == [one for one in before.files if one.path in want]
        assert manifest.tables == before.tables
        assert manifest.last_steps == before.last_steps == {"main": int(name[16:17]) - 1}


@functools.lru_cache
def trained(steps: int, sizes: Sizes = MANY) -> Job:
    """The whole job on the CPU after so many steps, evictions after those beyond `STEPS`."""
    job = Job(sizes=sizes)
    for _ in range(steps):
        job.step()
        if job.steps > STEPS:
            job.evict()
    return job
