"""Methods of tables whose rows lie on several ranks: rows by id, found or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from shoal.comm.collectives import Sizes
from shoal.comm.consensus import agree, reduced, together
from shoal.errors import CollectiveFailed, DTypeError, ShoalError
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.partition import (
    HostedTable,
    Outgoing,
    ReceivedIds,
    SendBuffer,
    SendPlan,
    Transfer,
    flat_rows,
    received_ids,
    reply_buffers,
    row_views,
    rows_of_groups,
)
from shoal.exchange.wire import RowBuffer, send_rows
from shoal.placement import hash_ids, owners
from shoal.table import checks
from shoal.table import shard as scalars
from shoal.table.hosting import joined_chunk, joined_entry, joined_stats, slice_rates
from shoal.table.rows import real_dtype
from shoal.table.shard import Found, IdGroups, StepContext
from shoal.table.spec import TableSpec
from shoal.table.values import Entry, RowChunk, TableStats


@dataclass(frozen=True, slots=True, eq=False)
class TablePositions:
    """Where each whole table's ids are in a call: positions of its groups, one after the other."""

    groups: IdGroups
    by_table: tuple[Tensor, ...]

    @classmethod
    def of(cls, groups: IdGroups, tables: int) -> TablePositions:
        """Of the first `tables` tables; other groups belong to none."""
        spans: list[list[Tensor]] = [[] for _ in range(tables)]
        cuts = groups.splits_G1.tolist()
        for (start, stop), table in zip(pairwise(cuts), groups.tables_G.tolist(), strict=True):
            if 0 <= table < tables:
                spans[table].append(torch.arange(start, stop, device="cpu"))
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        device = groups.ids_N.device
        return cls(groups, tuple(torch.cat([none, *parts]).to(device) for parts in spans))

    def joined(self, parts: Sequence[Tensor], spec: TableSpec, table: int) -> Tensor:
        """Rows [n, D] of a table's groups, one after the other."""
        tables = self.groups.tables_G.tolist()
        own = [part for part, k in zip(parts, tables, strict=bool(parts)) if k == table]
        shape, device = (0, spec.dim), self.groups.ids_N.device
        return torch.cat([torch.empty(shape, dtype=real_dtype(spec), device=device), *own])

    def by_group(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each group's part of its table's rows."""
        at, found = [0] * len(rows), []
        sizes: list[int] = self.groups.splits_G1.diff().tolist()
        for table, size in zip(self.groups.tables_G.tolist(), sizes, strict=True):
            found.append(rows[table][at[table] : at[table] + size])
            at[table] += size
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Ids of a call in send buffers.

    orders: by buffer and table, which of the table's positions go out, in order of owner.
    """

    outgoing: Outgoing
    positions: TablePositions
    orders: tuple[tuple[Tensor, ...], ...]

    def rows(self, number: int, parts: Sequence[Tensor], specs: Sequence[TableSpec]) -> Tensor:
        """Rows of the groups as the flat data of a buffer."""
        columns = []
        tables = self.outgoing.plan.buffers[number].tables
        for table, order in zip(tables, self.orders[number], strict=True):
            whole = self.positions.joined(parts, specs[table.table], table.table)
            columns.append(whole[order, table.hosted.start : table.hosted.stop])
        return _by_rank(columns, self.outgoing.buffers[number])

    def replies(
        self, number: int, data: Tensor, dims: Sequence[int]
    ) -> list[tuple[HostedTable, Tensor, Tensor]]:
        """Flat replies of a buffer: (table, positions within the table, values [n, dim])."""
        buffer, layout = self.outgoing.buffers[number], self.outgoing.plan.buffers[number]
        sizes_WK = _sent(buffer)
        views = row_views(data, sizes_WK, dims)
        orders = [
            torch.split(order, sizes)
            for order, sizes in zip(
                self.orders[number], map(list, zip(*sizes_WK, strict=True)), strict=True
            )
        ]
        return [
            (table, orders[k][rank], views[rank * len(layout.tables) + k])
            for rank in range(len(sizes_WK))
            for k, table in enumerate(layout.tables)
        ]


def pack(
    plan: SendPlan, groups: IdGroups, counts_N: Tensor, tables: int, *, to_all: bool
) -> Packed:
    """Put the ids of a call into send buffers, duplicates as they are.

    to_all: ids of replicated tables go to every rank (writes); else they stay here (reads).
    """
    positions = TablePositions.of(groups, tables)
    buffers, orders = [], []
    for layout in plan.buffers:
        everywhere = layout.replicated and to_all
        ranks = 1 if everywhere else plan.world_size
        own, sizes = [], []
        for table in layout.tables:
            at_n = positions.by_table[table.table]
            if everywhere:
                to_n = torch.zeros_like(at_n)
            elif layout.replicated:
                to_n = torch.full_like(at_n, plan.rank)
            else:
                to_n = owners(table.hosted, hash_ids(table.hash_name, groups.ids_N[at_n]))
            own.append(to_n.argsort(stable=True))
            sizes.append(torch.bincount(to_n, minlength=ranks).cpu())
        sizes_WK = torch.stack(sizes, dim=1).expand(plan.world_size, -1)
        empty = SendBuffer(groups.ids_N[:0], counts_N[:0], sizes_WK, everywhere)
        at = [positions.by_table[t.table][o] for t, o in zip(layout.tables, own, strict=True)]
        ids, counts = (_by_rank([of[n] for n in at], empty) for of in (groups.ids_N, counts_N))
        buffers.append(replace(empty, ids_N=ids, counts_N=counts))
        orders.append(tuple(own))
    return Packed(Outgoing(plan, tuple(buffers), groups.ids_N[:0]), positions, tuple(orders))


def _sent(buffer: SendBuffer) -> list[list[int]]:
    """Ids of a buffer by rank and table; one line with `to_all`."""
    sizes: list[list[int]] = buffer.sizes_WK[: 1 if buffer.to_all else None].tolist()
    return sizes


def _by_rank(columns: Sequence[Tensor], buffer: SendBuffer) -> Tensor:
    """Values of each table, in order of rank, as one flat tensor by rank and then by table."""
    sizes_KW = map(list, zip(*_sent(buffer), strict=True))
    pieces = [torch.split(part, sizes) for part, sizes in zip(columns, sizes_KW, strict=True)]
    return torch.cat([part.reshape(-1) for row in zip(*pieces, strict=True) for part in row])


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A call that reached this rank: its ids, and sets of rows [n, D] of their groups."""

    packed: Packed
    transfer: Transfer
    ids: ReceivedIds
    values: tuple[tuple[Tensor, ...], ...]
    ctx: StepContext


T = TypeVar("T")

_NONE = torch.zeros(1, dtype=torch.int64, device="cpu")
_NO_TABLES = torch.zeros(0, dtype=torch.int32, device="cpu")
_REPLIES = "replies of a table's method"
_METHODS = ("find", "assign", "assign_add", "reinitialize", "apply_ids")


class RowsOverRanks:
    """Rows by id over all ranks; tables are named by their index in `specs`.

    `Table(spec, shard=RowsOverRanks(exchange))` is a table of the whole job. Every method is
    called by all ranks together. Duplicates across ranks are taken in order of rank, then of
    position: of several `assign` the last rank's wins, `assign_add` and `apply_ids` add up. The
    event time of a call is the latest of any rank.

    Args:
        exchange: this rank's; its collectives carry the calls.
    """

    __slots__ = ("_collectives", "_plan", "_shard", "_specs")

    def __init__(self, exchange: AllToAllExchange) -> None:
        self._shard = exchange.shard
        self._specs = exchange.specs
        self._collectives = exchange.collectives
        self._plan = exchange.send_plan(tuple(range(len(self._specs))))

    @property
    def collective(self) -> bool:
        """Every method, `size` too, is a call that all ranks make together."""
        return True

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The whole tables."""
        return self._specs

    @property
    def device(self) -> torch.device:
        """Where this rank's ids are given and rows are returned."""
        return self._shard.device

    @property
    def seed(self) -> int:
        """Of initial values."""
        return self._shard.seed

    @property
    def last_step(self) -> int:
        """Global step of the last update on this rank."""
        return self._shard.last_step

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._shard.last_step = step

    def find(self, groups: IdGroups) -> Found:
        """Read rows; never inserts. Rows of replicated tables are read at home."""
        call = self._send("find", groups, (), None, StepContext(), to_all=False)
        found = self._shard.find(call.ids.groups)
        rows = flat_rows(call.transfer, [found.weights])
        buffers = [*reply_buffers(call.transfer, rows)[0], *self._numbers(call, found.found_N)[0]]
        replies = send_rows(self._collectives, buffers, None, what=_REPLIES).wait()
        positions, half = call.packed.positions, len(self._plan.buffers)
        weights = [
            torch.zeros(len(at_n), spec.dim, dtype=real_dtype(spec), device=self.device)
            for spec, at_n in zip(self._specs, positions.by_table, strict=True)
        ]
        for number, layout in enumerate(self._plan.buffers):
            for table, at, values in call.packed.replies(number, replies[number], layout.dims):
                weights[table.table][at, table.hosted.start : table.hosted.stop] = values
        there_N = self._by_position(call, replies[half:], 0)
        return Found(positions.by_group(weights), there_N != 0)

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; of duplicates the last wins, of ranks the highest."""
        self._write("assign", groups, weights, ctx, self._shard.assign)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up, over ranks too."""
        self._write("assign_add", groups, deltas, ctx, self._shard.assign_add)

    def _write(
        self,
        method: str,
        groups: IdGroups,
        rows: Sequence[Tensor],
        ctx: StepContext,
        write: Callable[..., None],
    ) -> None:
        call = self._send(method, groups, [rows], None, ctx)
        self._together(method, lambda: write(call.ids.groups, call.values[0], ctx=call.ctx))

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N] in input order: 1 existed, 0 inserted,
        -1 of a table that does not exist.
        """
        call = self._send("reinitialize", groups, (), None, ctx)
        status: list[Tensor] = []
        self._together(
            "reinitialize",
            lambda: status.append(self._shard.reinitialize(call.ids.groups, ctx=call.ctx)),
        )
        away, home = self._numbers(call, status[0])
        replies = send_rows(self._collectives, away, None, what=_REPLIES).wait()
        return self._by_position(call, (*replies, *home), -1)

    def apply_ids(
        self,
        groups: IdGroups,
        grads: Sequence[Tensor],
        counts_N: Tensor | None = None,
        *,
        ctx: StepContext,
        seen_weights: Sequence[Tensor] | None = None,
    ) -> None:
        """Sum gradients per id over all ranks, then one optimizer step per row.

        Raises:
            InputError: seen_weights on some ranks only; nothing was sent.
        """
        counted_N = torch.ones_like(groups.ids_N) if counts_N is None else counts_N
        values = [grads] if seen_weights is None else [grads, seen_weights]
        call = self._send("apply_ids", groups, values, counted_N, ctx)
        seen = call.values[1] if len(call.values) > 1 else None
        here = replace(call.ctx, learning_rates=self._rates(ctx))
        self._together(
            "apply_ids",
            lambda: self._shard.apply_ids(
                call.ids.groups, call.values[0], call.ids.counts_N, ctx=here, seen_weights=seen
            ),
        )

    def evict(self, now_s: int) -> int:
        """Drop what has expired by the latest time of any rank; how many rows of the whole tables
        went.
        """
        now_s = self._combined("max", now_s, "evict")
        before = [stats.evicted for stats in self._shard.stats()]
        self._together("evict", lambda: self._shard.evict(now_s))
        gone = [
            stats.evicted - earlier
            for stats, earlier in zip(self._shard.stats(), before, strict=True)
        ]
        return self._combined("sum", sum(gone[k] for k in self._counted()), "evict")

    def cut(self) -> int:
        """Close every rank's epoch and open the next; the closed one, the latest of any rank."""
        return max(self._together("cut", self._shard.cut))

    def clear(self, table: int) -> None:
        """Drop all rows of a table, everywhere."""
        checks.table_index(table, len(self._specs))
        local = [one.local for one in self._plan.tables if one.table == table and one.is_here]

        def work() -> None:
            for number in local:
                self._shard.clear(number)

        self._together("clear", work)

    def size(self, table: int) -> int:
        """Rows of a table on all ranks; replicas once."""
        checks.table_index(table, len(self._specs))
        return self._combined("sum", sum(map(self._shard.size, self._counted(table))), "size")

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of the whole tables: rows once, bytes of all ranks."""
        own = self._shard.stats()
        mine = {
            number: own[one.local] for number, one in enumerate(self._plan.tables) if one.is_here
        }
        everyone = self._collectives.gather_objects(mine, what="stats")
        return tuple(
            joined_stats(
                spec,
                [
                    (self._plan.tables[number].hosted, rank, stats)
                    for rank, theirs in enumerate(everyone)
                    for number, stats in theirs.items()
                    if self._plan.tables[number].table == table
                ],
            )
            for table, spec in enumerate(self._specs)
        )

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None; every rank may ask for another."""
        checks.table_index(table, len(self._specs))
        asked = self._collectives.gather_objects((table, id), what="entry")
        answers = [self._slices_of(*question) for question in asked]
        everyone = self._collectives.gather_objects(answers, what="entry")
        found = {
            number: entry
            for theirs in everyone
            for number, entry in theirs[self._collectives.rank].items()
        }
        parts = [(self._plan.tables[number].hosted, entry) for number, entry in found.items()]
        return joined_entry(self._specs[table], parts)

    def export(self, table: int) -> RowChunk:
        """All rows of a table on every rank, ordered by hash: for small tables."""
        checks.table_index(table, len(self._specs))
        mine = [(number, self._shard.export(one.local)) for number, one in self._speaks_for(table)]
        everyone = self._collectives.gather_objects(mine, what="export")
        hosted = [one.hosted for one in self._plan.tables]
        parts = [(hosted[k], chunk) for theirs in everyone for k, chunk in theirs]
        return joined_chunk(self._specs[table], parts)

    def check(self) -> None:
        """Raise what kernels of any rank found since the last call; waits for the device."""
        self._together("check", self._shard.check)

    def _speaks_for(self, table: int | None = None) -> list[tuple[int, HostedTable]]:
        """Hosted tables with rows of this rank's own, and replicas that it is the first to hold."""
        rank = self._collectives.rank
        return [
            (number, one)
            for number, one in enumerate(self._plan.tables)
            if one.is_here
            and table in (None, one.table)
            and (not one.hosted.replicated or rank == one.hosted.ranks[0])
        ]

    def _counted(self, table: int | None = None) -> list[int]:
        """Tables of this rank's shard in which rows are counted: leftmost slices, replicas once."""
        return [one.local for _, one in self._speaks_for(table) if one.hosted.start == 0]

    def _slices_of(self, table: int, id: int) -> dict[int, Entry]:
        entries = {n: self._shard.entry(one.local, id) for n, one in self._speaks_for(table)}
        return {number: entry for number, entry in entries.items() if entry is not None}

    def _combined(self, op: Literal["sum", "max"], number: int, what: str) -> int:
        return int(reduced(self._collectives, torch.tensor([number]), op, what=what)[0])

    def _rates(self, ctx: StepContext) -> dict[str, tuple[float, ...]]:
        """Rates of the shard's tables."""
        rates: dict[str, tuple[float, ...]] = {}
        for one in self._plan.tables:
            spec = self._specs[one.table]
            if one.is_here and spec.name in ctx.learning_rates:
                name = self._shard.specs[one.local].name
                rates[name] = slice_rates(spec, one.hosted, ctx.learning_rates[spec.name])
        return rates

    def _send(
        self,
        method: str,
        groups: IdGroups,
        values: Sequence[Sequence[Tensor]],
        counts_N: Tensor | None,
        ctx: StepContext,
        *,
        to_all: bool = True,
    ) -> Arrived:
        """Ids and values to their owners; what came here, and the context with the latest time."""
        collectives, plan = self._collectives, self._plan
        collectives.step = ctx.global_step
        wrong: ShoalError | None = None
        here, ready = groups, list(values)
        try:
            ready = self._checked(method, groups, values, counts_N, ctx)
        except ShoalError as error:
            wrong = error
            here = IdGroups(
                torch.empty(0, dtype=torch.int64, device=self.device), _NONE, _NO_TABLES
            )
        counted_N = torch.zeros_like(here.ids_N) if counts_N is None or wrong else counts_N
        packed = pack(plan, here, counted_N, len(self._specs), to_all=to_all)
        known = agree(
            collectives,
            _METHODS,
            method,
            torch.cat([buffer.sizes_WK for buffer in packed.outgoing.buffers], dim=1),
            time_s=ctx.event_time_s,
            sets=len(values) if here.ids_N.numel() else -1,
            wrong=wrong,
        )
        if not here.ids_N.numel():
            ready = [()] * max(known.sets, min(len(values), 1))
        transfer = Transfer(packed.outgoing, Sizes(*known.sizes), known.time_s)
        dtype = None if counts_N is None else torch.int64
        found = collectives.all_to_all(transfer.id_parts(dtype), what=method)
        rows = [
            RowBuffer(
                packed.rows(number, parts, self._specs),
                layout.dims,
                *transfer.sizes_of(layout),
                to_all=packed.outgoing.buffers[number].to_all,
            )
            for parts in ready
            for number, layout in enumerate(plan.buffers)
        ]
        flat, each = send_rows(collectives, rows, None, what=method).wait(), len(plan.buffers)
        return Arrived(
            packed,
            transfer,
            received_ids(transfer, found.wait(), counted=counts_N is not None),
            tuple(
                rows_of_groups(transfer, flat[n * each : (n + 1) * each], 1)[0]
                for n in range(len(ready))
            ),
            replace(ctx, event_time_s=known.time_s),
        )

    def _checked(
        self,
        method: str,
        groups: IdGroups,
        values: Sequence[Sequence[Tensor]],
        counts_N: Tensor | None,
        ctx: StepContext,
    ) -> list[Sequence[Tensor]]:
        """What a shard would check, before anything is sent."""
        scalars.event_time(ctx.event_time_s)
        if groups.ids_N.device != self.device:
            remedy = "Move them to the shard's device."
            got, allowed = groups.ids_N.device, self.device
            raise DTypeError("device of ids", got=got, allowed=allowed, remedy=remedy)
        if method != "reinitialize":
            for table in groups.tables_G.tolist():
                checks.table_index(table, len(self._specs))
        if counts_N is not None:
            checks.counts(groups, counts_N)
        checks.rates(ctx, self._specs)
        if not values:
            return []
        sizes: list[int] = groups.splits_G1.diff().tolist()
        specs = [self._specs[table] for table in groups.tables_G.tolist()]
        shapes = [((n, spec.dim), real_dtype(spec)) for n, spec in zip(sizes, specs, strict=True)]
        return [checks.grads(rows, shapes, self.device) for rows in values]

    def _numbers(
        self, call: Arrived, numbers_N: Tensor
    ) -> tuple[list[RowBuffer], tuple[Tensor, ...]]:
        """Buffers that bring back a number for each id that came; see `reply_buffers`."""
        sizes = [int(call.transfer.sizes_of(layout)[1].sum()) for layout in self._plan.buffers]
        ones = [(1,) * len(layout.tables) for layout in self._plan.buffers]
        rows = torch.split(numbers_N.to(torch.int32), sizes)
        return reply_buffers(call.transfer, rows, ones)

    def _by_position(self, call: Arrived, replies: Sequence[Tensor], other: int) -> Tensor:
        """What the owners of each id's first columns replied, int32 [N]; else `other`."""
        positions = call.packed.positions
        numbers_N = torch.full_like(positions.groups.ids_N, other, dtype=torch.int32)
        for number, (layout, data) in enumerate(zip(self._plan.buffers, replies, strict=True)):
            for table, at, values in call.packed.replies(number, data, [1] * len(layout.tables)):
                if table.hosted.start == 0:
                    numbers_N[positions.by_table[table.table][at]] = values[:, 0]
        return numbers_N

    def _together(self, method: str, work: Callable[[], T]) -> list[T]:
        """Do this rank's part, then learn how the others' went."""
        remedy = "Other ranks did their part; see that rank's error."
        return together(self._collectives, method, work, failed=CollectiveFailed, remedy=remedy)
