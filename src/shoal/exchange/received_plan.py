"""A pool plan over received rows, compiled to what the layout operators read.

Received rows are those of hosted tables: whole tables, or column slices of them. A feature of a
table with several column slices becomes one part per slice, and its plan slices are cut at the
slices' borders. One layout serves all outputs of one dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.errors import ConfigError
from shoal.ops.layout_plan import LayoutPlan
from shoal.table import checks
from shoal.table.shard import Pool, PoolPlan

_REALS = (torch.float32, torch.float64)
# As `LayoutPlan` has them: means, and sums into what others wrote, as shards take them.
_POOLINGS = {"sum": 0, "mean": 2, "first_n": 3}
_BY_ROW = 8
_ALONE, _FIRST, ADDED = 0, 1, 2
"""Roles of pieces; ADDED: it sums into what earlier ones wrote."""


@dataclass(frozen=True, slots=True)
class HostedColumns:
    """Columns [start, stop) of a table's rows, received side by side.

    Args:
        table: the table, by the number that a request's `tables_G` has for it.
        start, stop: a received row is `stop - start` floats.
        bank: the flat buffer its rows lie in.
    """

    table: int
    start: int
    stop: int
    bank: int

    @property
    def width(self) -> int:
        """Floats of a received row."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """Positions of one feature in one hosted table; blocks follow each other hosted-major."""

    group: int
    hosted: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns [start, start + width) of a received row, and where they go.

    place: column of the output; step: columns from one first_n row to the next.
    """

    start: int
    width: int
    output: int
    place: int
    step: int
    role: int = _ALONE


@dataclass(frozen=True, slots=True)
class Part:
    """What a plan reads of one block, in the plan's order."""

    block: int
    pool: Pool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BankLayout:
    """The outputs of one dtype.

    Args:
        dtype: of the outputs and the buffers.
        banks: numbers of the buffers, in the order the layout counts them.
        outputs, widths: the plan's outputs, in the order the layout counts them.
        parts: what feeds them; pieces name outputs by the layout's count.
        plan: the same as tensors.
        gaps: (output by the layout's count, first column, end) that nothing writes.
        operators: the layout operators can do it: no first_n slice adds.
    """

    dtype: torch.dtype
    banks: tuple[int, ...]
    outputs: tuple[int, ...]
    widths: tuple[int, ...]
    parts: tuple[Part, ...]
    plan: LayoutPlan
    gaps: tuple[tuple[int, int, int], ...]
    operators: bool


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPlan:
    """A pool plan over received rows. blocks_K as the positions lie; buffers_K: each block's
    buffer, by its layout's count; straight: positions lie as the request's own.
    """

    blocks: tuple[Block, ...]
    buffers_K: tuple[int, ...]
    layouts: tuple[BankLayout, ...]
    dtypes: tuple[torch.dtype, ...]
    straight: bool


def compile_plan(
    plan: PoolPlan,
    tables_G: Sequence[int],
    hosted: Sequence[HostedColumns],
    reals: Sequence[torch.dtype],
) -> CompiledPlan:
    """Compile for rows of `hosted` tables in banks of the given dtypes.

    Raises:
        ConfigError: a feature's table is not hosted, its columns are not covered once, a bank does
            not exist, or slices of a plan overlap without adding.
        ShapeError, DTypeError: a plan that does not fit its tables, as shards have it.
    """
    tables = [int(table) for table in tables_G]
    dims, table_reals = _tables(tables, hosted, reals)
    dtypes = checks.plan(plan, tables, dims, table_reals)
    blocks = tuple(
        Block(group, number)
        for number, columns in enumerate(hosted)
        for group, table in enumerate(tables)
        if table == columns.table
    )
    banks = {dtype: tuple(b for b, real in enumerate(reals) if real == dtype) for dtype in _REALS}
    buffers = []
    for block in blocks:
        bank = hosted[block.hosted].bank
        buffers.append(banks[reals[bank]].index(bank))
    layouts = tuple(
        _layout(plan, hosted, blocks, dtype, banks[dtype], dtypes)
        for dtype in _REALS
        if banks[dtype] or dtype in dtypes
    )
    straight = [block.group for block in blocks] == list(range(len(tables)))
    return CompiledPlan(blocks, tuple(buffers), layouts, dtypes, straight)


def _tables(
    tables: Sequence[int], hosted: Sequence[HostedColumns], reals: Sequence[torch.dtype]
) -> tuple[list[int], list[torch.dtype]]:
    """Dim and dtype of each table that the hosted columns make up."""
    for columns in hosted:
        if not 0 <= columns.bank < len(reals):
            allowed = f"0..{len(reals) - 1}"
            raise _wrong("bank of a hosted table", columns.bank, allowed, "Name each bank's dtype.")
    many = 1 + max([*tables, *(columns.table for columns in hosted)], default=-1)
    dims, table_reals = [0] * many, [torch.float32] * many
    for table in range(many):
        own = sorted((c.start, c.stop, c.bank) for c in hosted if c.table == table)
        for start, stop, bank in own:
            if start != dims[table] or stop <= start:
                got = [(left, right) for left, right, _ in own]
                remedy = "Every column is hosted once."
                raise _wrong(f"columns of hosted table {table}", got, "side by side from 0", remedy)
            dims[table], table_reals[table] = stop, reals[bank]
            if reals[bank] != reals[own[0][2]]:
                kinds = sorted({str(reals[b]) for _, _, b in own})
                remedy = "Rows have one dtype."
                raise _wrong(f"dtypes of hosted table {table}", kinds, "one", remedy)
    for table in tables:
        if dims[table] == 0:
            raise _wrong(f"table {table} of a feature", "not hosted", "hosted", "Place all tables.")
    return dims, table_reals


def _layout(
    plan: PoolPlan,
    hosted: Sequence[HostedColumns],
    blocks: Sequence[Block],
    dtype: torch.dtype,
    banks: tuple[int, ...],
    dtypes: Sequence[torch.dtype],
) -> BankLayout:
    outputs = tuple(i for i, of in enumerate(dtypes) if of == dtype)
    widths = tuple(plan.outputs[i].width for i in outputs)
    numbers = {output: i for i, output in enumerate(outputs)}
    # Plan order: all of a feature's columns come before the next feature's.
    order = sorted(range(len(blocks)), key=lambda b: (blocks[b].group, blocks[b].hosted))
    drafts: list[tuple[int, Pool, list[tuple[Piece, bool]]]] = []
    for number in order:
        block = blocks[number]
        pool, columns = plan.pools[block.group], hosted[block.hosted]
        pieces = [
            (piece, add) for piece, add in _pieces(pool, columns, numbers) if columns.bank in banks
        ]
        if pieces:
            drafts.append((number, pool, pieces))
    edges = _edges(drafts)
    parts, sums = _roles(drafts, edges)
    operators = not any(
        piece.role != _ALONE and part.pool.pooling == "first_n"
        for part in parts
        for piece in part.pieces
    )
    return BankLayout(
        dtype,
        banks,
        outputs,
        widths,
        tuple(parts),
        _tensors(parts, widths, sums),
        tuple(_gaps(parts, widths)),
        operators,
    )


def _pieces(
    pool: Pool, columns: HostedColumns, numbers: dict[int, int]
) -> Iterator[tuple[Piece, bool]]:
    """A feature's slices as far as these columns hold them, and whether each adds."""
    for part in pool.slices:
        start, stop = max(part.start, columns.start), min(part.stop, columns.stop)
        if start < stop and part.output in numbers:
            place = part.column + start - part.start
            step = part.stop - part.start
            output = numbers[part.output]
            yield Piece(start - columns.start, stop - start, output, place, step), part.add


def _spans(pool: Pool, piece: Piece) -> list[tuple[int, int]]:
    """Columns of the output that a piece writes."""
    many = pool.length if pool.pooling == "first_n" else 1
    firsts = [piece.place + j * piece.step for j in range(many)]
    return [(first, first + piece.width) for first in firsts]


def _edges(
    drafts: Sequence[tuple[int, Pool, list[tuple[Piece, bool]]]],
) -> dict[int, list[int]]:
    """Of each output, where its pieces begin and end, rising."""
    edges: dict[int, set[int]] = {}
    for _, pool, pieces in drafts:
        for piece, _ in pieces:
            for span in _spans(pool, piece):
                edges.setdefault(piece.output, set()).update(span)
    return {output: sorted(found) for output, found in edges.items()}


def _roles(
    drafts: Sequence[tuple[int, Pool, list[tuple[Piece, bool]]]],
    edges: dict[int, list[int]],
) -> tuple[list[Part], list[list[int]]]:
    """Parts whose pieces are cut so that those which meet cover the same columns; and the sums:
    for each run of columns that several pieces feed, its output and the numbers of its pieces.
    """
    written: dict[tuple[int, int], list[int]] = {}  # (output, column) -> numbers of pieces
    first: dict[tuple[int, int], list[Pool]] = {}  # features whose pieces do not add there
    cut: list[tuple[int, Pool, list[Piece]]] = []
    opening: dict[tuple[int, int], Pool] = {}
    number = 0
    for block, pool, pieces in drafts:
        own: list[Piece] = []
        for piece, add in pieces:
            for smaller in _cut(pool, piece, edges[piece.output]):
                own.append(smaller)
                for column, _ in _spans(pool, smaller):
                    place = piece.output, column
                    written.setdefault(place, []).append(number)
                    opening.setdefault(place, pool)
                    if not add:
                        first.setdefault(place, []).append(pool)
                number += 1
        cut.append((block, pool, own))
    for (output, column), pools in first.items():
        # Which column slice of the opening feature comes first does not matter: sums commute.
        if len(pools) > 1 or pools[0] is not opening[output, column]:
            what = f"column {column} of output {output} of a pool plan"
            remedy = "Slices that share columns add: Slice(add=True)."
            raise _wrong(what, "written twice", "once, or added", remedy)
    runs = [[output, *found] for (output, _), found in written.items() if len(found) > 1]
    roles = {piece: ADDED for _, *run in runs for piece in run[1:]}
    roles.update({run[1]: roles.get(run[1], _FIRST) for run in runs})
    parts, number = [], 0
    for block, pool, own in cut:
        kept = []
        for piece in own:
            kept.append(_with_role(piece, roles.get(number, _ALONE)))
            number += 1
        parts.append(Part(block, pool, tuple(kept)))
    return parts, runs


def _cut(pool: Pool, piece: Piece, edges: Sequence[int]) -> list[Piece]:
    """A piece in parts, cut at the edges that fall inside any of its rows."""
    cuts = {0, piece.width}
    for first, stop in _spans(pool, piece):
        cuts.update(edge - first for edge in edges if first < edge < stop)
    rising = sorted(cuts)
    return [
        Piece(piece.start + a, b - a, piece.output, piece.place + a, piece.step)
        for a, b in itertools.pairwise(rising)
    ]


def _with_role(piece: Piece, role: int) -> Piece:
    return Piece(piece.start, piece.width, piece.output, piece.place, piece.step, role)


def _gaps(parts: Sequence[Part], widths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for output, width in enumerate(widths):
        spans = [
            span
            for part in parts
            for piece in part.pieces
            if piece.output == output
            for span in _spans(part.pool, piece)
        ]
        reached = 0
        for first, stop in [*sorted(spans), (width, width)]:
            if first > reached:
                yield output, reached, first
            reached = max(reached, stop)


def _tensors(
    parts: Sequence[Part], widths: Sequence[int], sums: Sequence[Sequence[int]]
) -> LayoutPlan:
    features: list[tuple[int, ...]] = []
    slices: list[tuple[int, ...]] = []
    floats = 0
    for number, part in enumerate(parts):
        first_n = part.pool.pooling == "first_n"
        length = part.pool.length if first_n else 0
        low = min(piece.start for piece in part.pieces)
        high = max(piece.start + piece.width for piece in part.pieces)
        last = len(slices) + len(part.pieces)
        pooling = _POOLINGS[part.pool.pooling]
        if not first_n and any(piece.role == ADDED for piece in part.pieces):
            pooling += _BY_ROW
        features.append((len(slices), last, pooling, length, low, high))
        for piece in part.pieces:
            own = (number, piece.start, piece.width, piece.output, piece.place, piece.step)
            slices.append((*own, piece.role, floats, widths[piece.output]))
            floats += piece.width * max(length, 1)
    most = max((len(run) for run in sums), default=1)
    padded = [[*run, *[-1] * (most - len(run))] for run in sums]
    return LayoutPlan(
        torch.tensor(features, dtype=torch.int64, device="cpu").view(-1, 6),
        torch.tensor(slices, dtype=torch.int64, device="cpu").view(-1, 9),
        torch.tensor(padded, dtype=torch.int64, device="cpu").view(-1, most),
        tuple(size for width in widths for size in (0, 0, width)),
        max((row[5] for row in features), default=0),
        floats,
    )


def _wrong(what: str, got: object, allowed: object, remedy: str) -> ConfigError:
    return ConfigError(what, got=got, allowed=allowed, remedy=remedy)
