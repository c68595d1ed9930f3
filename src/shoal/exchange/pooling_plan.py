"""A pool plan over received rows, compiled to what the layout operators read.

Received rows are those of hosted tables: whole tables, or column slices of them. A feature of a
table with several column slices becomes one part per slice, and its plan slices are split at the
slices' borders. One layout serves all outputs of one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.lookup import LookupTables, Output, Pool, PoolPlan, Slice, compile_tables
from shoal.table import checks

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


@dataclass(frozen=True, slots=True)
class FeatureBlock:
    """Positions of one feature in one hosted table; blocks follow each other hosted-major."""

    group: int
    hosted: int


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


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedPlan:
    """A pool plan over received rows. blocks_K as the positions lie; buffers_K: each block's
    buffer, by its layout's count; straight: positions lie as the request's own.
    """

    blocks: tuple[FeatureBlock, ...]
    buffers_K: tuple[int, ...]
    layouts: tuple[OutputsLayout, ...]
    dtypes: tuple[torch.dtype, ...]
    straight: bool


def compile_plan(
    plan: PoolPlan,
    tables_G: Sequence[int],
    hosted: Sequence[HostedColumns],
    reals: Sequence[torch.dtype],
) -> ReceivedPlan:
    """Compile for rows of `hosted` tables in receive buffers of the given dtypes.

    Raises:
        ConfigError: slices of a plan overlap without adding.
        ShapeError, DTypeError: a plan that does not fit its tables, as shards have it.
    """
    tables = [int(table) for table in tables_G]
    dtypes = checks.plan(plan, tables, *_tables(hosted, reals))
    blocks = tuple(
        FeatureBlock(group, number)
        for number, columns in enumerate(hosted)
        for group, table in enumerate(tables)
        if table == columns.table
    )
    of_dtype = {
        dtype: tuple(b for b, real in enumerate(reals) if real == dtype) for dtype in _REALS
    }
    buffers = []
    for block in blocks:
        buffer = hosted[block.hosted].buffer
        buffers.append(of_dtype[reals[buffer]].index(buffer))
    layouts = tuple(
        _layout(plan, hosted, blocks, dtype, of_dtype[dtype], dtypes)
        for dtype in _REALS
        if of_dtype[dtype] or dtype in dtypes
    )
    straight = [block.group for block in blocks] == list(range(len(tables)))
    return ReceivedPlan(blocks, tuple(buffers), layouts, dtypes, straight)


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
    hosted: Sequence[HostedColumns],
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
    for number in sorted(range(len(blocks)), key=lambda b: (blocks[b].group, blocks[b].hosted)):
        pool, columns = plan.pools[blocks[number].group], hosted[blocks[number].hosted]
        held = tuple(_held(part, columns, numbers) for part in pool.slices if _meet(part, columns))
        if held and columns.buffer in buffers:
            numbered.append(number)
            pools.append(replace(pool, slices=held))
    own = [Output(plan.outputs[i].width) for i in outputs]
    sums = [replace(p, pooling="sum") if p.pooling == "mean" else p for p in pools]
    return OutputsLayout(
        dtype,
        buffers,
        outputs,
        tuple(numbered),
        compile_tables(pools, own),
        compile_tables(sums, own),
    )


def _meet(part: Slice, columns: HostedColumns) -> bool:
    return max(part.start, columns.start) < min(part.stop, columns.stop)


def _held(part: Slice, columns: HostedColumns, numbers: dict[int, int]) -> Slice:
    """A slice as far as these columns hold it, of outputs by the layout's count."""
    start, stop = max(part.start, columns.start), min(part.stop, columns.stop)
    place = numbers.get(part.output, 0), part.column + start - part.start
    return Slice(start - columns.start, stop - columns.start, *place, step=part.stride)
