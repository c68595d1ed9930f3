"""Damaged, mixed and misplaced checkpoints: each is refused with its name, and nothing is lost."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import CheckpointStore, compact, read_manifest, verify
from shoal.checkpoint.manifest import MANIFEST, to_json
from shoal.errors import CheckpointError, TableFull
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD, Adagrad
from shoal.table.spec import Segment, TableSpec
from support.mounts import small_disk
from support.shares import share_of
from support.tiny_job import ITEMS, VIEWS, TinyJob

FULL, DELTA = "step-000000000003-full", "step-000000000006-delta"
SMALL_BYTES = 800


def saved_chain(root: Path, seed: int = 0) -> dict[str, Any]:
    """A full checkpoint and a delta; what the job was at the latter."""
    job = TinyJob(seed)
    for _ in range(2):
        for _ in range(3):
            job.step()
        job.save(root)
    return job.everything()


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two chains, alike but for their numbers."""
    base = tmp_path_factory.mktemp("chains")
    saved_chain(base / "one", 0)
    saved_chain(base / "two", 1)
    return base / "one", base / "two"


@pytest.fixture
def root(chains: tuple[Path, Path], tmp_path: Path) -> Path:
    """A chain to be damaged."""
    shutil.copytree(chains[0], tmp_path / "store")
    return tmp_path / "store"


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def same(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found.keys() == want.keys()
    for key, value in want.items():
        equal = torch.equal(found[key], value) if torch.is_tensor(value) else found[key] == value
        assert equal, key


def refused(root: Path, words: str, job: TinyJob | None = None) -> str:
    """A load fails with these words and leaves a job as it was; what it says."""
    job = job or TinyJob(9)
    before = job.everything()
    with pytest.raises((CheckpointError, TableFull), match=words) as caught:
        job.load(root)
    same(job.everything(), before)
    assert job.shard.size(0) == job.shard.size(1) == 0
    assert not job.optimizer.state
    return str(caught.value)


def damaged(root: Path, file: Path) -> None:
    """Both `verify` and a load of the checkpoint that a file is of name it."""
    folder = file.relative_to(root).parts[0]
    path = file.relative_to(root / folder).as_posix()
    for rows in (True, False):
        problems = verify(root, rows=rows).problems
        assert [(p.checkpoint, p.file) for p in problems] == [(folder, path)]
    refused(root / folder, re.escape(path))
    if path == MANIFEST or path.startswith("rows"):  # a load of the delta needs them, too
        refused(root, re.escape(path))


def positions(size: int, most: int) -> Iterator[int]:
    stride = max(1, size // most)
    yield from range(0, size, stride)
    yield size - 1


def test_the_chain_has_a_file_of_every_kind(chains: tuple[Path, Path]) -> None:
    for root in chains:
        kinds = {file.kind for name in (FULL, DELTA) for file in read_manifest(root / name).files}
        assert kinds == {"rows", "deleted", "admission", "sketch", "dense", "state"}
        assert verify(root).ok
    sizes = [
        {p.relative_to(r): p.stat().st_size for p in files_of(r) if p.name != MANIFEST}
        for r in chains
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_any_flipped_byte_is_found(root: Path) -> None:
    flips = 0
    for file in files_of(root):
        good = file.read_bytes()
        for at in positions(len(good), SMALL_BYTES if len(good) <= SMALL_BYTES else 60):
            file.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
            (problem,) = verify(root, rows=False).problems
            assert file == root / problem.checkpoint / problem.file
            flips += 1
        for at in positions(len(good), 6):
            file.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
            damaged(root, file)
            flips += 1
        file.write_bytes(good)
    print(f"{flips} bytes flipped")
    assert verify(root).ok


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_every_flipped_byte_is_found(root: Path, part: int) -> None:
    job = TinyJob(9)
    for file in files_of(root)[part::4]:
        good = file.read_bytes()
        for at in positions(len(good), share_of(4000, 40)):
            file.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
            (problem,) = verify(root, rows=False).problems
            assert file == root / problem.checkpoint / problem.file
            if at % 5 == 0:
                refused(root / problem.checkpoint, re.escape(problem.file), job)
        file.write_bytes(good)
    assert verify(root).ok


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a byte more": lambda data: data + b"\0",
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [*DAMAGES, "missing", "a folder"])
def test_files_that_are_not_whole(root: Path, how: str) -> None:
    want = TinyJob(9)
    want.load(root)
    for file in files_of(root):
        if file.name == MANIFEST and how in ("missing", "a folder"):
            continue  # then it is no checkpoint: below
        good = file.read_bytes()
        if how in DAMAGES:
            file.write_bytes(DAMAGES[how](good))
        else:
            file.unlink()
        if how == "a folder":
            file.mkdir()
        damaged(root, file)
        if how == "a folder":
            file.rmdir()
        file.write_bytes(good)
    again = TinyJob(9)
    again.load(root)
    same(again.everything(), want.everything())


def test_swapped_files(root: Path) -> None:
    files = [file for file in files_of(root) if file.name != MANIFEST]
    pairs = [(a, b) for a, b in pairwise(files) if a.read_bytes() != b.read_bytes()]
    assert len(pairs) >= 10
    for one, other in pairs:
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        named = {root / p.checkpoint / p.file for p in verify(root).problems}
        assert named == {one, other}
        said = refused(one.parents[-len(root.parts) - 1], "damaged")
        assert one.name in said or other.name in said
        one.write_bytes(contents[0])
        other.write_bytes(contents[1])


def test_files_of_two_checkpoints_of_equal_sizes(root: Path, chains: tuple[Path, Path]) -> None:
    mixed = 0
    for file in files_of(root):
        good, other = file.read_bytes(), (chains[1] / file.relative_to(root)).read_bytes()
        if good == other or file.name == MANIFEST:
            continue
        assert len(good) == len(other)
        file.write_bytes(other)
        damaged(root, file)
        file.write_bytes(good)
        mixed += 1
    assert mixed >= 6
    shutil.copy(chains[1] / DELTA / MANIFEST, root / DELTA / MANIFEST)
    refused(root, "mixed")
    shutil.copy(chains[1] / FULL / MANIFEST, root / FULL / MANIFEST)
    refused(root, "checksum")


def test_a_newer_schema(root: Path) -> None:
    manifest = read_manifest(root / DELTA)
    newer = dataclasses.replace(manifest, schema=manifest.schema + 1)
    (root / DELTA / MANIFEST).write_bytes(to_json(newer))
    refused(root, "newer form")
    (problem,) = verify(root).problems
    assert problem.file == MANIFEST and "newer" in problem.why


@pytest.mark.parametrize("what", ["folder", "manifest"])
def test_a_missing_parent(root: Path, what: str) -> None:
    if what == "folder":
        shutil.rmtree(root / FULL)
    else:
        (root / FULL / MANIFEST).unlink()
    assert FULL in refused(root, "parent of checkpoint")
    (problem,) = verify(root).problems
    assert FULL in problem.why
    with pytest.raises(CheckpointError, match="parent of checkpoint"):
        compact(CheckpointStore(root), DELTA)


def test_a_parent_of_the_same_name(root: Path, chains: tuple[Path, Path]) -> None:
    shutil.rmtree(root / FULL)
    shutil.copytree(chains[1] / FULL, root / FULL)
    refused(root, "mixed")
    (problem,) = verify(root).problems
    assert "mixed" in problem.why
    job = TinyJob(0)
    job.parent = read_manifest(chains[0] / FULL)
    while job.steps <= job.parent.step:
        job.step()
    job.since = {"main": job.shard.resume(job.parent.version)}
    with pytest.raises(CheckpointError, match="parent of a delta"):
        job.save(root)


CHANGED = {
    "dim": dataclasses.replace(
        ITEMS, segments=(ITEMS.segments[0], Segment(name="vec", dim=4, optimizer=Adagrad()))
    ),
    "optimizer": dataclasses.replace(
        ITEMS, segments=(ITEMS.segments[0], Segment(name="vec", dim=3, optimizer=SGD()))
    ),
    "segment": dataclasses.replace(
        ITEMS, segments=(ITEMS.segments[0], Segment(name="vector", dim=3, optimizer=Adagrad()))
    ),
    "admission": dataclasses.replace(
        ITEMS, admission=Admission(threshold=2, counter="sketch", sketch_width=64)
    ),
    "name": dataclasses.replace(ITEMS, name="things"),
    "capacity": dataclasses.replace(ITEMS, capacity_rows=2),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_table_that_changed(root: Path, what: str) -> None:
    spec: TableSpec = CHANGED[what]
    said = refused(root, "items", TinyJob(9, (spec, VIEWS)))
    assert what in ("name", "capacity") or "main/items" in said


def test_other_places(root: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "neither is one nor holds one")
    refused(root / "nowhere", "neither is one nor holds one")
    file = tmp_path / "file"
    file.write_text("no folder")
    refused(file, "neither is one nor holds one")
    assert CheckpointStore(file).list() == ()
    for place in (file, file / "below"):
        with pytest.raises(CheckpointError, match="a file where a folder is needed"):
            TinyJob().save(place)
    assert file.read_text() == "no folder"
    with pytest.raises(CheckpointError, match="nosuch"):
        TinyJob().save("nosuch://place")
    with pytest.raises(CheckpointError, match="lost a slash"):
        TinyJob().save(Path("s3://bucket/place"))
    assert not Path("s3:").exists()


def test_a_file_in_the_way_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-000000000001-full").write_text("mine")
    job = TinyJob()
    job.step()
    with pytest.raises(CheckpointError, match="a file where a folder is needed"):
        job.save(tmp_path)
    job.step()
    job.save(tmp_path)
    assert verify(tmp_path).ok


def check_goes_on(job: TinyJob, root: Path, was: dict[str, Any]) -> None:
    """The last checkpoint is as it was, a new one is written, and it has everything."""
    old = TinyJob(9)
    old.load(root)
    same(old.everything(), was)
    job.step()
    job.save(root)
    now = TinyJob(9)
    now.load(root)
    same(now.everything(), job.everything())
    assert verify(root).ok


def test_a_read_only_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        root = disk.at / "store"
        was = saved_chain(root)
        job = TinyJob()
        job.load(root)
        job.step()
        disk.read_only(True)
        with pytest.raises(CheckpointError, match="read-only"):
            job.save(root)
        with pytest.raises(CheckpointError, match="read-only"):
            compact(CheckpointStore(root), DELTA)
        with pytest.raises(CheckpointError, match="read-only"):
            CheckpointStore(root).retain(1) or CheckpointStore(root).folder(FULL).remove(MANIFEST)
        assert verify(root).ok
        disk.read_only(False)
        check_goes_on(job, root, was)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What users without rights see; a superuser is asked nothing, so the call is replaced."""
    was = saved_chain(tmp_path)
    job = TinyJob()
    job.load(tmp_path)
    job.step()
    real = os.open

    def forbidden(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_WRONLY and str(tmp_path) in str(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", forbidden)
        with pytest.raises(CheckpointError, match="no permission"):
            job.save(tmp_path)
    check_goes_on(job, tmp_path, was)


@pytest.mark.parametrize("full", [False, True])
def test_no_space(tmp_path: Path, full: bool) -> None:
    """However much room is lacking, whichever file it hits."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        root = disk.at / "store"
        was = saved_chain(root)
        job = TinyJob()
        job.load(root)
        failed = set()
        for pages in range(100):
            CheckpointStore(root).clean()  # a save does it, too, and would have that room besides
            disk.leave(4096 * pages)
            job.step()
            try:
                job.save(root, full=full)
                break
            except CheckpointError as error:
                assert "no space left" in str(error) and "Free space" in str(error)
                found = re.search("writing the (.*?) of checkpoint", str(error))
                failed.add(found[1] if found else "beginning")
            assert [entry.name for entry in CheckpointStore(root).list()] == [FULL, DELTA]
            old = TinyJob(9)
            old.load(root)
            same(old.everything(), was)
        assert failed >= {
            "row files",
            "admission counters",
            "dense part",
            "state of the job",
            "manifest",
        }
        disk.free()
        check_goes_on(job, root, job.everything())
        assert CheckpointStore(root).clean() == ()


def test_no_space_for_a_compaction(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        root = disk.at / "store"
        was = saved_chain(root)
        store = CheckpointStore(root)
        for pages in range(100):
            disk.leave(4096 * pages)
            try:
                compact(store, DELTA)
                break
            except CheckpointError as error:
                assert "no space left" in str(error)
            assert [entry.name for entry in store.list()] == [FULL, DELTA]
            assert sorted(store.storage.folders()) == [FULL, DELTA]
        assert pages > 3
        newest = store.latest()
        assert newest is not None and newest.kind == "full" and newest.step == 6
        job = TinyJob()
        job.load(root)
        same(job.everything(), was)
