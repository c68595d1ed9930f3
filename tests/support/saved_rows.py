"""Handwritten rows, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.checkpoint import dense, job_state
from shoal.checkpoint.manifest import (
    SCHEMA,
    Manifest,
    Parent,
    SavedFile,
    SavedSegment,
    SavedTable,
    commit,
)
from shoal.checkpoint.row_files import RowFileWriter, RowLayout, sketch_path, write_whole
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import folder_name
from shoal.checkpoint.writing_plan import TableRows, split
from shoal.placement import hash_ids, sort_key
from shoal.table.values import RowChunk

FIELDS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


def by_hash(table: str, ids: Tensor) -> Tensor:
    """The ids in the order of files."""
    return ids[sort_key(hash_ids(table, ids)).argsort()]


def rows_of(
    table: str, ids: Tensor, layout: RowLayout, *, salt: int = 0, key: str | None = None
) -> RowChunk:
    """Rows whose values follow from their id and the salt, ordered by hash."""
    ids = by_hash(table, ids)
    seed = (ids % 1000 + salt).double()
    weights, state = layout.fields[4:]
    dim = weights.width
    columns = torch.arange(dim + state.width).double()
    values = (seed[:, None] * 0.5 + columns[None, :] * 0.25).float()
    return RowChunk(
        table=key or table,
        ids=ids,
        weights=values[:, :dim].to(weights.dtype).contiguous(),
        state=values[:, dim:].to(state.dtype).contiguous(),
        versions=ids % 7 + 1 + salt,
        last_seen_s=ids % 100 + salt,
        counts=ids % 5 + 1,
    )


def same(a: RowChunk, b: RowChunk) -> bool:
    """Equal in every field, bit for bit."""
    return all(
        getattr(a, name).dtype == getattr(b, name).dtype
        and torch.equal(getattr(a, name), getattr(b, name))
        for name in FIELDS
    )


def joined(chunks: list[RowChunk]) -> RowChunk:
    """All rows in one."""
    parts: Mapping[str, Tensor] = {
        name: torch.cat([getattr(chunk, name) for chunk in chunks]) for name in FIELDS
    }
    return RowChunk(table=chunks[0].table, **parts)


def histogram(table: str, ids: Tensor, bits: int) -> Tensor:
    """Ids by the top bits of their hash."""
    keys = sort_key(hash_ids(table, ids))
    cells = (keys >> (64 - bits)) + (1 << (bits - 1)) if bits else keys * 0
    return torch.bincount(cells, minlength=1 << bits)


def between(table: str, ids: Tensor, start: int, stop: int) -> Tensor:
    """bool: which hashes are in the range."""
    hashes = [h % (1 << 64) for h in hash_ids(table, ids).tolist()]
    return torch.tensor([start <= h < stop for h in hashes], dtype=torch.bool)


SKETCHED = SavedTable(
    collection="m",
    name="sketched",
    hash_name="sketched",
    dtype="float32",
    segments=(SavedSegment(name="all", dim=1, state_width=0, optimizer="sgd"),),
    rows=0,
    deleted=0,
    admission="sketch 8x2",
)
"""Nothing but what its admission has counted."""


@dataclass
class HandTable:
    """A table to be saved: rows (`rows_of`) and deleted ids, ordered by hash."""

    name: str
    layout: RowLayout
    rows: RowChunk
    deleted: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    admission: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def key(self) -> str:
        return f"m/{self.name}"

    def saved(self) -> SavedTable:
        weights, state = self.layout.fields[4:]
        segment = SavedSegment(
            name="all", dim=weights.width, state_width=state.width, optimizer="adagrad"
        )
        return SavedTable(
            collection="m",
            name=self.name,
            hash_name=self.name,
            dtype=str(weights.dtype).removeprefix("torch."),
            segments=(segment,),
            rows=len(self.rows.ids),
            deleted=len(self.deleted),
            admission="exact" if len(self.admission) else None,
        )


def save_by_hand(
    root: Storage,
    tables: Sequence[HandTable],
    *,
    step: int,
    parent: Manifest | None = None,
    file_bytes: int = 64 << 20,
    small_bytes: int = 8 << 20,
    extra: bool = False,
) -> Manifest:
    """A committed checkpoint of these rows; a delta with a parent."""
    kind = "delta" if parent else "full"
    folder = root.child(folder_name(step, kind))
    files: list[SavedFile] = []
    by_key = {table.key: table for table in tables}

    def plans(what: str):
        counted = []
        for t in tables:
            ids = {"rows": t.rows.ids, "deleted": t.deleted, "admission": t.admission}[what]
            layout = t.layout if what == "rows" else RowLayout.ids(counted=what == "admission")
            counted.append(TableRows(t.key, layout, histogram(t.name, ids, 8)))
        return split(counted, what, file_bytes=file_bytes, small_bytes=small_bytes)

    for plan in plans("rows"):
        layout = by_key[plan.tables[0]].layout
        writer = RowFileWriter(folder, plan.path, layout, plan.tables, (plan.start, plan.stop))
        for k, key in enumerate(plan.tables):
            rows = by_key[key].rows
            inside = between(by_key[key].name, rows.ids, plan.start, plan.stop)
            parts = {name: getattr(rows, name)[inside] for name in FIELDS}
            writer.add(k, RowChunk(table=key, **parts).columns)
        files.append(writer.close())
    for what in ("deleted", "admission"):
        for plan in plans(what):
            ends = (plan.start, plan.stop)
            writer = RowFileWriter(folder, plan.path, plan.layout, plan.tables, ends, what)  # type: ignore[arg-type]
            for k, key in enumerate(plan.tables):
                ids = by_key[key].deleted if what == "deleted" else by_key[key].admission
                ids = ids[between(by_key[key].name, ids, *ends)]
                counts = () if what == "deleted" else (ids.abs() % 9 + 1,)
                writer.add(k, (ids, *counts))
            files.append(writer.close())
    if extra:
        path = sketch_path("m", SKETCHED.name)
        files.append(write_whole(folder, path, "sketch", b"cell" * 16, [SKETCHED.key]))
        files += dense.write(dense.capture({"net": nn.BatchNorm1d(2)}, {}), folder)
        files.append(job_state.write(folder, {"step": step}, [{}]))
    manifest = Manifest(
        schema=SCHEMA,
        id=f"{step:031x}{'d' if parent else 'f'}",
        kind=kind,  # type: ignore[arg-type]
        step=step,
        position=step * 10,
        version=step + 10,
        parent=Parent(folder=folder_name(parent.step, parent.kind), id=parent.id)
        if parent
        else None,
        seed=3,
        last_steps={"m": step},
        world_size=1,
        created_s=1_700_000_000,
        packages={"shoal": "0"},
        tables=(*(table.saved() for table in tables), *([SKETCHED] if extra else [])),
        modules=(),
        optimizers=(),
        files=tuple(files),
    )
    commit(folder, manifest)
    return manifest
