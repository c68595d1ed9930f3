"""`verify` names the file of every damage, and takes nothing damaged for whole."""

from __future__ import annotations

import dataclasses
import errno
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shoal.checkpoint import verify
from shoal.checkpoint.manifest import MANIFEST, Manifest, commit
from shoal.checkpoint.row_files import RowFileWriter, RowLayout
from shoal.checkpoint.storage import Storage
from shoal.cli import app
from shoal.errors import CheckpointError
from support.saved_rows import HandTable, by_hash, rows_of, save_by_hand

LAYOUT = RowLayout.rows(2, 1, "float32")
FULL, DELTA = "step-000000000001-full", "step-000000000002-delta"


def table(name: str, rows: int, deleted: int = 0) -> HandTable:
    gone = by_hash(name, torch.arange(deleted) + 500)
    chunk = rows_of(name, torch.arange(rows), LAYOUT)
    return HandTable(name, LAYOUT, chunk, gone, by_hash(name, torch.arange(3) + 900))


def chain(folder: Path) -> list[Manifest]:
    root = Storage(folder)
    first = save_by_hand(root, [table("a", 30), table("b", 5)], step=1, extra=True)
    tables = [table("a", 4, 3), table("b", 0)]
    return [first, save_by_hand(root, tables, step=2, parent=first, extra=True)]


def recommitted(folder: Path, manifest: Manifest, **changes: Any) -> None:
    (folder / MANIFEST).unlink()
    commit(Storage(folder), dataclasses.replace(manifest, **changes))


def test_a_chain_that_is_well(tmp_path: Path):
    links = chain(tmp_path)
    report = verify(tmp_path)
    assert report.ok and report.problems == () == report.unlisted
    assert report.checkpoints == (FULL, DELTA) and report.url == str(tmp_path / DELTA)
    assert report.files == sum(len(link.files) for link in links)
    assert report.bytes == sum(file.bytes for link in links for file in link.files)
    assert report.rows == 35 + 4 + 3 + 2 * 2 * 3
    assert verify(tmp_path / DELTA, chain=False).checkpoints == (DELTA,)
    assert verify(tmp_path / FULL).checkpoints == (FULL,)
    assert verify(tmp_path, rows=False).rows == 0


@pytest.mark.slow
@pytest.mark.parametrize("link", [0, 1])
def test_any_flipped_byte_is_told_with_its_file(tmp_path: Path, link: int):
    manifest = chain(tmp_path)[link]
    folder = (FULL, DELTA)[link]
    paths = [MANIFEST, *(file.path for file in manifest.files)]
    assert {path.split("/")[0] for path in paths} >= {"rows", "admission", "dense", "state.pt"}
    for path in paths:
        file = tmp_path / folder / path
        good = file.read_bytes()
        step = max(1, len(good) // 40)
        for at in {*range(0, len(good), step), len(good) - 1}:
            file.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
            for rows in (True, False):
                report = verify(tmp_path, rows=rows)
                assert [(p.checkpoint, p.file) for p in report.problems] == [(folder, path)]
        file.write_bytes(good[:-1])
        assert [p.file for p in verify(tmp_path).problems] == [path]
        file.unlink()
        if path != MANIFEST:
            (problem,) = verify(tmp_path).problems
            assert problem.file == path and "missing" in problem.why
        elif link:
            with pytest.raises(CheckpointError, match="neither is one"):
                verify(tmp_path / folder)
        else:
            (problem,) = verify(tmp_path).problems
            assert problem.file == MANIFEST and folder in problem.why
        file.write_bytes(good)
    assert verify(tmp_path).ok


def test_unlisted_files_do_no_harm(tmp_path: Path):
    chain(tmp_path)
    (tmp_path / FULL / "rows" / "notes.txt").write_text("x")
    report = verify(tmp_path)
    assert report.ok and report.unlisted == (f"{FULL}/rows/notes.txt",)


def test_chains_that_are_none(tmp_path: Path):
    chain(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / FULL)
    (problem,) = verify(tmp_path / "a").problems
    assert FULL in problem.why
    other = save_by_hand(Storage(tmp_path / "b"), [table("a", 3)], step=1)
    shutil.copytree(tmp_path / "b" / FULL, tmp_path / "a" / FULL)
    recommitted(tmp_path / "a" / FULL, other, id="c" * 32)
    (problem,) = verify(tmp_path / "a").problems
    assert problem.file == MANIFEST and "mixed" in problem.why
    with pytest.raises(CheckpointError, match="neither is one"):
        verify(tmp_path / "nowhere")


def test_files_of_two_checkpoints_mixed(tmp_path: Path):
    chain(tmp_path)
    root = Storage(tmp_path)
    save_by_hand(root, [table("a", 31), table("b", 5)], step=3, extra=True)
    shutil.copy(tmp_path / FULL / "rows/00000.arrow", tmp_path / "step-000000000003-full/rows")
    (problem,) = verify(tmp_path).problems
    assert problem.file == "rows/00000.arrow" and "another checkpoint" in problem.why
    done = CliRunner().invoke(app, ["ckpt", "verify", str(tmp_path)])
    assert (done.exit_code, done.stdout.splitlines()[-1].split(":")[0]) == (1, "1 problem")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "not in the order"),
        ("twice", "not in the order"),
        ("range", "outside the file's hashes"),
        ("more", "31 rows; allowed: 30 rows"),
        ("overlap", "meet those of"),
    ],
)
def test_rows_that_were_written_wrong(tmp_path: Path, what: str, words: str):
    root = Storage(tmp_path)
    good = table("a", 30)
    manifest = save_by_hand(root, [good], step=1)
    chunk, ends = good.rows, (0, 1 << 64)
    if what in ("order", "twice"):
        at = torch.arange(30)
        at[7] = 9 if what == "order" else 8
        at[9] = 7 if what == "order" else 9
        parts = {f: getattr(chunk, f)[at] for f in chunk.__slots__ if f != "table"}
        chunk = dataclasses.replace(chunk, **parts)
    ends = (0, 1 << 63) if what == "range" else ends
    folder = root.child(FULL)
    writer = RowFileWriter(folder, "rows/00000.arrow", LAYOUT, ["m/a"], ends)
    writer.add(0, (chunk if what != "more" else table("a", 31).rows).columns)
    saved = writer.close()
    files = [dataclasses.replace(saved, rows=30)]
    tables = manifest.tables
    if what == "overlap":
        writer = RowFileWriter(folder, "rows/00001.arrow", LAYOUT, ["m/a"], ends)
        writer.add(0, chunk.columns)
        files.append(writer.close())
        tables = (dataclasses.replace(tables[0], rows=60),)
    admission = [file for file in manifest.files if file.kind == "admission"]
    recommitted(tmp_path / FULL, manifest, files=(*files, *admission), tables=tables)
    report = verify(tmp_path)
    assert any(words in problem.why for problem in report.problems)
    assert verify(tmp_path, rows=False).ok or what == "overlap"


def test_a_grouped_table_with_other_rows_than_counted(tmp_path: Path):
    root = Storage(tmp_path)
    manifest = save_by_hand(root, [table("a", 30), table("b", 5)], step=1)
    a, b = manifest.tables
    changed = (dataclasses.replace(a, rows=29), dataclasses.replace(b, rows=6))
    recommitted(tmp_path / FULL, manifest, tables=changed)
    first, second = verify(tmp_path).problems
    assert first.file == MANIFEST and "29 rows of table 'm/a', but 30" in first.why
    assert "6 rows of table 'm/b', but 5" in second.why


def test_a_disk_that_fails_is_told_with_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manifest = chain(tmp_path)[1]

    class Failing(io.RawIOBase):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Storage, "open", lambda *_: Failing())
    problems = verify(tmp_path / DELTA, chain=False).problems
    assert [one.file for one in problems] == [file.path for file in manifest.files]
    assert all("Input/output error" in one.why for one in problems)
