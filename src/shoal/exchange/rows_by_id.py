"""Methods of tables whose rows lie on several ranks: rows by id, found or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Literal, TypeVar

import torch
from torch import Tensor

from shoal.comm.consensus import agree, reduced, together
from shoal.errors import CollectiveFailed, DTypeError, ShoalError
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.partition import (
    HostedTable,
    Outgoing,
    SendBuffer,
    SendPlan,
    Transfer,
    flat_rows,
    received_ids,
    reply_buffers,
    rows_of_groups,
)
from shoal.exchange.wire import RowBuffer, send_rows
from shoal.placement import hash_ids, owners
from shoal.table import checks
from shoal.table import shard as scalars
from shoal.table.hosting import joined_chunk, joined_entry, joined_stats, slice_rates
from shoal.table.rows import real_dtype
from shoal.table.shard import Found, IdGroups, ReadTicket, StepContext
from shoal.table.spec import TableSpec
from shoal.table.values import Entry, RowChunk, TableStats


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A call's ids in send buffers, duplicates as they are.

    Rows of a call's groups that are of one dtype lie in one flat tensor, in order.

    Args:
        outgoing: the ids, and how often each occurs.
        spans: (table, first position, end, first float of its rows) of each group of a table.
        floats: by dtype, of all rows.
        positions: by buffer, the position in the call of each id that goes out.
        elements: by buffer, which of the call's flat rows' floats go with them.
        firsts: by buffer, whether each id stands for the first columns of its table.
    """

    outgoing: Outgoing
    spans: tuple[tuple[int, int, int, int], ...]
    floats: dict[torch.dtype, int]
    positions: tuple[Tensor, ...]
    elements: tuple[Tensor, ...]
    firsts: tuple[Tensor, ...]


def pack(
    plan: SendPlan, groups: IdGroups, counts_N: Tensor, specs: Sequence[TableSpec], *, to_all: bool
) -> Packed:
    """Put the ids of a call into send buffers.

    to_all: ids of replicated tables go to every rank (writes); else they stay here (reads).
    """
    floats_of, spans, device = {torch.float32: 0, torch.float64: 0}, [], groups.ids_N.device
    cuts = pairwise(groups.splits_G1.tolist())
    for (start, stop), table in zip(cuts, groups.tables_G.tolist(), strict=True):
        if 0 <= table < len(specs):  # groups of other tables have no rows
            real = real_dtype(specs[table])
            spans.append((table, start, stop, floats_of[real]))
            floats_of[real] += (stop - start) * specs[table].dim
    packed = []
    for layout in plan.buffers:
        everywhere = layout.replicated and to_all
        ranks, tables = 1 if everywhere else plan.world_size, len(layout.tables)
        none = torch.empty(0, dtype=torch.int64, device=device)
        positions, floats, keys = [none], [none], [none]
        for k, one in enumerate(layout.tables):
            for table, start, stop, at in spans:
                if table != one.table:
                    continue
                at_n = torch.arange(stop - start, device=device)
                if layout.replicated:
                    to_n = torch.full_like(at_n, 0 if everywhere else plan.rank)
                else:
                    to_n = owners(one.hosted, hash_ids(one.hash_name, groups.ids_N[start:stop]))
                positions.append(at_n + start)
                floats.append(at_n * specs[table].dim + at + one.hosted.start)
                keys.append(to_n * tables + k)
        key_n, order_n = torch.cat(keys).sort(stable=True)
        position_n, float_n = torch.cat(positions)[order_n], torch.cat(floats)[order_n]
        width_n = torch.tensor(layout.dims, device=device)[key_n % tables]
        ends_n = width_n.cumsum(0)
        elements_E = torch.repeat_interleave(float_n - ends_n + width_n, width_n)
        elements_E += torch.arange(elements_E.numel(), device=device)
        first_K = torch.tensor([one.hosted.start == 0 for one in layout.tables], device=device)
        sizes_WK = torch.bincount(key_n, minlength=ranks * tables).cpu().view(ranks, tables)
        buffer = SendBuffer(
            groups.ids_N[position_n],
            counts_N[position_n],
            sizes_WK.expand(plan.world_size, -1),
            everywhere,
        )
        packed.append((buffer, position_n, elements_E, first_K[key_n % tables]))
    buffers, places, elements, firsts = zip(*packed, strict=True)
    outgoing = Outgoing(plan, buffers, groups.ids_N[:0])
    return Packed(outgoing, tuple(spans), floats_of, places, elements, firsts)


def check_call(
    method: str,
    groups: IdGroups,
    values: Sequence[Sequence[Tensor]],
    counts_N: Tensor | None,
    ctx: StepContext,
    specs: Sequence[TableSpec],
    device: torch.device,
) -> list[Sequence[Tensor]]:
    """What a shard would check, before anything is sent; the values, as they are sent.

    Raises:
        InputError: what a shard of these tables on this device refuses.
    """
    scalars.event_time(ctx.event_time_s)
    if groups.ids_N.device != device:
        remedy = "Move them to the shard's device."
        raise DTypeError("device of ids", got=groups.ids_N.device, allowed=device, remedy=remedy)
    if method != "reinitialize":
        for table in groups.tables_G.tolist():
            checks.table_index(table, len(specs))
    if counts_N is not None:
        checks.counts(groups, counts_N)
    checks.rates(ctx, specs)
    if not values:
        return []
    sizes: list[int] = groups.splits_G1.diff().tolist()
    named = [specs[table] for table in groups.tables_G.tolist()]
    shapes = [((n, spec.dim), real_dtype(spec)) for n, spec in zip(sizes, named, strict=True)]
    return [checks.grads(rows, shapes, device) for rows in values]


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A call that reached this rank: its ids, and sets of rows [n, D] of their groups.

    given_N: the ids that this rank sent.
    """

    given_N: Tensor
    packed: Packed
    transfer: Transfer
    ids: ReadTicket
    values: tuple[tuple[Tensor, ...], ...]
    ctx: StepContext


T = TypeVar("T")

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

    __slots__ = ("_collectives", "_plan", "_shard", "device", "specs")

    collective = True
    """Every method, `size` too, is a call that all ranks make together."""

    def __init__(self, exchange: AllToAllExchange) -> None:
        self._shard = exchange.shard
        self.specs = exchange.specs
        self.device = exchange.shard.device
        self._collectives = exchange.collectives
        self._plan = exchange.send_plan(tuple(range(len(self.specs))))

    def find(self, groups: IdGroups) -> Found:
        """Read rows; never inserts. Rows of replicated tables are read at home."""
        call = self._send("find", groups, (), None, StepContext(), to_all=False)
        found = self._shard.find(call.ids.groups)
        rows = flat_rows(call.transfer, [found.weights])
        buffers = [*reply_buffers(call.transfer, rows)[0], *self._numbers(call, found.found_N)[0]]
        replies = send_rows(self._collectives, buffers, None, what=_REPLIES).wait()
        packed, half = call.packed, len(self._plan.buffers)
        flats = {
            real: torch.zeros(count, dtype=real, device=self.device)
            for real, count in packed.floats.items()
        }
        for layout, elements_E, data in zip(
            self._plan.buffers, packed.elements, replies[:half], strict=True
        ):
            flats[layout.real][elements_E] = data
        there_N = self._by_position(call, replies[half:], 0)
        rows = []
        for table, start, stop, at in packed.spans:
            shape = stop - start, self.specs[table].dim
            flat = flats[real_dtype(self.specs[table])]
            rows.append(flat[at : at + prod(shape)].view(shape))
        return Found(tuple(rows), there_N != 0)

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

    def close_version(self) -> int:
        """Close every rank's version and open the next; the closed one, the latest of any rank."""
        return max(self._together("close_version", self._shard.close_version))

    def clear(self, table: int) -> None:
        """Drop all rows of a table, everywhere."""
        checks.table_index(table, len(self.specs))
        local = [one.local for one in self._plan.tables if one.table == table and one.is_here]

        def work() -> None:
            for number in local:
                self._shard.clear(number)

        self._together("clear", work)

    def size(self, table: int) -> int:
        """Rows of a table on all ranks; replicas once."""
        checks.table_index(table, len(self.specs))
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
            for table, spec in enumerate(self.specs)
        )

    def entry(self, table: int, id: int) -> Entry | None:
        """One row in full, or None; every rank may ask for another."""
        checks.table_index(table, len(self.specs))
        asked = self._collectives.gather_objects((table, id), what="entry")
        answers = [
            {
                number: entry
                for number, one in self._speaks_for(table)
                if (entry := self._shard.entry(one.local, id)) is not None
            }
            for table, id in asked
        ]
        everyone = self._collectives.gather_objects(answers, what="entry")
        found = {
            number: entry
            for theirs in everyone
            for number, entry in theirs[self._collectives.rank].items()
        }
        parts = [(self._plan.tables[number].hosted, entry) for number, entry in found.items()]
        return joined_entry(self.specs[table], parts)

    def export(self, table: int) -> RowChunk:
        """All rows of a table on every rank, ordered by hash: for small tables."""
        checks.table_index(table, len(self.specs))
        mine = [(number, self._shard.export(one.local)) for number, one in self._speaks_for(table)]
        everyone = self._collectives.gather_objects(mine, what="export")
        hosted = [one.hosted for one in self._plan.tables]
        parts = [(hosted[k], chunk) for theirs in everyone for k, chunk in theirs]
        return joined_chunk(self.specs[table], parts)

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

    def _combined(self, op: Literal["sum", "max"], number: int, what: str) -> int:
        number_1 = torch.tensor([number], device="cpu")
        return int(reduced(self._collectives, number_1, op, what=what)[0])

    def _rates(self, ctx: StepContext) -> dict[str, tuple[float, ...]]:
        """Rates of the shard's tables."""
        rates: dict[str, tuple[float, ...]] = {}
        for one in self._plan.tables:
            spec = self.specs[one.table]
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
        agreed = partial(agree, collectives, _METHODS, method)
        try:
            ready = check_call(method, groups, values, counts_N, ctx, self.specs, self.device)
        except ShoalError as error:
            none_WX = torch.zeros(
                plan.world_size, len(plan.tables), dtype=torch.int64, device="cpu"
            )
            agreed(none_WX, time_s=0, sets=-1, wrong=error)  # raises it, once the others know
            raise
        counted_N = torch.zeros_like(groups.ids_N) if counts_N is None else counts_N
        packed = pack(plan, groups, counted_N, self.specs, to_all=to_all)
        sizes_WX = torch.cat([buffer.sizes_WK for buffer in packed.outgoing.buffers], dim=1)
        own_sets = len(values) if groups.ids_N.numel() else -1
        sizes, time_s, sets = agreed(sizes_WX, time_s=ctx.event_time_s, sets=own_sets)
        if not groups.ids_N.numel():
            ready = [()] * max(sets, min(len(values), 1))
        transfer = Transfer(packed.outgoing, sizes, time_s)
        dtype = None if counts_N is None else torch.int64
        found = collectives.all_to_all(transfer.id_parts(dtype), what=method)
        rows = [
            RowBuffer(
                self._flat(groups, parts, layout.real)[elements_E],
                layout.dims,
                *transfer.sizes_of(layout),
                to_all=buffer.to_all,
            )
            for parts in ready
            for layout, buffer, elements_E in zip(
                plan.buffers, packed.outgoing.buffers, packed.elements, strict=True
            )
        ]
        flat, each = send_rows(collectives, rows, None, what=method).wait(), len(plan.buffers)
        return Arrived(
            groups.ids_N,
            packed,
            transfer,
            received_ids(transfer, found.wait(), counted=counts_N is not None),
            tuple(
                rows_of_groups(transfer, flat[n * each : (n + 1) * each], 1)[0]
                for n in range(len(ready))
            ),
            replace(ctx, event_time_s=time_s),
        )

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
        packed = call.packed
        numbers_N = torch.full_like(call.given_N, other, dtype=torch.int32)
        for position_n, first_n, data in zip(packed.positions, packed.firsts, replies, strict=True):
            numbers_N[position_n[first_n]] = data[first_n]
        return numbers_N

    def _flat(self, groups: IdGroups, parts: Sequence[Tensor], real: torch.dtype) -> Tensor:
        """Rows of the groups of one dtype, one after the other; no parts: nobody has ids."""
        tables = groups.tables_G.tolist()
        own = [
            part.reshape(-1)
            for part, table in zip(parts, tables, strict=bool(parts))
            if real_dtype(self.specs[table]) is real
        ]
        return torch.cat([torch.empty(0, dtype=real, device=self.device), *own])

    def _together(self, method: str, work: Callable[[], T]) -> list[T]:
        """Do this rank's part, then learn how the others' went."""
        remedy = "Other ranks did their part; see that rank's error."
        return together(self._collectives, method, work, failed=CollectiveFailed, remedy=remedy)
