"""Forged manifests and files through load, verify, inspect, diff: one error, little memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import traceback
import zlib
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

from shoal.checkpoint import CheckpointStore, load, verify
from shoal.checkpoint.chain import Chain
from shoal.checkpoint.manifest import MANIFEST
from shoal.cli import app
from shoal.errors import CheckpointError
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import HASHES
from support.forgeries import forge
from support.isolated import failures, limited
from support.shares import SHARE
from support.tiny_job import TinyJob

FULL = "step-000000000003-full"
SLACK_BYTES = 64 << 20  # what parsers, threads and allocators take whatever they read


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("forged") / "good"
    job = TinyJob(0)
    for _ in range(2):
        for _ in range(3):
            job.step()
        job.save(root)
    return root


# A whole checkpoint of another job.
OF_THE_JOB = ("checkpoint and model", "dense part of checkpoint", "optimizer")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def command(*arguments: str) -> str | None:
    """What is wrong with how a command ends: it prints a result, or one error."""
    result = CliRunner().invoke(app, ["ckpt", *arguments])
    if isinstance(result.exception, (SystemExit, type(None))) and result.exit_code in (0, 1, 2):
        return None
    trace = "".join(traceback.format_exception(result.exception)[-6:])
    return f"{arguments[0]}: {trace}"


def is_sound(root: Path) -> bool:
    try:
        return verify(root).ok
    except CheckpointError:
        return False


@cache
def warm(process: int, store: Path) -> None:
    """What a new process maps at first, libraries above all, is no memory of a case's."""
    load(store, TinyJob(9).contents())
    for arguments in (("verify", store), ("inspect", store), ("diff", store, store)):
        assert command(*map(str, arguments)) is None


def outcome(number: int, store: Path, folder: Path) -> str | None:
    warm(os.getpid(), store)
    root = folder / "forged"
    forge(number, store, root)
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    before, problems = peak_bytes(), []
    job, refusal = TinyJob(9), ""
    loads = False
    with limited(20.0):
        try:
            load(root, job.contents())
            loads = True
        except CheckpointError as error:
            refusal = str(error)
        except Exception:  # noqa: BLE001 - what is looked for
            problems.append(f"load: {traceback.format_exc()[-1500:]}")
        if not loads and any(job.shard.size(table) for table in range(2)):
            problems.append("load: rows stay in the tables")
        if not loads and not refusal.startswith(OF_THE_JOB) and is_sound(root):
            problems.append(f"verify: all well, but a load says {refusal}")
        problems += filter(
            None,
            (
                command("verify", str(root)),
                command("inspect", str(root)),
                command("diff", str(root), str(store)),
                command("diff", str(store), str(root)),
            ),
        )
    grew = peak_bytes() - before
    if grew > 4 * size + SLACK_BYTES:
        problems.append(f"{grew} bytes more for files of {size}")
    return "\n".join(problems) or None


def run_all(numbers: range, store: Path, folder: Path) -> dict[int, str]:
    torch.set_num_threads(1)  # a child has none of the threads of its parent
    found = failures(numbers, lambda number: outcome(number, store, folder), dead_s=60.0)
    for number, said in found.items():
        print(f"--- case {number}: {said}")
    return found


def sealed(raw: dict[str, Any]) -> str:
    head = json.dumps(raw, indent=2).removesuffix("\n}")
    return f'{head},\n  "crc32": "{zlib.crc32(head.encode()):08x}"\n}}\n'


def opened(store: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the full checkpoint, and what its manifest says, to be changed and sealed."""
    root = tmp_path / "store"
    shutil.copytree(store / FULL, root / FULL)
    raw = json.loads((root / FULL / MANIFEST).read_text())
    del raw["crc32"]
    return root, raw


@pytest.mark.parametrize("rows", [10**7, 2 * 10**8])
@pytest.mark.parametrize("also_bytes", [False, True])
def test_no_memory_is_reserved_for_rows_that_files_cannot_hold(
    store: Path, tmp_path: Path, rows: int, also_bytes: bool
) -> None:
    root, raw = opened(store, tmp_path)
    raw["tables"][0]["rows"] = raw["files"][0]["rows"] = rows
    if also_bytes:
        raw["files"][0]["bytes"] = rows * 100
    (root / FULL / MANIFEST).write_text(sealed(raw))
    job = TinyJob(9)
    with (
        mock.patch.object(CpuShard, "expect") as expect,
        pytest.raises(CheckpointError, match=r"rows/00000\.arrow"),
    ):
        load(root, job.contents())
    expect.assert_not_called()
    assert not verify(root).ok


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("ranges", [False, True])
def test_rows_that_grow_as_they_are_read_are_refused(
    store: Path, tmp_path: Path, codec: str, ranges: bool
) -> None:
    """Zeros take a thousandth of their size on disk."""
    root, raw = opened(store, tmp_path)
    path = root / FULL / raw["files"][0]["path"]
    schema = pa.ipc.open_file(path).schema
    rows = 1 << 20
    zeros = {64: np.zeros(rows, np.int64), 32: np.zeros(rows, np.uint32)}
    columns = []
    for field in schema:
        kind = field.type
        if pa.types.is_fixed_size_list(kind):
            values = pa.array(np.zeros(rows * kind.list_size, kind.value_type.to_pandas_dtype()))
            columns.append(pa.FixedSizeListArray.from_arrays(values, type=kind))
        else:
            columns.append(pa.array(zeros[kind.bit_width]))
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(path, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    content = path.read_bytes()
    raw["files"][0] |= {"bytes": len(content), "crc32": zlib.crc32(content)}
    (root / FULL / MANIFEST).write_text(sealed(raw))
    with pytest.raises(CheckpointError, match="compressed rows"):
        if ranges:
            Chain(CheckpointStore(root), FULL).read(0, 0, HASHES)
        else:
            load(root, TinyJob(9).contents())
    assert not verify(root).ok


@pytest.mark.slow
def test_some_forgeries(store: Path, tmp_path: Path) -> None:
    assert run_all(range(60), store, tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(2))
def test_five_thousand_forgeries(part: int, store: Path, tmp_path: Path) -> None:
    numbers = range(2_500 * part, 2_500 * (part + 1), SHARE)
    assert run_all(numbers, store, tmp_path) == {}
