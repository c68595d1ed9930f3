"""The sub-tables that a placement puts on a rank, and whole tables split and joined for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError, known_name
from shoal.placement import (
    BUCKETS,
    Hosted,
    Placement,
    hash_ids,
    owners,
    rank_buckets,
    sharded,
    sort_key,
)
from shoal.rules.admission import sketch_block
from shoal.table.shard import Shard
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, Entry, RowChunk, TableStats

_META = "versions", "last_seen_s", "counts"


@dataclass(frozen=True, slots=True, eq=False)
class HostedTables:
    """Whole tables, and this rank's part of them.

    Args:
        specs: the whole tables, in the same order on every rank.
        shard: this rank's; hosts `specs`, or `hosted_specs(specs, placement, rank)`.
        placement: what lies where; None: all on this one rank.
        resume: gets the optimizer steps that the rows have behind them when they are loaded.
    """

    specs: tuple[TableSpec, ...]
    shard: Shard
    placement: Placement | None = None
    resume: Callable[[int], None] | None = None


def hosted_spec(spec: TableSpec, hosted: Hosted) -> TableSpec:
    """The table that each of `hosted.ranks` keeps for these columns of `spec`.

    It has the bits of the whole table's columns: hashes, initial values and rounding are keyed by
    the whole table's name and column numbers. Segments keep their names, so learning rates bind
    as before. `capacity_rows` and `expected_rows` are divided over the row shares, rounded up;
    admission and expiry stay. A slice is named "table[start:stop]".

    Raises:
        ConfigError: another table's slice, columns that the table lacks, or a split inside a
            segment whose rule reads more than its own column.
    """
    _check_slice(spec, hosted)
    whole = hosted.start == 0 and hosted.stop == spec.dim
    segments = []
    for first, last, segment in spec.spans:
        dim = min(last, hosted.stop) - max(first, hosted.start)
        if dim > 0:
            kept = segment if dim == segment.dim else dataclasses.replace(segment, dim=dim)
            segments.append(kept)
    return dataclasses.replace(
        spec,
        name=spec.name if whole else f"{spec.name}[{hosted.start}:{hosted.stop}]",
        segments=tuple(segments),
        capacity_rows=_share(spec.capacity_rows, hosted.shares),
        expected_rows=_share(spec.expected_rows, hosted.shares) or 0,
        hashed_as=spec.hashed_as if whole else spec.hash_name,
        first_column=spec.first_column + hosted.start,
    )


def hosted_specs(
    specs: Sequence[TableSpec], placement: Placement, rank: int
) -> tuple[TableSpec, ...]:
    """The tables that a rank's shard holds: those of `specs` in order, slices left to right.

    Raises:
        ConfigError: the placement does not fit the tables (`check_placement`), or no such rank.
    """
    check_placement(specs, placement)
    if not 0 <= rank < placement.world_size:
        allowed = f"0..{placement.world_size - 1}"
        raise ConfigError("rank of a placement", rank, allowed, "Ranks count from 0.")
    return tuple(
        hosted_spec(spec, one)
        for spec in specs
        for one in placement.of(spec.name)
        if rank in one.ranks
    )


def check_placement(specs: Sequence[TableSpec], placement: Placement) -> None:
    """Check that a placement places just these tables, each column once, no coupled range split.

    Any split of a segment with an element-wise rule is legal.

    Raises:
        UnknownName: it places a table that is not there.
        ConfigError: a table is not placed, columns are missing or too many, or a split goes through
            a range that a rule couples.
    """
    names = {spec.name for spec in specs}
    for table in placement.tables():
        known_name("table of a placement", table, names)
    for spec in specs:
        slices = placement.of(spec.name)
        stop = slices[-1].stop if slices else 0
        if stop != spec.dim:
            remedy = "Place each column of each table exactly once."
            what = f"columns of table {spec.name!r} in a placement"
            raise ConfigError(what, f"{stop} of them", f"all {spec.dim}", remedy)
        for one in slices:
            _check_slice(spec, one)
            _check_sketch(spec, one)


def plan_placement(
    specs: Sequence[TableSpec],
    world_size: int,
    *,
    default: str = "row_wise",
    kinds: Mapping[str, str] | None = None,
    local_world_size: int | None = None,
) -> Placement:
    """A placement that gives each table the sharding type named for it.

    Tables of one type take ranks (and nodes) in turn, starting where least of a row's bytes lie,
    by expected rows. Column slices are even and 4 columns or wider where the table has as many.

    Args:
        specs: the tables; the same order on every rank.
        world_size: ranks W.
        default: the type of tables that `kinds` does not name.
        kinds: table name -> "row_wise", "table_wise", "column_wise", "table_row_wise", "grid" or
            "data_parallel".
        local_world_size: ranks of a node; None takes the job for one node.

    Raises:
        ConfigError: no such type, table or node size, or a table that the type would split wrongly.
    """
    kinds = dict(kinds or {})
    names = [spec.name for spec in specs]
    for table in kinds:
        known_name("table of a placement", table, names)
    nodes = _nodes(world_size, local_world_size)
    load = [0] * world_size
    hosted: list[Hosted] = []
    for spec in specs:
        kind = kinds.get(spec.name, default)
        placed = sharded(kind, spec.name, spec.dim, nodes, load)
        for one in placed:
            for rank in one.ranks:
                load[rank] += _weight(spec, one) // one.shares
        hosted.extend(placed)
    placement = Placement(world_size, tuple(hosted))
    check_placement(specs, placement)
    return placement


def _nodes(world_size: int, local_world_size: int | None) -> list[tuple[int, ...]]:
    """Ranks of each node, in order; the last may have fewer."""
    size = world_size if local_world_size is None else local_world_size
    for what, value in (("world_size", world_size), ("local_world_size", size)):
        if value < 1:
            raise ConfigError(f"{what} of a placement", value, "1 or more", "Count the ranks.")
    return [
        tuple(range(first, min(first + size, world_size))) for first in range(0, world_size, size)
    ]


def _weight(spec: TableSpec, hosted: Hosted) -> int:
    """Floats of the rows of a slice, state as if spread evenly over columns."""
    rows = spec.expected_rows or spec.capacity_rows or 1
    return rows * (spec.dim + spec.state_width) * (hosted.stop - hosted.start)


def _check_slice(spec: TableSpec, hosted: Hosted) -> None:
    columns = f"[{hosted.start}, {hosted.stop})"
    if hosted.table != spec.name or hosted.stop > spec.dim:
        what = f"columns of table {spec.name!r} in a placement"
        got = f"{columns} of table {hosted.table!r}"
        raise ConfigError(what, got, f"columns of 0..{spec.dim}", "Place each table by its name.")
    for first, last, segment in spec.spans:
        coupling = segment.optimizer.coupling
        if coupling == "row":
            first, last = 0, spec.dim
        if coupling != "element" and any(first < cut < last for cut in (hosted.start, hosted.stop)):
            rule = type(getattr(segment.optimizer, "inner", segment.optimizer)).__name__
            raise ConfigError(
                f"column slice of table {spec.name!r}",
                f"{columns}, which splits columns {first}..{last - 1} of segment {segment.name!r}",
                f"splits outside them: a step of {rule} reads the whole {coupling}",
                "Split between segments, split the table by rows, or use an element-wise rule.",
            )


def _check_sketch(spec: TableSpec, hosted: Hosted) -> None:
    """Refuse shares of buckets that would count in cells of each other's."""
    if spec.admission is None or spec.admission.counter == "exact":
        return
    width = spec.admission.sketch_width
    cells = sketch_block(width) * BUCKETS
    starts = [rank_buckets(share, hosted.shares)[0] for share in range(hosted.shares)]
    if any(start * width % cells for start in starts):
        raise ConfigError(
            f"sketch_width of table {spec.name!r} with rows on {hosted.shares} ranks",
            width,
            "2^20 or more; on 2^k ranks, 2^(k + 4) or more",
            "Widen the sketch, count exactly, or keep all rows on one rank (table_wise).",
        )


def _share(rows: int | None, shares: int) -> int | None:
    return None if rows is None else -(-rows // shares)


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

    See `_state_columns`; what a split segment has for all of its columns is the same in every
    slice.
    """
    like = parts[0][1]
    whole = like.new_zeros((*like.shape[:-1], spec.state_width))
    for one, state in parts:
        whole[..., _state_columns(spec, one)] = state
    return whole


def joined_stats(spec: TableSpec, found: Sequence[tuple[Hosted, int, TableStats]]) -> TableStats:
    """Counters of a whole table, of (slice, rank, counters).

    Rows are counted in the leftmost slice, replicas once; bytes are all that is allocated.
    """
    counted = [stats for one, rank, stats in found if one.answers(rank)]
    everything = [stats for _, _, stats in found]
    once = ("rows", "inserted", "refused", "evicted", "nonfinite_skipped")
    numbers: dict[str, Any] = {
        field.name: sum(
            getattr(stats, field.name) for stats in (counted if field.name in once else everything)
        )
        for field in dataclasses.fields(TableStats)
        if field.name != "name"
    }
    numbers["index_load"] = max(stats.index_load for stats in everything)
    numbers["on_host"] = any(stats.on_host for stats in everything)
    return TableStats(name=spec.name, **numbers)


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
    states = zip([one for one, _, _ in columns], _joined("state", columns), strict=True)
    latest = (torch.stack(_joined(name, columns)).amax(dim=0) for name in _META)
    return RowChunk(
        spec.name,
        _joined("ids", columns)[0],
        torch.cat(_joined("weights", columns), dim=1),
        joined_state(spec, list(states)),
        *latest,
    )


def _joined(name: str, columns: Sequence[tuple[Hosted, list[RowChunk], Tensor]]) -> list[Tensor]:
    """A field of each column slice, its ranks' rows together, in order of hash."""
    return [
        torch.cat([getattr(chunk, name) for chunk in chunks])[order] for _, chunks, order in columns
    ]


def slice_rates(spec: TableSpec, hosted: Hosted, rates: Sequence[float]) -> tuple[float, ...]:
    """Learning rates of a slice: of a table's, those of the segments it has columns of."""
    return tuple(
        rate
        for (first, last, _), rate in zip(spec.spans, rates, strict=True)
        if max(first, hosted.start) < min(last, hosted.stop)
    )


def move_in(whole: Shard, part: Shard, placement: Placement, rank: int) -> None:
    """Load a rank's shard with its share of a shard of whole tables: rows, state, occurrences.

    part: hosts `hosted_specs(whole.specs, placement, rank)`.
    """
    indices = {spec.name: k for k, spec in enumerate(part.specs)}
    for k, spec in enumerate(whole.specs):
        chunk, admission = whole.export(k), whole.admission_state(k)
        for hosted in placement.of(spec.name):
            if rank in hosted.ranks:
                at = indices[hosted_spec(spec, hosted).name]
                part.load(at, hosted_rows(spec, hosted, rank, chunk))
                part.load_admission_state(at, hosted_admission(spec, hosted, rank, admission))
    part.last_step = whole.last_step


def hosted_rows(spec: TableSpec, hosted: Hosted, rank: int, chunk: RowChunk) -> RowChunk:
    """The rows of a chunk of a whole table that a rank holds, their columns and state only."""
    kept_R = _kept(spec, hosted, rank, chunk.ids)
    columns = torch.tensor(_state_columns(spec, hosted), dtype=torch.int64, device="cpu")
    weights = chunk.weights[kept_R, hosted.start : hosted.stop]
    if spec.dtype == "int8":  # behind the codes is the row's scale
        weights = torch.cat([weights, chunk.weights[kept_R, spec.dim :]], dim=1)
    state = chunk.state[kept_R][:, columns].contiguous()
    name = hosted_spec(spec, hosted).name
    meta = (getattr(chunk, one)[kept_R] for one in _META)
    return RowChunk(name, chunk.ids[kept_R], weights.contiguous(), state, *meta)


def hosted_admission(
    spec: TableSpec, hosted: Hosted, rank: int, admission: AdmissionState
) -> AdmissionState:
    """A rank's counts of ids without rows. Every rank gets a whole sketch."""
    kept_P = _kept(spec, hosted, rank, admission.ids)
    return AdmissionState(admission.ids[kept_P], admission.counts[kept_P], admission.cells)


def _kept(spec: TableSpec, hosted: Hosted, rank: int, ids_R: Tensor) -> Tensor:
    if hosted.replicated:
        return torch.ones_like(ids_R, dtype=torch.bool)
    return owners(hosted, hash_ids(spec.hash_name, ids_R)) == rank


def _state_columns(spec: TableSpec, hosted: Hosted) -> list[int]:
    """Columns of the whole table's state that go with the columns of a slice, segment by segment.

    A segment's state is blocks of one number per column, then numbers for the segment. Only
    segments with an element-wise rule, whose state is so in each part, may be split.
    """
    columns: list[int] = []
    at = 0
    for first, last, segment in spec.spans:
        start, stop = max(first, hosted.start) - first, min(last, hosted.stop) - first
        dim, width = segment.dim, segment.state_width
        if stop - start == dim:
            columns.extend(range(at, at + width))
        elif start < stop:
            blocks = segment.optimizer.state_width(1) - segment.optimizer.state_width(0)
            for block in range(blocks):
                columns.extend(range(at + block * dim + start, at + block * dim + stop))
            columns.extend(range(at + blocks * dim, at + width))
        at += width
    return columns
