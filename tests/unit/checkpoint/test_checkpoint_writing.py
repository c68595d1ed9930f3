"""Saving in one process: full and delta, while training goes on, and when something fails."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.checkpoint import saving, verify, writing
from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import load
from shoal.checkpoint.saving import begin, save
from shoal.checkpoint.storage import DurableFile, Storage
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.table_match import LoadOptions
from shoal.errors import CheckpointError, DTypeError, InputError
from shoal.table.cpu.snapshot import CpuSnapshot
from shoal.table.cuda.snapshots import CudaSnapshot
from shoal.table.hosting import HostedTables
from support.saved_jobs import FEW, MANY, SPECS, Home, Job, Sizes, row_bytes, small_files
from support.saved_rows import same
from support.shards import CUDA, SHARDS, TIERED
from support.toy_collections import collection

FULL, DELTA = "step-000000000003-full", "step-000000000004-delta"


@pytest.fixture(autouse=True)
def _small_files() -> Iterator[None]:
    with small_files():
        yield


def trained(steps: int = 3, home: Home = "cpu", sizes: Sizes = MANY) -> Job:
    job = Job(home=home, sizes=sizes)
    for _ in range(steps):
        job.step()
    return job


def check_same(found: Job, want: Job) -> None:
    """All rows and occurrences are equal, versions too."""
    for k, spec in enumerate(SPECS):
        assert same(found.shard.export(k), want.shard.export(k)), spec.name
    assert found.outcome().admission == want.outcome().admission


def loaded(url: Path) -> Job:
    job = Job()
    load(url, job.contents())
    return job


class Gate:
    """Holds a thread at a point until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


def test_a_full_checkpoint_comes_back(tmp_path: Path) -> None:
    job = trained()
    manifest = save(tmp_path, job.contents(), step=3, position=30)
    assert (manifest.kind, manifest.step, manifest.position) == ("full", 3, 30)
    assert manifest.parent is None and manifest.last_steps == {"main": 2}
    assert {one.key: one.rows for one in manifest.tables} == {
        f"main/{spec.name}": job.shard.size(k) for k, spec in enumerate(SPECS)
    }
    assert verify(tmp_path).problems == ()
    check_same(loaded(tmp_path), job)


def test_tables_have_files_of_their_own_or_share_them(tmp_path: Path) -> None:
    manifest = save(tmp_path, trained().contents(), step=3, position=0)
    rows = [one for one in manifest.files if one.kind == "rows"]
    users = [one for one in rows if one.tables == ("main/users",)]
    assert len(users) > 4
    assert users[0].start == 0 and users[-1].stop == 1 << 64
    assert all(a.stop == b.start for a, b in itertools.pairwise(users))
    kinds = [one.kind for one in manifest.files]
    assert kinds == sorted(kinds, key=["rows", "admission", "sketch", "dense", "state"].index)


@pytest.mark.slow
def test_training_goes_on_and_files_show_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = Gate(), CpuSnapshot.read

    def held(self: CpuSnapshot, *args: Any) -> Any:
        gate()
        return read(self, *args)

    monkeypatch.setattr(CpuSnapshot, "read", held)
    job = trained()
    saving = begin(tmp_path, job.contents(), step=3, position=30)
    assert gate.reached.wait(60)
    job.step()
    job.evict()
    assert not saving.done and not (tmp_path / FULL / "manifest.json").exists()
    with pytest.raises(TimeoutError, match=FULL):
        saving.wait(0.01)
    later = begin(tmp_path / "other", job.contents(), step=4, position=40)
    gate.open.set()
    assert later.wait().version == saving.version + 1
    check_same(loaded(tmp_path / "other"), job)
    manifest = saving.wait()
    assert saving.done and manifest.version == saving.version
    progress = saving.progress()
    assert progress.bytes_done == progress.bytes_total > 300_000
    assert progress.copied_rows > 1000 and progress.spilled_bytes == 0
    found, want = loaded(tmp_path), trained()
    check_same(found, want)
    assert torch.equal(found.net.weight, want.net.weight)


@pytest.mark.slow
@pytest.mark.parametrize("home", [CUDA, TIERED])
def test_training_goes_on_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Home
) -> None:
    """Full and then delta: all is as at the snapshot point, though each step changes rows."""
    gate, read = Gate(), CudaSnapshot.read
    sizes = MANY if torch.cuda.is_available() else FEW

    def held(self: CudaSnapshot, *args: Any) -> Any:
        gate()
        return read(self, *args)

    monkeypatch.setattr(CudaSnapshot, "read", held)
    job, want = trained(2, home, sizes), trained(2, "cpu", sizes)
    saving = begin(tmp_path, job.contents(), step=3, position=30)
    assert gate.reached.wait(60)
    job.step()
    job.evict()
    assert not saving.done
    gate.open.set()
    full = saving.wait()
    progress = saving.progress()
    assert progress.bytes_done == progress.bytes_total > 0
    assert progress.copied_rows > 30
    found = loaded(tmp_path)
    check_same(found, want)
    assert torch.equal(found.net.weight, want.net.weight)
    want.shard.close_version()
    want.step()
    want.evict()
    gate.reached.clear()
    gate.open.clear()
    later = begin(
        *(tmp_path, job.contents()),
        **dict(step=4, position=40, kind="delta", parent=full, since=saving.cursors),
    )
    assert gate.reached.wait(60)
    job.step()
    assert not later.done
    gate.open.set()
    later.wait()
    check_same(loaded(tmp_path), want)


@pytest.mark.slow
def test_a_delta_has_what_changed(tmp_path: Path) -> None:
    job = trained()
    saving = begin(tmp_path, job.contents(), step=3, position=30)
    full = saving.wait()
    job.step()
    job.evict()
    job.shard.release(
        job.shard.close_version(), "publisher"
    )  # lets go of nothing that the delta needs
    later = begin(
        *(tmp_path, job.contents()),
        **dict(step=4, position=40, kind="delta", parent=full, since=saving.cursors),
    )
    delta = later.wait()
    assert delta.parent is not None
    assert (delta.parent.folder, delta.parent.id) == (FULL, full.id)
    assert delta.version > full.version
    rows = {one.name: (one.rows, one.deleted) for one in delta.tables}
    assert rows["users"] == (1500, 0) and rows["items"] == (400, 0)
    assert rows["tags"][1] > 0
    check_same(loaded(tmp_path), job)
    check_same(loaded(tmp_path / FULL), trained())
    # Deletions that are saved may be forgotten, and the next delta does not miss any.
    later.release()
    job.step()
    job.evict()
    save(
        *(tmp_path, job.contents()),
        **dict(step=5, position=50, kind="delta", parent=delta, since=later.cursors),
    )
    check_same(loaded(tmp_path), job)
    assert [one.name for one in CheckpointStore(tmp_path).list()] == [
        *(FULL, DELTA, "step-000000000005-delta")
    ]


def test_a_delta_goes_on_top_of_what_was_loaded(tmp_path: Path) -> None:
    save(tmp_path, trained().contents(), step=3, position=30)
    job = Job()
    found = load(tmp_path, job.contents())
    job.steps = found.state["steps"]
    job.step()
    parts: dict[str, Any] = dict(kind="delta", parent=found.manifest, since=found.cursors)
    delta = save(tmp_path, job.contents(), step=4, position=40, **parts)
    assert {one.name: one.rows for one in delta.tables}["users"] == 1500
    check_same(loaded(tmp_path), job)


def test_a_quiet_job_has_an_empty_delta(tmp_path: Path) -> None:
    job = trained()
    saving = begin(tmp_path, job.contents(), step=3, position=30)
    parts: dict[str, Any] = dict(kind="delta", parent=saving.wait(), since=saving.cursors)
    delta = save(tmp_path, job.contents(), step=4, position=30, **parts)
    assert [one.kind for one in delta.files if one.kind in ("rows", "deleted")] == []
    check_same(loaded(tmp_path), job)


def test_the_same_rows_make_the_same_bytes(tmp_path: Path) -> None:
    """However they came into the table."""
    save(tmp_path / "a", trained().contents(), step=3, position=30)
    job = loaded(tmp_path / "a")
    job.steps = 3
    save(tmp_path / "b", job.contents(), step=3, position=30)
    first, second = row_bytes(tmp_path / "a" / FULL), row_bytes(tmp_path / "b" / FULL)
    assert first == second and len(first) > 8


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write", "close", "dense", "manifest", "read"])
def test_what_fails_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    job = trained()
    with monkeypatch.context() as patched:
        break_at(patched, where)
        saving = begin(tmp_path, job.contents(), step=3, position=30)
        job.step()
        with pytest.raises(CheckpointError, match=r"on rank 0: .*the disk is gone"):
            saving.wait()
        with pytest.raises(CheckpointError, match="the disk is gone"):
            saving.cursors  # noqa: B018
    assert CheckpointStore(tmp_path).list() == ()
    # The next save works, and removes what is left.
    assert (tmp_path / FULL).exists()
    save(tmp_path, job.contents(), step=4, position=40)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000004-full"]
    check_same(loaded(tmp_path), job)


def break_at(patched: pytest.MonkeyPatch, where: str) -> None:
    calls = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the disk is gone")

    def fail_later(self: DurableFile, data: Any) -> int:
        calls.append(self.path)
        return fail() if len(calls) > 60 else written(self, data)

    written = DurableFile.write
    if where == "write":
        patched.setattr(DurableFile, "write", fail_later)
    elif where == "close":
        patched.setattr(writing.RowFileWriter, "close", fail)
    elif where == "dense":
        patched.setattr(saving.dense, "write", fail)
    elif where == "manifest":
        patched.setattr(Storage, "replace", fail)
    else:
        patched.setattr(CpuSnapshot, "read", fail)


def test_a_save_may_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read = Gate(), CpuSnapshot.read

    def held(self: CpuSnapshot, *args: Any) -> Any:
        gate()
        return read(self, *args)

    monkeypatch.setattr(CpuSnapshot, "read", held)
    job = trained()
    saving = begin(tmp_path, job.contents(), step=3, position=30)
    assert gate.reached.wait(60)
    saving.abort()
    gate.open.set()
    with pytest.raises(CheckpointError, match=r"abort\(\)"):
        saving.wait()
    assert CheckpointStore(tmp_path).list() == ()
    job.shard.snapshot().close()  # rows are held no longer


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    job = trained()
    manifest = save(tmp_path, job.contents(), step=3, position=30)
    job.step()
    with pytest.raises(CheckpointError, match="never overwritten"):
        begin(tmp_path, job.contents(), step=3, position=30)
    assert CheckpointStore(tmp_path).manifest(FULL) == manifest
    job.shard.snapshot().close()


@pytest.mark.slow
def test_one_save_into_a_store_at_a_time(tmp_path: Path) -> None:
    """The second waits for the first, whose folder it would take for leftovers."""
    job = trained()
    first = begin(tmp_path, job.contents(), step=3, position=30)
    second = begin(tmp_path, job.contents(), step=4, position=40)
    assert first.done
    first.wait()
    second.wait()
    assert len(CheckpointStore(tmp_path).list()) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="folder"):
        begin(tmp_path / "file", trained().contents(), step=3, position=30)


@pytest.mark.parametrize(
    ("value", "named"),
    [(Gate(), "_thread.lock"), (np.float32(0.5), "got numpy"), (Path("x"), "got pathlib")],
)
def test_state_that_could_not_be_loaded_is_refused_at_once(
    tmp_path: Path, value: object, named: str
) -> None:
    job = trained()
    contents = job.contents()
    contents.state["made"] = value  # type: ignore[index]
    with pytest.raises(CheckpointError, match=f"state of a job: .*{named}"):
        begin(tmp_path, contents, step=3, position=30)
    job.shard.snapshot().close()


@pytest.mark.parametrize("value", [-1, 2.0, np.int64(2), True, "3", None, 1 << 63])
@pytest.mark.parametrize("name", ["step", "position"])
def test_numbers_of_a_checkpoint_are_ints(tmp_path: Path, name: str, value: object) -> None:
    numbers: dict[str, Any] = {"step": 3, "position": 30, name: value}
    with pytest.raises(InputError, match=f"{name} of a checkpoint"):
        begin(tmp_path, trained().contents(), **numbers)
    assert not list(tmp_path.iterdir())


def test_a_collection_is_no_hosted_tables(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"model": collection(SHARDS["cpu"])}
    with pytest.raises(DTypeError, match=r"'model' of a job: got EmbeddingCollection.*hosted"):
        save(tmp_path, Contents(tables=tables), step=3, position=30)


def test_deltas_want_a_parent_and_cursors(tmp_path: Path) -> None:
    job = trained()
    saving = begin(tmp_path, job.contents(), step=3, position=30)
    full, since = saving.wait(), saving.cursors
    later: dict[str, Any] = dict(step=4, position=40)
    with pytest.raises(InputError, match="parent and cursors of a delta"):
        begin(tmp_path, job.contents(), kind="delta", parent=full, **later)
    with pytest.raises(InputError, match="parent and cursors of a full"):
        begin(tmp_path, job.contents(), parent=full, **later)
    with pytest.raises(InputError, match="collections of cursors"):
        begin(tmp_path, job.contents(), kind="delta", parent=full, since={}, **later)
    with pytest.raises(InputError, match="kind of a checkpoint"):
        begin(tmp_path, job.contents(), kind="half", **later)  # type: ignore[arg-type]
    parts: dict[str, Any] = dict(kind="delta", parent=full, since=since, **later)
    with pytest.raises(CheckpointError, match="parent of a delta"):
        begin(tmp_path / "other", job.contents(), **parts)
    other = trained()
    with pytest.raises(InputError):  # cursors of another shard
        begin(tmp_path, other.contents(), **parts)
    with pytest.raises(InputError, match=r"step of a delta: got 3; allowed: more than .* 3"):
        begin(tmp_path, job.contents(), **{**parts, "step": 3})
    job.step()
    save(tmp_path, job.contents(), **parts)
    check_same(loaded(tmp_path), job)


def test_a_delta_may_not_lack_what_changed_since_its_parent(tmp_path: Path) -> None:
    job = trained()
    first = begin(tmp_path, job.contents(), step=3, position=30)
    full = first.wait()
    job.step()
    parts: dict[str, Any] = dict(kind="delta", parent=full)
    second = begin(tmp_path, job.contents(), step=4, position=40, since=first.cursors, **parts)
    second.wait()
    job.step()
    with pytest.raises(InputError, match="cursor of collection 'main'"):
        begin(tmp_path, job.contents(), step=5, position=50, since=second.cursors, **parts)
    save(tmp_path, job.contents(), step=5, position=50, since=first.cursors, **parts)
    check_same(loaded(tmp_path), job)


def test_shards_at_different_versions_are_brought_together(tmp_path: Path) -> None:
    ahead, behind = trained(), trained()
    for _ in range(5):
        ahead.shard.close_version()
    contents = ahead.contents()
    tables = {"ahead": ahead.tables, "behind": behind.tables}
    both = type(contents)(tables=tables, state={"steps": 3})
    manifest = save(tmp_path, both, step=3, position=30)
    assert ahead.shard.close_version() == behind.shard.close_version() == manifest.version + 1
    # Collections of the same shard have one snapshot.
    twice = type(contents)(tables={"one": ahead.tables, "two": ahead.tables})
    again = save(tmp_path, twice, step=4, position=40)
    assert [one.collection for one in again.tables] == ["one"] * 4 + ["two"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", CUDA])
def test_no_device_shows_in_the_bytes(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "a", trained().contents(), step=3, position=30)
    shard = SHARDS[kind](SPECS)
    contents = Contents(tables={"main": HostedTables(SPECS, shard)})
    found = load(tmp_path / "a", contents, options=LoadOptions(dense=False))
    assert found.cursors is not None
    saving = begin(tmp_path / "b", contents, step=3, position=30)
    saving.wait()
    assert row_bytes(tmp_path / "b" / FULL) == row_bytes(tmp_path / "a" / FULL)


def test_what_cannot_be_read_beside_training_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuSnapshot, "concurrent", property(lambda self: False))
    job = trained()
    saving = begin(tmp_path, job.contents(), step=3, position=30)
    assert saving.done and (tmp_path / FULL / "manifest.json").exists()
    job.step()
    check_same(loaded(tmp_path), trained())
