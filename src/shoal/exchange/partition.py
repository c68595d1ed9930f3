"""Send buffers: ids grouped by owner, rows of the same ids; and what of them reaches the owner.

Lookups pack the distinct ids of a request (`partition`), methods of tables over ranks the ids as
they are given (`rows_by_id`); sizes, ids, rows and replies then travel alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.comm.collectives import Part, Sizes
from shoal.exchange.wire import RowBuffer
from shoal.ids import salt, to_signed
from shoal.kernels.host_copies import staged
from shoal.ops.ids_by_shard import fused_reorder, fused_reorder_into
from shoal.placement import Hosted, Placement
from shoal.ragged import KeyedRagged
from shoal.table.hosting import hosted_spec
from shoal.table.rows import real_dtype
from shoal.table.shard import IdGroups, ReadTicket
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

    @property
    def is_here(self) -> bool:
        """Whether this rank's shard has some of it."""
        return self.local != _ABSENT


@dataclass(frozen=True)
class BufferLayout:
    """Hosted tables of one dtype, all split over ranks or all kept on every rank.

    Args:
        real: dtype of the rows that travel.
        replicated: every rank has all rows.
        tables: the hosted tables, in the order of their ids and rows.
        first_column: of the buffer's sizes among all sizes that ranks exchange.
    """

    real: torch.dtype
    replicated: bool
    tables: tuple[HostedTable, ...]
    first_column: int

    @cached_property
    def columns(self) -> slice:
        """The buffer's columns among the sizes."""
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
        return tuple(k for k, table in enumerate(self.tables) if table.is_here)

    @cached_property
    def here_columns(self) -> Tensor:
        """Columns of those tables among the sizes."""
        return torch.tensor(self.here, dtype=torch.int64, device="cpu") + self.first_column


@dataclass(frozen=True)
class SendPlan:
    """All buffers of a request, for one rank of `world_size`."""

    buffers: tuple[BufferLayout, ...]
    rank: int
    world_size: int
    _ranges: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def tables(self) -> tuple[HostedTable, ...]:
        """Hosted tables of all buffers, in order."""
        return tuple(table for layout in self.buffers for table in layout.tables)

    def ranges_on(self, layout: BufferLayout, device: torch.device) -> Tensor:
        """A buffer's `ranges`, on a device; sent there once."""
        key = layout.first_column, device
        if key not in self._ranges:
            self._ranges[key] = layout.ranges(self.world_size).to(device)
        return self._ranges[key]

    @cached_property
    def here_G(self) -> Tensor:
        """int32: tables, in this rank's shard, of what comes from all ranks: buffer by buffer."""
        return self._local(self.world_size)

    @cached_property
    def sender_G(self) -> Tensor:
        """int32: tables, in this rank's shard, of what comes from one rank."""
        return self._local(1)

    def _local(self, senders: int) -> Tensor:
        numbers = [
            number
            for layout in self.buffers
            for number in [layout.tables[k].local for k in layout.here] * senders
        ]
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def compile_send_plan(
    specs: Sequence[TableSpec],
    placement: Placement,
    hosted_here: Sequence[TableSpec],
    rank: int,
    tables_G: Sequence[int],
) -> SendPlan:
    """Buffers of requests whose features read the tables `tables_G` of `specs`.

    hosted_here: the tables of this rank's shard.
    """
    local = {spec.name: k for k, spec in enumerate(hosted_here)}
    found = []
    for table in sorted(set(tables_G)):
        spec = specs[table]
        features = tuple(g for g, k in enumerate(tables_G) if k == table)
        for hosted in placement.of(spec.name):
            here = local[hosted_spec(spec, hosted).name] if rank in hosted.ranks else _ABSENT
            entry = HostedTable(table, hosted, spec.hash_name, here, features)
            found.append((hosted.replicated, real_dtype(spec) is torch.float64, entry))
    # Sorting keeps the order of tables inside a layout.
    found.sort(key=lambda item: item[:2])
    buffers: list[BufferLayout] = []
    column = 0
    for (replicated, double), entries in groupby(found, key=lambda item: item[:2]):
        members = tuple(entry for _, _, entry in entries)
        real = torch.float64 if double else torch.float32
        buffers.append(BufferLayout(real, replicated, members, column))
        column += len(members)
    return SendPlan(tuple(buffers), rank, placement.world_size)


_WHAT = "exchange of ids: owners"


class SendBuffer(NamedTuple):
    """Ids of one buffer layout.

    Args:
        ids_N: int64, by rank and then by table; once for all ranks with `to_all`. On CUDA what
            lies behind the last id is unused.
        counts_N: int64, occurrences of each.
        sizes_WK: int64 [W, K], ids for each rank by table.
        to_all: every rank gets all of the ids.
    """

    ids_N: Tensor
    counts_N: Tensor
    sizes_WK: Tensor
    to_all: bool


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """All that one rank sends for one request.

    offsets_N: int64, for each position of each table's features of a lookup, buffer by buffer:
        where its row starts in the receive buffer of rows, in floats. Empty for other calls.
    """

    plan: SendPlan
    buffers: tuple[SendBuffer, ...]
    offsets_N: Tensor

    def header(self, said: int) -> Tensor:
        """int64 [W, X + 1]: ids for each rank by table of each buffer, and `said`."""
        parts = [buffer.sizes_WK for buffer in self.buffers]
        said_W1 = self.offsets_N.new_full((self.plan.world_size, 1), said)
        return torch.cat([*parts, said_W1], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What crosses the wire for one request.

    Args:
        outgoing: what this rank sends.
        sizes: ids by rank and hosted table, sent and received; for lookups, the last column is
            what the sender said.
        event_time_s: latest of any sender.
    """

    outgoing: Outgoing
    sizes: Sizes
    event_time_s: int

    @property
    def plan(self) -> SendPlan:
        """The buffers of its request."""
        return self.outgoing.plan

    def sizes_of(self, layout: BufferLayout) -> tuple[Tensor, Tensor]:
        """int64 [W, K] on the CPU: ids sent to and received from each rank, by table."""
        return self.sizes.sent_WX[:, layout.columns], self.sizes.received_WX[:, layout.columns]

    def floats(self) -> list[int]:
        """Floats of the rows this rank reads, by buffer."""
        found = []
        for layout in self.plan.buffers:
            sent_WK, _ = self.sizes_of(layout)
            floats_W = sent_WK @ layout.dims_K
            found.append(int(floats_W[0] if layout.replicated else floats_W.sum()))
        return found

    def id_parts(self, counts: torch.dtype | None) -> list[Part]:
        """Ids of each buffer and, in a dtype if there is one, how often each occurs."""
        parts: list[Part] = []
        for layout, buffer in zip(self.plan.buffers, self.outgoing.buffers, strict=True):
            sent_W, received_W = (tuple(sizes.sum(1).tolist()) for sizes in self.sizes_of(layout))
            size = sent_W[0] if buffer.to_all else sum(sent_W)
            data = [buffer.ids_N[:size]]
            if counts is not None:
                data.append(buffer.counts_N[:size].to(counts))
            if buffer.to_all:
                data = [part.repeat(self.plan.world_size) for part in data]
            parts.extend(Part(part, sent_W, received_W) for part in data)
        return parts


def partition(plan: SendPlan, ordered: KeyedRagged) -> Outgoing:
    """Make a request's ids distinct per hosted table and group them by owner.

    Nothing waits for the device, but for a batch that was built on it (`host_splits`).
    """
    cuts, device = ordered.host_splits.tolist(), ordered.values_N.device
    buffers, offsets = [], []
    for layout in plan.buffers:
        ranks, rule, ranges = 1, "floormod", None
        if not layout.replicated:
            ranks, rule = plan.world_size, "hash_ranges"
            ranges = plan.ranges_on(layout, device)
        spans, starts_K1 = _spans(layout, ordered.values_N, cuts)
        found = _reordered(spans, starts_K1, list(layout.dims), ranks, rule, ranges)
        ids, counts, sizes, offsets_n = found
        sizes_WK = sizes.view(ranks, -1).expand(plan.world_size, -1)
        buffers.append(SendBuffer(ids, counts, sizes_WK, layout.replicated))
        offsets.append(offsets_n)
    return Outgoing(plan, tuple(buffers), _joined(offsets))


def _spans(
    layout: BufferLayout, values_N: Tensor, cuts: Sequence[int]
) -> tuple[list[Tensor], Tensor | None]:
    """Ids of each table; or those of all, and where each table's begin."""
    if layout.edges is None:
        return [_span(table.features, values_N, cuts) for table in layout.tables], None
    starts = np.array([cuts[edge] for edge in layout.edges], dtype=np.int64)
    first, last = int(starts[0]), int(starts[-1])
    return [values_N[first:last]], staged(starts - first, values_N.device)


def _span(features: Sequence[int], values_N: Tensor, cuts: Sequence[int]) -> Tensor:
    """Ids of some features of a batch, one after the other."""
    first, last = features[0], features[-1]
    if last - first + 1 == len(features):
        return values_N[cuts[first] : cuts[last + 1]]
    return torch.cat([values_N[cuts[f] : cuts[f + 1]] for f in features])


def _reordered(spans: list[Tensor], *how: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, counts, sizes and offsets; on CUDA into buffers that are trimmed later.

    how: as `fused_reorder` takes it: starts, dims, ranks, the rule and its ranges.
    """
    like, (_, dims, ranks, *_) = spans[0], how
    if like.is_cpu:
        return fused_reorder(spans, *how, _WHAT)  # type: ignore[no-any-return]
    size = sum(span.numel() for span in spans)
    ids_N, counts_N, offsets_N = (like.new_empty(size) for _ in range(3))
    sizes_WK, size_1 = like.new_empty(ranks * len(dims)), like.new_empty(1)
    outs = ids_N, counts_N, sizes_WK, offsets_N
    fused_reorder_into(spans, *how, *outs, size_1, _WHAT)
    return outs


def received_ids(transfer: Transfer, received: Sequence[Tensor], *, counted: bool) -> ReadTicket:
    """What came to this rank: ids of each buffer, each followed by its counts if counted.

    Its groups are by buffer, then by sender, then by table; tables that this rank does not hold
    have none: nothing comes for them.
    """
    ids, counts = (received[::2], received[1::2]) if counted else (received, ())
    received_WX = transfer.sizes.received_WX
    sizes = [received_WX[:, layout.here_columns].flatten() for layout in transfer.plan.buffers]
    return _received(sizes, ids, counts, transfer.plan.here_G)


def ids_by_sender(transfer: Transfer, received: Sequence[Tensor]) -> tuple[ReadTicket, ...]:
    """The same, counted, for one lookup per sender; without ids on a rank that has no table:
    all ranks know alike that senders step one by one.
    """
    layouts = transfer.plan.buffers
    splits = [s for one in layouts for s in [transfer.sizes_of(one)[1].sum(1).tolist()] * 2]
    parts = [torch.split(part, cut) for part, cut in zip(received, splits, strict=True)]
    return tuple(
        _received(
            [received_X[layout.here_columns] for layout in layouts],
            [part[rank] for part in parts[::2]],
            [part[rank] for part in parts[1::2]],
            transfer.plan.sender_G,
        )
        for rank, received_X in enumerate(transfer.sizes.received_WX)
    )


def _received(
    sizes: Sequence[Tensor], ids: Sequence[Tensor], counts: Sequence[Tensor], tables_G: Tensor
) -> ReadTicket:
    sizes_G = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), *sizes])
    return ReadTicket(
        IdGroups(_joined(ids), sizes_G.cumsum(0), tables_G),
        _joined(counts).long() if counts else None,
    )


def flat_rows(transfer: Transfer, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Rows [n, D] of each lookup's groups as one flat tensor per buffer, by sender and table."""
    senders = transfer.plan.world_size // max(len(rows), 1)
    buffers, first = [], 0
    for layout in transfer.plan.buffers:
        last = first + senders * len(layout.here)
        views = [view for lookup in rows for view in lookup[first:last]]
        buffers.append(flat(views, layout.real, transfer.outgoing.offsets_N.device))
        first = last
    return buffers


def reply_buffers(
    transfer: Transfer, rows: Sequence[Tensor], dims: Sequence[tuple[int, ...]] | None = None
) -> tuple[list[RowBuffer], tuple[Tensor, ...]]:
    """Flat rows of each buffer on their way back to who asked, and those that stay.

    Of ids that went to every rank, every rank has the rows: those of its own stay. Buffers of
    such tables come after the others.

    dims: elements of a row of each buffer's tables; None: as they have them.
    """
    away, home = [], []
    plan = transfer.plan
    for number, (layout, buffer) in enumerate(
        zip(plan.buffers, transfer.outgoing.buffers, strict=True)
    ):
        sent_WK, received_WK = transfer.sizes_of(layout)
        widths = layout.dims if dims is None else dims[number]
        if buffer.to_all:
            floats_W = (received_WK @ torch.tensor(widths, device="cpu")).tolist()
            home.append(torch.split(rows[number], floats_W)[plan.rank])
        else:
            away.append(RowBuffer(rows[number], widths, received_WK, sent_WK))
    return away, tuple(home)


def rows_of_groups(
    transfer: Transfer, received: Sequence[Tensor], lookups: int
) -> tuple[tuple[Tensor, ...], ...]:
    """Rows [n, D] of each lookup's groups: views of each flat receive buffer."""
    if lookups == 0:
        return ()
    senders = transfer.plan.world_size // lookups
    buffers = []
    for layout, buffer in zip(transfer.plan.buffers, received, strict=True):
        sizes_WK = transfer.sizes.received_WX[:, layout.here_columns].tolist()
        views = row_views(buffer, sizes_WK, [layout.dims[k] for k in layout.here])
        buffers.append((senders * len(layout.here), views))
    return tuple(
        tuple(view for size, views in buffers for view in views[at * size : (at + 1) * size])
        for at in range(lookups)
    )


def row_views(
    buffer: Tensor, sizes_WK: Sequence[Sequence[int]], dims: Sequence[int]
) -> list[Tensor]:
    """A flat buffer as [n, D] per rank and table."""
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
