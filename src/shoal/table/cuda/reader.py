"""How rows of a GPU shard are read: one launch per row form, for all groups of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels import pool, rows
from shoal.kernels.tables import CallGroups
from shoal.lookup import PoolPlan
from shoal.table import checks
from shoal.table.cuda.calls import CallShape, PlanCache, ShardTables, probed
from shoal.table.cuda.host_rows import RowsOnHost
from shoal.table.cuda.memory import DeviceMemory
from shoal.table.cuda.ticket import HeldRows


class Reader:
    """Reads rows by handle, plain or pooled.

    Args:
        tables, memory: the shard's.
        host: where rows are on the host; else None.

    Attributes:
        plans: of pooled calls, compiled.
    """

    def __init__(self, tables: ShardTables, memory: DeviceMemory, host: RowsOnHost | None) -> None:
        self.plans = PlanCache(tables.forms, tables.form_of, tables.device)
        self._tables = tables
        self._memory = memory
        self._host = host

    def found(
        self, shape: CallShape, call: CallGroups, global_step: int
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Search and copy out: one [n_g, D_g] per group, zeros where there is no row; bool [N]."""
        if self._host is not None:
            handles_N, found_N = probed(self._memory.layout, call)
            return self.rows(shape, call, handles_N, global_step), found_N
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        return self.rows(shape, call, None, global_step, found_N=found_N), found_N

    def rows(
        self,
        shape: CallShape,
        call: CallGroups,
        handles_N: Tensor | None,
        global_step: int,
        *,
        initial: bool = False,
        found_N: Tensor | None = None,
        held: HeldRows | None = None,
    ) -> tuple[Tensor, ...]:
        """Rows of handles, one [n_g, D_g] per group; -1 reads as zeros or as the initial value.

        Args:
            found_N: bool [N], filled as the index is searched; instead of handles.
            held: of the ticket whose handles they are.
        """
        places_N = None if handles_N is None else self._places_N(shape, handles_N, held)
        outs = self._outs(shape)
        for form, starts_G, out in zip(shape.forms, shape.starts_FG, outs, strict=True):
            rows.gather(
                self._memory.layout,
                self._tables.forms[form],
                call,
                out,
                out_rows_G=None if len(shape.forms) == 1 else starts_G,
                handles_N=places_N,
                found_N=found_N,
                initial=initial,
                global_step=global_step,
            )
        return self._by_group(shape, outs)

    def _places_N(self, shape: CallShape, handles_N: Tensor, held: HeldRows | None) -> Tensor:
        """Where the rows of these handles are read: at home, but for a cache's rows."""
        if self._host is None:
            return handles_N
        return self._host.places_N(handles_N, shape.rooms, held)

    def _outs(self, shape: CallShape) -> list[Tensor]:
        forms = [self._tables.forms[form] for form in shape.forms]
        return [
            torch.empty(shape.rooms[place], form.dim, dtype=form.real, device=self._tables.device)
            for place, form in zip(shape.forms, forms, strict=True)
        ]

    def _by_group(self, shape: CallShape, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if len(outs) == 1:
            return torch.split(outs[0], list(shape.sizes))
        return tuple(
            outs[place][first : first + shape.sizes[g]]
            for g, (place, first) in enumerate(shape.firsts)
        )

    def pooled(
        self,
        shape: CallShape,
        call: CallGroups,
        handles_N: Tensor,
        plan: PoolPlan,
        offsets_GB1: Tensor,
        weights_N: Tensor | None,
        global_step: int,
        *,
        initial: bool,
        held: HeldRows | None = None,
    ) -> tuple[Tensor, ...]:
        """`rows`, pooled: one [B, width] per output."""
        compiled = self.plans.of(plan, shape.tables)
        checks.bag_count(
            len(shape.tables), shape.splits[-1], offsets_GB1, weights_N, self._tables.device
        )
        return pool.gather_pooled(
            self._memory.layout,
            compiled.lines,
            call,
            self._places_N(shape, handles_N, held),
            offsets_GB1,
            weights_N,
            initial=initial,
            global_step=global_step,
        )
