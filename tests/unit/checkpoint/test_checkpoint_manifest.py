"""Manifests come back as they were written, or are told to be damaged, newer or none."""

from __future__ import annotations

import dataclasses
import json
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.manifest import (
    SCHEMA,
    Manifest,
    Parent,
    SavedFile,
    SavedSegment,
    SavedTable,
    commit,
    from_json,
    read_manifest,
    to_json,
)
from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError


def manifest(**changes: Any) -> Manifest:
    segment = SavedSegment(name="vec", dim=3, state_width=2, optimizer="adagrad")
    table = SavedTable(
        collection="m",
        name="tä",
        hash_name="t",
        dtype="bfloat16",
        segments=(segment,),
        rows=4,
        deleted=0,
        admission=None,
    )
    file = SavedFile(
        path="rows/00000.arrow",
        kind="rows",
        tables=("m/tä",),
        start=0,
        stop=1 << 64,
        rows=4,
        bytes=400,
        crc32=(1 << 32) - 1,
    )
    whole = Manifest(
        schema=SCHEMA,
        id="0123456789abcdef" * 2,
        kind="full",
        step=5,
        position=50,
        version=2,
        parent=None,
        seed=1,
        last_steps={"m": 5},
        world_size=2,
        created_s=1_700_000_000,
        packages={"shoal": "0"},
        tables=(table,),
        modules=("net",),
        optimizers=(),
        files=(file,),
    )
    return dataclasses.replace(whole, **changes)


def resealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest with a good checksum and bad content."""
    raw = json.loads(to_json(manifest()))
    del raw["crc32"]
    change(raw)
    head = json.dumps(raw, indent=2).removesuffix("\n}")
    return f'{head},\n  "crc32": "{zlib.crc32(head.encode()):08x}"\n}}\n'.encode()


def test_it_comes_back():
    for one in (manifest(), manifest(kind="delta", parent=Parent(folder="x", id="y"))):
        assert from_json(to_json(one)) == one
    assert json.loads(to_json(manifest()))["files"][0]["stop"] == 1 << 64
    assert list(json.loads(to_json(manifest())))[-1] == "crc32"


def test_every_flipped_byte_shows():
    data = to_json(manifest())
    for at in range(len(data)):
        for bit in (0, 3, 6):
            bad = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                from_json(bad)
    for at in (0, 1, len(data) - 1):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            from_json(data[:at])
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        from_json(data + b" ")


@pytest.mark.parametrize(("schema", "word"), [(SCHEMA + 1, "newer"), (1, "older")])
def test_another_schema(schema: int, word: str):
    with pytest.raises(CheckpointError, match=f"got {schema}, a {word} form; allowed: {SCHEMA}"):
        from_json(resealed(lambda raw: raw.update(schema=schema, more=[])))
    with pytest.raises(CheckpointError, match=f"a {word} form"):
        from_json(json.dumps({"schema": schema, "step": 1}).encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop("seed"), "manifest.seed: Field required"),
        (lambda raw: raw.update(more=1), "manifest.more: Unexpected"),
        (lambda raw: raw.update(step=1.0), "manifest.step"),
        (lambda raw: raw.update(step=True), "manifest.step"),
        (lambda raw: raw.update(step="1"), "manifest.step"),
        (lambda raw: raw.update(kind="half"), "manifest.kind"),
        (lambda raw: raw.update(modules="net"), "manifest.modules"),
        (lambda raw: raw.update(last_steps={"m": None}), "manifest.last_steps.m"),
        (lambda raw: raw.update(id="xyz"), "manifest.id: .*not 'xyz'"),
        (lambda raw: raw.update(kind="delta"), "parent is"),
        (lambda raw: raw.update(tables=raw["tables"] * 2), "two of one name"),
        (
            lambda raw: raw["tables"][0]["segments"][0].pop("dim"),
            r"segments\[0\].dim: Field required",
        ),
        (lambda raw: raw["tables"][0].update(rows=5), "rows of table"),
        (lambda raw: raw.update(files=raw["files"] * 2), "twice"),
        (lambda raw: raw["files"][0].update(path="../x"), "path of a file"),
        (lambda raw: raw["files"][0].update(path="/x"), "path of a file"),
        (lambda raw: raw["files"][0].update(stop=(1 << 64) + 1), r"files\[0\].stop: "),
        (lambda raw: raw["files"][0].update(tables=["m/other"]), "tables of rows/"),
        (lambda raw: raw["files"][0].update(stop=0), "hashes of rows/"),
        (lambda raw: raw["files"][0].update(crc32=1 << 32), r"files\[0\].crc32: "),
        (lambda raw: raw["files"][0].update(bytes=-1), r"files\[0\].bytes: "),
        (lambda raw: raw["files"][0].update(bytes=4 * 34 - 1), "rows of rows/"),
        (lambda raw: raw["files"][0].update(tables=[]), "tables of rows/"),
        (lambda raw: raw["files"][0].update(tables=["m/tä"] * 2), "tables of rows/"),
        (lambda raw: raw["files"][0].update(kind="sketch"), "bytes of rows/"),
        (lambda raw: raw["files"][0].update(kind="admission"), "tables of rows/"),
        (lambda raw: raw["files"][0].update(path="rows/\ud800"), "hex escape"),
        (lambda raw: raw["files"][0].update(path="rows/\0"), "path"),
        (lambda raw: raw.update(seed=1 << 70), "seed"),
        (lambda raw: raw.update(seed=1 << 64), "seed"),
        (lambda raw: raw.update(step=-1), "step"),
        (lambda raw: raw.update(version=-5), "version"),
        (lambda raw: raw.update(version=(1 << 32) - 1), "version"),
        (lambda raw: raw.update(position=-1), "position"),
        (lambda raw: raw.update(created_s=-1), "created_s"),
        (lambda raw: raw.update(world_size=0), "world_size"),
        (lambda raw: raw.update(last_steps={"m": -1}), "last_steps.m: "),
        (lambda raw: raw["tables"][0].update(dtype="int8"), "form of table"),
        (lambda raw: raw["tables"][0].update(segments=[]), "form of table"),
        (lambda raw: raw["tables"][0].update(admission="sketch 0"), "admission of"),
        (
            lambda raw: raw["tables"][0]["segments"][0].update(dim=-1),
            r"segments\[0\].dim: .*not '-1'",
        ),
        (lambda raw: raw["tables"][0]["segments"][0].update(dim=1 << 40), r"segments\[0\].dim: "),
        (
            lambda raw: raw.update(kind="delta", parent={"folder": "../x", "id": "y"}),
            "folder of the parent",
        ),
    ],
)
def test_values_that_no_checkpoint_has(change: Callable[[dict[str, Any]], object], words: str):
    with pytest.raises(CheckpointError, match=words):
        from_json(resealed(change))
    for text in (b"", b"[]", b"null", b"{}", b'{"schema": true}', b"\xff"):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            from_json(text)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_manifest_is_the_commit(tmp_path: Path, kind: str):
    storage = Storage(tmp_path / "x" if kind == "local" else f"memory://{uuid.uuid4().hex}/x")
    with pytest.raises(CheckpointError, match=r"without manifest\.json.*Check the path"):
        read_manifest(storage)
    with pytest.raises(CheckpointError, match=r"not there, rows/00000\.arrow first.*shared folder"):
        commit(storage, manifest())
    assert not storage.exists("manifest.json")
    storage.create("rows/00000.arrow").close()
    commit(storage, manifest())
    assert read_manifest(storage.url) == manifest()
    with pytest.raises(CheckpointError, match="never overwritten"):
        commit(storage, manifest(step=6))
    assert read_manifest(storage.url) == manifest()


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path):
    storage = Storage(tmp_path / "x")
    with pytest.raises(CheckpointError, match="parent is"):
        commit(storage, manifest(kind="delta"))
    assert storage.files() == ()


def test_brackets_without_end():
    with pytest.raises(CheckpointError, match="no JSON"):
        from_json(b"[" * 100_000)
