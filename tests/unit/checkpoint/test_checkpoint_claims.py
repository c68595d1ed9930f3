"""One writer for each folder, whoever else saves, cleans or removes in the same store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import CheckpointStore, compact, saving, verify
from shoal.checkpoint.saving import Saving
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import WRITER, claim
from shoal.errors import CheckpointError
from support.tiny_job import TinyJob


class Held:
    """A save that stands still before its manifest, as of another process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, job: TinyJob) -> None:
        self.go, there = threading.Event(), threading.Event()
        commit = Saving._commit

        def wait_and_commit(writer: Saving, manifest: Any) -> None:
            there.set()
            assert self.go.wait(60)
            commit(writer, manifest)

        with monkeypatch.context() as patch:
            patch.setattr(Saving, "_commit", wait_and_commit)
            self.saving = saving.begin(root, job.contents(), step=job.steps, position=job.steps)
            assert there.wait(60)
        saving._begun.discard(self.saving)


def stepped(seed: int, steps: int = 5) -> TinyJob:
    job = TinyJob(seed)
    for _ in range(steps):
        job.step()
    return job


def test_two_jobs_that_save_the_same_step_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, tmp_path, stepped(1))
    with pytest.raises(CheckpointError, match="another save is writing"):
        stepped(2).save(tmp_path)
    held.go.set()
    manifest = held.saving.wait()
    assert verify(tmp_path).ok
    assert CheckpointStore(tmp_path).manifest("step-000000000005-full").id == manifest.id


def test_a_save_leaves_the_unfinished_one_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, tmp_path, stepped(1))
    stepped(2, steps=6).save(tmp_path)
    held.go.set()
    held.saving.wait()
    assert [one.step for one in CheckpointStore(tmp_path).list()] == [5, 6]
    assert verify(tmp_path / "step-000000000005-full").ok
    assert not list(tmp_path.glob(f"*/{WRITER}"))


def test_a_compaction_leaves_a_full_save_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stepped(1)
    job.save(tmp_path)
    job.step()
    job.save(tmp_path)
    held = Held(monkeypatch, tmp_path, job)
    with pytest.raises(CheckpointError, match="another save is writing"):
        compact(CheckpointStore(tmp_path), "step-000000000006-delta")
    held.go.set()
    held.saving.wait()
    assert verify(tmp_path / "step-000000000006-full").ok


@pytest.mark.slow
def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000000001-full"
    program = (
        "import os, sys; from shoal.checkpoint.store import claim;"
        "from shoal.checkpoint.storage import Storage;"
        "held = claim(Storage(sys.argv[1])); print(held is not None, flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert claim(Storage(folder)) is None
        assert CheckpointStore(tmp_path).clean() == ()
        other.kill()
    assert CheckpointStore(tmp_path).clean() == (folder.name,)
    assert not folder.exists()


def test_a_forked_child_keeps_no_claim(tmp_path: Path) -> None:
    held = claim(Storage(tmp_path))
    assert held is not None
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    held.release()
    again = claim(Storage(tmp_path))
    assert again is not None
    again.release()
    os.close(write)
    os.waitpid(child, 0)


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    root, pinned = tmp_path / "store", tmp_path / "best"
    job = TinyJob()
    for _ in range(2):
        job.step()
        job.save(root, full=True)
    shutil.move(root / "step-000000000001-full", pinned)
    os.symlink(pinned, root / "step-000000000001-full")
    assert CheckpointStore(root).retain(1) == ("step-000000000001-full",)
    assert os.listdir(root) == ["step-000000000002-full"]
    assert verify(pinned).ok
    os.symlink(tmp_path, root / "step-000000000003-full")  # no checkpoint: none of ours
    job.step()
    job.step()
    job.save(root, full=True)
    assert verify(pinned).ok


@pytest.mark.slow
def test_no_delta_on_a_chain_that_lost_a_link(tmp_path: Path) -> None:
    job = stepped(1)
    for _ in range(3):
        job.save(tmp_path)
        job.step()
    shutil.rmtree(tmp_path / "step-000000000005-full")
    with pytest.raises(CheckpointError, match="no checkpoint step-000000000005-full"):
        job.save(tmp_path)
    assert job.save(tmp_path, full=True).step == 8
    assert verify(tmp_path).ok


def test_a_copy_under_another_step_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    job = stepped(1)
    job.save(tmp_path)
    shutil.copytree(tmp_path / "step-000000000005-full", tmp_path / "step-000000000099-full")
    with pytest.raises(CheckpointError, match="the full checkpoint of step 5"):
        TinyJob(1).load(tmp_path)
    assert not verify(tmp_path).ok
    (tmp_path / "step-000000000099-full").rename(tmp_path / "best")
    assert TinyJob(1).load(tmp_path / "best").manifest.step == 5
