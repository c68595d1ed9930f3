"""Saves by several ranks of which one fails, lags behind or dies."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shoal import _core
from shoal.checkpoint import saving as job_saving
from shoal.checkpoint import sharded_rows, writing
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import Saving, begin, save
from shoal.checkpoint.store import CheckpointStore
from shoal.comm import launch
from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, CollectiveFailed
from shoal.table.cpu.shard import CpuShard
from shoal.table.cpu.snapshot import CpuSnapshot
from shoal.table.hosting import HostedTables, hosted_specs, plan_placement
from support.ranks import run_ranks, start_ranks
from support.saved_jobs import KINDS, SPECS, Job, check_part, placed_job, small_files

pytestmark = pytest.mark.multiproc

FULL = "step-000000000003-full"
BREAKS = {
    "read": (CpuSnapshot, "read"),
    "count": (CpuSnapshot, "histogram"),
    "write": (writing.RowFileWriter, "add"),
    "close": (writing.RowFileWriter, "close"),
}


@pytest.mark.slow
def test_what_fails_on_a_rank_is_raised_on_all(tmp_path: Path) -> None:
    errors = run_ranks(3, on_ranks, fail_everywhere, str(tmp_path))
    for place in BREAKS:
        told = [one[place] for one in errors]
        assert all("on rank 1: OSError: the disk is gone" in text for text in told), told
        assert "on rank 0" not in told[0] and "on rank 2" not in told[0]
    assert [one.name for one in CheckpointStore(tmp_path).list()] == [FULL]
    load(tmp_path, Job().contents())


def fail_everywhere(ranks: Collectives, root: str) -> dict[str, str]:
    """Break a part of rank 1's work at a time, then save."""
    errors = {}
    for number, (place, (owner, name)) in enumerate(BREAKS.items()):
        job = trained(KINDS[number % len(KINDS)], ranks)
        with on_rank_1(ranks, mock.patch.object(owner, name, broken)):
            saving = begin(root, job.contents(), step=3, position=0, collectives=ranks)
            job.step()
            with pytest.raises(CheckpointError) as caught:
                saving.wait()
        errors[place] = str(caught.value)
        assert not (Path(root) / FULL / "manifest.json").exists()
    save(root, trained("grid", ranks).contents(), step=3, position=0, collectives=ranks)
    return errors


@pytest.mark.slow
def test_no_memory_on_a_rank_leaves_ranks_in_step(tmp_path: Path) -> None:
    for told in run_ranks(3, on_ranks, lack_memory, str(tmp_path)):
        assert "on rank 1: MemoryError: no room" in told
    assert [one.name for one in CheckpointStore(tmp_path).list()] == [FULL]
    load(tmp_path, Job().contents())


def lack_memory(ranks: Collectives, root: str) -> str:
    """Before rows are sent: the others hear of it, and the next save is as ever."""
    job = trained("row_wise", ranks)
    plain, calls = sharded_rows._packed, []

    def packed(parts: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no room")
        return plain(parts)

    with on_rank_1(ranks, mock.patch.object(sharded_rows, "_packed", packed)):
        with pytest.raises(CheckpointError) as caught:
            save(root, job.contents(), step=3, position=0, collectives=ranks)
        assert len(calls) == (4 if ranks.rank == 1 else 0)
    save(root, job.contents(), step=3, position=0, collectives=ranks)
    return str(caught.value)


@pytest.mark.slow
def test_no_memory_for_what_others_send_ends_the_job(tmp_path: Path) -> None:
    told = run_ranks(2, on_ranks, lack_memory_inside, str(tmp_path))
    assert "on their way to rank 1: got MemoryError: no room" in told[1]
    assert "rows of a checkpoint" in told[0]
    assert CheckpointStore(tmp_path).list() == ()


def lack_memory_inside(ranks: Collectives, root: str) -> str:
    """Others wait inside the collective: this rank calls no other one of theirs."""
    job = trained("row_wise", ranks)
    plain = type(ranks).all_to_all

    def no_room(self: Collectives, parts: Any, *, what: str) -> Any:
        if what == "rows of a checkpoint":
            raise MemoryError("no room")
        return plain(self, parts, what=what)

    with (
        on_rank_1(ranks, mock.patch.object(type(ranks), "all_to_all", no_room)),
        pytest.raises((CheckpointError, CollectiveFailed)) as caught,
    ):
        save(root, job.contents(), step=3, position=0, collectives=ranks)
    return str(caught.value)


@pytest.mark.slow
def test_a_save_is_given_up_by_one_rank_at_any_stage(tmp_path: Path) -> None:
    """The others are told by the vote after the stage, and the next save works."""
    run_ranks(2, on_ranks, give_up_everywhere, str(tmp_path))
    assert [one.name for one in CheckpointStore(tmp_path).list()] == [FULL]


def give_up_everywhere(ranks: Collectives, root: str) -> None:
    job = trained("row_wise", ranks)
    counters = ("admission counters", "admission sketches")
    states = ("states of ranks", "state of the job")
    for stage in ("row files", "deletions", *counters, "dense part", *states):
        with give_up_before(stage, ranks):
            saving = begin(root, job.contents(), step=3, position=0, collectives=ranks)
            with pytest.raises(CheckpointError, match=rf"{stage} .*: got on rank 1: .*abort\(\)"):
                saving.wait()
    with give_up_before("manifest", ranks):
        save(root, job.contents(), step=3, position=0, collectives=ranks)


def give_up_before(stage: str, ranks: Collectives) -> Any:
    run = Saving._stage

    def given_up(self: Saving, what: str, *args: Any, **parts: Any) -> Any:
        if what == stage:
            self.abort()
        return run(self, what, *args, **parts)

    return on_rank_1(ranks, mock.patch.object(Saving, "_stage", given_up))


@pytest.mark.slow
def test_deletions_and_sketches_that_fail_on_a_rank(tmp_path: Path) -> None:
    """Others are in collective calls meanwhile, which stay in step."""
    run_ranks(2, on_ranks, fail_beside_rows, str(tmp_path))
    assert [one.kind for one in CheckpointStore(tmp_path).list()] == ["full", "delta"]


def fail_beside_rows(ranks: Collectives, root: str) -> None:
    job = trained("row_wise", ranks)
    # Rank 1 writes the second sketch, rank 0 the first and the third.
    views = [replace(SPECS[3], name=f"views {k}") for k in range(3)]
    placement = plan_placement(views, ranks.world_size)
    shard = CpuShard(hosted_specs(views, placement, ranks.rank))
    more = {"main": job.tables, "more": HostedTables(tuple(views), shard, placement)}
    contents = replace(job.contents(), tables=more)
    saving = begin(root, contents, step=3, position=0, collectives=ranks)
    parts: dict[str, Any] = dict(kind="delta", parent=saving.wait(), since=saving.cursors)
    parts |= dict(step=4, position=0, collectives=ranks)
    for owner, name in ((CpuSnapshot, "deleted"), (job_saving, "write_whole")):
        with (
            on_rank_1(ranks, mock.patch.object(owner, name, broken)),
            pytest.raises(CheckpointError, match="on rank 1: OSError: the disk is gone"),
        ):
            save(root, contents, **parts)
    save(root, contents, **parts)


@pytest.mark.slow
def test_what_fails_at_the_snapshot_point_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(2, on_ranks, fail_at_the_snapshot_point, str(tmp_path))


def fail_at_the_snapshot_point(ranks: Collectives, root: str) -> None:
    job = trained("row_wise", ranks)
    held = [job.shard.snapshot() for _ in range(_core.MOST_SNAPSHOTS * ranks.rank)]
    with pytest.raises(Exception, match="snapshot"):
        begin(root, job.contents(), step=3, position=0, collectives=ranks)
    for snapshot in held:
        snapshot.close()
    with pytest.raises(CheckpointError, match="position"):
        begin(root, job.contents(), step=3, position=ranks.rank, collectives=ranks)
    assert CheckpointStore(root).list() == ()
    save(root, job.contents(), step=3, position=0, collectives=ranks)
    with pytest.raises(CheckpointError, match="never overwritten"):
        begin(root, job.contents(), step=3, position=0, collectives=ranks)


@pytest.mark.slow
def test_ranks_at_different_versions_are_brought_together(tmp_path: Path) -> None:
    versions = run_ranks(3, on_ranks, save_apart, str(tmp_path))
    assert len(set(versions)) == 1
    assert CheckpointStore(tmp_path).manifest(FULL).version == versions[0]


def save_apart(ranks: Collectives, root: str) -> int:
    job = trained("table_wise", ranks)
    for _ in range(4 * ranks.rank):
        job.shard.close_version()
    saving = begin(root, job.contents(), step=3, position=0, collectives=ranks)
    manifest = saving.wait()
    # A delta does not lack what came between.
    job.step()
    parts: dict[str, Any] = dict(kind="delta", parent=manifest, since=saving.cursors)
    save(root, job.contents(), step=4, position=0, collectives=ranks, **parts)
    again = placed_job("grid", ranks.world_size, ranks.rank)
    load(root, again.contents(), collectives=ranks)
    check_part(again.outcome(), again, whole(4))
    return saving.version


@pytest.mark.slow
def test_sketches_do_not_grow_by_being_moved(tmp_path: Path) -> None:
    """Cells are the largest of any rank's, so ranks that all hold a sketch save it as it is."""
    run_ranks(2, on_ranks, move_sketches, str(tmp_path))
    first, second = (
        (tmp_path / name / FULL / "admission/main.views.sketch").read_bytes() for name in "ab"
    )
    assert first == second and any(first)


def move_sketches(ranks: Collectives, root: str) -> None:
    job = trained("row_wise", ranks)
    save(f"{root}/a", job.contents(), step=3, position=0, collectives=ranks)
    again = placed_job("table_wise", ranks.world_size, ranks.rank)
    load(f"{root}/a", again.contents(), collectives=ranks)
    save(f"{root}/b", again.contents(), step=3, position=0, collectives=ranks)


@pytest.mark.slow
def test_a_rank_that_dies_leaves_no_checkpoint(tmp_path: Path) -> None:
    found = start_ranks(2, on_ranks, die_on_one, str(tmp_path)).outcomes()
    assert found[0] == (True, True)
    assert found[1] == (False, "died with 3")
    assert CheckpointStore(tmp_path).list() == ()
    save(tmp_path, whole(3).contents(), step=4, position=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000004-full"]


def die_on_one(ranks: Collectives, root: str) -> bool:
    job = trained("column_wise", ranks)
    dies = mock.patch.object(writing.RowFileWriter, "close", lambda _: os._exit(3))
    with on_rank_1(ranks, dies):
        saving = begin(root, job.contents(), step=3, position=0, collectives=ranks)
        with pytest.raises(CheckpointError, match="CollectiveFailed"):
            saving.wait()
    return True


def on_rank_1(ranks: Collectives, patch: Any) -> Any:
    return patch if ranks.rank == 1 else contextlib.nullcontext()


def on_ranks(act: Any, *args: Any) -> Any:
    mesh = launch.init(device="cpu", timeout_s=120)
    with small_files():
        return act(mesh.collectives("checkpoints"), *args)


def trained(kind: str, ranks: Collectives) -> Job:
    job = placed_job(kind, ranks.world_size, ranks.rank)
    for _ in range(3):
        job.step()
    return job


def whole(steps: int) -> Job:
    job = Job()
    for _ in range(steps):
        job.step()
    return job


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OSError("the disk is gone")
