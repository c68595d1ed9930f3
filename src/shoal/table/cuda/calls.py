"""Checks of what crosses into a GPU shard, and the device's view of a call's groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.kernels import index
from shoal.kernels.gradients import PooledGroup, Runs, runs_of
from shoal.kernels.host_copies import retire, staged
from shoal.kernels.pool import PoolLines, pool_lines
from shoal.kernels.tables import CallGroups, RowForm, SegmentForm, ShardLayout
from shoal.lookup import PoolPlan
from shoal.rules.optimizers import DelayCompensated, Optimizer
from shoal.table import checks
from shoal.table.rows import weight_dtype
from shoal.table.shard import IdGroups
from shoal.table.spec import TableSpec

_WORDS_OF_A_BLOCK = 4


def form_of(spec: TableSpec) -> RowForm:
    """The form of a table's rows; learning rates are no part of it."""
    segments = []
    column = state_column = 0
    for rate, segment in enumerate(spec.segments):
        segments.append(
            SegmentForm(
                column=column,
                dim=segment.dim,
                state_column=state_column,
                state_width=segment.state_width,
                rate=rate,
                initializer=segment.initializer,
                optimizer=_without_rate(segment.optimizer),
                compressor=segment.compressor,
            )
        )
        column += segment.dim
        state_column += segment.state_width
    shift = spec.first_column % _WORDS_OF_A_BLOCK
    return RowForm(column, state_column, weight_dtype(spec), tuple(segments), shift)


def forms_of(specs: Sequence[TableSpec]) -> tuple[tuple[RowForm, ...], tuple[int, ...]]:
    """The distinct forms of some tables, and the index of each table's."""
    places: dict[RowForm, int] = {}
    indices = tuple(places.setdefault(form_of(spec), len(places)) for spec in specs)
    return tuple(places), indices


@dataclass(frozen=True, slots=True)
class ShardTables:
    """What a shard hosts, as all parts of it read it: forms, and the index of each table's."""

    specs: tuple[TableSpec, ...]
    forms: tuple[RowForm, ...]
    form_of: tuple[int, ...]
    device: torch.device

    def form(self, table: int) -> RowForm:
        """The row form of a table."""
        return self.forms[self.form_of[table]]

    def runs_of(self, layout: ShardLayout, handles_N: Tensor, rooms: Sequence[int]) -> Runs:
        """Positions sorted by row; rooms: capacity in positions of each form."""
        return runs_of(handles_N, layout if len(self.forms) > 1 else None, rooms)


def probed(layout: ShardLayout, call: CallGroups) -> tuple[Tensor, Tensor]:
    """Handles int32 [N], -1 where there is none, and bool [N]; inserts nothing."""
    handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
    found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
    index.probe(layout, call, handles_N, found_N, None, insert=False)
    return handles_N, found_N


def _without_rate(rule: Optimizer) -> Optimizer:
    if isinstance(rule, DelayCompensated):
        return dataclasses.replace(rule, inner=_without_rate(rule.inner))
    if not hasattr(rule, "lr"):
        return rule
    fixed: Optimizer = dataclasses.replace(rule, lr=1.0)  # type: ignore[type-var]
    return fixed


_PLANS_KEPT = 64


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A pool plan for certain tables: how to pool, how gradients come back, what comes out.

    `plan` is held so that its identity stays its own.
    """

    plan: PoolPlan
    lines: PoolLines
    groups: tuple[PooledGroup, ...]
    dtypes: tuple[torch.dtype, ...]


class PlanCache:
    """Compiles plans and keeps those of late.

    Args:
        forms, form_of: the shard's row forms, and the index of each table's.
        device: the shard's.
    """

    def __init__(
        self, forms: Sequence[RowForm], form_of: Sequence[int], device: torch.device
    ) -> None:
        self._forms = tuple(forms)
        self._form_of = tuple(form_of)
        self._device = device
        self._kept: dict[tuple[int, tuple[int, ...]], DevicePlan] = {}

    def of(self, plan: PoolPlan, tables: tuple[int, ...]) -> DevicePlan:
        """Check a plan against the tables of its groups; its compiled form.

        Raises:
            ShapeError, DTypeError: it does not fit them.
        """
        key = (id(plan), tables)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._made(plan, tables)
            if len(self._kept) >= _PLANS_KEPT:
                for old in self._kept.values():
                    retire(*(wave.lines_LW for wave in old.lines.launches))
                self._kept.clear()
            self._kept[key] = kept
        return kept

    def _made(self, plan: PoolPlan, tables: tuple[int, ...]) -> DevicePlan:
        dims = [form.dim for form in (self._forms[index] for index in self._form_of)]
        reals = [form.real for form in (self._forms[index] for index in self._form_of)]
        dtypes = checks.plan(plan, tables, dims, reals)
        forms_G = [self._forms[self._form_of[k]] for k in tables]
        groups = tuple(
            PooledGroup(pool, forms_G[g].dim, self._form_of[tables[g]])
            for g, pool in enumerate(plan.pools)
        )
        return DevicePlan(plan, pool_lines(plan, forms_G, self._device), groups, dtypes)


_SHAPES_KEPT = 256
_MAX_COUNT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class CallShape:
    """Everything about a call's groups but the ids: equal for batches of equal sizes.

    Args:
        splits, tables: the groups, on the host.
        splits_G1, tables_G: the same on the device.
        new_K: ids of each table; ids_of: of those that have any.
        rooms: ids of each row form of the shard.
        forms: form indices that occur, rising.
        starts_FG: per form that occurs, int64 [G] on the device: the row of the form's output
            that takes a group's first row; -1 for groups of other forms.
        firsts: per group, (form's place in `forms`, first row).
        sizes: ids of each group.
        forms_G: form index of each group.
        grad_shapes: shape and dtype of a gradient of each group.
    """

    splits: tuple[int, ...]
    tables: tuple[int, ...]
    splits_G1: Tensor
    tables_G: Tensor
    new_K: NDArray[np.int64]
    ids_of: Mapping[int, int]
    rooms: tuple[int, ...]
    forms: tuple[int, ...]
    starts_FG: tuple[Tensor, ...]
    firsts: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    forms_G: tuple[int, ...]
    grad_shapes: tuple[tuple[tuple[int, int], torch.dtype], ...]

    def groups(self, ids_N: Tensor) -> CallGroups:
        """The groups of these ids as kernels take them."""
        return CallGroups(ids_N, self.splits_G1, self.tables_G)


class CallShapes:
    """Makes a shard's `CallShape`s; keeps those of late, so that steady batches send nothing."""

    def __init__(self, tables: ShardTables) -> None:
        self._forms, self._form_of, self._device = tables.forms, tables.form_of, tables.device
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], CallShape] = {}

    def of(self, groups: IdGroups) -> CallShape:
        """Check ids, splits and tables of a call; its shape.

        Raises:
            DTypeError: ids that are not int64 on the shard's device; other splits or tables.
            ShapeError: splits or tables that do not fit.
        """
        checks.flat("ids", groups.ids_N, self._device)
        splits_G1, tables_G = groups.splits_G1, groups.tables_G
        checks.flat("splits of groups", splits_G1)
        checks.flat("tables of groups", tables_G, dtype=torch.int32)
        key = tuple(splits_G1.tolist()), tuple(tables_G.tolist())
        shape = self._kept.get(key)
        if shape is None:
            shape = self._made(splits_G1, tables_G, groups.ids_N.numel())
            if len(self._kept) >= _SHAPES_KEPT:
                for old in self._kept.values():
                    retire(old.splits_G1, old.tables_G, *old.starts_FG)
                self._kept.clear()
            self._kept[key] = shape
        if shape.splits[-1] != groups.ids_N.numel():
            sizes = len(self._form_of), groups.ids_N.numel()
            raise checks.unfit_groups(shape.splits, shape.tables, *sizes)
        return shape

    def _made(self, splits_G1: Tensor, tables_G: Tensor, ids: int) -> CallShape:
        count = tables_G.numel()
        splits, tables = tuple(splits_G1.tolist()), tuple(tables_G.tolist())
        places = address(splits_G1), address(tables_G)
        try:
            if len(splits) != count + 1:
                raise ValueError
            _core.Groups(splits[-1], count, 0, *places, len(self._form_of))
        except ValueError:
            raise checks.unfit_groups(splits, tables, len(self._form_of), ids) from None
        sizes_G = np.diff(np.array(splits, dtype=np.int64))
        new_K = np.zeros(len(self._form_of), dtype=np.int64)
        np.add.at(new_K, np.array(tables, dtype=np.int64), sizes_G)
        forms = tuple(sorted({self._form_of[k] for k in tables}))
        starts = {form: [-1] * count for form in forms}
        rooms = [0] * len(self._forms)
        firsts = []
        for g, k in enumerate(tables):
            form = self._form_of[k]
            starts[form][g] = rooms[form]
            firsts.append((forms.index(form), rooms[form]))
            rooms[form] += int(sizes_G[g])
        tables_32 = np.array([*tables, *[0] * (count % 2)], dtype=np.int32)
        words = [np.array(splits), tables_32.view(np.int64), *map(np.array, starts.values())]
        on_device = together(words, self._device)
        forms_G = tuple(self._form_of[k] for k in tables)
        sizes = tuple(sizes_G.tolist())
        rows = [self._forms[form] for form in forms_G]
        return CallShape(
            splits=splits,
            tables=tables,
            splits_G1=on_device[0],
            tables_G=on_device[1].view(torch.int32)[:count],
            new_K=new_K,
            ids_of={k: int(n) for k, n in enumerate(new_K) if n},
            rooms=tuple(rooms),
            forms=forms,
            starts_FG=tuple(on_device[2:]),
            firsts=tuple(firsts),
            sizes=sizes,
            forms_G=forms_G,
            grad_shapes=tuple(
                ((size, form.dim), form.real) for size, form in zip(sizes, rows, strict=True)
            ),
        )


def together(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """int64 words on a device by one copy; each starts aligned, as a tensor of its own would."""
    sizes = [len(array) for array in arrays]
    rooms = [size + size % 2 for size in sizes]
    words = np.zeros(sum(rooms), dtype=np.int64)
    parts = []
    at = 0
    for array, size, room in zip(arrays, sizes, rooms, strict=True):
        words[at : at + size] = array
        parts.append((at, size))
        at += room
    sent_words = staged(words, device)
    return [sent_words[at : at + size] for at, size in parts]


def occurrences(counts_N: Tensor | None) -> Tensor | None:
    """Checked counts as kernels take them: int32 [N], clamped to 0..2^31-1; None stays None."""
    return None if counts_N is None else counts_N.clamp(0, _MAX_COUNT).to(torch.int32)
