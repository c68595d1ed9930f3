"""How rows and their gradients travel between ranks: as they are, or in fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, Part, Pending
from shoal.comm.precision import WireKind, check_wire_kind, decode, encode, wire_elements

__all__ = ["Load", "Wire", "send_loads"]


@dataclass(frozen=True, slots=True)
class Wire:
    """Precision of what travels between ranks; None sends values as they are.

    Tables keep their own precision: values are rounded on the way only. "int8" has one scale per
    row. Rows that a rank reads from its own shard are rounded as all others, so that results do
    not depend on where a row lives; those of replicated tables never travel.

    Args:
        rows: of rows on the way to who asked for them.
        grads: of gradients on the way to the owner.

    Raises:
        ConfigError: an unknown precision.
    """

    rows: WireKind | None = None
    grads: WireKind | None = None

    def __post_init__(self) -> None:
        check_wire_kind(self.rows)
        check_wire_kind(self.grads)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Flat rows of several tables for every rank.

    Args:
        data: the rows, by rank and then by table; one run for all ranks with `to_all`.
        dims: floats of a row of each table.
        send_WK, receive_WK: int64 on the CPU, rows to and from each rank by table.
        to_all: every rank gets all of `data`.
    """

    data: Tensor
    dims: tuple[int, ...]
    send_WK: Tensor
    receive_WK: Tensor
    to_all: bool = False


def send_loads(
    collectives: Collectives, loads: Sequence[Load], kind: WireKind | None, *, what: str
) -> Pending:
    """Begin to send; `wait` gives one flat tensor per load, of its own dtype."""
    if not loads:
        return _Arrived((), None, None)
    parts = []
    for load in loads:
        widths_K = torch.tensor([wire_elements(1, dim, kind) for dim in load.dims], device="cpu")
        data = load.data
        if kind is not None:
            sizes_WK = load.send_WK[:1] if load.to_all else load.send_WK
            data = encode(data, _segments(sizes_WK, load.dims), kind)
        if load.to_all:
            data = data.repeat(collectives.world_size)
        send, receive = ((sizes @ widths_K).tolist() for sizes in (load.send_WK, load.receive_WK))
        parts.append(Part(data, tuple(send), tuple(receive)))
    pending = collectives.all_to_all(parts, what=what)
    return pending if kind is None else _Arrived(tuple(loads), kind, pending)


class _Arrived:
    """Decodes, once, what a collective brings."""

    __slots__ = ("_kind", "_loads", "_pending", "_rows")

    def __init__(
        self, loads: tuple[Load, ...], kind: WireKind | None, pending: Pending | None
    ) -> None:
        self._loads = loads
        self._kind = kind
        self._pending = pending
        self._rows: tuple[Tensor, ...] | None = None

    def wait(self) -> tuple[Tensor, ...]:
        """Flat rows of each load."""
        if self._rows is None:
            wires = () if self._pending is None else self._pending.wait()
            self._rows = tuple(
                decode(wire, _segments(load.receive_WK, load.dims), self._kind, load.data.dtype)
                for wire, load in zip(wires, self._loads, strict=True)
            )
            # What was sent need not be kept any longer.
            self._loads, self._pending = (), None
        return self._rows


def _segments(sizes_WK: Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    return [
        (rows, dim) for sizes in sizes_WK.tolist() for rows, dim in zip(sizes, dims, strict=True)
    ]
