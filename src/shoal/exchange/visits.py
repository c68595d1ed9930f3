"""What reaches the owner of rows: ids as one lookup, rows as flat buffers to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.exchange.lanes import Lane
from shoal.exchange.partition import Trip
from shoal.table.shard import IdGroups

__all__ = [
    "Visit",
    "flat",
    "flat_lanes",
    "grads_of",
    "visits_of",
]


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
