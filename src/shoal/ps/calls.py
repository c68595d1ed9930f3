"""A call over all servers: each one's share of its ids and rows, and their answers put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shoal.comm.frames import tensor
from shoal.comm.transport import Frames
from shoal.exchange.partition import Outgoing, flat
from shoal.exchange.wire import WireKind
from shoal.ids import salt, to_signed
from shoal.ops import gather_rows
from shoal.ops.ids_by_shard import fused_reorder
from shoal.placement import hash_ids, ranks_of
from shoal.ps.messages import READS, REALS, Head, Method, rows_of_frames, rows_of_segments
from shoal.table.rows import real_dtype, weight_dtype
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk

_CPU = torch.device("cpu")
_FLAGS: dict[str, tuple[torch.dtype, int]] = {
    "find": (torch.bool, 1),
    "lookup": (torch.bool, 2),
    "reinitialize": (torch.int32, 1),
}
"""Flags of each id in a reply: their dtype, and how many frames of them."""


def head_of(method: Method, ctx: StepContext) -> Head:
    """The head of a request of a step."""
    return Head(
        method=method,
        step=ctx.global_step,
        event_time_s=ctx.event_time_s,
        nan_policy=ctx.nan_policy,
        nan_clip=ctx.nan_clip,
        rates=dict(ctx.learning_rates),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ServerShare:
    """One server's share of a call: groups by buffer and table, and sets of flat rows by dtype."""

    tables: tuple[int, ...]
    sizes: tuple[int, ...]
    ids_n: Tensor
    counts_n: Tensor
    sets: list[list[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a server replied: flat rows of each dtype of `REALS`, and flags of each id.

    seen: updates that it had applied before a lookup; None of other calls.
    """

    rows: list[Tensor]
    flags: list[Tensor]
    seen: int | None = None


class SplitCall:
    """A call's groups by server: which of their positions go to which, in order.

    Groups of tables that do not exist go nowhere.

    distinct: each id of a group goes out once, whose rows and flags then are those of all its
        positions; such a call brings no values.
    """

    def __init__(
        self, groups: IdGroups, specs: Sequence[TableSpec], servers: int, *, distinct: bool = False
    ) -> None:
        self.groups, self.specs, self.servers = groups, specs, servers
        cuts = pairwise(groups.splits_G1.tolist())
        found = enumerate(zip(cuts, groups.tables_G.tolist(), strict=True))
        self.spans = [(n, *cut, k) for n, (cut, k) in found if 0 <= k < len(specs)]
        self.orders: list[Tensor | None] = []  # None: as they are, for one server has all
        self.places: list[Tensor] = []  # of distinct ids: which of them each position has
        self.sizes: list[list[int]] = []
        self._ids: list[Tensor] = []
        for _, start, stop, table in self.spans:
            ids_n, hash_name = groups.ids_N[start:stop], specs[table].hash_name
            if distinct:
                ranges = torch.tensor(
                    [[to_signed(salt(hash_name)), servers, *range(servers)]], device="cpu"
                )
                ids_n, _, sizes_W, place_n = fused_reorder(
                    [ids_n], None, [1], servers, "hash_ranges", ranges
                )
                self.places.append(place_n)
            else:
                owner_n = ranks_of(hash_ids(hash_name, ids_n), servers)
                sizes_W = torch.bincount(owner_n, minlength=servers)
                order = None if sizes_W.max() == stop - start else owner_n.argsort(stable=True)
                self.orders.append(order)
                ids_n = ids_n if order is None else ids_n[order]
            self.sizes.append(sizes_W.tolist())
            self._ids.append(ids_n)

    def shares(
        self, counts_N: Tensor | None, sets: Sequence[Sequence[Tensor]]
    ) -> list[ServerShare]:
        """Each server's share of ids, occurrences and rows."""
        ids = self._cut(self._ids)
        counts = ids if counts_N is None else self._cut(self._ordered(self._of_groups(counts_N)))
        rows = [self._cut(self._ordered([one[n] for n, *_ in self.spans])) for one in sets]
        tables = tuple(table for *_, table in self.spans)
        return [
            ServerShare(
                tables,
                tuple(sizes[server] for sizes in self.sizes),
                cat(ids[server]),
                cat(counts[server]),
                [rows_by_real(one[server]) for one in rows],
            )
            for server in range(self.servers)
        ]

    def rows(self, answers: Sequence[Answer]) -> tuple[Tensor, ...]:
        """Rows [n, D] of each group."""
        pieces: list[list[Tensor]] = [[] for _ in self.spans]
        for server, answer in enumerate(answers):
            for real, rows_E in zip(REALS, answer.rows, strict=True):
                own = [
                    (g, (self.sizes[g][server], self.specs[table].dim))
                    for g, (*_, table) in enumerate(self.spans)
                    if real_dtype(self.specs[table]) is real
                ]
                views = rows_of_segments(rows_E, [segment for _, segment in own])
                for (g, _), view in zip(own, views, strict=True):
                    pieces[g].append(view)
        return tuple(self._in_order(g, parts) for g, parts in enumerate(pieces))

    def flags(self, answers: Sequence[Answer], other: int, dtype: torch.dtype) -> Tensor:
        """Each position's flag; `other` of groups that went nowhere."""
        flags_N = torch.full_like(self.groups.ids_N, other, dtype=dtype)
        sizes = [[one[server] for one in self.sizes] for server in range(self.servers)]
        cut = [torch.split(a.flags[0], cut) for a, cut in zip(answers, sizes, strict=True)]
        for g, (_, start, stop, _) in enumerate(self.spans):
            flags_N[start:stop] = self._in_order(g, [parts[g] for parts in cut])
        return flags_N

    def _of_groups(self, values_N: Tensor) -> list[Tensor]:
        return [values_N[start:stop] for _, start, stop, _ in self.spans]

    def _ordered(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Each group's values, by server."""
        pairs = zip(values, self.orders, strict=True)
        return [part if order is None else part[order] for part, order in pairs]

    def _cut(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """Of each server, its part of each group's values."""
        cut = [torch.split(part, sizes) for part, sizes in zip(values, self.sizes, strict=True)]
        return [[parts[server] for parts in cut] for server in range(self.servers)]

    def _in_order(self, group: int, parts: Sequence[Tensor]) -> Tensor:
        if self.places and parts[0].dim() == 2:
            return gather_rows(parts, self.places[group])
        joined = cat(parts)
        if self.places:
            return joined.index_select(0, self.places[group])
        order = self.orders[group]
        if order is None:
            return joined
        return torch.empty_like(joined).index_copy_(0, order, joined)


def rows_by_real(parts: Sequence[Tensor]) -> list[Tensor]:
    """Rows of each dtype of `REALS`, one after the other, flat."""
    return [flat([part for part in parts if part.dtype is real], real, _CPU) for real in REALS]


def shares_of(outgoing: Outgoing) -> list[ServerShare]:
    """Each server's share of a lookup's distinct ids, by buffer and table."""
    layouts = outgoing.plan.buffers
    sizes = [buffer.sizes_WK.sum(1).tolist() for buffer in outgoing.buffers]
    ids = [torch.split(b.ids_N, cut) for b, cut in zip(outgoing.buffers, sizes, strict=True)]
    counts = [torch.split(b.counts_N, cut) for b, cut in zip(outgoing.buffers, sizes, strict=True)]
    return [
        ServerShare(
            tuple(table.table for layout in layouts for table in layout.tables),
            tuple(n for buffer in outgoing.buffers for n in buffer.sizes_WK[server].tolist()),
            cat([part[server] for part in ids]),
            cat([part[server] for part in counts]),
            [],
        )
        for server in range(outgoing.plan.world_size)
    ]


def answer_of(
    method: Method,
    share: ServerShare,
    reply: tuple[bytes, Frames],
    specs: Sequence[TableSpec],
    kind: WireKind | None,
) -> Answer:
    """Nothing was asked of a server without ids."""
    if method not in _FLAGS:
        return Answer([], [])
    count, (dtype, flags), (said, frames) = sum(share.sizes), _FLAGS[method], reply
    if not frames:
        none = [torch.empty(0, dtype=real, device="cpu") for real in REALS]
        return Answer(none, [torch.empty(0, dtype=dtype, device="cpu")] * flags)
    head = Head(method="find", tables=share.tables, sizes=share.sizes)
    rows: list[Tensor] = []
    if method in READS:
        segments = [head.segments(specs, real) for real in REALS]
        rows = rows_of_frames(segments, frames[: len(REALS)], kind)
    return Answer(
        rows,
        [tensor(frame, dtype, count, "flags") for frame in frames[len(frames) - flags :]],
        int(said) if said else None,
    )


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Of ids, if there are none."""
    if not parts:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def chunk_of_frames(spec: TableSpec, frames: Frames) -> RowChunk:
    rows = frames[0].nbytes // 8
    wide = (weight_dtype(spec), spec.dim), (real_dtype(spec), spec.state_width)
    weights, state = (
        tensor(frame, dtype, rows * width, "rows").view(rows, width)
        for frame, (dtype, width) in zip(frames[1:3], wide, strict=True)
    )
    ids, versions, last_seen_s, counts = (
        tensor(frame, torch.int64, rows, "rows") for frame in (frames[0], *frames[3:])
    )
    return RowChunk(spec.name, ids, weights, state, versions, last_seen_s, counts)
