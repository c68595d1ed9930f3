"""Checkpoints of tables written file by file, as a save of several ranks would leave them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint import dense, job_state
from shoal.checkpoint.manifest import SCHEMA, Manifest, Parent, SavedFile, commit
from shoal.checkpoint.row_files import RowFileWriter, RowLayout, write_whole
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import folder_name
from shoal.checkpoint.table_match import saved_table
from shoal.placement import hash_ids, sort_key
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, RowChunk

__all__ = ["HandTable", "chunk_where", "write_by_hand"]

HASHES = 1 << 64


@dataclass(eq=False)
class HandTable:
    """A table to save: `cuts` are the hashes at which its rows are split into files."""

    spec: TableSpec
    rows: RowChunk
    deleted: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    admission: AdmissionState | None = None
    cuts: Sequence[int] = ()


def chunk_where(chunk: RowChunk, kept_R: Tensor) -> RowChunk:
    parts = {
        one.name: getattr(chunk, one.name)[kept_R]
        for one in dataclasses.fields(chunk)
        if one.name != "table"
    }
    return RowChunk(table=chunk.table, **parts)


def write_by_hand(
    root: Storage,
    tables: Mapping[str, Sequence[HandTable]],
    *,
    step: int = 1,
    version: int = 1,
    parent: Parent | None = None,
    grouped: Sequence[str] = (),
    modules: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    state: Mapping[str, Any] | None = None,
    rank_states: Sequence[Mapping[str, Any]] = ({},),
    last_steps: Mapping[str, int] | None = None,
) -> Parent:
    """Write and commit one checkpoint; what a delta of it names. `grouped` keys share one file."""
    kind: Any = "full" if parent is None else "delta"
    name = folder_name(step, kind)
    folder = root.child(name)
    by_key = {
        f"{group}/{one.spec.name}": (group, one) for group, all_ in tables.items() for one in all_
    }
    files: list[SavedFile] = []
    for key, (_, table) in by_key.items():
        if key not in grouped:
            files += _row_files(folder, key, table, len(files))
        files += _other_files(folder, key, table, len(files))
    if grouped:
        files.append(_grouped_file(folder, {key: by_key[key][1] for key in grouped}))
    captured = dense.capture(modules or {}, optimizers or {})
    files += dense.write(captured, folder)
    files.append(job_state.write(folder, state or {}, rank_states))
    manifest = Manifest(
        schema=SCHEMA,
        id=f"{step:032x}",
        kind=kind,
        step=step,
        position=10 * step,
        version=version,
        parent=parent,
        seed=0,
        last_steps=dict(last_steps or {}),
        world_size=len(rank_states),
        created_s=0,
        packages={},
        tables=tuple(
            saved_table(group, one.spec, rows=one.rows.ids.numel(), deleted=one.deleted.numel())
            for group, one in by_key.values()
        ),
        modules=captured.modules,
        optimizers=captured.optimizers,
        files=tuple(files),
    )
    commit(folder, manifest)
    return Parent(folder=name, id=manifest.id)


def _layout(table: HandTable) -> RowLayout:
    return RowLayout.rows(table.spec.dim, table.spec.state_width, table.spec.dtype)


def _ordered(table: HandTable, ids: Tensor) -> Tensor:
    return torch.argsort(sort_key(hash_ids(table.spec.hash_name, ids)))


def _row_files(folder: Storage, key: str, table: HandTable, number: int) -> list[SavedFile]:
    files = []
    hashes = [h % HASHES for h in hash_ids(table.spec.hash_name, table.rows.ids).tolist()]
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    edges = [0, *table.cuts, HASHES]
    for start, stop in pairwise(edges):
        inside = [k for k in order if start <= hashes[k] < stop]
        if inside:
            path = f"rows/{number + len(files):05d}.arrow"
            writer = RowFileWriter(folder, path, _layout(table), [key], (start, stop))
            writer.add(0, chunk_where(table.rows, torch.tensor(inside)).columns)
            files.append(writer.close())
    return files


def _other_files(folder: Storage, key: str, table: HandTable, number: int) -> list[SavedFile]:
    files = []
    if table.deleted.numel():
        path, layout = f"deleted/{number:05d}.arrow", RowLayout.ids(counted=False)
        deleted = RowFileWriter(folder, path, layout, [key], kind="deleted")
        deleted.add(0, (table.deleted[_ordered(table, table.deleted)],))
        files.append(deleted.close())
    if table.admission is not None and table.admission.cells:
        path = f"admission/{number:05d}.sketch"
        files.append(write_whole(folder, path, "sketch", table.admission.cells, [key]))
    elif table.admission is not None:
        order = _ordered(table, table.admission.ids)
        path, layout = f"admission/{number:05d}.arrow", RowLayout.ids(counted=True)
        admission = RowFileWriter(folder, path, layout, [key], kind="admission")
        admission.add(0, (table.admission.ids[order], table.admission.counts[order]))
        files.append(admission.close())
    return files


def _grouped_file(folder: Storage, tables: Mapping[str, HandTable]) -> SavedFile:
    layout = _layout(next(iter(tables.values())))
    writer = RowFileWriter(folder, "rows/grouped.arrow", layout, list(tables))
    for index, table in enumerate(tables.values()):
        writer.add(index, chunk_where(table.rows, _ordered(table, table.rows.ids)).columns)
    return writer.close()
