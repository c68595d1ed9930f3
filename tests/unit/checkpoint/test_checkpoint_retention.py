"""A folder of checkpoints: what is in it, what a chain is, what is kept and what is cleaned."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import CheckpointStore
from shoal.checkpoint.manifest import Manifest, commit
from shoal.checkpoint.row_files import RowLayout
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointEntry, folder_name, locate
from shoal.errors import CheckpointError, InputError
from support.remote_stores import REMOTE, remote_url
from support.saved_rows import HandTable, rows_of, save_by_hand

LAYOUT = RowLayout.rows(2, 1, "float32")


def put(root: Storage, step: int, parent: Manifest | None = None) -> Manifest:
    rows = rows_of("t", torch.arange(step + 1), LAYOUT)
    return save_by_hand(root, [HandTable("t", LAYOUT, rows)], step=step, parent=parent)


def names(store: CheckpointStore) -> list[str]:
    return [f"{entry.step}{entry.kind[0]}" for entry in store.list()]


def two_chains(root: Storage) -> list[Manifest]:
    """1f <- 2d <- 3d, 4f <- 5d"""
    links = [put(root, 1)]
    links.append(put(root, 2, links[0]))
    links.append(put(root, 3, links[1]))
    links.append(put(root, 4))
    links.append(put(root, 5, links[3]))
    return links


@pytest.fixture(params=["local", *REMOTE])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    kind = request.param
    return Storage(tmp_path / "run" if kind == "local" else remote_url(kind, tmp_path))


def test_listing_and_chains(root: Storage):
    store = CheckpointStore(root.url)
    assert store.list() == () and store.latest() is None
    with pytest.raises(CheckpointError, match="neither is one nor holds one"):
        locate(root.url)
    links = two_chains(root)
    assert names(store) == ["1f", "2d", "3d", "4f", "5d"]
    assert store.latest() == CheckpointEntry("step-000000000005-delta", 5, "delta")
    assert store.chain("step-000000000003-delta") == tuple(links[:3])
    assert store.chain("step-000000000004-full") == (links[3],)
    assert locate(root.url)[1] == "step-000000000005-delta"
    found, name = locate(f"{root.url}/step-000000000002-delta")
    assert (found.url, name) == (root.url, "step-000000000002-delta")
    put(root.child("run").child("checkpoints"), 7)
    found, name = locate(f"{root.url}/run")
    assert (found.url, name) == (f"{root.url}/run/checkpoints", "step-000000000007-full")
    with pytest.raises(InputError, match="step of a checkpoint"):
        folder_name(-1, "full")


def test_a_full_one_is_newer_than_a_delta_of_its_step(root: Storage):
    first = put(root, 1)
    put(root, 2, first)
    put(root, 2)
    store = CheckpointStore(root)
    assert names(store) == ["1f", "2d", "2f"]
    assert store.latest() == store.list()[-1]


def test_chains_that_are_none(root: Storage):
    links = two_chains(root)
    store = CheckpointStore(root)
    with pytest.raises(CheckpointError, match="step-000000000009-full without manifest"):
        store.chain("step-000000000009-full")
    root.child("step-000000000002-delta").remove_tree()
    with pytest.raises(
        CheckpointError,
        match=rf"step-000000000003-delta.*no checkpoint step-000000000002-delta.*{links[1].id}",
    ):
        store.chain("step-000000000003-delta")
    root.child("step-000000000004-full").remove_tree()
    stranger = dataclasses.replace(save_by_hand(root, [], step=4), id="a" * 32)
    root.child("step-000000000004-full").remove_tree()
    commit(root.child("step-000000000004-full"), stranger)
    with pytest.raises(CheckpointError, match=rf"of id {'a' * 32}; allowed: id {links[3].id}"):
        store.chain("step-000000000005-delta")


def test_only_our_folders_without_a_manifest_are_cleaned(root: Storage):
    two_chains(root)
    for path in (
        "step-000000000007-full/rows/00000.arrow",
        "step-000000000008-delta/manifest.json.tmp",
        "step-7-full/x",
        "other/x",
        "step-000000000007-full-copy/x",
    ):
        with root.create(path) as file:
            file.write(b"1")
    store = CheckpointStore(root)
    assert store.clean() == ("step-000000000007-full", "step-000000000008-delta")
    assert store.clean() == ()
    assert names(store) == ["1f", "2d", "3d", "4f", "5d"]
    assert {"other", "step-7-full", "step-000000000007-full-copy"} <= set(root.folders())


def test_the_newest_full_ones_and_their_deltas_are_kept(root: Storage):
    two_chains(root)
    assert CheckpointStore(root).retain() == () == CheckpointStore(root, keep_full=2).retain()
    gone = CheckpointStore(root, keep_full=1).retain()
    assert [int(name[5:17]) for name in gone] == [3, 2, 1], "children go before parents"
    assert names(CheckpointStore(root)) == ["4f", "5d"]
    with pytest.raises(CheckpointError, match="1 or more"):
        CheckpointStore(root, keep_full=0)
    with pytest.raises(CheckpointError, match="1 or more"):
        CheckpointStore(root).retain(0)


def test_parents_in_use_are_kept(root: Storage):
    two_chains(root)
    store = CheckpointStore(root, keep_full=1)
    assert store.retain(in_use=["step-000000000002-delta"]) == ()
    put(root, 5)  # compacted from 5d, on which the next delta will stand
    assert [name[-6:] for name in store.retain()] == ["-delta", "-delta", "1-full"]
    assert names(store) == ["4f", "5d", "5f"]
    put(root, 6)
    assert len(store.retain()) == 3
    assert names(store) == ["6f"]


def test_a_job_that_went_back_keeps_what_it_builds_on(tmp_path: Path):
    root = Storage(tmp_path)
    first = put(root, 1)
    put(root, 5)
    child = save_by_hand(Storage(tmp_path / "b"), [], step=3, parent=first)
    commit(root.child("step-000000000003-delta"), dataclasses.replace(child, created_s=1 << 31))
    store = CheckpointStore(root)
    assert store.retain(1) == () and names(store) == ["1f", "3d", "5f"]


def test_a_delta_of_a_missing_parent_goes_with_its_age(root: Storage):
    two_chains(root)
    root.child("step-000000000001-full").remove_tree()
    put(root, 6)
    store = CheckpointStore(root)
    assert len(store.retain(2)) == 0
    root.child("step-000000000004-full").remove_tree()
    put(root, 7)
    store.retain(1)
    assert names(store) == ["7f"]


def test_the_manifest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = Storage(tmp_path)
    two_chains(root)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    store = CheckpointStore(root, keep_full=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            store.retain()
    assert names(store) == ["1f", "2d", "4f", "5d"] and len(root.folders()) == 5
    assert store.chain("step-000000000002-delta")
    assert store.clean() == ("step-000000000003-delta",)
