"""Checks of what crosses into a GPU shard, and the device's view of a call's groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.errors import DTypeError, InputError, ShapeError
from shoal.kernels.gradients import PooledGroup
from shoal.kernels.launch import retire, staged
from shoal.kernels.pool import PoolLines, pool_lines
from shoal.kernels.tables import CallGroups, RowForm, SegmentForm
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


def _without_rate(rule: Optimizer) -> Optimizer:
    if isinstance(rule, DelayCompensated):
        return dataclasses.replace(rule, inner=_without_rate(rule.inner))
    if not hasattr(rule, "lr"):
        return rule
    fixed: Optimizer = dataclasses.replace(rule, lr=1.0)  # type: ignore[type-var]
    return fixed


_PLANS_KEPT = 64


@dataclass(frozen=True, slots=True)
class CompiledPlan:
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
        self._kept: dict[tuple[int, tuple[int, ...]], CompiledPlan] = {}

    def of(self, plan: PoolPlan, tables: tuple[int, ...]) -> CompiledPlan:
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

    def _made(self, plan: PoolPlan, tables: tuple[int, ...]) -> CompiledPlan:
        dims = [form.dim for form in (self._forms[index] for index in self._form_of)]
        reals = [form.real for form in (self._forms[index] for index in self._form_of)]
        dtypes = checks.plan(plan, tables, dims, reals)
        forms_G = [self._forms[self._form_of[k]] for k in tables]
        groups = tuple(
            PooledGroup(pool, forms_G[g].dim, self._form_of[tables[g]])
            for g, pool in enumerate(plan.pools)
        )
        return CompiledPlan(plan, pool_lines(plan, forms_G, self._device), groups, dtypes)


_SHAPES_KEPT = 256
_MAX_COUNT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class CallShape:
    """Everything about a call's groups but the ids: equal for batches of equal sizes.

    Args:
        splits, tables: the groups, on the host.
        splits_G1, tables_G: the same on the device.
        new_K: ids of each table.
        rooms: ids of each row form of the shard.
        forms: form indices that occur, rising.
        starts_FG: per form that occurs, int64 [G] on the device: the row of the form's output
            that takes a group's first row; -1 for groups of other forms.
        firsts: per group, (form's place in `forms`, first row).
        sizes: ids of each group.
    """

    splits: tuple[int, ...]
    tables: tuple[int, ...]
    splits_G1: Tensor
    tables_G: Tensor
    new_K: NDArray[np.int64]
    rooms: tuple[int, ...]
    forms: tuple[int, ...]
    starts_FG: tuple[Tensor, ...]
    firsts: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    def groups(self, ids_N: Tensor) -> CallGroups:
        """The groups of these ids as kernels take them."""
        return CallGroups(ids_N, self.splits_G1, self.tables_G)


class CallShapes:
    """Makes `CallShape`s and keeps those of late, so that steady batches send nothing.

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
        self._kept: dict[tuple[bytes, bytes], CallShape] = {}

    def of(self, groups: IdGroups) -> CallShape:
        """Check ids, splits and tables of a call; its shape.

        Raises:
            DTypeError: ids that are not int64 on the shard's device.
            ShapeError: splits or tables that do not fit.
        """
        self._check_ids(groups.ids_N)
        splits_G1, tables_G = groups.splits_G1, groups.tables_G
        for what, value in (("splits", splits_G1), ("tables", tables_G)):
            if value.device.type != "cpu":
                raise _placed(f"{what} of groups", value, "cpu", value.dtype)
        if splits_G1.dtype is not torch.int64 or tables_G.dtype is not torch.int32:
            raise _typed(splits_G1, tables_G)
        key = splits_G1.numpy().tobytes(), tables_G.numpy().tobytes()
        shape = self._kept.get(key)
        if shape is None:
            shape = self._made(splits_G1.contiguous(), tables_G.contiguous())
            if len(self._kept) >= _SHAPES_KEPT:
                for old in self._kept.values():
                    retire(old.splits_G1, old.tables_G, *old.starts_FG)
                self._kept.clear()
            self._kept[key] = shape
        if shape.splits[-1] != groups.ids_N.numel():
            raise _unfit(shape.splits, shape.tables, len(self._form_of), groups.ids_N.numel())
        return shape

    def _check_ids(self, ids_N: Tensor) -> None:
        if ids_N.dtype is not torch.int64 or ids_N.device != self._device:
            raise _placed("ids", ids_N, str(self._device))
        _check_flat("ids", ids_N)

    def _made(self, splits_G1: Tensor, tables_G: Tensor) -> CallShape:
        count = tables_G.numel()
        splits, tables = tuple(splits_G1.tolist()), tuple(tables_G.tolist())
        if len(splits) != count + 1:
            raise _unfit(splits, tables, len(self._form_of), None)
        places = address(splits_G1), address(tables_G)
        try:
            _core.Groups(splits[-1], count, 0, *places, len(self._form_of))
        except ValueError:
            raise _unfit(splits, tables, len(self._form_of), None) from None
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
        on_device = _together(words, self._device)
        return CallShape(
            splits=splits,
            tables=tables,
            splits_G1=on_device[0],
            tables_G=on_device[1].view(torch.int32)[:count],
            new_K=new_K,
            rooms=tuple(rooms),
            forms=forms,
            starts_FG=tuple(on_device[2:]),
            firsts=tuple(firsts),
            sizes=tuple(sizes_G.tolist()),
        )


def _together(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
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


def check_counts(shape: CallShape, counts_N: Tensor | None, device: torch.device) -> None:
    """Check occurrence counts against ids; what they hold is clamped to 0..2^31-1 in kernels."""
    if counts_N is None:
        return
    if counts_N.dtype is not torch.int64 or counts_N.device != device:
        raise _placed("counts", counts_N, str(device))
    if counts_N.shape != (shape.splits[-1],) or not counts_N.is_contiguous():
        raise ShapeError(
            "counts",
            got=tuple(counts_N.shape),
            allowed=f"one per id, {shape.splits[-1]}",
            remedy="Leave counts out when each position stands for one sight.",
        )


def occurrences(counts_N: Tensor | None) -> Tensor | None:
    """Checked counts as kernels take them: int32 [N], clamped to 0..2^31-1; None stays None."""
    return None if counts_N is None else counts_N.clamp(0, _MAX_COUNT).to(torch.int32)


def check_bags(
    shape: CallShape, offsets_GB1: Tensor, weights_N: Tensor | None, device: torch.device
) -> int:
    """Check bag offsets and weights of a pooled call; returns B. What they hold is not read."""
    if offsets_GB1.dtype is not torch.int64 or offsets_GB1.device != device:
        raise _placed("offsets", offsets_GB1, str(device))
    _check_flat("offsets", offsets_GB1)
    count, cells = len(shape.tables), offsets_GB1.numel() - 1
    if cells < 0 or (cells if count == 0 else cells % count):
        raise ShapeError(
            "offsets",
            got=f"{offsets_GB1.numel()} values for {count} groups",
            allowed="G * B + 1",
            remedy="Concatenate one row of B lengths per group, then take the running sum.",
        )
    n = shape.splits[-1]
    if weights_N is not None and (
        weights_N.dtype is not torch.float32
        or weights_N.shape != (n,)
        or not weights_N.is_contiguous()
        or weights_N.device != device
    ):
        raise ShapeError(
            "weights of ids",
            got=f"{weights_N.dtype} {tuple(weights_N.shape)} on {weights_N.device}",
            allowed=f"contiguous torch.float32 ({n},) on {device}",
            remedy="Give one float32 weight per id.",
        )
    return cells // count if count else 0


def _check_flat(what: str, value: Tensor) -> None:
    if value.dim() != 1 or not value.is_contiguous():
        raise ShapeError(
            what,
            got=f"shape {tuple(value.shape)}, contiguous={value.is_contiguous()}",
            allowed="one contiguous dimension",
            remedy="Flatten with .reshape(-1).contiguous().",
        )


def _placed(what: str, got: Tensor, where: str, dtype: torch.dtype = torch.int64) -> DTypeError:
    return DTypeError(
        what,
        got=f"{got.dtype} on {got.device}",
        allowed=f"{dtype} on {where}",
        remedy=f"Convert with .to({where!r}, {dtype}).",
    )


def _typed(splits_G1: Tensor, tables_G: Tensor) -> ShapeError:
    return ShapeError(
        "groups",
        got=f"splits of {splits_G1.dtype}, tables of {tables_G.dtype}",
        allowed="int64 splits and int32 table indices",
        remedy="Give each group of ids one table index.",
    )


def _unfit(splits: Sequence[int], tables: Sequence[int], known: int, ids: int | None) -> InputError:
    rest = "" if ids is None else f", {ids} ids"
    return ShapeError(
        "groups",
        got=f"splits {list(splits)[:8]}, tables {list(tables)[:8]}{rest}",
        allowed=f"G + 1 splits rising from 0 to the number of ids, tables 0..{known - 1}",
        remedy="Build the splits as a running sum of group sizes.",
    )
