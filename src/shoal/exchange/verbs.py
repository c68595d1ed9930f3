"""The methods of tables whose rows lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, Part
from shoal.comm.consensus import agree, finish
from shoal.errors import ConfigError, DTypeError, ShoalError
from shoal.placement import Hosted, Placement, hash_ids, owners
from shoal.table import checks
from shoal.table import shard as scalars
from shoal.table.hosting import hosted_spec, joined_chunk, joined_entry, joined_stats, slice_rates
from shoal.table.rows import real_dtype
from shoal.table.shard import Found, IdGroups, Shard, StepContext
from shoal.table.spec import TableSpec
from shoal.table.values import Entry, RowChunk, TableStats


@dataclass(frozen=True, slots=True)
class Hosting:
    """One hosted slice, as every rank counts them.

    Args:
        table: index of the whole table.
        hosted: its columns and ranks.
        hash_name: what its ids are hashed as.
        real: dtype of its rows on the wire.
        local: its index in this rank's shard, or None.
    """

    table: int
    hosted: Hosted
    hash_name: str
    real: torch.dtype
    local: int | None

    @property
    def width(self) -> int:
        """Floats of a row."""
        return self.hosted.stop - self.hosted.start


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """Positions of one hosted slice, in order of destination; counts_W: how many go to each."""

    hosting: int
    positions_n: Tensor
    counts_W: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """What one rank sends: its ids, where each group lies, and a leg per slice it touches."""

    groups: IdGroups
    legs: tuple[Leg, ...]

    def sizes(self, hostings: int, ranks: int) -> Tensor:
        """int64 [W, H] on the CPU."""
        sizes_WH = torch.zeros(ranks, hostings, dtype=torch.int64, device="cpu")
        for leg in self.legs:
            sizes_WH[:, leg.hosting] = torch.tensor(leg.counts_W, device="cpu")
        return sizes_WH


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What reached this rank: groups by rank and then by slice, and values of each group."""

    groups: IdGroups
    hostings_G: tuple[int, ...]
    senders_G: tuple[int, ...]
    values: tuple[tuple[Tensor, ...], ...]
    counts_N: Tensor | None
    sent_WH: Tensor
    received_WH: Tensor


def outgoing(
    groups: IdGroups, hostings: Sequence[Hosting], rank: int, ranks: int, *, to_all: bool
) -> Outgoing:
    """Where each id goes.

    to_all: ids of replicated slices go to every rank (writes); else they stay here (reads).
    """
    cuts, tables = groups.splits_G1.tolist(), groups.tables_G.tolist()
    legs = []
    for number, hosting in enumerate(hostings):
        spans = [
            torch.arange(start, stop, device="cpu")
            for (start, stop), table in zip(pairwise(cuts), tables, strict=True)
            if table == hosting.table and start < stop
        ]
        if not spans:
            continue
        positions_n = torch.cat(spans).to(groups.ids_N.device)
        if hosting.hosted.replicated and to_all:
            counts = (positions_n.numel(),) * ranks
            legs.append(Leg(number, positions_n.repeat(ranks), counts))
            continue
        if hosting.hosted.replicated:
            to_n = torch.full_like(positions_n, rank)
        else:
            hashes_n = hash_ids(hosting.hash_name, groups.ids_N[positions_n])
            to_n = owners(hosting.hosted, hashes_n)
        order_n = to_n.argsort(stable=True)
        counts_W = torch.bincount(to_n, minlength=ranks).tolist()
        legs.append(Leg(number, positions_n[order_n], tuple(counts_W)))
    return Outgoing(groups, tuple(legs))


def receive(
    sent: Outgoing,
    values: Sequence[Sequence[Tensor]],
    counts_N: Tensor | None,
    sizes: tuple[Tensor, Tensor],
    hostings: Sequence[Hosting],
    collectives: Collectives,
    what: str,
) -> Arrived:
    """Exchange ids, counts and values.

    values: several sets of rows (gradients, weights), each one [n_g, D] per group of `sent`.
    sizes: int64 [W, H] on the CPU, sent and received.
    """
    sent_WH, received_WH = sizes
    reals = sorted({hosting.real for hosting in hostings}, key=str)
    parts = [_ids_part(sent.groups.ids_N, sent.legs, sizes)]
    if counts_N is not None:
        parts.append(_ids_part(counts_N, sent.legs, sizes))
    for rows in values:
        parts += [_rows_part(sent, rows, hostings, sizes, real) for real in reals]
    found = collectives.all_to_all(parts, what=what).wait()
    groups, hostings_G, senders_G = _groups(found[0], received_WH, hostings)
    rest = found[1:] if counts_N is None else found[2:]
    cut = [
        _cut_rows(rest[i * len(reals) : (i + 1) * len(reals)], reals, groups, hostings_G, hostings)
        for i in range(len(values))
    ]
    counted = None if counts_N is None else found[1]
    return Arrived(groups, hostings_G, senders_G, tuple(cut), counted, sent_WH, received_WH)


def reply(
    arrived: Arrived,
    answers: Sequence[Tensor],
    sent: Outgoing,
    hostings: Sequence[Hosting],
    collectives: Collectives,
    *,
    scalar: bool,
    what: str,
) -> list[Tensor]:
    """Answers back to who asked: of each leg, in the order of its positions.

    answers: one per group that arrived: int32 [n] each if `scalar`, else rows [n, width].
    """
    kinds = [torch.int32] if scalar else []
    kinds += sorted({h.real for h in hostings}, key=str) if not kinds else []
    widths = [1 if scalar else hosting.width for hosting in hostings]
    parts = []
    for kind in kinds:
        mine = [k for k, h in enumerate(hostings) if scalar or h.real == kind]
        own = [
            answer.reshape(-1)
            for answer, h in zip(answers, arrived.hostings_G, strict=True)
            if h in mine
        ]
        like = torch.empty(0, dtype=kind, device=collectives.device)
        sizes_H = torch.tensor(
            [widths[k] if k in mine else 0 for k in range(len(hostings))], device="cpu"
        )
        send = tuple((arrived.received_WH @ sizes_H).tolist())
        back = tuple((arrived.sent_WH @ sizes_H).tolist())
        parts.append(Part(torch.cat([*own, like]), send, back))
    found = collectives.all_to_all(parts, what=what).wait()
    return [
        _leg_answers(leg, kinds, found, sent.legs, hostings, widths, scalar) for leg in sent.legs
    ]


def _leg_answers(
    leg: Leg,
    kinds: Sequence[torch.dtype],
    found: Sequence[Tensor],
    legs: Sequence[Leg],
    hostings: Sequence[Hosting],
    widths: Sequence[int],
    scalar: bool,
) -> Tensor:
    """A leg's stretches of what came back, joined over the ranks."""
    real = hostings[leg.hosting].real
    flat = found[0] if scalar else found[kinds.index(real)]
    mates = [other for other in legs if scalar or hostings[other.hosting].real == real]
    pieces, at = [], 0
    for rank in range(len(leg.counts_W)):
        for other in mates:
            floats = other.counts_W[rank] * widths[other.hosting]
            if other is leg:
                pieces.append(flat[at : at + floats])
            at += floats
    joined = torch.cat(pieces)
    return joined if scalar else joined.view(-1, widths[leg.hosting])


def _ids_part(data_N: Tensor, legs: Sequence[Leg], sizes: tuple[Tensor, Tensor]) -> Part:
    pieces = [torch.split(data_N[leg.positions_n], list(leg.counts_W)) for leg in legs]
    sent_WH, received_WH = sizes
    ranks = range(sent_WH.shape[0])
    data = torch.cat([data_N[:0], *(piece[w] for w in ranks for piece in pieces)])
    return Part(data, tuple(sent_WH.sum(1).tolist()), tuple(received_WH.sum(1).tolist()))


def _rows_part(
    sent: Outgoing,
    rows: Sequence[Tensor],
    hostings: Sequence[Hosting],
    sizes: tuple[Tensor, Tensor],
    real: torch.dtype,
) -> Part:
    """The rows of all slices of one dtype, flat."""
    pieces = []
    for leg in sent.legs:
        hosting = hostings[leg.hosting]
        if hosting.real != real:
            continue
        picked = _picked(sent.groups, rows, hosting, leg.positions_n)
        floats = [count * hosting.width for count in leg.counts_W]
        pieces.append(torch.split(picked.reshape(-1), floats))
    sent_WH, received_WH = sizes
    widths_H = torch.tensor([h.width if h.real == real else 0 for h in hostings], device="cpu")
    ranks = range(sent_WH.shape[0])
    like = torch.empty(0, dtype=real, device=sent.groups.ids_N.device)
    data = torch.cat([like, *(piece[w] for w in ranks for piece in pieces)])
    return Part(
        data, tuple((sent_WH @ widths_H).tolist()), tuple((received_WH @ widths_H).tolist())
    )


def _picked(
    groups: IdGroups, rows: Sequence[Tensor], hosting: Hosting, positions_n: Tensor
) -> Tensor:
    """Rows at some positions of the call, all of one table, its slice's columns."""
    cuts, tables = groups.splits_G1.tolist(), groups.tables_G.tolist()
    own, moved_n, before = [], positions_n.clone(), 0
    for (start, stop), table, part in zip(pairwise(cuts), tables, rows, strict=True):
        if table != hosting.table:
            continue
        inside_n = (positions_n >= start) & (positions_n < stop)
        moved_n = torch.where(inside_n, positions_n - start + before, moved_n)
        own.append(part[:, hosting.hosted.start : hosting.hosted.stop])
        before += stop - start
    return torch.cat(own)[moved_n]


def _groups(
    ids_N: Tensor, received_WH: Tensor, hostings: Sequence[Hosting]
) -> tuple[IdGroups, tuple[int, ...], tuple[int, ...]]:
    """A group per sender and slice that ids came for."""
    found = [
        (sender, number, count)
        for sender, row in enumerate(received_WH.tolist())
        for number, count in enumerate(row)
        if count
    ]
    splits_G1 = torch.tensor(
        [0, *(count for _, _, count in found)], dtype=torch.int64, device="cpu"
    ).cumsum(0)
    local = [hostings[number].local for _, number, _ in found]
    tables_G = torch.tensor(
        [-1 if k is None else k for k in local], dtype=torch.int32, device="cpu"
    )
    numbers = tuple(number for _, number, _ in found)
    return IdGroups(ids_N, splits_G1, tables_G), numbers, tuple(sender for sender, _, _ in found)


def _cut_rows(
    flats: Sequence[Tensor],
    reals: Sequence[torch.dtype],
    groups: IdGroups,
    hostings_G: Sequence[int],
    hostings: Sequence[Hosting],
) -> tuple[Tensor, ...]:
    """[n_g, D_g] of each group, out of flat rows by dtype."""
    at = dict.fromkeys(reals, 0)
    rows = []
    for count, number in zip(groups.splits_G1.diff().tolist(), hostings_G, strict=True):
        hosting = hostings[number]
        flat, start = flats[reals.index(hosting.real)], at[hosting.real]
        at[hosting.real] = start + count * hosting.width
        rows.append(flat[start : at[hosting.real]].view(count, hosting.width))
    return tuple(rows)


class OneRankOnly:
    """Lookups with tickets, and rows in bulk: verbs of one rank's shard.

    A training lookup is the exchange's own; rows in bulk are each rank's part of a checkpoint.
    """

    __slots__ = ()

    def find_pooled(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `EmbeddingCollection` pools."""
        raise _refused("find_pooled", "Call the collection, or `find`.")

    def find_or_init(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `EmbeddingCollection` looks up for training."""
        raise _refused("find_or_init", "Call the collection, `assign_add` or `reinitialize`.")

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no ticket over ranks."""
        raise _refused("gather", "Call `find`.")

    def gather_pooled(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no ticket over ranks."""
        raise _refused("gather_pooled", "Call the collection.")

    def apply(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no ticket over ranks."""
        raise _refused("apply of records", "Call the optimizer's step, or `apply_ids`.")

    def sum_grads(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: gradients are summed at their owner."""
        raise _refused("sum_grads", "Use the rank's own shard.")

    def apply_summed(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: gradients are summed at their owner."""
        raise _refused("apply_summed", "Use the rank's own shard.")

    def snapshot(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank saves its own part."""
        raise _refused("snapshot", "Use the rank's own shard, or save a checkpoint.")

    @property
    def incarnation(self) -> NoReturn:
        """Refused: every rank's shard has its own."""
        raise _refused("incarnation", "Use the rank's own shard.")

    def release(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank keeps deletions of its own."""
        raise _refused("release", "Use the rank's own shard.")

    def resume(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank goes on by itself."""
        raise _refused("resume", "Use the rank's own shard.")

    def expect(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank loads its own part."""
        raise _refused("expect", "Load each rank's part into its own shard.")

    def load(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank loads its own part."""
        raise _refused("load", "Load each rank's part into its own shard.")

    def admission_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank saves its own part."""
        raise _refused("admission_state", "Use the rank's own shard.")

    def load_admission_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: every rank loads its own part."""
        raise _refused("load_admission_state", "Use the rank's own shard.")


def _refused(verb: str, remedy: str) -> ConfigError:
    allowed = "find, assign, assign_add, reinitialize, apply_ids, entry, export, size, stats"
    return ConfigError("verb of a table over ranks", got=verb, allowed=allowed, remedy=remedy)


_VERBS = ("find", "assign", "assign_add", "reinitialize", "apply_ids")


class Placed(Protocol):
    """What `RoutedVerbs` reads of an exchange."""

    @property
    def shard(self) -> Shard: ...
    @property
    def specs(self) -> tuple[TableSpec, ...]: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def collectives(self) -> Collectives: ...


class RoutedVerbs(OneRankOnly):
    """Table verbs over all ranks; tables are named by their index in `specs`.

    `Table(spec, shard=RoutedVerbs(exchange))` is a table of the whole job. Duplicates across
    ranks are taken in order of rank, then of position: of several `assign` the last rank's wins,
    `assign_add` and `apply_ids` add up. The event time of a verb is the latest of any rank.

    Args:
        exchange: this rank's; its collectives carry the verbs.
    """

    __slots__ = ("_collectives", "_hostings", "_placement", "_shard", "_specs")

    def __init__(self, exchange: Placed) -> None:
        self._shard = exchange.shard
        self._specs = exchange.specs
        self._placement = exchange.placement
        self._collectives = exchange.collectives
        local = {spec.name: k for k, spec in enumerate(self._shard.specs)}
        rank = self._collectives.rank
        self._hostings = tuple(
            Hosting(
                table,
                hosted,
                spec.hash_name,
                real_dtype(spec),
                local[hosted_spec(spec, hosted).name] if rank in hosted.ranks else None,
            )
            for table, spec in enumerate(self._specs)
            for hosted in self._placement.of(spec.name)
        )

    @property
    def collective(self) -> bool:
        """Every verb, `size` too, is a call that all ranks make together."""
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
        sent, arrived, _ = self._send("find", groups, (), None, StepContext(), to_all=False)
        found = self._shard.find(arrived.groups)
        flags = torch.split(found.found_N.to(torch.int32), _lengths(arrived.groups))
        rows = self._reply(arrived, found.weights, sent, scalar=False)
        there = self._reply(arrived, flags, sent, scalar=True)
        found_N = torch.zeros(groups.ids_N.shape, dtype=torch.bool, device=self.device)
        weights = self._empty(groups)
        cuts, tables = groups.splits_G1.tolist(), groups.tables_G.tolist()
        for leg, rows_nD, there_n in zip(sent.legs, rows, there, strict=True):
            hosting = self._hostings[leg.hosting]
            if hosting.hosted.start == 0:
                found_N[leg.positions_n] = there_n != 0
            columns = slice(hosting.hosted.start, hosting.hosted.stop)
            for g, (start, stop) in enumerate(pairwise(cuts)):
                if tables[g] == hosting.table:
                    mine_n = (leg.positions_n >= start) & (leg.positions_n < stop)
                    weights[g][leg.positions_n[mine_n] - start, columns] = rows_nD[mine_n]
        return Found(tuple(weights), found_N)

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; of duplicates the last wins, of ranks the highest."""
        _, arrived, ctx = self._send("assign", groups, [weights], None, ctx)
        self._finish(
            "assign", lambda: self._shard.assign(arrived.groups, arrived.values[0], ctx=ctx)
        )

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up, over ranks too."""
        _, arrived, ctx = self._send("assign_add", groups, [deltas], None, ctx)
        self._finish(
            "assign_add", lambda: self._shard.assign_add(arrived.groups, arrived.values[0], ctx=ctx)
        )

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N] in input order: 1 existed, 0 inserted,
        -1 of a table that does not exist.
        """
        sent, arrived, ctx = self._send("reinitialize", groups, (), None, ctx)
        status: list[Tensor] = []
        self._finish(
            "reinitialize", lambda: status.append(self._shard.reinitialize(arrived.groups, ctx=ctx))
        )
        answers = torch.split(status[0], _lengths(arrived.groups))
        status_N = torch.full(groups.ids_N.shape, -1, dtype=torch.int32, device=self.device)
        for leg, found_n in zip(
            sent.legs, self._reply(arrived, answers, sent, scalar=True), strict=True
        ):
            # Every replica answers; its last answer is as good as the others.
            if self._hostings[leg.hosting].hosted.start == 0:
                status_N[leg.positions_n] = found_n
        return status_N

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
        _, arrived, ctx = self._send("apply_ids", groups, values, counted_N, ctx)
        seen = arrived.values[1] if len(arrived.values) > 1 else None
        here = replace(ctx, learning_rates=self._rates(ctx))
        self._finish(
            "apply_ids",
            lambda: self._shard.apply_ids(
                arrived.groups, arrived.values[0], arrived.counts_N, ctx=here, seen_weights=seen
            ),
        )

    def evict(self, now_s: int) -> int:
        """Drop what has expired by the latest time of any rank; how many rows of the whole tables
        went.
        """
        times = torch.tensor([now_s], device=self.device)
        now_s = int(self._collectives.all_reduce(times, "max", what="evict").wait()[0])
        before = [stats.evicted for stats in self._shard.stats()]
        self._finish("evict", lambda: self._shard.evict(now_s))
        gone = [
            stats.evicted - earlier
            for stats, earlier in zip(self._shard.stats(), before, strict=True)
        ]
        return self._total("evict", sum(gone[k] for k in self._counted()))

    def cut(self) -> int:
        """Close every rank's epoch and open the next; the closed one, the latest of any rank."""
        closed: list[int] = []
        self._finish("cut", lambda: closed.append(self._shard.cut()))
        epochs = torch.tensor(closed, device=self.device)
        return int(self._collectives.all_reduce(epochs, "max", what="cut").wait()[0])

    def clear(self, table: int) -> None:
        """Drop all rows of a table, everywhere."""
        checks.table_index(table, len(self._specs))
        local = [k for k in self._local(table) if k is not None]

        def work() -> None:
            for number in local:
                self._shard.clear(number)

        self._finish("clear", work)

    def size(self, table: int) -> int:
        """Rows of a table on all ranks; replicas once."""
        checks.table_index(table, len(self._specs))
        counted = set(self._counted())
        local = [k for k in self._local(table) if k in counted]
        return self._total("size", sum(self._shard.size(k) for k in local if k is not None))

    def stats(self) -> tuple[TableStats, ...]:
        """Counters of the whole tables: rows once, bytes of all ranks."""
        own = self._shard.stats()
        mine = {
            number: own[hosting.local]
            for number, hosting in enumerate(self._hostings)
            if hosting.local is not None
        }
        everyone = self._collectives.gather_objects(mine, what="stats")
        return tuple(
            joined_stats(
                spec,
                [
                    (self._hostings[number].hosted, rank, stats)
                    for rank, theirs in enumerate(everyone)
                    for number, stats in theirs.items()
                    if self._hostings[number].table == table
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
        parts = [(self._hostings[number].hosted, entry) for number, entry in found.items()]
        return joined_entry(self._specs[table], parts)

    def export(self, table: int) -> RowChunk:
        """All rows of a table on every rank, ordered by hash: for small tables."""
        checks.table_index(table, len(self._specs))
        mine = [
            (number, self._shard.export(hosting.local))
            for number, hosting in enumerate(self._hostings)
            if hosting.table == table and hosting.local is not None and self._first(hosting)
        ]
        everyone = self._collectives.gather_objects(mine, what="export")
        parts = [(self._hostings[k].hosted, chunk) for theirs in everyone for k, chunk in theirs]
        return joined_chunk(self._specs[table], parts)

    def check(self) -> None:
        """Raise what kernels of any rank found since the last call; waits for the device."""
        self._finish("check", self._shard.check)

    def _first(self, hosting: Hosting) -> bool:
        """Whether this rank speaks for a replica, or holds rows of its own."""
        hosted = hosting.hosted
        return not hosted.replicated or self._collectives.rank == hosted.ranks[0]

    def _counted(self) -> list[int]:
        """Tables of this rank's shard in which rows are counted: leftmost slices, replicas once."""
        return [
            hosting.local
            for hosting in self._hostings
            if hosting.local is not None and hosting.hosted.start == 0 and self._first(hosting)
        ]

    def _local(self, table: int) -> list[int | None]:
        return [hosting.local for hosting in self._hostings if hosting.table == table]

    def _slices_of(self, table: int, id: int) -> dict[int, Entry]:
        found = {}
        for number, hosting in enumerate(self._hostings):
            if hosting.table == table and hosting.local is not None and self._first(hosting):
                entry = self._shard.entry(hosting.local, id)
                if entry is not None:
                    found[number] = entry
        return found

    def _total(self, what: str, number: int) -> int:
        numbers = torch.tensor([number], device=self.device)
        return int(self._collectives.all_reduce(numbers, "sum", what=what).wait()[0])

    def _rates(self, ctx: StepContext) -> dict[str, tuple[float, ...]]:
        """Rates of the shard's tables."""
        return {
            self._shard.specs[hosting.local].name: slice_rates(
                self._specs[hosting.table],
                hosting.hosted,
                ctx.learning_rates[self._specs[hosting.table].name],
            )
            for hosting in self._hostings
            if hosting.local is not None and self._specs[hosting.table].name in ctx.learning_rates
        }

    def _empty(self, groups: IdGroups) -> list[Tensor]:
        cuts = groups.splits_G1.tolist()
        return [
            torch.zeros(
                stop - start,
                self._specs[table].dim,
                dtype=real_dtype(self._specs[table]),
                device=self.device,
            )
            for (start, stop), table in zip(pairwise(cuts), groups.tables_G.tolist(), strict=True)
        ]

    def _send(
        self,
        verb: str,
        groups: IdGroups,
        values: Sequence[Sequence[Tensor]],
        counts_N: Tensor | None,
        ctx: StepContext,
        *,
        to_all: bool = True,
    ) -> tuple[Outgoing, Arrived, StepContext]:
        """Ids and values to their owners; what came here, and the context with the latest time."""
        ranks, rank = self._collectives.world_size, self._collectives.rank
        self._collectives.step = ctx.global_step
        wrong: ShoalError | None = None
        ready: list[Sequence[Tensor]] = []
        try:
            ready = self._checked(verb, groups, values, counts_N, ctx)
            sent = outgoing(groups, self._hostings, rank, ranks, to_all=to_all)
        except ShoalError as error:
            wrong, sent = error, Outgoing(groups, ())
        known = agree(
            self._collectives,
            _VERBS,
            verb,
            sent.sizes(len(self._hostings), ranks),
            time_s=ctx.event_time_s,
            sets=len(values) if groups.ids_N.numel() else -1,
            wrong=wrong,
        )
        if not groups.ids_N.numel():
            ready = [self._empty(groups)] * max(known.sets, min(len(values), 1))
        sizes = known.sizes
        arrived = receive(sent, ready, counts_N, sizes, self._hostings, self._collectives, verb)
        return sent, arrived, replace(ctx, event_time_s=known.time_s)

    def _checked(
        self,
        verb: str,
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
        if verb != "reinitialize":
            for table in groups.tables_G.tolist():
                checks.table_index(table, len(self._specs))
        if counts_N is not None:
            checks.counts(groups, counts_N)
        checks.rates(ctx, self._specs)
        if not values:
            return []
        shapes = [(tuple(part.shape), part.dtype) for part in self._empty(groups)]
        return [checks.grads(rows, shapes, self.device) for rows in values]  # type: ignore[arg-type]

    def _reply(
        self, arrived: Arrived, answers: Sequence[Tensor], sent: Outgoing, *, scalar: bool
    ) -> list[Tensor]:
        return reply(
            arrived,
            answers,
            sent,
            self._hostings,
            self._collectives,
            scalar=scalar,
            what="answers of a table verb",
        )

    def _finish(self, verb: str, work: Callable[[], object]) -> None:
        finish(self._collectives, verb, work)


def _lengths(groups: IdGroups) -> list[int]:
    lengths: list[int] = groups.splits_G1.diff().tolist()
    return lengths
