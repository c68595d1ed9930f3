"""Which features feed which model inputs: declarations, and the plan they compile to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, get_args

import torch
from torch import Tensor, nn

from shoal.embedding.combiners import COMBINERS, Combiner, ReduceSum
from shoal.errors import ConfigError, ShapeError, known_name
from shoal.lookup import Columns, Joined, LayoutKind, Pooling, PoolPlan, join, plan_of
from shoal.ragged import KeyedRagged, Ragged
from shoal.rules.rule import Checked, whole
from shoal.table.spec import TableSpec

KINDS = get_args(LayoutKind)
_LENGTH = whole(1, remedy="Leave it out for lists of any length.")


@dataclass(frozen=True, slots=True)
class Feature(Checked):
    """A jagged list of ids per example, and how its rows are pooled.

    Args:
        name: its key in a batch.
        table: name of the table its ids live in; several features may share one.
        combiner: how an example's rows become one input. One of your own needs `max_length`; it
            is called with the columns of each layout slice, on zero-padded rows [B, max_length, D]
            in memory.
        max_length: most ids one example may hold; a longer list is an InputError. None: no limit.

    Raises:
        ConfigError: no combiner, one of your own without `max_length` or with weights of its own,
            or a `max_length` below 1.
    """

    name: str
    table: str
    combiner: Combiner = field(default_factory=ReduceSum)
    max_length: Annotated[int | None, _LENGTH.or_none()] = None

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.is_custom:
            self._check_custom()

    def described(self) -> str:
        """In errors."""
        return f"feature {self.name!r}"

    @property
    def is_custom(self) -> bool:
        """Whether the combiner is one of your own, which shards do not know."""
        return type(self.combiner) not in COMBINERS

    @property
    def pooling(self) -> tuple[Pooling, int]:
        """How shards pool the rows, and the rows they keep of an example, 0 for all as one."""
        if isinstance(self.combiner, COMBINERS) and not self.is_custom:
            return self.combiner.pooling, self.combiner.max_seq_length
        return "first_n", self.max_length or 0

    def _check_custom(self) -> None:
        what = f"combiner of feature {self.name!r}"
        if isinstance(self.combiner, nn.Module):
            raise ConfigError(
                what,
                got="a torch module",
                allowed="an object without weights of its own",
                remedy="Take the rows with FirstN, and pool them in the model.",
            )
        if isinstance(self.combiner, type) or not isinstance(self.combiner, Combiner):
            raise ConfigError(
                what,
                got=self.combiner,
                allowed="ReduceSum(), ReduceMean(), FirstN(length), or an object with "
                "combine(), output_shape() and max_seq_length",
                remedy="Give it the methods of shoal.embedding.combiners.Combiner.",
            )
        if self.max_length is None:
            raise ConfigError(
                what,
                got=f"{type(self.combiner).__name__} without max_length",
                allowed="max_length with a combiner of your own: that many rows are kept",
                remedy="Set Feature.max_length, or take the rows with FirstN and pool them in "
                "the model.",
            )

    def combine(self, rows_BLD: Tensor, ids: Ragged) -> Tensor:
        """What the feature's own combiner makes of zero-padded rows.

        Raises:
            ShapeError: not the combiner's `output_shape`.
        """
        offsets_B1, count = ids.offsets_B1, ids.values.numel()
        # The size is known on the host: a device need not be asked for it.
        bags_B = torch.arange(ids.batch_size, device=rows_BLD.device)
        bags_N = bags_B.repeat_interleave(offsets_B1.diff(), output_size=count)
        steps_N = torch.arange(count, device=rows_BLD.device) - offsets_B1[bags_N]
        made = self.combiner.combine(ids, rows_BLD[bags_N, steps_N])
        shape = (ids.batch_size, *self.combiner.output_shape(rows_BLD.shape[-1])[1:])
        if not isinstance(made, Tensor) or tuple(made.shape) != shape:
            raise ShapeError(
                f"result of the combiner of feature {self.name!r}",
                got=list(made.shape) if isinstance(made, Tensor) else type(made).__name__,
                allowed=f"{list(shape)}, as its output_shape says",
                remedy="Correct combine() or output_shape().",
            )
        return made


@dataclass(frozen=True, slots=True)
class LayoutSlice(Checked):
    """Columns of a feature: one segment of its table, or with None the whole row."""

    feature: str
    segment: str | None = None


@dataclass(frozen=True, slots=True)
class Layout(Checked):
    """One model input, or with "none" one per slice.

    D is a slice's width, L the length of `FirstN` features:

    | kind | result | keys |
    |---|---|---|
    | none | [B, D] or [B, L, D] each | the feature, or "feature/segment" for one segment |
    | concat | [B, sum D], or [B, L, sum D] of FirstN features of one L | the layout's name |
    | stack | [B, n, D] or [B, n, L, D]; equal shapes | the layout's name |
    | addn | [B, D]: the sum; equal widths, no FirstN | the layout's name |

    Args:
        name: of the model input.
        kind: of the table above.
        slices: which features, and which of their segments, in order.

    Raises:
        UnknownName: no such kind.
        ConfigError: no slices.
    """

    name: str
    kind: LayoutKind
    slices: tuple[LayoutSlice, ...]

    def __post_init__(self) -> None:
        remedy = "Monolith's NONE, CONCAT, STACK and ADDN are written in lower case."
        known_name(f"kind of layout {self.name!r}", self.kind, KINDS, remedy=remedy)
        if not self.slices:
            raise ConfigError(f"slices of layout {self.name!r}", "none", "one or more", "Name one.")
        Checked.__post_init__(self)


@dataclass(frozen=True, eq=False)
class CompiledLayouts:
    """What a step needs of the declarations, worked out once.

    Args:
        plan: one `Pool` per feature in `features` order.
        names: of the outputs: model inputs, and what `joined` joins.
        joined: layouts of model inputs that are several outputs, and the outputs' names.
        custom: outputs whose rows a feature's own combiner pools.
        order: names of the model inputs as declared.
    """

    plan: PoolPlan
    names: tuple[str, ...]
    joined: Mapping[str, tuple[LayoutKind, tuple[str, ...]]]
    custom: Mapping[str, Feature]
    order: tuple[str, ...]

    def inputs(self, outputs: Sequence[Tensor], ordered: KeyedRagged) -> dict[str, Tensor]:
        """Model inputs by name, as declared, of the plan's outputs [B, width] for some ids."""
        named = dict(zip(self.names, outputs, strict=True))
        for name, shape in self.shapes:
            named[name] = named[name].view(-1, *shape)
        for name, feature in self.custom.items():
            named[name] = feature.combine(named[name], ordered[feature.name])
        if not self.joined:
            return named
        for name, (kind, parts) in self.joined.items():
            tensors = [named[part] for part in parts]
            if kind == "concat":
                named[name] = torch.cat(tensors, dim=-1)
            else:
                stacked = torch.stack(tensors, dim=1)
                named[name] = stacked if kind == "stack" else stacked.sum(dim=1)
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
    joined: dict[str, tuple[LayoutKind, tuple[str, ...]]] = {}
    order: list[str] = []
    for layout in layouts:
        parts = [_columns(layout, piece, tables, features, positions) for piece in layout.slices]
        if layout.kind == "none":
            names = [p.feature if p.segment is None else f"{p.feature}/{p.segment}"
                     for p in layout.slices]  # fmt: skip
            made = [join(name, "concat", [part]) for name, part in zip(names, parts, strict=True)]
        elif any(features[part.feature].is_custom for part in parts):
            made = _parts(layout.name, parts)
            joined[layout.name] = layout.kind, tuple(part.name for part in made)
            _check_joined(layout, [_shape(features[p.feature], p.stop - p.start) for p in parts])
        else:
            made = [join(layout.name, layout.kind, parts)]
            if len(parts) > 1 and len(made[0].shape) == 2 and parts[0].length:
                # An output each, copied together: in a joined gradient the rows of one feature lie
                # far apart, which costs more than the copy.
                made = _parts(layout.name, parts)
                joined[layout.name] = "concat", tuple(part.name for part in made)
        inputs += made
        order += [layout.name] if layout.kind != "none" else [one.name for one in made]
    _check_names(order)
    used = {part.feature for made in inputs for part, _, _ in made.places}
    unused = [feature.name for i, feature in enumerate(features) if i not in used]
    if unused:
        remedy = "Add it to a layout, or drop the feature."
        raise ConfigError(
            "features without a layout", unused, "each in one or more layouts", remedy
        )
    own = ((made.name, features[made.places[0][0].feature]) for made in inputs)
    return CompiledLayouts(
        plan_of([feature.pooling for feature in features], inputs),
        tuple(made.name for made in inputs),
        joined,
        {name: feature for name, feature in own if feature.is_custom},
        tuple(order),
    )


def _parts(name: str, parts: Sequence[Columns]) -> list[Joined]:
    """An output for each part of a model input."""
    return [join(f"\0{name}/{i}", "concat", [part]) for i, part in enumerate(parts)]


def _shape(feature: Feature, width: int) -> tuple[int | None, ...]:
    """Of a part of a model input, without the batch."""
    return tuple(feature.combiner.output_shape(width)[1:])


def _check_joined(layout: Layout, shapes: Sequence[tuple[int | None, ...]]) -> None:
    """Check shapes that `shoal.lookup.join` cannot know.

    Raises:
        ConfigError: they do not fit the layout.
    """
    alike = [shape[:-1] if layout.kind == "concat" else shape for shape in shapes]
    if len(set(alike)) > 1:
        raise ConfigError(
            f"shapes of the slices of {layout.kind} layout {layout.name!r}",
            got=[list(shape) for shape in shapes],
            allowed="one shape; in a concat layout of any last width",
            remedy="Use a layout for each shape, or 'none'.",
        )


def _check_features(tables: Mapping[str, TableSpec], features: Sequence[Feature]) -> dict[str, int]:
    if not features:
        raise ConfigError("features", "none", "one or more", "Declare Feature(name, table).")
    positions: dict[str, int] = {}
    for feature in features:
        if feature.name in positions:
            remedy = "Name each feature once; use several slices to read it twice."
            raise ConfigError("feature names", f"{feature.name!r} twice", "distinct names", remedy)
        known_name(f"table of feature {feature.name!r}", feature.table, tables)
        positions[feature.name] = len(positions)
    return positions


def _columns(
    layout: Layout,
    piece: LayoutSlice,
    tables: Mapping[str, TableSpec],
    features: Sequence[Feature],
    positions: Mapping[str, int],
) -> Columns:
    known_name(f"feature in layout {layout.name!r}", piece.feature, positions)
    index = positions[piece.feature]
    spec = tables[features[index].table]
    start, stop = (0, spec.dim) if piece.segment is None else spec.columns(piece.segment)
    return Columns(index, start, stop, features[index].pooling[1])


def _check_names(names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        remedy = "Rename a layout, or read a segment of a feature in one 'none' layout only."
        raise ConfigError("names of model inputs", f"{twice} twice", "distinct names", remedy)
