"""Which columns of which features feed which model inputs: frozen specs and the plan they make.

Monolith's `FeatureConfigs` message as dataclasses. Features are sorted by name, tables too;
outputs are the layouts in sorted name order, a "none" layout giving one output per slice.

| pooling_type | Monolith | result of one example's rows |
|---|---|---|
| sum | SUM = 0 | their sum, [D] |
| mean | MEAN = 1 | their sum over their number, [D] |
| firstn | FIRSTN = 3 | the first L = max_sequence_length of them, zero padded, [L, D] |

| out_type | Monolith | output |
|---|---|---|
| concat | CONCAT = 0 | [B, sum D], or [B, L, sum D] of firstn slices of one L |
| stack | STACK = 1 | [B, n, D], or [B, n, L, D]; slices of one shape |
| addn | ADDN = 2 | [B, D]: the sum of slices of one width, in feature order; no firstn |
| none | NONE = 3 | n outputs [B, D] or [B, L, D], in slice order |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.errors import ConfigError, describe, unknown_name

__all__ = [
    "FeatureConfig",
    "FeatureConfigs",
    "LayoutPlan",
    "OutConfig",
    "OutType",
    "PoolingType",
    "SliceConfig",
]

PoolingType = Literal["sum", "mean", "firstn"]
OutType = Literal["concat", "stack", "addn", "none"]

POOLINGS: dict[PoolingType, int] = {"sum": 0, "mean": 1, "firstn": 3}
OUT_TYPES: dict[OutType, int] = {"concat": 0, "stack": 1, "addn": 2, "none": 3}


@dataclass(frozen=True, slots=True)
class FeatureConfig:
    """How a feature's rows are read and pooled.

    Args:
        table: name of the table its ids live in.
        slice_dims: widths of the row's slices; the row is sum(slice_dims) floats wide.
        pooling_type: how the rows of one example become one input.
        max_sequence_length: L of "firstn", at least 1; the other poolings read all rows.
    """

    table: str
    slice_dims: tuple[int, ...]
    pooling_type: PoolingType = "sum"
    max_sequence_length: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "slice_dims", tuple(self.slice_dims))
        if self.pooling_type not in get_args(PoolingType):
            raise unknown_name("pooling_type", self.pooling_type, get_args(PoolingType))
        if not self.slice_dims or min(self.slice_dims) < 1:
            remedy = "Give the width of each slice of the row."
            raise _wrong("slice_dims", self.slice_dims, "one or more, each at least 1", remedy)
        least = 1 if self.pooling_type == "firstn" else 0
        if self.max_sequence_length < least:
            what = f"max_sequence_length with {self.pooling_type!r}"
            remedy = "It is the number of rows a firstn feature keeps."
            raise _wrong(what, self.max_sequence_length, f"at least {least}", remedy)

    @property
    def width(self) -> int:
        """Floats of a row."""
        return sum(self.slice_dims)


@dataclass(frozen=True, slots=True)
class SliceConfig:
    """Columns [start, end) of a feature's rows.

    Monolith's further fields (feature_idx, slice_idx, pooling_type, max_sequence_length) follow
    from the feature and are worked out by `FeatureConfigs`.
    """

    feature_name: str
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            what = f"columns of a slice of {self.feature_name!r}"
            raise _wrong(what, f"[{self.start}, {self.end})", "0 <= start < end", "Name some.")

    @property
    def width(self) -> int:
        """Floats of the slice."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class OutConfig:
    """One layout: slices, and how they are joined. Monolith's `shape` is inferred."""

    slice_configs: tuple[SliceConfig, ...]
    out_type: OutType = "concat"

    def __post_init__(self) -> None:
        object.__setattr__(self, "slice_configs", tuple(self.slice_configs))
        if self.out_type not in get_args(OutType):
            raise unknown_name("out_type", self.out_type, get_args(OutType))
        if not self.slice_configs:
            raise _wrong("slice_configs", "none", "one or more", "Drop the layout instead.")


@dataclass(frozen=True, slots=True, eq=False)
class LayoutPlan:
    """The specs as int64 tensors, made once, that every implementation reads as they are.

    Args:
        features_F: first slice, last slice + 1, pooling number, L (0 unless firstn), and the
            range of columns its slices read. Poolings that no `FeatureConfig` names: 2, the mean
            as shards take it, each row times 1 / number of ids; 8 more than 0 or 2: the rows go
            to the outputs one by one, as a shard adds them (on CUDA pooled first).
        slices_S: feature, first column, width, output, place in an example's part of the output,
            floats from one firstn step to the next, part in a sum (0: none, 1: the first, 2: one
            to add), place in a vector of all slices' floats, and floats of an example's part of
            the output. Sorted by feature.
        sums_AM: for each "addn" output: its number, then its slices, padded with -1.
        shapes: n, L and D of each output, 0 where absent.
        widest: most columns that any feature's slices span, from the row's start.
        floats: length of the vector of all slices' floats.
    """

    features_F: Tensor
    slices_S: Tensor
    sums_AM: Tensor
    shapes: tuple[int, ...]
    widest: int
    floats: int
    _elsewhere: dict[torch.device, LayoutPlan] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> LayoutPlan:
        """The plan on a device; copied there once."""
        if device == self.features_F.device:
            return self
        if device in self._elsewhere:
            return self._elsewhere[device]
        moved = LayoutPlan(
            self.features_F.to(device),
            self.slices_S.to(device),
            self.sums_AM.to(device),
            self.shapes,
            self.widest,
            self.floats,
        )
        # A tracer's stand-ins must not outlive the trace.
        if type(moved.features_F) is Tensor and not torch.compiler.is_exporting():
            self._elsewhere[device] = moved
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class FeatureConfigs:
    """Features and layouts by name, checked against each other when made.

    Monolith: `FeatureConfigs`. `features`, `tables` and `outputs` are the orders all operations
    on it use: feature names sorted, table names sorted, and output names ("layout", or
    "layout:slice number" of a "none" layout) by sorted layout name.

    Raises:
        UnknownName: a slice names a feature that is not configured.
        ConfigError: no features or layouts, columns beyond a row, or slices a layout cannot join.
    """

    feature_configs: Mapping[str, FeatureConfig]
    out_configs: Mapping[str, OutConfig]
    features: tuple[str, ...] = field(init=False)
    tables: tuple[str, ...] = field(init=False)
    outputs: tuple[str, ...] = field(init=False, repr=False)
    plan: LayoutPlan = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("feature_configs", "out_configs"):
            given = getattr(self, name)
            if not given:
                raise _wrong(name, "none", "one or more", "Name what the model reads.")
            object.__setattr__(self, name, MappingProxyType(dict(given)))
        tables = {config.table for config in self.feature_configs.values()}
        object.__setattr__(self, "features", tuple(sorted(self.feature_configs)))
        object.__setattr__(self, "tables", tuple(sorted(tables)))
        positions = {name: index for index, name in enumerate(self.features)}
        layouts = sorted(self.out_configs)
        drafts = [draft for name in layouts for draft in self._drafts(name, positions)]
        object.__setattr__(self, "outputs", tuple(draft.name for draft in drafts))
        object.__setattr__(self, "plan", _plan(self, drafts))

    def __reduce__(self) -> tuple[type[FeatureConfigs], tuple[dict[str, object], ...]]:
        """Processes that prepare batches are sent the specs and make the plan anew."""
        return FeatureConfigs, (dict(self.feature_configs), dict(self.out_configs))

    def features_of(self, table: str) -> tuple[str, ...]:
        """Names of a table's features, sorted."""
        return tuple(f for f in self.features if self.feature_configs[f].table == table)

    def _drafts(self, layout: str, positions: Mapping[str, int]) -> list[_Draft]:
        """A layout's outputs: shapes, and where each slice lies in them."""
        out = self.out_configs[layout]
        parts = [self._part(layout, piece, positions) for piece in out.slice_configs]
        if out.out_type == "none":
            return [
                _Draft(f"{layout}:{i}", (0, part.length, part.width), ((part, 0, part.width),))
                for i, part in enumerate(parts)
            ]
        if out.out_type == "concat":
            return [_concat(layout, parts)]
        if len({(part.length, part.width) for part in parts}) > 1:
            got = [(part.length, part.width) if part.length else part.width for part in parts]
            what = f"shapes of the slices of {out.out_type} layout {layout!r}"
            raise _wrong(what, got, "one shape", "Use a concat layout, or 'none'.")
        if out.out_type == "addn":
            return [_addn(layout, parts)]
        length, width = parts[0].length, parts[0].width
        floats = max(length, 1) * width
        places = tuple((part, i * floats, width) for i, part in enumerate(parts))
        return [_Draft(layout, (len(parts), length, width), places)]

    def _part(self, layout: str, piece: SliceConfig, positions: Mapping[str, int]) -> _Part:
        if piece.feature_name not in self.feature_configs:
            what = f"feature in layout {layout!r}"
            raise unknown_name(what, piece.feature_name, self.feature_configs)
        config = self.feature_configs[piece.feature_name]
        if piece.end > config.width:
            what = f"end of a slice of {piece.feature_name!r} in layout {layout!r}"
            remedy = "slice_dims give the row's width."
            raise _wrong(what, piece.end, f"at most {config.width}", remedy)
        length = config.max_sequence_length if config.pooling_type == "firstn" else 0
        return _Part(positions[piece.feature_name], piece.start, piece.width, length)


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice with its names resolved; length 0 unless firstn."""

    feature: int
    start: int
    width: int
    length: int


@dataclass(frozen=True, slots=True)
class _Draft:
    """An output: (n, L, D), and its slices with their place and the floats between steps."""

    name: str
    shape: tuple[int, int, int]
    places: tuple[tuple[_Part, int, int], ...]
    added: bool = False

    @property
    def floats(self) -> int:
        return max(self.shape[0], 1) * max(self.shape[1], 1) * self.shape[2]


def _concat(layout: str, parts: Sequence[_Part]) -> _Draft:
    lengths = {part.length for part in parts}
    if len(lengths) > 1:
        got = [part.length or "pooled" for part in parts]
        what = f"lengths of the slices of concat layout {layout!r}"
        raise _wrong(what, got, "one length", "Use a layout for each length.")
    total = sum(part.width for part in parts)
    places, column = [], 0
    for part in parts:
        places.append((part, column, total))
        column += part.width
    return _Draft(layout, (0, parts[0].length, total), tuple(places))


def _addn(layout: str, parts: Sequence[_Part]) -> _Draft:
    if parts[0].length:
        what = f"pooling of the slices of addn layout {layout!r}"
        raise _wrong(what, "firstn", "sum or mean", "Use a stack layout for sequences.")
    places = tuple((part, 0, part.width) for part in parts)
    return _Draft(layout, (0, 0, parts[0].width), places, added=True)


def _plan(configs: FeatureConfigs, drafts: Sequence[_Draft]) -> LayoutPlan:
    found = [
        (part.feature, output, place, part, step, draft)
        for output, draft in enumerate(drafts)
        for part, place, step in draft.places
    ]
    # Stable: slices of one feature keep the order of their outputs.
    found.sort(key=lambda entry: entry[0])
    slices, floats, sums = [], 0, {i: [i] for i, draft in enumerate(drafts) if draft.added}
    for feature, output, place, part, step, draft in found:
        role = min(len(sums[output]), 2) if draft.added else 0
        row = (feature, part.start, part.width, output, place, step, role, floats)
        slices.append((*row, draft.floats))
        if draft.added:
            sums[output].append(len(slices) - 1)
        floats += part.width * max(part.length, 1)
    features = _feature_rows(configs, slices)
    most = max((len(row) for row in sums.values()), default=1)
    padded = [row + [-1] * (most - len(row)) for row in sums.values()]
    return LayoutPlan(
        torch.tensor(features, dtype=torch.int64, device="cpu").view(-1, 6),
        torch.tensor(slices, dtype=torch.int64, device="cpu").view(-1, 9),
        torch.tensor(padded, dtype=torch.int64, device="cpu").view(-1, most),
        tuple(size for draft in drafts for size in draft.shape),
        max(row[5] for row in features),
        floats,
    )


def _feature_rows(
    configs: FeatureConfigs, slices: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    by_feature: dict[int, list[tuple[int, ...]]] = {}
    for row in slices:
        by_feature.setdefault(row[0], []).append(row)
    rows: list[tuple[int, ...]] = []
    first = 0
    for index, name in enumerate(configs.features):
        config = configs.feature_configs[name]
        own = by_feature.get(index, [])
        length = config.max_sequence_length if config.pooling_type == "firstn" else 0
        low = min((row[1] for row in own), default=0)
        high = max((row[1] + row[2] for row in own), default=0)
        rows.append((first, first + len(own), POOLINGS[config.pooling_type], length, low, high))
        first += len(own)
    return rows


def _wrong(what: str, got: object, allowed: object, remedy: str) -> ConfigError:
    return ConfigError(describe(what, got=got, allowed=allowed, remedy=remedy))
