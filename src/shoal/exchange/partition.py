"""Ids of a request made distinct, grouped by owner, in buffers; what reaches the owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from shoal.comm.collectives import Part, Sizes
from shoal.ids import salt, to_signed
from shoal.kernels.launch import staged
from shoal.ops.reorder import fused_reorder, fused_reorder_into
from shoal.placement import Hosted, Placement
from shoal.ragged import KeyedRagged
from shoal.table.hosting import hosted_spec
from shoal.table.rows import real_dtype
from shoal.table.shard import IdGroups
from shoal.table.spec import TableSpec

_ABSENT = -1


@dataclass(frozen=True)
class HostedTable:
    """Columns of a table that a request reads.

    Args:
        table: index of the whole table among the job's specs.
        hosted: where its rows are.
        hash_name: what its ids are hashed as.
        local: its index in this rank's shard, -1 where the shard has none of it.
        features: the request's features that read it, rising.
    """

    table: int
    hosted: Hosted
    hash_name: str
    local: int
    features: tuple[int, ...]

    @property
    def dim(self) -> int:
        """Floats of a row."""
        return self.hosted.stop - self.hosted.start


@dataclass(frozen=True)
class Lane:
    """Hosted tables of one dtype, all split over ranks or all kept on every rank.

    Args:
        real: dtype of the rows that travel.
        replicated: every rank has all rows.
        tables: the hosted tables, in the order of their ids and rows.
        first_column: of the lane's sizes among all sizes that ranks exchange.
    """

    real: torch.dtype
    replicated: bool
    tables: tuple[HostedTable, ...]
    first_column: int

    @cached_property
    def columns(self) -> slice:
        """The lane's columns among the sizes."""
        return slice(self.first_column, self.first_column + len(self.tables))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Floats of a row of each table."""
        return tuple(table.dim for table in self.tables)

    @cached_property
    def dims_K(self) -> Tensor:
        """The same as int64 on the CPU."""
        return torch.tensor(self.dims, device="cpu")

    def ranges(self, world_size: int) -> Tensor:
        """int64 [K, 2 + W] on the CPU: each table's salt, shares, and the rank of each share."""
        lines_KX = torch.zeros(len(self.tables), 2 + world_size, dtype=torch.int64, device="cpu")
        for line, table in zip(lines_KX, self.tables, strict=True):
            ranks = table.hosted.ranks
            line[0], line[1] = to_signed(salt(table.hash_name)), len(ranks)
            line[2 : 2 + len(ranks)] = torch.tensor(ranks, device="cpu")
        return lines_KX

    @cached_property
    def edges(self) -> tuple[int, ...] | None:
        """First feature of each table, and the end; None unless the tables' features are
        neighbours in this order.
        """
        features = [feature for table in self.tables for feature in table.features]
        first, last = features[0], features[-1]
        if features != list(range(first, last + 1)):
            return None
        return (*(table.features[0] for table in self.tables), last + 1)

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Which of its tables this rank's shard has."""
        return tuple(k for k, table in enumerate(self.tables) if table.local != _ABSENT)

    @cached_property
    def here_columns(self) -> Tensor:
        """Columns of those tables among the sizes."""
        return torch.tensor(self.here, dtype=torch.int64, device="cpu") + self.first_column


@dataclass(frozen=True)
class Lanes:
    """All lanes of a request, for one rank of `world_size`."""

    lanes: tuple[Lane, ...]
    rank: int
    world_size: int
    _ranges: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def tables(self) -> tuple[HostedTable, ...]:
        """Hosted tables of all lanes, in order."""
        return tuple(table for lane in self.lanes for table in lane.tables)

    @cached_property
    def columns(self) -> int:
        """Sizes that each rank tells each other."""
        return len(self.tables)

    def ranges_on(self, lane: Lane, device: torch.device) -> Tensor:
        """A lane's `ranges`, on a device; sent there once."""
        key = lane.first_column, device
        if key not in self._ranges:
            self._ranges[key] = lane.ranges(self.world_size).to(device)
        return self._ranges[key]

    @cached_property
    def here_G(self) -> Tensor:
        """int32: tables, in this rank's shard, of what comes from all ranks: lane by lane."""
        return self._local(self.world_size)

    @cached_property
    def sender_G(self) -> Tensor:
        """int32: tables, in this rank's shard, of what comes from one rank."""
        return self._local(1)

    def _local(self, senders: int) -> Tensor:
        numbers = [
            number
            for lane in self.lanes
            for number in [lane.tables[k].local for k in lane.here] * senders
        ]
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def compile_lanes(
    specs: Sequence[TableSpec],
    placement: Placement,
    local: Mapping[str, int],
    rank: int,
    tables_G: Sequence[int],
) -> Lanes:
    """Lanes of requests whose features read the tables `tables_G` of `specs`.

    local: index in this rank's shard of each hosted table's name.
    """
    found = []
    for table in sorted(set(tables_G)):
        spec = specs[table]
        features = tuple(g for g, k in enumerate(tables_G) if k == table)
        for hosted in placement.of(spec.name):
            here = local[hosted_spec(spec, hosted).name] if rank in hosted.ranks else _ABSENT
            entry = HostedTable(table, hosted, spec.hash_name, here, features)
            found.append((hosted.replicated, real_dtype(spec) is torch.float64, entry))
    # Sorting keeps the order of tables inside a lane.
    found.sort(key=lambda item: item[:2])
    lanes: list[Lane] = []
    column = 0
    for (replicated, double), entries in groupby(found, key=lambda item: item[:2]):
        members = tuple(entry for _, _, entry in entries)
        real = torch.float64 if double else torch.float32
        lanes.append(Lane(real, replicated, members, column))
        column += len(members)
    return Lanes(tuple(lanes), rank, placement.world_size)


_WHAT = "exchange of ids: owners"


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Distinct ids of one lane.

    Args:
        ids_N: int64, by rank and then by table; once for all ranks where they are replicated. On
            CUDA what lies behind the last id is unused.
        counts_N: int64, occurrences of each.
        sizes_WK: int64 [W, K], ids for each rank by table.
        offsets_N: int64, for each position of each table's features: where its row starts in the
            lane's buffer of received rows, in floats.
    """

    ids_N: Tensor
    counts_N: Tensor
    sizes_WK: Tensor
    offsets_N: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """All that one rank sends for one request."""

    lanes: Lanes
    packed: tuple[Packed, ...]
    offsets_N: Tensor

    def header(self, said: int) -> Tensor:
        """int64 [W, X + 1]: ids for each rank by table of each lane, and `Said` as a word."""
        parts = [packed.sizes_WK for packed in self.packed]
        said_W1 = self.offsets_N.new_full((self.lanes.world_size, 1), said)
        return torch.cat([*parts, said_W1], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Trip:
    """What crossed the wire for one request.

    Args:
        parcel: what this rank sent.
        sizes: ids by rank and hosted table, sent and received; the last column is the sender's
            `Said`.
        event_time_s: latest of any sender.
    """

    parcel: Parcel
    sizes: Sizes
    event_time_s: int

    @property
    def lanes(self) -> Lanes:
        """The lanes of its request."""
        return self.parcel.lanes

    def sizes_of(self, lane: Lane) -> tuple[Tensor, Tensor]:
        """int64 [W, K] on the CPU: ids sent to and received from each rank, by table of a lane."""
        return self.sizes.sent_WX[:, lane.columns], self.sizes.received_WX[:, lane.columns]

    def floats(self) -> list[int]:
        """Floats of the rows this rank reads, by lane."""
        found = []
        for lane in self.lanes.lanes:
            sent_WK, _ = self.sizes_of(lane)
            floats_W = sent_WK @ lane.dims_K
            found.append(int(floats_W[0] if lane.replicated else floats_W.sum()))
        return found

    def id_parts(self, *, counted: bool) -> list[Part]:
        """Ids of each lane and, where they are counted, how often each occurs (int32)."""
        parts: list[Part] = []
        for lane, packed in zip(self.lanes.lanes, self.parcel.packed, strict=True):
            sent_W, received_W = (tuple(sizes.sum(1).tolist()) for sizes in self.sizes_of(lane))
            size = sent_W[0] if lane.replicated else sum(sent_W)
            data = [packed.ids_N[:size]]
            if counted:
                data.append(packed.counts_N[:size].to(torch.int32))
            if lane.replicated:
                data = [part.repeat(self.lanes.world_size) for part in data]
            parts.extend(Part(part, sent_W, received_W) for part in data)
        return parts


def partition(lanes: Lanes, ordered: KeyedRagged) -> Parcel:
    """Make a request's ids distinct per hosted table and group them by owner.

    Nothing waits for the device, but for a batch that was built on it (`host_splits`).
    """
    cuts = ordered.host_splits.tolist()
    packed = tuple(
        _replicated(lanes, lane, ordered.values_N, cuts)
        if lane.replicated
        else _split(lanes, lane, ordered.values_N, cuts)
        for lane in lanes.lanes
    )
    parts = [lane.offsets_N for lane in packed]
    return Parcel(lanes, packed, parts[0] if len(parts) == 1 else torch.cat(parts))


def _split(lanes: Lanes, lane: Lane, values_N: Tensor, cuts: Sequence[int]) -> Packed:
    ranges = lanes.ranges_on(lane, values_N.device)
    ids, counts, sizes, offsets = _reordered(
        *_spans(lane, values_N, cuts), lane.dims, lanes.world_size, "hash_ranges", ranges
    )
    return Packed(ids, counts, sizes.view(lanes.world_size, -1), offsets)


def _replicated(lanes: Lanes, lane: Lane, values_N: Tensor, cuts: Sequence[int]) -> Packed:
    spans = _spans(lane, values_N, cuts)
    ids, counts, sizes, offsets = _reordered(*spans, lane.dims, 1, "floormod", None)
    return Packed(ids, counts, sizes.view(1, -1).expand(lanes.world_size, -1), offsets)


def _spans(lane: Lane, values_N: Tensor, cuts: Sequence[int]) -> tuple[list[Tensor], Tensor | None]:
    """Ids of each table; or those of all, and where each table's begin."""
    if lane.edges is None:
        return [_span(table.features, values_N, cuts) for table in lane.tables], None
    starts = np.array([cuts[edge] for edge in lane.edges], dtype=np.int64)
    first, last = int(starts[0]), int(starts[-1])
    return [values_N[first:last]], staged(starts - first, values_N.device)


def _span(features: Sequence[int], values_N: Tensor, cuts: Sequence[int]) -> Tensor:
    """Ids of some features of a batch, one after the other."""
    first, last = features[0], features[-1]
    if last - first + 1 == len(features):
        return values_N[cuts[first] : cuts[last + 1]]
    return torch.cat([values_N[cuts[f] : cuts[f + 1]] for f in features])


def _reordered(
    spans: list[Tensor],
    starts_K1: Tensor | None,
    dims: Sequence[int],
    ranks: int,
    rule: str,
    ranges_K: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, counts, sizes and offsets; on CUDA into buffers that are trimmed later."""
    if spans[0].is_cpu:
        found = fused_reorder(spans, starts_K1, list(dims), ranks, rule, ranges_K, _WHAT)
        ids_U, counts_U, sizes_WK, offsets_N = found
        return ids_U, counts_U, sizes_WK, offsets_N
    size = sum(span.numel() for span in spans)
    like = spans[0]
    ids_N, counts_N, offsets_N = (like.new_empty(size) for _ in range(3))
    sizes_WK, size_1 = like.new_empty(ranks * len(dims)), like.new_empty(1)
    fused_reorder_into(
        spans,
        starts_K1,
        list(dims),
        ranks,
        rule,
        ranges_K,
        ids_N,
        counts_N,
        sizes_WK,
        offsets_N,
        size_1,
        _WHAT,
    )
    return ids_N, counts_N, sizes_WK, offsets_N


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """Ids of one lookup at their owner: groups by lane, then by sender, then by table.

    Tables that this rank does not hold have no groups: nothing comes for them.
    counts_N: int64, occurrences each position stands for; None where they did not travel.
    """

    groups: IdGroups
    counts_N: Tensor | None


def visits_of(
    trip: Trip, received: Sequence[Tensor], *, counted: bool, by_sender: bool
) -> tuple[Visit, ...]:
    """What came to this rank: one visit, or one per sender.

    A rank that holds no such table has no visit, or one without ids per sender: all ranks know
    alike that senders step one by one.

    received: ids of each lane, each followed by its counts where they are counted.
    """
    ids, counts = (received[::2], received[1::2]) if counted else (received, ())
    if by_sender:
        return _by_sender(trip, ids, counts)
    if not any(lane.here for lane in trip.lanes.lanes):
        return ()
    return (_of_all(trip, ids, counts),)


def _of_all(trip: Trip, ids: Sequence[Tensor], counts: Sequence[Tensor]) -> Visit:
    received_WX = trip.sizes.received_WX
    sizes = [received_WX[:, lane.here_columns].flatten() for lane in trip.lanes.lanes]
    return _visit(sizes, ids, counts, trip.lanes.here_G)


def _by_sender(trip: Trip, ids: Sequence[Tensor], counts: Sequence[Tensor]) -> tuple[Visit, ...]:
    lanes = trip.lanes.lanes
    splits: list[list[int]] = [trip.sizes_of(lane)[1].sum(1).tolist() for lane in lanes]
    ids_LW = [torch.split(part, cut) for part, cut in zip(ids, splits, strict=True)]
    counts_LW = [torch.split(part, cut) for part, cut in zip(counts, splits, strict=bool(counts))]
    return tuple(
        _visit(
            [received_X[lane.here_columns] for lane in lanes],
            [part[rank] for part in ids_LW],
            [part[rank] for part in counts_LW],
            trip.lanes.sender_G,
        )
        for rank, received_X in enumerate(trip.sizes.received_WX)
    )


def _visit(
    sizes: Sequence[Tensor], ids: Sequence[Tensor], counts: Sequence[Tensor], tables_G: Tensor
) -> Visit:
    sizes_G = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), *sizes])
    return Visit(
        IdGroups(_joined(ids), sizes_G.cumsum(0), tables_G),
        _joined(counts).long() if counts else None,
    )


def flat_lanes(trip: Trip, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Rows [n, D] of each visit's groups as one flat buffer per lane, by sender and then table."""
    senders = trip.lanes.world_size // max(len(rows), 1)
    buffers, first = [], 0
    for lane in trip.lanes.lanes:
        last = first + senders * len(lane.here)
        views = [view for visit in rows for view in visit[first:last]]
        device = trip.parcel.offsets_N.device
        buffers.append(flat(views, lane.real, device))
        first = last
    return buffers


def grads_of(trip: Trip, received: Sequence[Tensor], visits: int) -> tuple[tuple[Tensor, ...], ...]:
    """Gradients [n, D] of each visit's groups: views of each lane's buffer."""
    if visits == 0:
        return ()
    senders = trip.lanes.world_size // visits
    lanes = [
        (senders * len(lane.here), _views(trip, lane, buffer))
        for lane, buffer in zip(trip.lanes.lanes, received, strict=True)
    ]
    return tuple(
        tuple(view for size, views in lanes for view in views[at * size : (at + 1) * size])
        for at in range(visits)
    )


def _views(trip: Trip, lane: Lane, buffer: Tensor) -> list[Tensor]:
    """A lane's buffer as [n, D] per sender and table held here."""
    dims = [lane.dims[k] for k in lane.here]
    sizes_WK = trip.sizes.received_WX[:, lane.here_columns].tolist()
    if len(set(dims)) == 1:
        return list(torch.split(buffer.view(-1, dims[0]), [n for sizes in sizes_WK for n in sizes]))
    shapes = [(n, dim) for sizes in sizes_WK for n, dim in zip(sizes, dims, strict=True)]
    pieces = torch.split(buffer, [n * dim for n, dim in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def flat(views: Sequence[Tensor], real: torch.dtype, device: torch.device) -> Tensor:
    """The views' elements one after the other, [E]: no copy where they lie so already."""
    full = [view for view in views if view.numel()]
    if not full:
        return torch.empty(0, dtype=real, device=device)
    size = _side_by_side(full)
    if size is None:
        return torch.cat([part.reshape(-1) for part in full])
    return full[0].as_strided((size,), (1,), full[0].storage_offset())


def _side_by_side(views: Sequence[Tensor]) -> int | None:
    """Elements of views that follow one another in one storage, None of others."""
    at = start = views[0].data_ptr()
    item = views[0].element_size()
    for view in views:
        if view.data_ptr() != at or not view.is_contiguous():
            return None
        at += view.numel() * item
    # What lies between two places of a storage is of that storage.
    first, last = (view.untyped_storage().data_ptr() for view in (views[0], views[-1]))
    return (at - start) // item if first == last else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
