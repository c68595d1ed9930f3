"""Which features feed which model inputs: declarations, and the plan they compile to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shoal.embedding.combiners import COMBINERS, Combiner, ReduceSum
from shoal.errors import ConfigError, unknown_name
from shoal.table.shard import Output, Pool, PoolPlan, Slice
from shoal.table.spec import TableSpec

LayoutKind = Literal["none", "concat", "stack", "addn"]
KINDS: tuple[LayoutKind, ...] = ("none", "concat", "stack", "addn")


@dataclass(frozen=True, slots=True)
class Feature:
    """A jagged list of ids per example, and how its rows are pooled.

    Args:
        name: its key in a batch.
        table: name of the table its ids live in; several features may share one.
        combiner: how an example's rows become one input.
        max_length: most ids one example may hold; a longer list is an InputError. None: no limit.
    """

    name: str
    table: str
    combiner: Combiner = field(default_factory=ReduceSum)
    max_length: int | None = None

    def __post_init__(self) -> None:
        if type(self.combiner) not in COMBINERS:
            allowed = "a ReduceSum(), ReduceMean() or FirstN(length)"
            remedy = "For another pooling, take the rows with FirstN and pool them in the model."
            raise _wrong(f"combiner of feature {self.name!r}", self.combiner, allowed, remedy)
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(
                f"max_length of feature {self.name!r}",
                got=self.max_length,
                allowed="None or at least 1",
                remedy="Leave it out for lists of any length.",
            )


@dataclass(frozen=True, slots=True)
class LayoutSlice:
    """Columns of a feature: one segment of its table, or with None the whole row."""

    feature: str
    segment: str | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """One model input, or with "none" one per slice.

    D is a slice's width, L the length of `FirstN` features:

    | kind | result | keys |
    |---|---|---|
    | none | [B, D] or [B, L, D] each | the feature, or "feature/segment" for one segment |
    | concat | [B, sum D], or [B, L, sum D] of FirstN features of one L | the layout's name |
    | stack | [B, n, D] or [B, n, L, D]; equal shapes | the layout's name |
    | addn | [B, D]: the sum; equal widths, no FirstN | the layout's name |
    """

    name: str
    kind: LayoutKind
    slices: tuple[LayoutSlice, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            remedy = "Monolith's NONE, CONCAT, STACK and ADDN are written in lower case."
            raise unknown_name(f"kind of layout {self.name!r}", self.kind, KINDS, remedy=remedy)
        if not self.slices:
            raise _wrong(f"slices of layout {self.name!r}", "none", "one or more", "Name one.")


@dataclass(frozen=True, slots=True)
class Placed:
    """A model input as outputs of the plan: `shape` without B, joined in dim 2 when several."""

    name: str
    outputs: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    widths: tuple[int, ...] = ()

    def take(self, outputs: Sequence[Tensor]) -> Tensor:
        """The model input, a view of its output; several outputs are copied together."""
        if len(self.outputs) == 1:
            output = outputs[self.outputs[0]]
            return output if self.shape is None else output.view(-1, *self.shape)
        assert self.shape is not None
        length = self.shape[0]
        parts = [
            outputs[i].view(-1, length, width)
            for i, width in zip(self.outputs, self.widths, strict=True)
        ]
        return torch.cat(parts, dim=2)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledLayouts:
    """What a step needs of the declarations, worked out once.

    Args:
        plan: one `Pool` per feature in `features` order.
        plain: names of the model inputs that are an output as it is, in output order; they come
            first in the plan's outputs.
        placed: the other model inputs.
        order: names of all model inputs as declared.
    """

    plan: PoolPlan
    plain: tuple[str, ...]
    placed: tuple[Placed, ...]
    order: tuple[str, ...]

    def inputs(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Model inputs by name, as declared, of the plan's outputs [B, width]."""
        named = dict(zip(self.plain, outputs, strict=False))
        if not self.placed:
            return named
        for placed in self.placed:
            named[placed.name] = placed.take(outputs)
        return {name: named[name] for name in self.order}


@dataclass(frozen=True, slots=True)
class _Columns:
    """A layout slice with its names resolved."""

    feature: int
    start: int
    stop: int
    length: int | None

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def floats(self) -> int:
        return self.width * (self.length or 1)

    @property
    def shape(self) -> tuple[int, ...] | None:
        return None if self.length is None else (self.length, self.width)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A model input before its outputs have numbers: each output is a run of slices."""

    name: str
    outputs: tuple[tuple[_Columns, ...], ...]
    added: bool = False
    shape: tuple[int, ...] | None = None


def default_layouts(features: Sequence[Feature]) -> tuple[Layout, ...]:
    """One "none" layout of all features: each feature's whole rows under its own name."""
    slices = tuple(LayoutSlice(feature.name) for feature in features)
    return (Layout("features", "none", slices),) if slices else ()


def compile_layouts(
    tables: Mapping[str, TableSpec], features: Sequence[Feature], layouts: Sequence[Layout]
) -> CompiledLayouts:
    """Check the declarations against each other and compile them.

    Raises:
        UnknownName: a feature's table, or a slice's feature or segment, does not exist.
        ConfigError: a name used twice, a feature no layout uses, or shapes that do not fit.
    """
    positions = _check_features(tables, features)
    drafts: list[_Draft] = []
    for layout in layouts:
        columns = [_resolve(layout, piece, tables, features, positions) for piece in layout.slices]
        drafts += DRAFTERS[layout.kind](layout, columns)
    _check_names([draft.name for draft in drafts])
    used = {piece.feature for draft in drafts for run in draft.outputs for piece in run}
    unused = [feature.name for i, feature in enumerate(features) if i not in used]
    if unused:
        remedy = "Add it to a layout, or drop the feature."
        raise _wrong("features without a layout", unused, "each in one or more layouts", remedy)
    return _number(features, drafts)


def _check_features(tables: Mapping[str, TableSpec], features: Sequence[Feature]) -> dict[str, int]:
    if not features:
        raise _wrong("features", "none", "one or more", "Declare Feature(name, table).")
    positions: dict[str, int] = {}
    for feature in features:
        if feature.name in positions:
            remedy = "Name each feature once; use several slices to read it twice."
            raise _wrong("feature names", f"{feature.name!r} twice", "distinct names", remedy)
        if feature.table not in tables:
            raise unknown_name(f"table of feature {feature.name!r}", feature.table, tables)
        positions[feature.name] = len(positions)
    return positions


def _resolve(
    layout: Layout,
    piece: LayoutSlice,
    tables: Mapping[str, TableSpec],
    features: Sequence[Feature],
    positions: Mapping[str, int],
) -> _Columns:
    if piece.feature not in positions:
        raise unknown_name(f"feature in layout {layout.name!r}", piece.feature, positions)
    index = positions[piece.feature]
    spec = tables[features[index].table]
    start, stop = (0, spec.dim) if piece.segment is None else spec.columns(piece.segment)
    return _Columns(index, start, stop, features[index].combiner.max_seq_length or None)


def _draft_none(layout: Layout, columns: list[_Columns]) -> list[_Draft]:
    return [
        _Draft(
            piece.feature if piece.segment is None else f"{piece.feature}/{piece.segment}",
            ((part,),),
            shape=part.shape,
        )
        for piece, part in zip(layout.slices, columns, strict=True)
    ]


def _draft_concat(layout: Layout, columns: list[_Columns]) -> list[_Draft]:
    lengths = {part.length for part in columns}
    if len(lengths) > 1:
        remedy = "Use one FirstN length, or a layout per length."
        got = [part.length or "pooled" for part in columns]
        raise _wrong(f"lengths in concat layout {layout.name!r}", got, "one length", remedy)
    if columns[0].length is None:
        return [_Draft(layout.name, (tuple(columns),))]
    shape = (columns[0].length, sum(part.width for part in columns))
    return [_Draft(layout.name, tuple((part,) for part in columns), shape=shape)]


def _draft_stack(layout: Layout, columns: list[_Columns]) -> list[_Draft]:
    _check_equal(layout, columns)
    shape = (len(columns), *(columns[0].shape or (columns[0].width,)))
    return [_Draft(layout.name, (tuple(columns),), shape=shape)]


def _draft_addn(layout: Layout, columns: list[_Columns]) -> list[_Draft]:
    for piece, part in zip(layout.slices, columns, strict=True):
        if part.length is not None:
            got = f"FirstN feature {piece.feature!r}"
            remedy = "Pool the feature with ReduceSum, or use a stack layout."
            raise _wrong(f"addn layout {layout.name!r}", got, "pooled features", remedy)
    _check_equal(layout, columns)
    return [_Draft(layout.name, (tuple(columns),), added=True)]


DRAFTERS: dict[LayoutKind, Callable[[Layout, list[_Columns]], list[_Draft]]] = {
    "none": _draft_none,
    "concat": _draft_concat,
    "stack": _draft_stack,
    "addn": _draft_addn,
}


def _check_equal(layout: Layout, columns: list[_Columns]) -> None:
    shapes = [part.shape or (part.width,) for part in columns]
    if len(set(shapes)) > 1:
        raise _wrong(
            f"slices of {layout.kind} layout {layout.name!r}",
            f"shapes {shapes}",
            "equal shapes",
            "Use a concat layout for slices of different widths.",
        )


def _check_names(names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        remedy = "Rename a layout, or read a segment of a feature in one 'none' layout only."
        raise _wrong("names of model inputs", f"{twice} twice", "distinct names", remedy)


def _number(features: Sequence[Feature], drafts: list[_Draft]) -> CompiledLayouts:
    # Plain inputs come first, so that naming them is one zip whatever their number.
    ordered = sorted(drafts, key=_needs_view)
    slices: list[list[Slice]] = [[] for _ in features]
    outputs: list[Output] = []
    placed: list[Placed] = []
    for draft in ordered:
        first = len(outputs)
        for run in draft.outputs:
            outputs.append(_place(run, len(outputs), slices, added=draft.added))
        if _needs_view(draft):
            widths = tuple(run[0].width for run in draft.outputs)
            numbers = tuple(range(first, len(outputs)))
            placed.append(Placed(draft.name, numbers, draft.shape, widths))
    pools = tuple(
        Pool(feature.combiner.pooling, tuple(parts), feature.combiner.max_seq_length or 1)
        for feature, parts in zip(features, slices, strict=True)
    )
    plain = tuple(draft.name for draft in ordered if not _needs_view(draft))
    order = tuple(draft.name for draft in drafts)
    return CompiledLayouts(PoolPlan(pools, tuple(outputs)), plain, tuple(placed), order)


def _needs_view(draft: _Draft) -> bool:
    return draft.shape is not None


def _place(
    run: tuple[_Columns, ...], output: int, slices: list[list[Slice]], *, added: bool
) -> Output:
    """Give a run of slices its columns of one output."""
    column = 0
    if not added:
        for part in run:
            slices[part.feature].append(Slice(part.start, part.stop, output, column))
            column += part.floats
        return Output(column)
    # A plan writes feature by feature, so the first feature in that order starts the sum.
    for i, part in enumerate(sorted(run, key=lambda part: part.feature)):
        slices[part.feature].append(Slice(part.start, part.stop, output, 0, add=i > 0))
    return Output(run[0].width)


def _wrong(what: str, got: object, allowed: object, remedy: str) -> ConfigError:
    return ConfigError(what, got=got, allowed=allowed, remedy=remedy)
