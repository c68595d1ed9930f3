"""From received rows to pooled outputs, and from their gradients to gradients of received rows.

Received rows are those of hosted tables: whole tables, or column slices of them. A feature of a
table with several column slices becomes one part per slice, and its plan slices are split at the
slices' borders. One layout serves all outputs of one dtype.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shoal.exchange.local import Request
from shoal.exchange.partition import SendPlan
from shoal.kernels.host_copies import sent
from shoal.lookup import LookupTables, Output, Pool, PoolPlan, Slice, compile_tables
from shoal.ops import fused_gather_embeddings_by_input, fused_gather_embeddings_by_input_gradient
from shoal.ops.dispatch import backend_on, checks_bounds
from shoal.ops.layout import layout_added, layout_backward, layout_forward
from shoal.ragged import KeyedRagged
from shoal.table import checks

if TYPE_CHECKING:
    from shoal.exchange.pooling_cuda import DenseRows, Places


_SIZES_KEPT = _PLANS_KEPT = 64
_UNIT = 16  # bytes that rows of a shard's memory are multiples of
_MOST = 1 << 31  # rows or positions, exclusive, that kernels number
# First position of each block, and what `pool` is given: offsets of rows, the ordered batch.
_Positions = tuple[Sequence[int], Tensor, KeyedRagged]


_REALS = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class HostedColumns:
    """Columns [start, stop) of a table's rows, received side by side.

    Args:
        table: the table, by the number that a request's `tables_G` has for it.
        start, stop: a received row is `stop - start` floats.
        buffer: the flat buffer its rows lie in.
    """

    table: int
    start: int
    stop: int
    buffer: int

    @property
    def width(self) -> int:
        """Floats of a received row."""
        return self.stop - self.start


class FeatureBlock(NamedTuple):
    """Positions of one feature in one hosted table; blocks follow each other hosted-major."""

    group: int
    columns: HostedColumns


@dataclass(frozen=True, slots=True, eq=False)
class OutputsLayout:
    """The outputs of one dtype.

    Args:
        dtype: of the outputs and the buffers.
        buffers: numbers of the buffers, in the order the layout counts them.
        outputs: the plan's outputs, in the order the layout counts them.
        blocks: what the plan reads of which block, in the plan's order: a feature of the tables.
        tables: how the blocks are pooled.
        weighted: the same for rows that hold their weights and shares of a mean: means are sums.
    """

    dtype: torch.dtype
    buffers: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[int, ...]
    tables: LookupTables
    weighted: LookupTables


def _tables(
    hosted: Sequence[HostedColumns], reals: Sequence[torch.dtype]
) -> tuple[list[int], list[torch.dtype]]:
    """Dim and dtype of each table that the hosted columns make up, as a placement has them."""
    many = 1 + max((columns.table for columns in hosted), default=-1)
    dims, table_reals = [0] * many, [torch.float32] * many
    for columns in hosted:
        dims[columns.table] = max(dims[columns.table], columns.stop)
        table_reals[columns.table] = reals[columns.buffer]
    return dims, table_reals


def _layout(
    plan: PoolPlan,
    blocks: Sequence[FeatureBlock],
    dtype: torch.dtype,
    buffers: tuple[int, ...],
    dtypes: Sequence[torch.dtype],
) -> OutputsLayout:
    outputs = tuple(i for i, of in enumerate(dtypes) if of == dtype)
    numbers = {output: i for i, output in enumerate(outputs)}
    numbered: list[int] = []
    pools: list[Pool] = []
    # Plan order: all of a feature's columns come before the next feature's.
    for number, (group, columns) in sorted(enumerate(blocks), key=lambda item: item[1].group):
        pool = plan.pools[group]
        held = tuple(_held(pool.slices, columns, numbers))
        if held and columns.buffer in buffers:
            numbered.append(number)
            pools.append(replace(pool, slices=held))
    own = [Output(plan.outputs[i].width) for i in outputs]
    sums = [replace(p, pooling="sum") if p.pooling == "mean" else p for p in pools]
    tables, weighted = compile_tables(pools, own), compile_tables(sums, own)
    return OutputsLayout(dtype, buffers, outputs, tuple(numbered), tables, weighted)


def _held(
    slices: Sequence[Slice], columns: HostedColumns, numbers: dict[int, int]
) -> Iterator[Slice]:
    """The slices as far as these columns hold them, of outputs by the layout's count."""
    for part in slices:
        start, stop = max(part.start, columns.start), min(part.stop, columns.stop)
        if start < stop:
            place = numbers.get(part.output, 0), part.column + start - part.start
            here = start - columns.start, stop - columns.start
            yield Slice(*here, *place, part.add, part.stride)


class ReceivedRows:
    """A pool plan over rows of hosted tables, compiled once; thread-safe.

    Sums are in order of feature and position, so results are a local shard's.

    Args:
        plan: how the rows are pooled.
        tables_G: each feature's table, by the number that `hosted` has for it.
        hosted: which columns of which table are received, and in which receive buffer.
        reals: float32 or float64, of each receive buffer.
        dense: rows lie side by side in their receive buffer, and some position reads each.

    Attributes:
        dtypes: of each output.

    Raises:
        ConfigError, ShapeError, DTypeError: the plan does not fit its tables.
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
        self._plan = plan
        self._tables = tuple(int(table) for table in tables_G)
        self._hosted = tuple(hosted)
        self._reals = tuple(reals)
        self._widths = tuple(output.width for output in plan.outputs)
        self.dtypes = checks.plan(plan, self._tables, *_tables(hosted, reals))
        self._blocks = tuple(
            FeatureBlock(group, columns)
            for columns in hosted
            for group, table in enumerate(self._tables)
            if table == columns.table
        )
        of_dtype = {
            dtype: tuple(b for b, real in enumerate(reals) if real == dtype) for dtype in _REALS
        }
        buffers = [columns.buffer for _, columns in self._blocks]
        # Each block's buffer, by its layout's count.
        self._buffers_K = [of_dtype[reals[buffer]].index(buffer) for buffer in buffers]
        self._layouts = tuple(
            _layout(plan, self._blocks, dtype, of_dtype[dtype], self.dtypes)
            for dtype in _REALS
            if of_dtype[dtype] or dtype in self.dtypes
        )
        groups = [block.group for block in self._blocks]
        # Plan order: all of a feature's columns come before the next feature's.
        by_group = sorted(range(len(groups)), key=groups.__getitem__)
        in_order = [self._blocks[k] for k in by_group]
        self._memory_plan = _memory_plan(plan, in_order, reals) if dense else None
        self._memory_tables = tuple(self._hosted.index(block.columns) for block in in_order)
        self._split = len(self._blocks) > len(self._tables)
        # Positions lie as the request's own.
        self._straight = groups == list(range(len(self._tables)))
        self._in_plan_order = None if self._straight else by_group
        self._dense: dict[torch.device, DenseRows] = {}
        self._static: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._cells: dict[tuple[torch.dtype, int, torch.device], Tensor] = {}

    def places(
        self, offsets_N: Tensor, ordered: KeyedRagged, *, backward: bool = True
    ) -> Places | None:
        """What `pool` and `spread` of one batch share; None where that is nothing.

        With `backward` work begins on the device that only `spread` needs, parallel to the stream.

        Args:
            offsets_N, ordered: as `pool` takes them.
        """
        device = offsets_N.device
        if (
            self._memory_plan is None
            or offsets_N.shape[0] >= _MOST
            or backend_on(device) != "triton"
            or checks_bounds()
        ):
            return None
        starts, rows = self._starts(ordered), self._dense_on(device)
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        if self._split:
            ordered = self._repeated(offsets_N, ordered)
        return rows.places(offsets_N, ordered, lengths, self._in_plan_order, backward=backward)

    def pool(
        self,
        rows: Sequence[Tensor],
        offsets_N: Tensor,
        ordered: KeyedRagged,
        places: Places | None = None,
    ) -> tuple[Tensor, ...]:
        """One [B, width] per output of the plan; columns that no slice covers are zeros.

        Args:
            rows: each receive buffer's rows, flat.
            offsets_N: int64 [N], the float at which each position's row begins in its buffer:
                hosted table by hosted table, in it feature by feature of its table, in order.
            ordered: the batch in the plan's order.
            places: of this batch; found here if None.

        Raises:
            InputError: a row leaves its buffer (on CUDA only under `ops.set_bounds_checks`).
        """
        starts = self._starts(ordered)
        if places is None:
            places = self.places(offsets_N, ordered, backward=False)
        if places is not None:
            return self._dense_on(offsets_N.device).pool(rows[0], places)
        device, weighted = offsets_N.device, ordered.weights_N is not None
        index = self._index(starts, offsets_N, ordered)
        made: dict[int, Tensor] = {}
        for layout in self._layouts:
            tables = layout.weighted if weighted else layout.tables
            if not layout.blocks:
                size, dtype = ordered.batch_size, layout.dtype
                widths = [self._widths[output] for output in layout.outputs]
                outputs = [torch.zeros(size, w, dtype=dtype, device=device) for w in widths]
            else:
                if weighted:
                    buffers = self._scaled(layout, rows, (starts, offsets_N, ordered))
                else:
                    buffers = [rows[buffer] for buffer in layout.buffers]
                forward = layout_added if tables.sequences_add else layout_forward  # rare
                cells = self._cells_of(layout, ordered.batch_size, device)
                call = tables.on(device).call(*index, cells, [ordered.batch_size])
                outputs = forward(buffers, *call)
            for output, first, stop in () if tables.sequences_add else tables.gaps:
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
        """Gradients of the outputs as gradients of the rows: one flat [size] per receive buffer.

        A row's gradient is summed over the positions that read it, in order; floats that nothing
        reads are zeros.

        Args:
            grads: one [B, width] per output, of its dtype.
            sizes: floats of each receive buffer.
            offsets_N, ordered, places: as given to `pool`.

        Raises:
            InputError: as `pool`.
        """
        starts = self._starts(ordered)
        if places is None:
            places = self.places(offsets_N, ordered)
        if places is not None:
            dense = self._dense_on(offsets_N.device)
            return (dense.spread(grads, sizes[0], places),)
        device, weighted = offsets_N.device, ordered.weights_N is not None
        index = self._index(starts, offsets_N, ordered)
        made: dict[int, Tensor] = {}
        for layout in self._layouts:
            own = [grads[output] for output in layout.outputs]
            floats = [sizes[buffer] for buffer in layout.buffers]
            spread = [torch.zeros(size, dtype=layout.dtype, device=device) for size in floats]
            if layout.blocks:
                tables = layout.weighted if weighted else layout.tables
                if weighted:
                    floats = [
                        (stop - start) * block.columns.width
                        for block, start, stop in self._spans(starts)
                    ]
                cells = self._cells_of(layout, ordered.batch_size, device)
                call = tables.on(device).call(*index, cells, [ordered.batch_size])
                spread = layout_backward(own, None, floats, *call)
            if layout.blocks and weighted:
                spread = self._summed(layout, spread, sizes, (starts, offsets_N, ordered))
            made.update(zip(layout.buffers, spread, strict=True))
        return tuple(made[buffer] for buffer in range(len(self._reals)))

    def _dense_on(self, device: torch.device) -> DenseRows:
        found = self._dense.get(device)
        if found is None:
            # Imported here only: it needs Triton, which a CPU does without.
            kernels = importlib.import_module("shoal.exchange.pooling_cuda")
            dim, real = self._hosted[0].width, self._reals[0]
            made = kernels.DenseRows(self._memory_plan, self._memory_tables, dim, real, device)
            found = self._dense.setdefault(device, made)
        return found

    def _starts(self, ordered: KeyedRagged) -> list[int]:
        """First position of each block, and the end."""
        cuts: list[int] = ordered.host_splits.tolist()
        if self._straight:
            return cuts
        lengths = [cuts[b.group + 1] - cuts[b.group] for b in self._blocks]
        return list(itertools.accumulate(lengths, initial=0))

    def _spans(self, starts: Sequence[int]) -> list[tuple[FeatureBlock, int, int]]:
        """Each block, its first position and the one after its last."""
        return list(zip(self._blocks, starts[:-1], starts[1:], strict=True))

    def _index(
        self, starts: Sequence[int], offsets_N: Tensor, ordered: KeyedRagged
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each position's row and buffer, and where cells begin; the host waits for nothing.

        Weighted rows lie in order of position, in a buffer for each block.
        """
        groups_K, buffers_K, widths_K = self._on(offsets_N.device)
        count, rows_N = offsets_N.shape[0], offsets_N
        numbers = set(self._buffers_K) or {0}
        buffer_N = offsets_N.new_full((count,), min(numbers), dtype=torch.int32)
        if len(numbers) == 1 and self._straight and ordered.weights_N is None:
            return rows_N, buffer_N, ordered.offsets_FB1
        starts_K1 = sent(starts, offsets_N.device)
        if ordered.weights_N is not None:
            blocks_K = torch.arange(groups_K.numel(), device=offsets_N.device)
            block_N = blocks_K.repeat_interleave(starts_K1.diff(), output_size=count)
            within_N = torch.arange(count, device=offsets_N.device) - starts_K1[block_N]
            rows_N, buffer_N = within_N * widths_K[block_N], block_N.to(torch.int32)
        elif len(numbers) > 1:
            buffer_N = buffers_K.repeat_interleave(starts_K1.diff(), output_size=count)
        if self._straight:
            return rows_N, buffer_N, ordered.offsets_FB1
        return rows_N, buffer_N, self._begins(starts_K1, groups_K, ordered)

    def _begins(self, starts_K1: Tensor, groups_K: Tensor, ordered: KeyedRagged) -> Tensor:
        """int64 [K*B + 1]: where the examples of some blocks begin, each of a feature; the end."""
        size, device = ordered.batch_size, starts_K1.device
        if size == 0 or not self._blocks:
            return starts_K1.new_zeros(1)
        splits_G1 = sent(ordered.host_splits.tolist(), device)
        begins_FB = ordered.offsets_FB1[:-1].view(len(self._tables), size)
        moves_K = starts_K1[:-1] - splits_G1[groups_K]
        moved_KB = begins_FB.index_select(0, groups_K) + moves_K[:, None]
        return torch.cat([moved_KB.view(-1), starts_K1[-1:]])

    def _repeated(self, offsets_N: Tensor, ordered: KeyedRagged) -> KeyedRagged:
        """The batch with each feature once for each of its blocks; for ids the places of rows."""
        order, cuts = self._in_plan_order, ordered.host_splits.tolist()
        assert order is not None
        groups = [self._blocks[k].group for k in order]
        spans = [cuts[group : group + 2] for group in groups]
        edges = list(itertools.accumulate((b - a for a, b in spans), initial=0))
        edges_K1 = torch.tensor(edges, dtype=torch.int64, device="cpu")
        weights_N = ordered.weights_N
        if weights_N is not None:
            weights_N = torch.cat([weights_N[first:last] for first, last in spans])
        both = sent([*edges, *groups], offsets_N.device)
        begins_KB1 = self._begins(both[: len(edges)], both[len(edges) :], ordered)
        keys = tuple(map(str, range(len(order))))
        return KeyedRagged(keys, offsets_N, begins_KB1, weights_N, _edges_F1=edges_K1)

    def _factors(self, layout: OutputsLayout, ordered: KeyedRagged) -> Tensor:
        """[N, 1]: what each position's row counts for, in the order of the batch."""
        assert ordered.weights_N is not None
        lengths_GB = ordered.lengths
        shares_GB = torch.ones(lengths_GB.shape, dtype=layout.dtype, device=ordered.values_N.device)
        for group, pool in enumerate(self._plan.pools):
            if pool.pooling == "mean":
                shares_GB[group] /= lengths_GB[group]
        weights_N = ordered.weights_N.to(layout.dtype)
        shares_N = shares_GB.view(-1).repeat_interleave(
            lengths_GB.reshape(-1), output_size=weights_N.shape[0]
        )
        return (shares_N * weights_N)[:, None]

    def _scaled(
        self, layout: OutputsLayout, rows: Sequence[Tensor], at: _Positions
    ) -> list[Tensor]:
        """Each block's rows times their factors, by position; nothing for those of other dtypes."""
        starts, offsets_N, ordered = at
        factors_N, firsts = self._factors(layout, ordered), ordered.host_splits.tolist()
        found = []
        for block, start, stop in self._spans(starts):
            hosted, first = block.columns, firsts[block.group]
            if hosted.buffer not in layout.buffers:
                found.append(factors_N.new_empty(0))
                continue
            taken = [offsets_N[start:stop]], [hosted.width]
            (rows_nD,) = fused_gather_embeddings_by_input(rows[hosted.buffer], *taken)
            found.append(rows_nD * factors_N[first : first + stop - start])
        return found

    def _summed(
        self, layout: OutputsLayout, spread: Sequence[Tensor], sizes: Sequence[int], at: _Positions
    ) -> list[Tensor]:
        """Gradients by position times their factors, summed per row: one flat [size] per buffer."""
        starts, offsets_N, ordered = at
        factors_N, firsts = self._factors(layout, ordered), ordered.host_splits.tolist()
        summed = []
        for buffer in layout.buffers:
            parts, offsets, widths = [], [], []
            for (block, start, stop), grad in zip(self._spans(starts), spread, strict=True):
                hosted, first = block.columns, firsts[block.group]
                if hosted.buffer == buffer:
                    factors_n = factors_N[first : first + stop - start]
                    parts.append(grad.view(-1, hosted.width) * factors_n)
                    offsets.append(offsets_N[start:stop])
                    widths.append(hosted.width)
            flat = sizes[buffer], parts, offsets, widths
            summed.append(
                fused_gather_embeddings_by_input_gradient(*flat)
                if parts
                else factors_N.new_zeros(sizes[buffer])
            )
        return summed

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [K] feature, int32 [K] buffer and int64 [K] width of each block."""
        if device not in self._static:
            numbered = zip(self._blocks, self._buffers_K, strict=True)
            rows = [(block.group, buffer, block.columns.width) for block, buffer in numbered]
            static_K3 = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).to(device)
            groups_K, buffers_K, widths_K = static_K3.unbind(1)
            self._static[device] = groups_K, buffers_K.to(torch.int32), widths_K
        return self._static[device]

    def _cells_of(self, layout: OutputsLayout, size: int, device: torch.device) -> Tensor:
        """int64 [1, features, 3]: a cell per example; made once per batch size."""
        key = (layout.dtype, size, device)
        found = self._cells.get(key)
        if found is None:
            rows = [[block * size, size, 0] if size else [0, 0, 0] for block in layout.blocks]
            if len(self._cells) >= _SIZES_KEPT:
                self._cells.clear()
            cells = torch.tensor([rows], dtype=torch.int64, device="cpu")
            found = self._cells[key] = sent(cells, device)
        return found


class RequestPlans:
    """What requests of the same features share, compiled once: send plans and `ReceivedRows`.

    Args:
        compiled: makes the send plan of features that read the tables of these numbers.

    Attributes:
        send: the same; each plan is made once.
    """

    def __init__(self, compiled: Callable[[tuple[int, ...]], SendPlan]) -> None:
        self.send = cache(compiled)
        self._received: dict[tuple[int, tuple[int, ...]], tuple[PoolPlan, ReceivedRows]] = {}

    def received(self, request: Request) -> ReceivedRows:
        """How the rows of a request come back and are pooled."""
        plan, tables_G = request.plan, tuple(request.tables_G.tolist())
        key = id(plan), tables_G
        kept = self._received.get(key)
        if kept is None:
            layouts = self.send(tables_G).buffers
            hosted = [
                HostedColumns(table.table, table.hosted.start, table.hosted.stop, number)
                for number, layout in enumerate(layouts)
                for table in layout.tables
            ]
            reals = [layout.real for layout in layouts]
            if len(self._received) >= _PLANS_KEPT:
                self._received.clear()
            # The plan is held so that its identity stays its own.
            kept = plan, ReceivedRows(plan, tables_G, hosted, reals, dense=True)
            self._received[key] = kept
        return kept[1]


def _memory_plan(
    plan: PoolPlan, blocks: Sequence[FeatureBlock], reals: Sequence[torch.dtype]
) -> PoolPlan | None:
    """The plan over rows that a shard's memory could hold: of one width, in one buffer.

    blocks: in the plan's order. If tables are cut, each is a feature. None: rows are not so, or
    nothing reads some.
    """
    widths = {columns.width for _, columns in blocks}
    if len(reals) != 1 or len(widths) != 1 or widths.pop() * reals[0].itemsize % _UNIT:
        return None
    if len(blocks) > len(plan.pools):
        numbers = {output: output for output in range(len(plan.outputs))}
        pools = [
            replace(pool, slices=tuple(_held(pool.slices, columns, numbers)))
            for pool, columns in ((plan.pools[group], columns) for group, columns in blocks)
        ]
        plan = PoolPlan(tuple(pools), plan.outputs)
    return plan if all(pool.slices for pool in plan.pools) else None
