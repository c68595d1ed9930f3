from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.checkpoint import whole as checkpoint
from shoal.errors import CheckpointError
from shoal.rules.optimizers import SGD, Adagrad, Adam
from shoal.table.shard import IdGroups, RowChunk, Shard, StepContext
from shoal.table.spec import Segment, TableSpec
from support.reference_shard import ReferenceShard

SPECS = (
    TableSpec(
        name="user/id",
        segments=(
            Segment(name="bias", dim=1, optimizer=SGD()),
            Segment(name="vec", dim=3, optimizer=Adam()),
        ),
    ),
    TableSpec(name="item", segments=(Segment(dim=2, optimizer=SGD()),)),
    TableSpec(name="half", segments=(Segment(dim=5, optimizer=Adagrad()),), dtype="bfloat16"),
    TableSpec(name="empty", segments=(Segment(dim=2),)),
)


class TypedShard(ReferenceShard):
    """Exports weights in the row dtype, as real shards do; the reference computes in one."""

    def export(self, table: int) -> RowChunk:
        chunk = super().export(table)
        weights = chunk.weights.to(getattr(torch, self.specs[table].dtype))
        return replace(chunk, weights=weights)


def fresh(specs: tuple[TableSpec, ...] = SPECS) -> Shard:
    return TypedShard(specs, seed=3, dtype=torch.float32)


def filled() -> Shard:
    shard = fresh()
    splits = torch.tensor([0, 40, 45, 48])
    groups = IdGroups(torch.arange(48) * 7 - 60, splits, torch.tensor([0, 1, 2], dtype=torch.int32))
    grads = [torch.ones(40, 4), torch.ones(5, 2), torch.ones(3, 5)]
    shard.apply_ids(groups, grads, ctx=StepContext(event_time_s=1234))
    return shard


def saved(path: Path) -> tuple[Shard, nn.Module]:
    torch.manual_seed(0)
    shard, module = filled(), nn.Linear(3, 2)
    checkpoint.save(path, shards={"model": shard}, modules={"model": module}, step=17)
    return shard, module


def equal(a: RowChunk, b: RowChunk) -> bool:
    fields = ("ids", "weights", "state", "last_seen_s", "counts")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in fields)


def test_everything_comes_back(tmp_path: Path):
    shard, module = saved(tmp_path / "model")
    other, twin = fresh(), nn.Linear(3, 2)
    manifest = checkpoint.load(tmp_path / "model", shards={"model": other}, modules={"model": twin})
    assert manifest.step == 17
    assert [other.size(k) for k in range(4)] == [40, 5, 3, 0]
    assert all(equal(shard.export(k), other.export(k)) for k in range(4))
    assert torch.equal(module.weight, twin.weight)


def test_row_files_do_not_show_the_order_of_arrival(tmp_path: Path):
    first, second = filled(), fresh()
    for k in range(3):
        chunk = first.export(k)
        back = torch.arange(len(chunk.ids) - 1, -1, -1)
        parts = ("ids", "weights", "state", "versions", "last_seen_s", "counts")
        second.load(k, RowChunk(chunk.table, *(getattr(chunk, name)[back] for name in parts)))
    sums = []
    for name, shard in (("a", first), ("b", second)):
        manifest = checkpoint.save(tmp_path / name, shards={"m": shard}, modules={}, step=0)
        sums.append([row.sha256 for row in manifest.row_files])
    assert sums[0] == sums[1]


def test_the_manifest_comes_last_and_names_every_file(tmp_path: Path):
    saved(tmp_path)
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert files == {"manifest.json", "dense.pt", "counters.pt"} | {
        r["file"] for r in manifest["row_files"]
    }
    newest = max(tmp_path.rglob("*"), key=lambda p: p.stat().st_mtime_ns if p.is_file() else 0)
    assert newest.name == "manifest.json"


def test_a_checkpoint_is_not_overwritten(tmp_path: Path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        saved(tmp_path)


def load_into(path: Path, specs: tuple[TableSpec, ...] = SPECS, width: int = 2) -> Shard:
    shard = fresh(specs)
    try:
        checkpoint.load(path, shards={"model": shard}, modules={"model": nn.Linear(3, width)})
    finally:
        assert all(shard.size(k) == 0 for k in range(len(specs)))
    return shard


def test_no_manifest_is_no_checkpoint(tmp_path: Path):
    saved(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_into(tmp_path)


@pytest.mark.parametrize("file", ["dense.pt", "tables/model.item.arrow"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damaged_files_are_named(tmp_path: Path, file: str, damage: str):
    saved(tmp_path)
    path = tmp_path / file
    content = path.read_bytes()
    changed = content[:-8] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(changed)
    if damage == "missing":
        path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        load_into(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}'])
def test_a_broken_manifest_is_named(tmp_path: Path, text: str):
    saved(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_into(tmp_path)


def test_a_later_schema_is_refused(tmp_path: Path):
    saved(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(CheckpointError, match="99"):
        load_into(tmp_path)


def test_other_tables_are_refused(tmp_path: Path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="model/item"):
        load_into(tmp_path, SPECS[:1])
    wider = TableSpec(name="item", segments=(Segment(dim=9, optimizer=SGD()),))
    with pytest.raises(CheckpointError, match="'item'"):
        load_into(tmp_path, (SPECS[0], wider, *SPECS[2:]))


def test_other_dense_shapes_are_refused(tmp_path: Path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="dense weights of 'model'"):
        load_into(tmp_path, width=5)
