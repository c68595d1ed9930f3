"""How rows and gradients travel between ranks: as they are, or in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from shoal.comm.collectives import Arriving, Collectives, Part, Pending
from shoal.rules.rule import Allowed, Checked

WireKind = Literal["bfloat16", "float16", "int8"]
_KINDS = (*get_args(WireKind), None)
Precision = Annotated[
    WireKind | None,
    Allowed(", ".join(map(str, _KINDS)), _KINDS.__contains__, "None sends rows as they are."),
]
Segments = Sequence[tuple[int, int]]

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALE_BYTES = 4
_STEPS = 127


def wire_dtype(kind: WireKind | None, real: torch.dtype) -> torch.dtype:
    """The dtype of the wire of rows of dtype `real`."""
    if kind is None:
        return real
    return _HALF.get(kind, torch.uint8)


def wire_elements(rows: int, width: int, kind: WireKind | None) -> int:
    """Elements of the wire's dtype that `rows` rows of `width` take."""
    return rows * (width + _SCALE_BYTES if kind == "int8" else width)


def encode(rows_E: Tensor, segments: Segments, kind: WireKind | None) -> Tensor:
    """The wire of flat rows: 1-D of `wire_dtype`; for None, `rows_E` itself.

    rows_E: float32 or float64 [sum of rows x width], any device.
    segments: (rows, width) of each run of rows, in order.
    """
    if kind is None:
        return rows_E
    if kind != "int8":
        if kind == "float16":
            largest = torch.finfo(torch.float16).max
            rows_E = torch.where(rows_E.isinf(), rows_E, rows_E.clamp(-largest, largest))
        return rows_E.to(_HALF[kind])
    segments = _merged(segments)
    size = sum(wire_elements(rows, width, kind) for rows, width in segments)
    wire = torch.empty(size, dtype=torch.uint8, device=rows_E.device)
    for values_ND, row_bytes in _runs(rows_E, wire, segments):
        if not values_ND.numel():  # rows of no columns: scales alone
            row_bytes.zero_()
            continue
        scales_N1, steps_ND = _quantised(values_ND)
        row_bytes[:, :_SCALE_BYTES] = scales_N1.view(torch.uint8)
        row_bytes[:, _SCALE_BYTES:] = steps_ND.view(torch.uint8)
    return wire


def decode(
    wire: Tensor, segments: Segments, kind: WireKind | None, real: torch.dtype = torch.float32
) -> Tensor:
    """Flat rows [sum of rows x width] of dtype `real` from their wire; the inverse of `encode`."""
    if kind is None:
        return wire
    if kind != "int8":
        return wire.to(real)
    segments = _merged(segments)
    size = sum(rows * width for rows, width in segments)
    rows_E = torch.empty(size, dtype=real, device=wire.device)
    for values_ND, row_bytes in _runs(rows_E, wire, segments):
        if not values_ND.numel():
            continue
        # Copied to an address that a float may have.
        scale_bytes = row_bytes[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        scales_N1 = scale_bytes.view(torch.float32).to(real)
        steps_ND = row_bytes[:, _SCALE_BYTES:].view(torch.int8).to(real)
        torch.mul(steps_ND, scales_N1, out=values_ND)
        values_ND.masked_fill_(steps_ND == 0, 0.0)  # 0 x infinity
    return rows_E


def _quantised(values_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Scales float32 [N, 1] and steps int8 [N, D] with value = step x scale.

    A row with an infinity or NaN has that as its scale; its steps are 1 or -1 where such values
    are and 0 elsewhere.
    """
    largest_N1 = values_ND.abs().amax(dim=1, keepdim=True)
    scales_N1 = (largest_N1 / _STEPS).to(torch.float32)
    # float64 rows may lie beyond float32: such a row saturates.
    beyond_N1 = scales_N1.isinf() & largest_N1.isfinite()
    scales_N1 = torch.where(beyond_N1, torch.finfo(torch.float32).max, scales_N1)
    whole_N1 = scales_N1.isfinite()
    divisor_N1 = torch.where(whole_N1 & (scales_N1 > 0), scales_N1, 1.0).to(values_ND.dtype)
    finite_ND = values_ND.isfinite()
    steps_ND = (values_ND / divisor_N1).round_().clamp_(-_STEPS, _STEPS)
    marks_ND = torch.where(values_ND < 0, -1.0, 1.0).masked_fill_(finite_ND, 0.0)
    steps_ND = torch.where(whole_N1, steps_ND, marks_ND.to(steps_ND.dtype))
    return scales_N1, steps_ND.to(torch.int8)


def _runs(rows_E: Tensor, wire: Tensor, segments: Segments) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows [N, D] of each run and their bytes [N, 4 + D], scale first: views."""
    sizes = (
        [rows * width for rows, width in segments],
        [wire_elements(rows, width, "int8") for rows, width in segments],
    )
    parts = zip(*map(torch.split, (rows_E, wire), sizes), segments, strict=True)
    for values, row_bytes, (rows, width) in parts:
        yield values.view(rows, width), row_bytes.view(rows, _SCALE_BYTES + width)


def _merged(segments: Segments) -> list[tuple[int, int]]:
    """The segments with neighbours of one width as one: fewer, larger operations."""
    merged: list[tuple[int, int]] = []
    for rows, width in segments:
        if rows and merged and merged[-1][1] == width:
            merged[-1] = (merged[-1][0] + rows, width)
        elif rows:
            merged.append((rows, width))
    return merged


@dataclass(frozen=True, slots=True)
class Wire(Checked):
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

    rows: Precision = None
    grads: Precision = None


@dataclass(frozen=True, slots=True, eq=False)
class RowBuffer:
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


def send_rows(
    collectives: Collectives, buffers: Sequence[RowBuffer], kind: WireKind | None, *, what: str
) -> Pending:
    """Begin to send; `wait` gives one flat tensor per buffer, of its own dtype."""
    if not buffers:
        return Arriving(lambda: ())
    parts = []
    for buffer in buffers:
        widths_K = _widths(buffer.dims, kind)
        data = buffer.data
        if kind is not None:
            sizes_WK = buffer.send_WK[:1] if buffer.to_all else buffer.send_WK
            data = encode(data, _segments(sizes_WK, buffer.dims), kind)
        if buffer.to_all:
            data = data.repeat(collectives.world_size)
        send_W, receive_W = (
            tuple((sizes @ widths_K).tolist()) for sizes in (buffer.send_WK, buffer.receive_WK)
        )
        parts.append(Part(data, send_W, receive_W))
    pending = collectives.all_to_all(parts, what=what)
    if kind is None:
        return pending
    # Not what is sent, which need not be kept that long.
    forms = [(_segments(buffer.receive_WK, buffer.dims), buffer.data.dtype) for buffer in buffers]

    def decoded() -> tuple[Tensor, ...]:
        return tuple(
            decode(wire, segments, kind, real)
            for wire, (segments, real) in zip(pending.wait(), forms, strict=True)
        )

    return Arriving(decoded)


@lru_cache(maxsize=64)
def _widths(dims: tuple[int, ...], kind: WireKind | None) -> Tensor:
    """Elements of a row of each table on the wire, int64 on the CPU."""
    return torch.tensor([wire_elements(1, dim, kind) for dim in dims], device="cpu")


def _segments(sizes_WK: Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    return [
        (rows, dim) for sizes in sizes_WK.tolist() for rows, dim in zip(sizes, dims, strict=True)
    ]
