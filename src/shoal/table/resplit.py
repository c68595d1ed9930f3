"""Rows of whole tables handed to the sub-tables that a placement puts on a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.placement import Hosted, Placement, hash_ids, owners
from shoal.table.hosting import hosted_spec
from shoal.table.shard import AdmissionState, RowChunk, Shard
from shoal.table.spec import TableSpec

__all__ = ["hosted_rows", "hosted_sights", "move_in"]


def move_in(whole: Shard, part: Shard, placement: Placement, rank: int) -> None:
    """Load a rank's shard with its share of the rows, state and sights of a shard of whole tables.

    part: hosts `hosted_specs(whole.specs, placement, rank)`.
    """
    indices = {spec.name: k for k, spec in enumerate(part.specs)}
    for k, spec in enumerate(whole.specs):
        chunk, sights = whole.export(k), whole.admission_state(k)
        for hosted in placement.of(spec.name):
            if rank in hosted.ranks:
                at = indices[hosted_spec(spec, hosted).name]
                part.load(at, hosted_rows(spec, hosted, rank, chunk))
                part.load_admission_state(at, hosted_sights(spec, hosted, rank, sights))
    part.last_step = whole.last_step


def hosted_rows(spec: TableSpec, hosted: Hosted, rank: int, chunk: RowChunk) -> RowChunk:
    """The rows of a chunk of a whole table that a rank holds, their columns and state only."""
    kept_R = _kept(spec, hosted, rank, chunk.ids)
    state_RS = chunk.state[kept_R]
    columns = torch.tensor(_state_columns(spec, hosted), dtype=torch.int64, device="cpu")
    return RowChunk(
        table=hosted_spec(spec, hosted).name,
        ids=chunk.ids[kept_R],
        weights=chunk.weights[kept_R, hosted.start : hosted.stop].contiguous(),
        state=state_RS[:, columns].contiguous(),
        versions=chunk.versions[kept_R],
        last_seen_s=chunk.last_seen_s[kept_R],
        counts=chunk.counts[kept_R],
    )


def hosted_sights(
    spec: TableSpec, hosted: Hosted, rank: int, sights: AdmissionState
) -> AdmissionState:
    """A rank's sights of ids without rows. A sketch, which cannot be split, goes to every rank."""
    kept_P = _kept(spec, hosted, rank, sights.ids)
    return AdmissionState(sights.ids[kept_P], sights.counts[kept_P], sights.cells)


def _kept(spec: TableSpec, hosted: Hosted, rank: int, ids_R: Tensor) -> Tensor:
    if hosted.replicated:
        return torch.ones_like(ids_R, dtype=torch.bool)
    return owners(hosted, hash_ids(spec.hash_name, ids_R)) == rank


def _state_columns(spec: TableSpec, hosted: Hosted) -> list[int]:
    """Columns of the whole table's state that go with the columns of a slice, segment by segment.

    A segment's state is blocks of one number per column, then numbers for the segment. Only
    segments with an element-wise rule, whose state is so in each part, may be cut.
    """
    columns: list[int] = []
    first = at = 0
    for segment in spec.segments:
        rule, dim = segment.optimizer, segment.dim
        width = rule.state_width(dim)
        start, stop = max(first, hosted.start) - first, min(first + dim, hosted.stop) - first
        if start < stop:
            blocks = rule.state_width(1) - rule.state_width(0) if stop - start < dim else 0
            if stop - start == dim:
                columns.extend(range(at, at + width))
            else:
                for block in range(blocks):
                    columns.extend(range(at + block * dim + start, at + block * dim + stop))
                columns.extend(range(at + blocks * dim, at + width))
        first, at = first + dim, at + width
    return columns
