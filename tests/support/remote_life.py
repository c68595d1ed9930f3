"""The life of a store of checkpoints, on any file system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from shoal.checkpoint import CheckpointStore, begin, compact, diff, verify
from shoal.checkpoint.storage import Storage
from shoal.cli import app
from support.tiny_job import TinyJob

__all__ = ["shoal_run", "store_life", "training_life"]


def store_life(url: str) -> None:
    """Full and delta, in the background too; load, verify, compare, compact, retain, clean."""
    job = TinyJob()
    for _ in range(3):
        job.step()
        job.save(url)
    job.step()
    saving = begin(
        url, job.contents(), step=4, position=4, kind="delta", parent=job.parent, since=job.since
    )
    wanted = job.everything()
    job.step()
    saving.wait()
    saving.release()
    store = CheckpointStore(url)
    assert _names(store) == ["1-full", "2-delta", "3-delta", "4-delta"]
    _check_loads(url, wanted)
    report = verify(url)
    assert report.ok, report.problems
    newest = store.name(4, "delta")
    compact(store, newest)
    assert diff(f"{url}/{newest}", f"{url}/{store.name(4, 'full')}").same
    _check_loads(url, wanted)
    job.save(url, full=True)
    assert len(store.retain(keep_full=1)) == 5 and _names(store) == ["5-full"]
    _check_cli(url)
    left = store.folder(store.name(9, "full"))
    with left.create("rows/00000.arrow") as file:
        file.write(b"an interrupted save")
    assert store.clean() == (store.name(9, "full"),) and left.files() == ()
    _check_damage(url)


def training_life(url: str, folder: Path, *, epochs: int = 2) -> None:
    """A run that saves there and ends; the same with more epochs, which resumes from there."""
    for epoch in range(epochs):
        code, out = shoal_run(
            "train", "examples/flights.yaml", "data.max_examples=400", "data.batch_size=100",
            "baselines=[]", "model.hidden=[4]", "eval.max_examples=100",
            "logging.tensorboard=false", f"output.dir={folder}", f"checkpoint.dir={url}",
            "checkpoint.every_steps=2", "checkpoint.full_every=3", f"data.epochs={epoch + 1}",
        )  # fmt: skip
        assert code == 0, out
        newest = CheckpointStore(url).latest()
        assert newest is not None and newest.step == 4 * (epoch + 1)
    assert len(list(folder.iterdir())) == 1, "the second resumed in the folder of the first"
    assert verify(url).ok


def shoal_run(*arguments: str) -> tuple[int, str]:
    """A command of `shoal`, in this process: exit code and output."""
    result = CliRunner().invoke(app, list(arguments), prog_name="shoal", env={"TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def _check_loads(url: str, wanted: dict[str, Any]) -> None:
    other = TinyJob()
    assert other.load(url).state == {"steps": 4}
    torch.testing.assert_close(other.everything(), wanted, rtol=0, atol=0)


def _check_cli(url: str) -> None:
    code, out = shoal_run("ckpt", "inspect", url, "--json")
    assert code == 0 and json.loads(out)["step"] == 5
    code, out = shoal_run("ckpt", "verify", url)
    assert code == 0, out
    code, out = shoal_run("ckpt", "verify", f"{url}/nothing")
    assert code == 2 and "neither is one nor holds one" in " ".join(out.split())


def _check_damage(url: str) -> None:
    store = CheckpointStore(url)
    newest = store.latest()
    assert newest is not None
    folder: Storage = store.folder(newest.name)
    path = next(file.path for file in store.manifest(newest.name).files if file.kind == "rows")
    data = bytearray(folder.read(path))
    data[len(data) // 2] ^= 1
    with folder.create(path) as file:
        file.write(data)
    (problem,) = verify(url).problems
    assert problem.file == path


def _names(store: CheckpointStore) -> list[str]:
    return [f"{entry.step}-{entry.kind}" for entry in store.list()]
