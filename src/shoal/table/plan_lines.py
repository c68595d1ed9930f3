"""Pool plans as kernels take them, compiled once per plan and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.kernels.grad_sources import GradSlice, PooledGroup
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_pool import PoolLines, PoolPiece, pool_lines
from shoal.kernels.transfer import retire
from shoal.table import checks
from shoal.table.shard import Pool, PoolPlan

__all__ = ["CompiledPlan", "PlanCache"]

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
        widths = [output.width for output in plan.outputs]
        forms_G = [self._forms[self._form_of[k]] for k in tables]
        pieces = [piece for g, pool in enumerate(plan.pools) for piece in _pieces(g, pool)]
        groups = tuple(
            PooledGroup(
                pool.pooling,
                tuple(GradSlice(s.start, s.stop, s.output, s.column) for s in pool.slices),
                forms_G[g].dim,
                pool.length,
                self._form_of[tables[g]],
            )
            for g, pool in enumerate(plan.pools)
        )
        return CompiledPlan(plan, pool_lines(pieces, widths, forms_G, self._device), groups, dtypes)


def _pieces(group: int, pool: Pool) -> list[PoolPiece]:
    return [
        PoolPiece(
            group=group,
            start=part.start,
            width=part.stop - part.start,
            output=part.output,
            column=part.column,
            pooling=pool.pooling,
            length=pool.length,
            add=part.add,
        )
        for part in pool.slices
    ]
