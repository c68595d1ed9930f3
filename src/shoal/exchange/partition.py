"""A request's ids made distinct and grouped by owner; what crosses the wire for one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.comm.collectives import Part, Sizes
from shoal.exchange.lanes import Lane, Lanes
from shoal.kernels.transfer import staged
from shoal.ops.reorder_operators import fused_reorder, fused_reorder_into
from shoal.ragged import KeyedRagged

__all__ = ["Packed", "Parcel", "Trip", "partition"]

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
