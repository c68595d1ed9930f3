"""From received rows to pooled outputs, and from their gradients to gradients of received rows."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.errors import ShapeError
from shoal.exchange.received_plan import ADDED, BankLayout, HostedColumns, Part, compile_plan
from shoal.kernels.launch import sent
from shoal.ops import (
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
    segment_first_n,
    segment_sum,
)
from shoal.ops.dispatch import backend_on, checks_bounds
from shoal.ops.layout import layout_backward, layout_forward
from shoal.ragged import KeyedRagged
from shoal.table.shard import PoolPlan

if TYPE_CHECKING:
    from shoal.exchange.received_cuda import DenseRows, Places


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


def spread_weighted(
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


_SIZES_KEPT = 64
_UNIT = 16  # bytes that rows of a shard's memory are multiples of
_MOST = 1 << 31  # rows or positions, exclusive, that kernels number


class ReceivedRows:
    """A pool plan over rows of hosted tables, compiled once; thread-safe.

    Sums are in order of feature and position, so results are a local shard's.

    Args:
        plan: how the rows are pooled.
        tables_G: each feature's table, by the number that `hosted` has for it.
        hosted: which columns of which table are received, and in which bank.
        reals: float32 or float64, of each bank.
        dense: rows lie side by side in their bank, and some position reads each.

    Raises:
        ConfigError: a feature's table is not hosted, or its columns are not covered once.
        ShapeError, DTypeError: the plan does not fit its tables.
    """

    def __init__(
        self,
        plan: PoolPlan,
        tables_G: Sequence[int],
        hosted: Sequence[HostedColumns],
        reals: Sequence[torch.dtype],
        *,
        dense: bool = False,
    ) -> None:
        self._compiled = compile_plan(plan, tables_G, hosted, reals)
        self._hosted = tuple(hosted)
        self._reals = tuple(reals)
        self._widths = tuple(output.width for output in plan.outputs)
        self._groups = len(plan.pools)
        self._plan = plan
        self._tables = tuple(int(table) for table in tables_G)
        self._fits = dense and _one_memory(plan, self._hosted, self._reals)
        blocks = {block.group: k for k, block in enumerate(self._compiled.blocks)}
        self._block_of = None if self._compiled.straight else [blocks[g] for g in sorted(blocks)]
        self._dense: dict[torch.device, DenseRows] = {}
        self._static: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._cells: dict[tuple[int, int, torch.device], Tensor] = {}

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of each output."""
        return self._compiled.dtypes

    def places(
        self, offsets_N: Tensor, ordered: KeyedRagged, *, backward: bool = True
    ) -> Places | None:
        """What `pool` and `spread` of one batch share; None where that is nothing.

        With `backward` work begins on the device that only `spread` needs, beside the stream.

        Args:
            offsets_N, ordered: as `pool` takes them.
        """
        device = offsets_N.device
        if (
            not self._fits
            or offsets_N.shape[0] >= _MOST
            or backend_on(device) != "triton"
            or checks_bounds()
        ):
            return None
        starts = self._starts(self._reals, offsets_N, ordered)
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        rows = self._dense_on(device)
        return rows.places(offsets_N, ordered, lengths, self._block_of, backward=backward)

    def pool(
        self,
        rows: Sequence[Tensor],
        offsets_N: Tensor,
        ordered: KeyedRagged,
        places: Places | None = None,
    ) -> tuple[Tensor, ...]:
        """One [B, width] per output of the plan; columns that no slice covers are zeros.

        Args:
            rows: each bank's rows, flat.
            offsets_N: int64 [N], the float at which each position's row begins in its bank:
                hosted table by hosted table, in it feature by feature of its table, in order.
            ordered: the batch in the plan's order.
            places: of this batch; found here if None.

        Raises:
            ShapeError: offsets_N of another length, or another number of banks or features.
            InputError: a row leaves its bank (on CUDA only under `ops.set_bounds_checks`).
        """
        starts = self._starts(rows, offsets_N, ordered)
        if places is None:
            places = self.places(offsets_N, ordered, backward=False)
        if places is not None:
            return self._dense_on(offsets_N.device).pool(rows[0], places, ordered)
        made: dict[int, Tensor] = {}
        index = self._index(starts, offsets_N, ordered)
        for number, layout in enumerate(self._compiled.layouts):
            if layout.operators and layout.parts and ordered.weights_N is None:
                outputs = layout_forward(
                    [rows[bank] for bank in layout.banks],
                    offsets_N,
                    *index,
                    *self._arguments(number, ordered, offsets_N.device),
                )
            else:
                outputs = pool(layout, self._blocks(starts), rows, offsets_N, ordered)
            for output, first, stop in layout.gaps:
                outputs[output][:, first:stop] = 0
            made.update(zip(layout.outputs, outputs, strict=True))
        return tuple(made[output] for output in range(len(self._widths)))

    def spread(
        self,
        grads: Sequence[Tensor],
        sizes: Sequence[int],
        offsets_N: Tensor,
        ordered: KeyedRagged,
        places: Places | None = None,
    ) -> tuple[Tensor, ...]:
        """Gradients of the outputs as gradients of the rows: one flat [size] per bank.

        A row's gradient is summed over the positions that read it, in order; floats that nothing
        reads are zeros.

        Args:
            grads: one [B, width] per output, of its dtype.
            sizes: floats of each bank.
            offsets_N, ordered, places: as given to `pool`.

        Raises:
            ShapeError, InputError: as `pool`; gradients that are not the outputs' shapes.
        """
        starts = self._starts(sizes, offsets_N, ordered)
        self._check_grads(grads, ordered)
        if places is None:
            places = self.places(offsets_N, ordered)
        if places is not None:
            dense = self._dense_on(offsets_N.device)
            return (dense.spread(grads, sizes[0], places, ordered),)
        index = self._index(starts, offsets_N, ordered)
        made: dict[int, Tensor] = {}
        for number, layout in enumerate(self._compiled.layouts):
            own = [grads[output] for output in layout.outputs]
            floats = [sizes[bank] for bank in layout.banks]
            if layout.operators and layout.parts and ordered.weights_N is None:
                spread = layout_backward(
                    own,
                    None,
                    floats,
                    offsets_N,
                    *index,
                    *self._arguments(number, ordered, offsets_N.device),
                )
            else:
                blocks = self._blocks(starts)
                spread = spread_weighted(layout, blocks, own, floats, offsets_N, ordered)
            made.update(zip(layout.banks, spread, strict=True))
        return tuple(made[bank] for bank in range(len(self._reals)))

    def _dense_on(self, device: torch.device) -> DenseRows:
        found = self._dense.get(device)
        if found is None:
            # Imported here only: it needs Triton, which a CPU does without.
            kernels = importlib.import_module("shoal.exchange.received_cuda")
            dim, real = self._hosted[0].width, self._reals[0]
            made = kernels.DenseRows(self._plan, self._tables, dim, real, device)
            found = self._dense.setdefault(device, made)
        return found

    def _starts(
        self, banks: Sequence[object], offsets_N: Tensor, ordered: KeyedRagged
    ) -> list[int]:
        """First position of each block, and the end; checks what costs nothing."""
        cuts = ordered.host_splits.tolist()
        if len(cuts) != self._groups + 1 or len(banks) != len(self._reals):
            got = f"{len(cuts) - 1} features and {len(banks)} banks"
            allowed = f"{self._groups} and {len(self._reals)}"
            raise _shape("what is pooled", got, allowed, "Use the plan's own batch and rows.")
        starts = cuts
        if not self._compiled.straight:
            lengths = [cuts[b.group + 1] - cuts[b.group] for b in self._compiled.blocks]
            starts = list(itertools.accumulate(lengths, initial=0))
        if offsets_N.shape != (starts[-1],):
            remedy = "Give one per position of every hosted table."
            raise _shape("offsets of rows", tuple(offsets_N.shape), (starts[-1],), remedy)
        return starts

    def _check_grads(self, grads: Sequence[Tensor], ordered: KeyedRagged) -> None:
        got = [tuple(grad.shape) for grad in grads]
        want = [(ordered.batch_size, width) for width in self._widths]
        if got != want:
            raise _shape("gradients", got, want, "Give one per output, in its shape.")

    def _blocks(self, starts: Sequence[int]) -> list[Span]:
        """Where each block's positions are, here and in the request, and how wide its rows."""
        return [
            Span(block.group, first, stop, self._hosted[block.hosted])
            for block, first, stop in zip(
                self._compiled.blocks, starts[:-1], starts[1:], strict=True
            )
        ]

    def _index(
        self, starts: Sequence[int], offsets_N: Tensor, ordered: KeyedRagged
    ) -> tuple[Tensor, Tensor]:
        """Buffer of each position, and where cells begin; the host waits for nothing."""
        groups_K, buffers_K = self._on(offsets_N.device)
        count, size = offsets_N.shape[0], ordered.batch_size
        if not any(self._compiled.buffers_K):
            buffer_N = offsets_N.new_zeros(count, dtype=torch.int32)
        elif len(set(self._compiled.buffers_K)) == 1:
            buffer_N = buffers_K[:1].expand(count).contiguous()
        else:
            lengths = [b - a for a, b in itertools.pairwise(starts)]
            lengths_K = sent(lengths, offsets_N.device)
            buffer_N = buffers_K.repeat_interleave(lengths_K, output_size=count)
        if self._compiled.straight:
            return buffer_N, ordered.offsets_FB1
        if size == 0 or not self._compiled.blocks:
            return buffer_N, offsets_N.new_zeros(1)
        cuts = ordered.host_splits.tolist()
        moves = [
            first - cuts[block.group]
            for first, block in zip(starts[:-1], self._compiled.blocks, strict=True)
        ]
        moves_K1 = sent([*moves, starts[-1]], offsets_N.device)
        begins_FB = ordered.offsets_FB1[:-1].view(self._groups, size)
        moved_KB = begins_FB.index_select(0, groups_K) + moves_K1[:-1, None]
        return buffer_N, torch.cat([moved_KB.view(-1), moves_K1[-1:]])

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """int64 [K] feature and int32 [K] buffer of each block."""
        found = self._static.get(device)
        if found is None:
            groups = [block.group for block in self._compiled.blocks]
            buffers_K = torch.tensor(self._compiled.buffers_K, dtype=torch.int32, device="cpu")
            found = self._static[device] = (
                torch.tensor(groups, dtype=torch.int64, device="cpu").to(device),
                buffers_K.to(device),
            )
        return found

    def _arguments(
        self, number: int, ordered: KeyedRagged, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int], list[int], list[int]]:
        """Cells, the plan's tensors and numbers, as the layout operators take them."""
        layout, size = self._compiled.layouts[number], ordered.batch_size
        plan = layout.plan.on(device)
        return (
            self._cells_of(number, layout, size, device),
            plan.features_F,
            plan.slices_S,
            plan.sums_AM,
            [size],
            list(plan.shapes),
            [plan.widest, plan.floats],
        )

    def _cells_of(self, number: int, layout: BankLayout, size: int, device: torch.device) -> Tensor:
        """int64 [1, parts, 3]: a cell per example; made once per batch size."""
        key = (number, size, device)
        found = self._cells.get(key)
        if found is None:
            rows = [[part.block * size, size, 0] if size else [0, 0, 0] for part in layout.parts]
            if len(self._cells) >= _SIZES_KEPT:
                self._cells.clear()
            found = self._cells[key] = sent(
                torch.tensor([rows], dtype=torch.int64, device="cpu"), device
            )
        return found


def _one_memory(
    plan: PoolPlan, hosted: Sequence[HostedColumns], reals: Sequence[torch.dtype]
) -> bool:
    """Whether all rows are whole rows of one width in one bank, as a shard's memory has them."""
    return (
        len(reals) == 1
        and len({columns.table for columns in hosted}) == len(hosted)
        and len({columns.width for columns in hosted}) == 1
        and hosted[0].width * reals[0].itemsize % _UNIT == 0
        and all(pool.slices for pool in plan.pools)
    )


def _shape(what: str, got: object, allowed: object, remedy: str) -> ShapeError:
    return ShapeError(f"ReceivedRows: {what}", got=got, allowed=allowed, remedy=remedy)
