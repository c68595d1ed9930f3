"""Pooling of received rows whose ids carry weights, in plain torch over segment operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.exchange.received_plan import ADDED, BankLayout, HostedColumns, Part
from shoal.ops import (
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
    segment_first_n,
    segment_sum,
)
from shoal.ragged import KeyedRagged

__all__ = ["Span", "pool", "spread"]


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of `offsets_N`: one feature in one hosted table."""

    group: int
    start: int
    stop: int
    hosted: HostedColumns

    @property
    def count(self) -> int:
        """Positions."""
        return self.stop - self.start


def pool(
    layout: BankLayout,
    spans: Sequence[Span],
    rows: Sequence[Tensor],
    offsets_N: Tensor,
    ordered: KeyedRagged,
) -> list[Tensor]:
    """One [B, width] per output of the layout."""
    size, device = ordered.batch_size, offsets_N.device
    outputs = [
        torch.zeros(size, width, dtype=layout.dtype, device=device) for width in layout.widths
    ]
    for part in layout.parts:
        span = spans[part.block]
        offsets_n = offsets_N[span.start : span.stop]
        bank, width = rows[span.hosted.bank], span.hosted.width
        rows_nD = fused_gather_embeddings_by_input(bank, [offsets_n], [width])[0]
        rows_nD = rows_nD * _factors(layout, part, span, ordered)[:, None]
        offsets_B1 = _offsets(span, ordered)
        if part.pool.pooling == "first_n":
            pooled = segment_first_n(rows_nD, offsets_B1, part.pool.length)
        else:
            pooled = segment_sum(rows_nD, offsets_B1)[:, None]
        for piece in part.pieces:
            columns = slice(piece.start, piece.start + piece.width)
            for j in range(pooled.shape[1]):
                first = piece.place + j * piece.step
                into = outputs[piece.output][:, first : first + piece.width]
                if piece.role == ADDED and into.is_cpu and part.pool.pooling != "first_n":
                    into.copy_(_added_by_row(into, rows_nD[:, columns], offsets_B1))
                else:
                    into += pooled[:, j, columns]
    return outputs


def _added_by_row(base_BD: Tensor, rows_nD: Tensor, offsets_B1: Tensor) -> Tensor:
    """base + row + row ..., in that order, as a shard on the CPU adds: base leads each segment."""
    size, count = base_BD.shape[0], rows_nD.shape[0]
    longer_B1 = offsets_B1 + torch.arange(size + 1, device="cpu")
    joined = rows_nD.new_empty(size + count, rows_nD.shape[1])
    joined[longer_B1[:-1]] = base_BD
    joined[torch.arange(count, device="cpu") + _bags(offsets_B1, count) + 1] = rows_nD
    return segment_sum(joined, longer_B1)


def spread(
    layout: BankLayout,
    spans: Sequence[Span],
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    offsets_N: Tensor,
    ordered: KeyedRagged,
) -> list[Tensor]:
    """One flat [size] per bank of the layout: the gradients of `pool`."""
    found: dict[int, list[tuple[Tensor, Tensor, int]]] = {bank: [] for bank in layout.banks}
    for part in layout.parts:
        span = spans[part.block]
        own = _position_grads(layout, part, span, grads, ordered)
        own = own * _factors(layout, part, span, ordered)[:, None]
        offsets_n = offsets_N[span.start : span.stop]
        found[span.hosted.bank].append((own, offsets_n, span.hosted.width))
    made = []
    for bank, size in zip(layout.banks, sizes, strict=True):
        if not found[bank]:
            made.append(torch.zeros(size, dtype=layout.dtype, device=offsets_N.device))
            continue
        parts, offsets, widths = zip(*found[bank], strict=True)
        made.append(fused_gather_embeddings_by_input_gradient(size, parts, offsets, widths))
    return made


def _position_grads(
    layout: BankLayout, part: Part, span: Span, grads: Sequence[Tensor], ordered: KeyedRagged
) -> Tensor:
    """[n, D]: what each position's row gets, without its factor."""
    offsets_B1 = _offsets(span, ordered)
    bags_n = _bags(offsets_B1, span.count)
    rows_nD = torch.zeros(
        span.count, span.hosted.width, dtype=layout.dtype, device=offsets_B1.device
    )
    first_n = part.pool.pooling == "first_n"
    lanes_n = torch.arange(span.count, device=offsets_B1.device) - offsets_B1[bags_n]
    for piece in part.pieces:
        columns = torch.arange(piece.width, device=offsets_B1.device) + piece.place
        into = rows_nD[:, piece.start : piece.start + piece.width]
        if first_n:
            kept_n = lanes_n.clamp(max=part.pool.length - 1)
            at = kept_n[:, None] * piece.step + columns
            taken = grads[piece.output][bags_n[:, None], at]
            into += taken.where(lanes_n[:, None] < part.pool.length, 0)
        else:
            into += grads[piece.output][bags_n[:, None], columns]
    return rows_nD


def _factors(layout: BankLayout, part: Part, span: Span, ordered: KeyedRagged) -> Tensor:
    """[n]: each position's weight, over the number of ids for a mean."""
    offsets_B1 = _offsets(span, ordered)
    factors_n = torch.ones(span.count, dtype=layout.dtype, device=offsets_B1.device)
    if part.pool.pooling == "mean":
        bags_n = _bags(offsets_B1, span.count)
        factors_n = factors_n / offsets_B1.diff()[bags_n]
    if ordered.weights_N is not None:
        first = int(ordered.host_splits[span.group])
        weights_n = ordered.weights_N[first : first + span.count]
        factors_n = factors_n * weights_n.to(layout.dtype)
    return factors_n


def _offsets(span: Span, ordered: KeyedRagged) -> Tensor:
    """int64 [B+1] into the span's positions."""
    size = ordered.batch_size
    first = int(ordered.host_splits[span.group])
    return ordered.offsets_FB1[span.group * size : (span.group + 1) * size + 1] - first


def _bags(offsets_B1: Tensor, count: int) -> Tensor:
    """Example of each position; the host knows how many there are."""
    lengths_B = offsets_B1.diff()
    bags_B = torch.arange(lengths_B.numel(), device=offsets_B1.device)
    return bags_B.repeat_interleave(lengths_B, output_size=count)
