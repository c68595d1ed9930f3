"""Rows and counters of a table put together again from what its hosted slices have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.placement import Hosted, hash_ids, sort_key
from shoal.table.shard import Entry, RowChunk, TableStats
from shoal.table.spec import TableSpec

__all__ = ["joined_chunk", "joined_entry", "joined_state", "joined_stats", "slice_rates"]


def joined_entry(spec: TableSpec, found: Sequence[tuple[Hosted, Entry]]) -> Entry | None:
    """One row of its column slices; None unless all are there.

    Version and last-seen are the latest of any slice's, the count the largest.
    """
    parts = sorted(found, key=lambda part: part[0].start)
    if sum(one.stop - one.start for one, _ in parts) != spec.dim:
        return None
    entries = [entry for _, entry in parts]
    states = [(one, entry.state) for one, entry in parts]
    return Entry(
        entries[0].id,
        torch.cat([entry.weights for entry in entries]),
        joined_state(spec, states),
        max(entry.version for entry in entries),
        max(entry.last_seen_s for entry in entries),
        max(entry.count for entry in entries),
    )


def joined_state(spec: TableSpec, parts: Sequence[tuple[Hosted, Tensor]]) -> Tensor:
    """Optimizer state [..., S] of a whole row, of the states of its column slices.

    A segment's state is runs as long as the segment, then single floats; where it is cut, each
    run is cut with it and the single floats are the same in every slice.
    """
    pieces = []
    at = [0] * len(parts)
    first = 0
    for segment in spec.segments:
        runs: list[list[Tensor]] = []
        rest: Tensor | None = None
        for i, (one, state) in enumerate(parts):
            width = min(one.stop, first + segment.dim) - max(one.start, first)
            if width <= 0:
                continue
            whole = segment.optimizer.state_width(width)
            own = state[..., at[i] : at[i] + whole]
            at[i] += whole
            if width == segment.dim:
                runs, rest = [[own]], None
                break
            many = segment.optimizer.state_width(2) - segment.optimizer.state_width(1)
            runs = runs or [[] for _ in range(many)]
            for k, run in enumerate(runs):
                run.append(own[..., k * width : (k + 1) * width])
            rest = own[..., many * width :]
        pieces += [torch.cat(run, dim=-1) for run in runs]
        pieces += [] if rest is None else [rest]
        first += segment.dim
    return torch.cat(pieces, dim=-1)


def joined_stats(spec: TableSpec, found: Sequence[tuple[Hosted, int, TableStats]]) -> TableStats:
    """Counters of a whole table, of (slice, rank, counters).

    Rows are counted in the leftmost slice, replicas once; bytes are all that is allocated.
    """
    counted = [
        stats
        for one, rank, stats in found
        if one.start == 0 and (not one.replicated or rank == one.ranks[0])
    ]
    everything = [stats for _, _, stats in found]
    return TableStats(
        name=spec.name,
        rows=sum(stats.rows for stats in counted),
        bytes_total=sum(stats.bytes_total for stats in everything),
        bytes_weights=sum(stats.bytes_weights for stats in everything),
        bytes_state=sum(stats.bytes_state for stats in everything),
        bytes_metadata=sum(stats.bytes_metadata for stats in everything),
        bytes_index=sum(stats.bytes_index for stats in everything),
        index_load=max(stats.index_load for stats in everything),
        inserted=sum(stats.inserted for stats in counted),
        refused=sum(stats.refused for stats in counted),
        evicted=sum(stats.evicted for stats in counted),
        nonfinite_skipped=sum(stats.nonfinite_skipped for stats in counted),
        on_host=any(stats.on_host for stats in everything),
    )


def joined_chunk(spec: TableSpec, found: Sequence[tuple[Hosted, RowChunk]]) -> RowChunk:
    """All rows of a table, ordered by hash, of the chunks of its slices on all ranks."""
    by_start: dict[int, list[tuple[Hosted, RowChunk]]] = {}
    for one, chunk in found:
        by_start.setdefault(one.start, []).append((one, chunk))
    columns = []
    for start in sorted(by_start):
        chunks = [chunk for _, chunk in by_start[start]]
        ids = torch.cat([chunk.ids for chunk in chunks])
        order = sort_key(hash_ids(spec.hash_name, ids)).argsort()
        columns.append((by_start[start][0][0], chunks, order))
    return RowChunk(
        spec.name,
        _joined("ids", columns)[0],
        torch.cat(_joined("weights", columns), dim=1),
        joined_state(
            spec,
            [
                (one, part)
                for (one, _, _), part in zip(columns, _joined("state", columns), strict=True)
            ],
        ),
        torch.stack(_joined("versions", columns)).amax(dim=0),
        torch.stack(_joined("last_seen_s", columns)).amax(dim=0),
        torch.stack(_joined("counts", columns)).amax(dim=0),
    )


def _joined(name: str, columns: Sequence[tuple[Hosted, list[RowChunk], Tensor]]) -> list[Tensor]:
    """A field of each column slice, its ranks' rows together, in order of hash."""
    return [
        torch.cat([getattr(chunk, name) for chunk in chunks])[order] for _, chunks, order in columns
    ]


def slice_rates(spec: TableSpec, hosted: Hosted, rates: Sequence[float]) -> tuple[float, ...]:
    """Learning rates of a slice: of a table's, those of the segments it has columns of."""
    first, kept = 0, []
    for segment, rate in zip(spec.segments, rates, strict=True):
        if max(first, hosted.start) < min(first + segment.dim, hosted.stop):
            kept.append(rate)
        first += segment.dim
    return tuple(kept)
