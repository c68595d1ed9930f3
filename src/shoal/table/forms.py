"""Row forms of table specs: what tables of a GPU shard must share to share a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shoal.kernels.row_form import RowForm, SegmentForm
from shoal.rules.optimizers import DelayCompensated, Optimizer
from shoal.table.rows import weight_dtype
from shoal.table.spec import TableSpec

__all__ = ["form_of", "forms_of"]

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
