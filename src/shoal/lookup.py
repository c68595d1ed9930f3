"""The lookup plan: which columns of which rows become which columns of which outputs.

Layouts of an embedding, Monolith's feature configs and rows received from other ranks all become
one `PoolPlan`. It compiles once to int64 tables (`LookupTables`), which the compiled core, the
kernels and the layout operators read as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError

Pooling = Literal["sum", "mean", "first_n"]
POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "first_n")
Join = Literal["concat", "stack", "addn"]
LayoutKind = Literal["none", "concat", "stack", "addn"]

# Of `LookupTables.features_F`.
SUM, DIVIDED, MEAN, FIRST_N, BY_ROW = 0, 1, 2, 3, 8
_NUMBERS = {"sum": SUM, "mean": MEAN, "first_n": FIRST_N}
# Of `LookupTables.slices_S`.
ALONE, FIRST, ADDED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Slice:
    """Columns [start, stop) of a feature's rows, written at `column` of output `output`.

    `add` sums into what earlier slices of the plan wrote there (ADDN). `step`: columns from one
    row of a "first_n" feature to the next; 0: the rows lie side by side.
    """

    start: int
    stop: int
    output: int
    column: int
    add: bool = False
    step: int = 0

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.stop - self.start

    @property
    def stride(self) -> int:
        """Columns of the output from one "first_n" row to the next."""
        return self.step or self.width


@dataclass(frozen=True, slots=True)
class Pool:
    """How one group (feature) is pooled.

    "sum" and "mean" give [B, D]; "first_n" gives `length` rows per example, zero padded.
    """

    pooling: Pooling
    slices: tuple[Slice, ...]
    length: int = 1

    @property
    def lanes(self) -> int:
        """Rows of an example that are kept."""
        return self.length if self.pooling == "first_n" else 1

    def spans(self, part: Slice) -> list[tuple[int, int]]:
        """Columns [first, stop) of the output that a slice writes: one span per element."""
        firsts = [part.column + j * part.stride for j in range(self.lanes)]
        return [(first, first + part.width) for first in firsts]


@dataclass(frozen=True, slots=True)
class Output:
    """One dense output of a plan, [B, width]; float64 tables make it float64.

    shape: what the model sees in the place of [width], if anything else.
    """

    width: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class PoolPlan:
    """The static part of a pooled lookup: one `Pool` per group, and the outputs they fill.

    Built once by the embedding collection; shards may cache a compiled form by identity.
    """

    pools: tuple[Pool, ...]
    outputs: tuple[Output, ...]

    @cached_property
    def tables(self) -> LookupTables:
        """The plan as int64 tables, in the arithmetic of shards."""
        return compile_tables(self.pools, self.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class LookupTables:
    """A plan as int64 tensors, made once, that every implementation reads as they are.

    Slices that meet in an output are split so that they cover the same columns.

    Args:
        features_F: first slice, last slice + 1, pooling number, L (0 unless first_n), and the
            range of columns its slices read. Pooling numbers: 0 sum; 1 mean, the sum over the
            number of ids; 2 mean as shards take it, each row times 1 / number of ids; 3 first_n;
            8 more than 0 or 2: the rows go to the outputs one by one, as a shard adds them (on
            CUDA pooled first).
        slices_S: feature, first column, width, output, place in an example's part of the output,
            floats from one first_n step to the next, part in a sum (0: none, 1: the first, 2: one
            to add), place in a vector of all slices' floats, and floats of an example's part of
            the output. Sorted by feature.
        sums_AM: for each run of columns that several slices feed: the output, then the slices,
            padded with -1.
        shapes: three sizes of each output, 0 where absent.
        widest: most columns that any feature's slices span, from the row's start.
        floats: length of the vector of all slices' floats.
        gaps: (output, first column, end) of what no slice writes, though some may add to it.
        sequences_add: some first_n slice shares columns with another slice.
    """

    features_F: Tensor
    slices_S: Tensor
    sums_AM: Tensor
    shapes: tuple[int, ...]
    widest: int
    floats: int
    gaps: tuple[tuple[int, int, int], ...] = ()
    sequences_add: bool = False
    _elsewhere: dict[torch.device, LookupTables] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> LookupTables:
        """The tables on a device; copied there once."""
        if device == self.features_F.device:
            return self
        if device in self._elsewhere:
            return self._elsewhere[device]
        # Kept for calls that record gradients, which take no tensors of inference mode.
        with torch.inference_mode(False):
            moved = replace(
                self,
                features_F=self.features_F.to(device),
                slices_S=self.slices_S.to(device),
                sums_AM=self.sums_AM.to(device),
                _elsewhere={},
            )
        # A tracer's stand-ins must not outlive the trace.
        if type(moved.features_F) is Tensor and not torch.compiler.is_exporting():
            self._elsewhere[device] = moved
        return moved

    def call(
        self,
        rows_N: Tensor,
        buffer_N: Tensor,
        cell_splits: Tensor,
        cells: Tensor,
        batch_sizes: Sequence[int],
    ) -> LayoutCall:
        """What a layout operator takes besides rows or gradients; all on one device."""
        index = rows_N, buffer_N, cell_splits, cells
        tables = self.features_F, self.slices_S, self.sums_AM
        sizes = list(batch_sizes), list(self.shapes), [self.widest, self.floats]
        return LayoutCall(*index, *tables, *sizes)


class LayoutCall(NamedTuple):
    """Arguments of the layout operators after the rows or gradients.

    The first four are as `shoal.ops.LayoutIndex` has them, the next three as `LookupTables`;
    `limits` are the tables' `widest` and `floats`.
    """

    rows_N: Tensor
    buffer_N: Tensor
    cell_splits: Tensor
    cells: Tensor
    features: Tensor
    slices: Tensor
    sums: Tensor
    batch_sizes: list[int]
    shapes: list[int]
    limits: list[int]


def compile_tables(
    pools: Sequence[Pool], outputs: Sequence[Output], *, divided: bool = False
) -> LookupTables:
    """Pools, in the order in which they add up, as tables.

    divided: Monolith's arithmetic: a mean divides the sum, and sums are over pooled features.
    """
    cut = _cut(pools)
    runs = _meetings(cut)
    roles = {number: ADDED for _, *run in runs for number in run[1:]}
    roles.update({run[1]: roles.get(run[1], FIRST) for run in runs})
    features: list[tuple[int, ...]] = []
    slices: list[tuple[int, ...]] = []
    floats = 0
    for group, pool in enumerate(cut):
        first = len(slices)
        for part in pool.slices:
            place = (part.start, part.width, part.output, part.column, part.stride)
            role = roles.get(len(slices), ALONE)
            slices.append((group, *place, role, floats, outputs[part.output].width))
            floats += part.width * pool.lanes
        own = slices[first:]
        number = DIVIDED if divided and pool.pooling == "mean" else _NUMBERS[pool.pooling]
        if number != FIRST_N and not divided and any(row[6] == ADDED for row in own):
            number += BY_ROW
        low = min((row[1] for row in own), default=0)
        high = max((row[1] + row[2] for row in own), default=0)
        length = pool.length if number == FIRST_N else 0
        features.append((first, len(slices), number, length, low, high))
    most = max(map(len, runs), default=1)
    shapes = [(output.shape or (output.width,))[-3:] for output in outputs]
    return LookupTables(
        torch.tensor(features, dtype=torch.int64, device="cpu").view(-1, 6),
        torch.tensor(slices, dtype=torch.int64, device="cpu").view(-1, 9),
        torch.tensor(
            [row + [-1] * (most - len(row)) for row in runs], dtype=torch.int64, device="cpu"
        ).view(-1, most),
        tuple(n for shape in shapes for n in (*[0] * (3 - len(shape)), *shape)),
        max((row[5] for row in features), default=0),
        floats,
        tuple(_gaps(slices, cut, outputs)),
        any(features[slices[number][0]][2] == FIRST_N for number in roles),
    )


def check_sums(pools: Sequence[Pool]) -> None:
    """Check that slices which share columns add to the first of them.

    Raises:
        ConfigError: they do not.
    """
    for pool in pools:
        for part in pool.slices:
            if pool.lanes > 1 and part.stride < part.width:
                raise ConfigError(
                    f"step of a first_n slice into output {part.output}",
                    got=part.stride,
                    allowed=f"{part.width} or more, the columns of a row; 0 for just them",
                    remedy="Leave the step out.",
                )
    cut = _cut(pools)
    parts = [part for pool in cut for part in pool.slices]
    for output, *run in _meetings(cut):
        if not all(parts[number].add for number in run[1:]):
            raise ConfigError(
                f"column {parts[run[0]].column} of output {output} of a pool plan",
                got="written twice",
                allowed="once, or added",
                remedy="Slices that share columns add: Slice(add=True).",
            )


def _cut(pools: Sequence[Pool]) -> list[Pool]:
    """Pools whose slices are split where others of the same output begin or end."""
    edges: dict[int, set[int]] = {}
    for pool in pools:
        for part in pool.slices:
            edges.setdefault(part.output, set()).update(itertools.chain(*pool.spans(part)))
    cut = [
        replace(
            pool,
            slices=tuple(
                smaller
                for part in pool.slices
                for smaller in _cut_at(pool, part, edges[part.output])
            ),
        )
        for pool in pools
    ]
    # A split in one row of a sequence splits the others, which may be new edges.
    count = sum(len(pool.slices) for pool in pools)
    return cut if sum(len(pool.slices) for pool in cut) == count else _cut(cut)


def _cut_at(pool: Pool, part: Slice, edges: set[int]) -> Iterator[Slice]:
    cuts = {0, part.width}
    for first, stop in pool.spans(part):
        cuts.update(edge - first for edge in edges if first < edge < stop)
    for a, b in itertools.pairwise(sorted(cuts)):
        place = part.start + a, part.start + b, part.output, part.column + a
        yield Slice(*place, part.add, part.stride)


def _meetings(pools: Sequence[Pool]) -> list[list[int]]:
    """For each run of columns that several slices feed: the output, then the slices' numbers."""
    found: dict[tuple[int, int], list[int]] = {}
    numbers = itertools.count()
    for pool in pools:
        for part in pool.slices:
            number = next(numbers)
            for column, _ in pool.spans(part):
                found.setdefault((part.output, column), []).append(number)
    return [[output, *run] for (output, _), run in found.items() if len(run) > 1]


def _gaps(
    slices: Sequence[tuple[int, ...]], pools: Sequence[Pool], outputs: Sequence[Output]
) -> Iterator[tuple[int, int, int]]:
    spans: list[list[tuple[int, int]]] = [[] for _ in outputs]
    parts = [(pool, part) for pool in pools for part in pool.slices]
    for row, (pool, part) in zip(slices, parts, strict=True):
        if row[6] != ADDED:
            spans[part.output] += pool.spans(part)
    for number, output in enumerate(outputs):
        reached = 0
        for first, stop in [*sorted(spans[number]), (output.width, output.width)]:
            if first > reached:
                yield number, reached, first
            reached = max(reached, stop)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns [start, stop) of a feature by number; length: its first_n rows, 0 where pooled."""

    feature: int
    start: int
    stop: int
    length: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A model input: its shape without B, and for each part its column and step there."""

    name: str
    shape: tuple[int, ...]
    places: tuple[tuple[Columns, int, int], ...]
    added: bool = False


def join(name: str, kind: Join, parts: Sequence[Columns], *, layout: str = "") -> Joined:
    """Join columns to one model input of this name.

    Raises:
        ConfigError: their lengths or widths do not fit the kind of `layout`.
    """
    what = f"of the slices of {kind} layout {layout or name!r}"
    shapes = [(p.length, p.stop - p.start) if p.length else (p.stop - p.start,) for p in parts]
    if kind == "concat":
        lengths = [part.length for part in parts]
        if len(set(lengths)) > 1:
            got = [length or "pooled" for length in lengths]
            raise ConfigError(f"lengths {what}", got, "one length", "Use a layout for each length.")
        widths = [shape[-1] for shape in shapes]
        columns = itertools.accumulate(widths[:-1], initial=0)
        places = tuple((p, column, sum(widths)) for p, column in zip(parts, columns, strict=True))
        return Joined(name, (*shapes[0][:-1], sum(widths)), places)
    if kind == "addn" and any(part.length for part in parts):
        remedy = "Pool them with a sum, or use a stack layout for sequences."
        raise ConfigError(f"pooling {what}", "sequences", "sum or mean", remedy)
    if len(set(shapes)) > 1:
        remedy = "Use a concat layout for slices of different widths, or 'none'."
        raise ConfigError(f"shapes {what}", shapes, "one shape", remedy)
    width = shapes[0][-1]
    if kind == "addn":
        return Joined(name, (width,), tuple((part, 0, width) for part in parts), added=True)
    floats = width * max(parts[0].length, 1)
    places = tuple((part, i * floats, width) for i, part in enumerate(parts))
    return Joined(name, (len(parts), *shapes[0]), places)


def plan_of(poolings: Sequence[tuple[Pooling, int]], inputs: Sequence[Joined]) -> PoolPlan:
    """The plan that makes model inputs, one output each.

    poolings: of each feature, with its number of first_n rows.
    """
    slices: list[list[Slice]] = [[] for _ in poolings]
    outputs = []
    for output, made in enumerate(inputs):
        places = made.places
        if made.added:
            # A plan writes feature by feature, so the first feature in that order starts the sum.
            places = tuple(sorted(places, key=lambda place: place[0].feature))
        for i, (part, column, step) in enumerate(places):
            add = made.added and i > 0
            own = Slice(part.start, part.stop, output, column, add, step if part.length else 0)
            slices[part.feature].append(own)
        shape = made.shape if len(made.shape) > 1 else ()
        outputs.append(Output(math.prod(made.shape), shape))
    pools = [
        Pool(pooling, tuple(own), max(length, 1))
        for (pooling, length), own in zip(poolings, slices, strict=True)
    ]
    return PoolPlan(tuple(pools), tuple(outputs))
