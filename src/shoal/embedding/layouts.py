"""Which features feed which model inputs: declarations, and the plan they compile to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from shoal.embedding.combiners import COMBINERS, Combiner, ReduceSum
from shoal.errors import ConfigError, unknown_name
from shoal.lookup import Columns, Joined, LayoutKind, PoolPlan, join, plan_of
from shoal.table.spec import TableSpec

KINDS = get_args(LayoutKind)


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
            raise ConfigError(f"combiner of feature {self.name!r}", self.combiner, allowed, remedy)
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
            raise ConfigError(f"slices of layout {self.name!r}", "none", "one or more", "Name one.")


@dataclass(frozen=True, eq=False)
class CompiledLayouts:
    """What a step needs of the declarations, worked out once.

    Args:
        plan: one `Pool` per feature in `features` order.
        names: of the outputs: model inputs, and what `joined` joins.
        joined: model inputs that are several outputs side by side in dim 2.
        order: names of the model inputs as declared.
    """

    plan: PoolPlan
    names: tuple[str, ...]
    joined: Mapping[str, tuple[str, ...]]
    order: tuple[str, ...]

    def inputs(self, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Model inputs by name, as declared, of the plan's outputs [B, width]."""
        named = dict(zip(self.names, outputs, strict=True))
        for name, shape in self.shapes:
            named[name] = named[name].view(-1, *shape)
        if not self.joined:
            return named
        for name, parts in self.joined.items():
            named[name] = torch.cat([named[part] for part in parts], dim=2)
        return {name: named[name] for name in self.order}

    @cached_property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Model inputs that are not [B, width], and their shapes without B."""
        pairs = zip(self.names, self.plan.outputs, strict=True)
        return tuple((name, output.shape) for name, output in pairs if output.shape)


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
    inputs: list[Joined] = []
    for layout in layouts:
        parts = [_columns(layout, piece, tables, features, positions) for piece in layout.slices]
        if layout.kind == "none":
            names = [p.feature if p.segment is None else f"{p.feature}/{p.segment}"
                     for p in layout.slices]  # fmt: skip
            inputs += [
                join(name, "concat", [part]) for name, part in zip(names, parts, strict=True)
            ]
        else:
            inputs.append(join(layout.name, layout.kind, parts))
    order = [made.name for made in inputs]
    _check_names(order)
    used = {part.feature for made in inputs for part, _, _ in made.places}
    unused = [feature.name for i, feature in enumerate(features) if i not in used]
    if unused:
        remedy = "Add it to a layout, or drop the feature."
        raise ConfigError(
            "features without a layout", unused, "each in one or more layouts", remedy
        )
    poolings = [(f.combiner.pooling, f.combiner.max_seq_length) for f in features]
    outputs: list[Joined] = []
    joined: dict[str, tuple[str, ...]] = {}
    for made in inputs:
        own = [made]
        if len(made.places) > 1 and len(made.shape) == 2 and made.places[0][0].length:
            # An output each, copied together: in a joined gradient the rows of one feature lie far
            # apart, which costs more than the copy.
            places = enumerate(made.places)
            own = [join(f"\0{made.name}/{i}", "concat", [part]) for i, (part, _, _) in places]
            joined[made.name] = tuple(part.name for part in own)
        outputs += own
    named = tuple(made.name for made in outputs)
    return CompiledLayouts(plan_of(poolings, outputs), named, joined, tuple(order))


def _check_features(tables: Mapping[str, TableSpec], features: Sequence[Feature]) -> dict[str, int]:
    if not features:
        raise ConfigError("features", "none", "one or more", "Declare Feature(name, table).")
    positions: dict[str, int] = {}
    for feature in features:
        if feature.name in positions:
            remedy = "Name each feature once; use several slices to read it twice."
            raise ConfigError("feature names", f"{feature.name!r} twice", "distinct names", remedy)
        if feature.table not in tables:
            raise unknown_name(f"table of feature {feature.name!r}", feature.table, tables)
        positions[feature.name] = len(positions)
    return positions


def _columns(
    layout: Layout,
    piece: LayoutSlice,
    tables: Mapping[str, TableSpec],
    features: Sequence[Feature],
    positions: Mapping[str, int],
) -> Columns:
    if piece.feature not in positions:
        raise unknown_name(f"feature in layout {layout.name!r}", piece.feature, positions)
    index = positions[piece.feature]
    spec = tables[features[index].table]
    start, stop = (0, spec.dim) if piece.segment is None else spec.columns(piece.segment)
    return Columns(index, start, stop, features[index].combiner.max_seq_length)


def _check_names(names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        remedy = "Rename a layout, or read a segment of a feature in one 'none' layout only."
        raise ConfigError("names of model inputs", f"{twice} twice", "distinct names", remedy)
