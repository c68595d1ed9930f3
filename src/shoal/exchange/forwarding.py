"""Ids with their values to the ranks that hold them, and answers back in the order of the ids.

Unlike a batch's lookup nothing is made distinct: every id travels with its value, in order, so
that the owner sees duplicates as one process would: in order of rank, then of position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, Part
from shoal.placement import Hosted, hash_ids, owners
from shoal.table.shard import IdGroups

__all__ = ["Arrived", "Hosting", "Leg", "Outgoing", "outgoing", "receive", "reply"]


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
