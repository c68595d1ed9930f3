"""A chain compacted has the bytes that a full save would have had."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import CheckpointStore, compact, diff, verify, writing_plan
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.row_files import RowLayout
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writing_plan import split
from shoal.errors import CheckpointError
from support.remote_stores import REMOTE, remote_url
from support.saved_rows import HandTable, by_hash, joined, rows_of, save_by_hand

LAYOUTS = {
    "big": RowLayout.rows(4, 2, "float32"),
    "one": RowLayout.rows(2, 2, "bfloat16"),
    "two": RowLayout.rows(2, 2, "bfloat16"),
    "late": RowLayout.rows(1, 0, "float64"),
}
SIZES = {"file_bytes": 3000, "small_bytes": 1500}
NONE = torch.empty(0, dtype=torch.int64)


def hand(name: str, ids: range, salt: int = 0, deleted: range = range(0)) -> HandTable:
    layout = LAYOUTS[name]
    gone = by_hash(name, torch.tensor(list(deleted), dtype=torch.int64))
    rows = rows_of(name, torch.tensor(list(ids), dtype=torch.int64), layout, salt=salt)
    return HandTable(name, layout, rows, gone, by_hash(name, torch.arange(3) - 1000))


def merged(name: str, *parts: tuple[range, int]) -> HandTable:
    """Rows of disjoint ids, each range with its salt."""
    chunks = [rows_of(name, torch.tensor(list(ids)), LAYOUTS[name], salt=s) for ids, s in parts]
    both = joined(chunks)
    order = by_hash(name, both.ids)
    place = {int(id): k for k, id in enumerate(both.ids)}
    at = torch.tensor([place[int(id)] for id in order])
    rows = {f: getattr(both, f)[at] for f in both.__slots__ if f != "table"}
    chunk = type(both)(table=name, **rows)
    return HandTable(name, LAYOUTS[name], chunk, NONE, by_hash(name, torch.arange(3) - 1000))


def chain(root: Storage) -> list[Manifest]:
    save = functools.partial(save_by_hand, root, extra=True, **SIZES)
    first = save([hand("big", range(400)), hand("one", range(20)), hand("two", range(9))], step=1)
    second = save(
        [
            hand("big", range(350, 450), 1, range(100)),
            hand("one", range(0), 1),
            hand("two", range(5, 9), 1, range(5)),
        ],
        step=2,
        parent=first,
    )
    third = save(
        [
            hand("big", range(50, 60), 2, range(440, 450)),
            hand("one", range(20), 2),
            hand("two", range(0), 2, range(9)),
            hand("late", range(7), 2),
        ],
        step=3,
        parent=second,
    )
    return [first, second, third]


def full(root: Storage) -> Manifest:
    """What a full save at the third step would write."""
    tables = [
        merged("big", (range(100, 350), 0), (range(350, 440), 1), (range(50, 60), 2)),
        hand("one", range(20), 2),
        hand("two", range(0)),
        hand("late", range(7), 2),
    ]
    return save_by_hand(root, tables, step=3, extra=True, **SIZES)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_plan, "split", functools.partial(split, **SIZES))
    monkeypatch.setattr(writing_plan, "PIECE_BYTES", 700)


@pytest.mark.parametrize("kind", ["local", *REMOTE])
def test_row_files_have_the_bytes_of_a_full_save(tmp_path: Path, kind: str):
    base = str(tmp_path) if kind == "local" else remote_url(kind, tmp_path)
    root, other = Storage(f"{base}/chain"), Storage(f"{base}/full")
    links = chain(root)
    store = CheckpointStore(root)
    manifest = compact(store, "step-000000000003-delta")
    wanted = full(other)
    # The index of what is dense has a random number in it.
    files, its_files = (
        [file for file in one.files if file.path != "dense/.metadata"] for one in (manifest, wanted)
    )
    assert files == its_files and len(files) == len(manifest.files) - 1 == 8
    mine, its = (one.child("step-000000000003-full") for one in (root, other))
    assert mine.files() == its.files()
    for file in files:
        assert mine.read(file.path) == its.read(file.path)
    assert store.manifest("step-000000000003-full") == manifest
    assert manifest.tables == wanted.tables and manifest.id not in {one.id for one in links}
    assert (manifest.kind, manifest.parent, manifest.step) == ("full", None, 3)
    report = verify(mine.url)
    assert report.ok and report.rows == 350 + 20 + 7 + 4 * 3
    assert diff(mine.url, root.child("step-000000000003-delta").url).same
    with pytest.raises(CheckpointError, match=r"step-000000000003-full in its store"):
        compact(store, "step-000000000003-delta")
    with pytest.raises(CheckpointError, match="got a full one"):
        compact(store, "step-000000000001-full")


def test_damage_stops_it_and_leaves_nothing(tmp_path: Path):
    root = Storage(tmp_path)
    links = chain(root)
    store = CheckpointStore(root)
    for link, folder in zip(links, root.folders(), strict=True):
        copied = ("admission", "sketch", "dense", "state") if link is links[-1] else ()
        for file in link.files:
            if file.kind not in ("rows", "deleted", *copied):
                continue
            path = tmp_path / folder / file.path
            good = path.read_bytes()
            path.write_bytes(good[:-5] + bytes([good[-5] ^ 4]) + good[-4:])
            with pytest.raises(CheckpointError, match=f"{file.path} of checkpoint .*{folder}"):
                compact(store, "step-000000000003-delta")
            path.write_bytes(good)
    assert root.folders() == tuple(sorted(one.name for one in store.list()))
    assert compact(store, "step-000000000003-delta").step == 3


@pytest.mark.parametrize("room", [0, 3, 7])
def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int):
    root = Storage(tmp_path)
    chain(root)
    store, before = CheckpointStore(root), root.files()
    write, writes = os.writev, []

    def full_disk(fd: int, parts: list[memoryview]) -> int:
        writes.append(fd)
        if len(writes) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, parts)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full_disk)
        with pytest.raises(CheckpointError, match="no space left"):
            compact(store, "step-000000000003-delta")
    assert root.files() == before
    assert compact(store, "step-000000000003-delta").step == 3


SCRIPT = """
import os, shutil, sys
import pyarrow
from shoal.checkpoint import CheckpointStore, compact
from shoal.checkpoint.storage import DurableFile, Storage

calls = 0
limit = 0

def counted(call):
    def count(*args, **kwargs):
        global calls
        if calls == limit:
            os.kill(os.getpid(), 9)
        calls += 1
        return call(*args, **kwargs)
    return count

for owner, name in ((DurableFile, "write"), (DurableFile, "close"), (os, "replace"), (os, "fsync")):
    setattr(owner, name, counted(getattr(owner, name)))

def run(point):
    global limit
    limit = point
    shutil.copytree("root", str(point))
    pid = os.fork()
    if not pid:
        compact(CheckpointStore(str(point)), "step-000000000003-delta")
        with open("calls", "w") as file:
            file.write(str(calls))
        os._exit(0)
    return os.waitpid(pid, 0)[1]

assert run(-1) == 0
total = int(open("calls").read())
for point in sorted({*range(0, total, max(1, total // 12)), *range(total - 5, total)}):
    assert run(point) == 9
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_killed_at_any_point_the_chain_is_still_there(tmp_path: Path):
    """Leftovers are none of the checkpoints, and the next compaction starts from scratch."""
    chain(Storage(tmp_path / "root"))
    before = CheckpointStore(tmp_path / "root").list()
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, check=True)
    points = sorted(int(one.name) for one in tmp_path.iterdir() if one.name.isdigit())
    assert len(points) > 12
    for point in points:
        store = CheckpointStore(tmp_path / str(point))
        assert verify(tmp_path / str(point) / "step-000000000003-delta").ok
        if store.list() == before:
            assert compact(store, "step-000000000003-delta").kind == "full"
        else:  # the manifest was in place, and so was all that it names
            assert point >= points[-3] and len(store.list()) == len(before) + 1
        report = verify(tmp_path / str(point) / "step-000000000003-full")
        assert report.ok and report.unlisted == ()
