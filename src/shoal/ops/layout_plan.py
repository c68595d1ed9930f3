"""Which columns of which features feed which model inputs, and which ids make up a cell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, known_name
from shoal.kernels.host_copies import sent
from shoal.lookup import (
    Columns,
    Joined,
    LayoutKind,
    LookupTables,
    Pooling,
    compile_tables,
    join,
    plan_of,
)
from shoal.ragged import KeyedRagged

PoolingType = Literal["sum", "mean", "firstn"]
OutType = LayoutKind

_POOLINGS: dict[PoolingType, Pooling] = {"sum": "sum", "mean": "mean", "firstn": "first_n"}


@dataclass(frozen=True, slots=True)
class FeatureConfig:
    """How a feature's rows are read and pooled.

    Args:
        table: name of the table its ids live in.
        slice_dims: widths of the row's slices; the row is sum(slice_dims) floats wide.
        pooling_type: how the rows of one example become one input.
        max_sequence_length: L of "firstn", at least 1; the other poolings read all rows.

    Raises:
        UnknownName: no such pooling.
        ConfigError: widths below 1, or a length that the pooling cannot have.
    """

    table: str
    slice_dims: tuple[int, ...]
    pooling_type: PoolingType = "sum"
    max_sequence_length: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "slice_dims", tuple(self.slice_dims))
        known_name("pooling_type", self.pooling_type, get_args(PoolingType))
        if not self.slice_dims or min(self.slice_dims) < 1:
            remedy = "Give the width of each slice of the row."
            raise ConfigError("slice_dims", self.slice_dims, "one or more, each at least 1", remedy)
        least = 1 if self.pooling_type == "firstn" else 0
        if self.max_sequence_length < least:
            what = f"max_sequence_length with {self.pooling_type!r}"
            remedy = "It is the number of rows a firstn feature keeps."
            raise ConfigError(what, self.max_sequence_length, f"at least {least}", remedy)

    @property
    def width(self) -> int:
        """Floats of a row."""
        return sum(self.slice_dims)

    @property
    def kept(self) -> int:
        """Rows of an example that "firstn" keeps; 0 for the other poolings."""
        return self.max_sequence_length if self.pooling_type == "firstn" else 0


@dataclass(frozen=True, slots=True)
class SliceConfig:
    """Columns [start, end) of a feature's rows.

    Monolith's further fields (feature_idx, slice_idx, pooling_type, max_sequence_length) follow
    from the feature and are worked out by `FeatureConfigs`.

    Raises:
        ConfigError: not 0 <= start < end.
    """

    feature_name: str
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            what = f"columns of a slice of {self.feature_name!r}"
            raise ConfigError(what, f"[{self.start}, {self.end})", "0 <= start < end", "Name some.")

    @property
    def width(self) -> int:
        """Floats of the slice."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class OutConfig:
    """One layout: slices, and how they are joined. Monolith's `shape` is inferred.

    Raises:
        UnknownName: no such `out_type`.
        ConfigError: no slices.
    """

    slice_configs: tuple[SliceConfig, ...]
    out_type: OutType = "concat"

    def __post_init__(self) -> None:
        object.__setattr__(self, "slice_configs", tuple(self.slice_configs))
        known_name("out_type", self.out_type, get_args(OutType))
        if not self.slice_configs:
            raise ConfigError("slice_configs", "none", "one or more", "Drop the layout instead.")


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
    plan: LookupTables = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("feature_configs", "out_configs"):
            given = getattr(self, name)
            if not given:
                raise ConfigError(name, "none", "one or more", "Name what the model reads.")
            object.__setattr__(self, name, MappingProxyType(dict(given)))
        tables = {config.table for config in self.feature_configs.values()}
        object.__setattr__(self, "features", tuple(sorted(self.feature_configs)))
        object.__setattr__(self, "tables", tuple(sorted(tables)))
        inputs = [made for name in sorted(self.out_configs) for made in self._inputs(name)]
        object.__setattr__(self, "outputs", tuple(made.name for made in inputs))
        configs = [self.feature_configs[name] for name in self.features]
        plan = plan_of([(_POOLINGS[c.pooling_type], c.kept) for c in configs], inputs)
        object.__setattr__(self, "plan", compile_tables(plan.pools, plan.outputs, divided=True))

    def __reduce__(self) -> tuple[type[FeatureConfigs], tuple[dict[str, object], ...]]:
        """Processes that prepare batches are sent the specs and compile the plan again."""
        return FeatureConfigs, (dict(self.feature_configs), dict(self.out_configs))

    def features_of(self, table: str) -> tuple[str, ...]:
        """Names of a table's features, sorted."""
        return tuple(f for f in self.features if self.feature_configs[f].table == table)

    def _inputs(self, layout: str) -> list[Joined]:
        """A layout's outputs."""
        out = self.out_configs[layout]
        parts = [self._columns(layout, piece) for piece in out.slice_configs]
        if out.out_type == "none":
            return [join(f"{layout}:{i}", "concat", [part]) for i, part in enumerate(parts)]
        return [join(layout, out.out_type, parts)]

    def _columns(self, layout: str, piece: SliceConfig) -> Columns:
        known_name(f"feature in layout {layout!r}", piece.feature_name, self.feature_configs)
        config = self.feature_configs[piece.feature_name]
        if piece.end > config.width:
            what = f"end of a slice of {piece.feature_name!r} in layout {layout!r}"
            remedy = "slice_dims give the row's width."
            raise ConfigError(what, piece.end, f"at most {config.width}", remedy)
        number = self.features.index(piece.feature_name)
        return Columns(number, piece.start, piece.end, config.kept)


@dataclass(frozen=True, slots=True, eq=False)
class LayoutIndex:
    """What `fused_embedding_to_layout` reads besides the rows themselves.

    A *cell* is one feature of one example; it holds the ids
    `cell_splits_C1[c] .. cell_splits_C1[c+1]`. All offsets are 64-bit, so no buffer is too large.

    Args:
        rows_N: int64 [N], for each id the place of its row's first float in its buffer.
        buffer_N: int32 [N], for each id its buffer in the list of buffers.
        cell_splits_C1: int64 [C+1], starts at 0, never falls, ends at N.
        cells_RF: int64 [R, F, 3] for each request and each feature in sorted name order: its
            first cell; its number of cells (one per example, one when shared, 0 when the batch
            lacks the feature); 1 if shared, that is, if all examples read the one cell.
        batch_sizes: examples of each request; their sum B is the outputs' first dimension. A
            training batch is one request.

    A row belongs to one buffer and does not overlap another row; ids may share rows. Features may
    share cells: each reads them, and their gradients add up.

    Raises:
        DTypeError: other dtypes, or tensors on several devices.
        ShapeError: shapes that do not fit together.
    """

    rows_N: Tensor
    buffer_N: Tensor
    cell_splits_C1: Tensor
    cells_RF: Tensor
    batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        dtypes = {"rows_N": torch.int64, "buffer_N": torch.int32, "cell_splits_C1": torch.int64}
        for name, dtype in {**dtypes, "cells_RF": torch.int64}.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype:
                raise _bad(DTypeError, f"dtype of {name}", tensor.dtype, dtype, "Convert it.")
            if tensor.device != self.rows_N.device:
                allowed = f"{self.rows_N.device}, as rows_N"
                raise _bad(DTypeError, f"device of {name}", tensor.device, allowed, "Use .to().")
            if name != "cells_RF" and tensor.ndim != 1:
                allowed = "one dimension"
                raise _bad(ShapeError, f"shape of {name}", tuple(tensor.shape), allowed, "Flatten.")
        if self.rows_N.shape != self.buffer_N.shape:
            got = f"{self.buffer_N.shape[0]} for {self.rows_N.shape[0]} rows"
            raise _bad(ShapeError, "length of buffer_N", got, "one per row", "Name every buffer.")
        if self.cell_splits_C1.shape[0] < 1:
            raise _bad(ShapeError, "length of cell_splits_C1", 0, "C + 1", "Start with a 0.")
        if not self.batch_sizes or any(size < 0 for size in self.batch_sizes):
            allowed = "one or more sizes, each at least 0"
            raise _bad(ShapeError, "batch_sizes", self.batch_sizes, allowed, "Count examples.")
        shape = tuple(self.cells_RF.shape)
        if len(shape) != 3 or shape[0] != len(self.batch_sizes) or shape[2] != 3:
            allowed = f"[{len(self.batch_sizes)}, F, 3], one per request"
            raise _bad(ShapeError, "shape of cells_RF", shape, allowed, "Describe each feature.")

    @property
    def batch_size(self) -> int:
        """Examples B of all requests."""
        return sum(self.batch_sizes)

    @classmethod
    def from_keyed(
        cls,
        batch: KeyedRagged,
        inverse_N: Tensor,
        widths: Mapping[str, int],
        configs: FeatureConfigs,
        *,
        shared: Collection[str] = (),
    ) -> LayoutIndex:
        """Of a batch whose rows were gathered per unique id of each table.

        The buffers to go with it are the tables' `rows_UD`, in `configs.tables` order.

        Args:
            batch: ids by feature. Configured features it lacks read as zeros.
            inverse_N: int64 [N], for each id of the batch its row in its table's `rows_UD`.
            widths: D of each table; a feature narrower than its table reads the first columns.
            configs: the features and their tables; keys they do not name are ignored.
            shared: features whose first example holds the ids of the whole batch (the others
                must be empty): pooled once, copied to every example.

        Raises:
            UnknownName: a shared feature or a table without a width.
            ShapeError: inverse_N not one per id, or a feature wider than its table.
            InputError: ids of a shared feature beyond the first example (read on the CPU only).
        """
        _check_keyed(batch, inverse_N, widths, configs, shared)
        tables = {table: number for number, table in enumerate(configs.tables)}
        wanted = [configs.feature_configs.get(key) for key in batch.keys]
        table_K = [tables[config.table] if config else 0 for config in wanted]
        width_K = [widths[config.table] if config else 0 for config in wanted]
        size, device = batch.batch_size, inverse_N.device
        counts_K = batch.key_splits.diff()
        facts_2K = on_device([table_K, width_K], device)
        facts_2N = facts_2K.repeat_interleave(counts_K, dim=1, output_size=inverse_N.shape[0])
        check_shared(batch, shared)
        return cls(
            inverse_N * facts_2N[1],
            facts_2N[0].to(torch.int32),
            batch.offsets_FB1,
            cells_of(batch, configs, shared),
            (size,),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> LayoutIndex:
        """On a device; what is there already is not copied."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LayoutIndex:
        """Copy to pinned memory, so that a non-blocking `to("cuda")` overlaps."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> LayoutIndex:
        ids = move(self.rows_N), move(self.buffer_N)
        cells = move(self.cell_splits_C1), move(self.cells_RF)
        return LayoutIndex(*ids, *cells, self.batch_sizes)


def cells_of(batch: KeyedRagged, configs: FeatureConfigs, shared: Collection[str]) -> Tensor:
    """`LayoutIndex.cells_RF` of a batch, one request."""
    size = batch.batch_size
    places = {key: place * size for place, key in enumerate(batch.keys) if size}
    cells = [
        [places[name], 1 if name in shared else size, int(name in shared)]
        if name in places
        else [0, 0, 0]
        for name in configs.features
    ]
    return on_device(cells, batch.values_N.device).view(1, -1, 3)


def check_shared(batch: KeyedRagged, shared: Collection[str]) -> None:
    """Refuse ids that no example would read; costs nothing unless features are shared."""
    if not shared or batch.values_N.is_cuda or torch.compiler.is_compiling():
        return
    for key in sorted(set(shared) & set(batch.keys)):
        later = int(batch[key].lengths[1:].sum())
        if later:
            what = f"ids of shared feature {key!r} beyond the first example"
            raise _bad(InputError, what, later, 0, "Give the batch's ids to its first example.")


def on_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A small int64 tensor, sent without waiting for the device."""
    return sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)


def _check_keyed(
    batch: KeyedRagged,
    inverse_N: Tensor,
    widths: Mapping[str, int],
    configs: FeatureConfigs,
    shared: Collection[str],
) -> None:
    if inverse_N.dtype != torch.int64:
        raise _bad(DTypeError, "dtype of inverse_N", inverse_N.dtype, "int64", "Call .long().")
    if inverse_N.shape != batch.values_N.shape:
        got, want = tuple(inverse_N.shape), tuple(batch.values_N.shape)
        raise _bad(ShapeError, "shape of inverse_N", got, want, "Give one row per id.")
    for feature in shared:
        known_name("shared feature", feature, configs.feature_configs)
    for name, config in configs.feature_configs.items():
        known_name("table without a width", config.table, widths)
        if config.width > widths[config.table]:
            allowed = f"at most {widths[config.table]}, the width of table {config.table!r}"
            remedy = "Its slice_dims must fit the table's rows."
            raise _bad(ShapeError, f"width of feature {name!r}", config.width, allowed, remedy)


def _bad(
    kind: type[InputError], what: str, got: object, allowed: object, remedy: str
) -> InputError:
    return kind(f"LayoutIndex: {what}", got=got, allowed=allowed, remedy=remedy)
