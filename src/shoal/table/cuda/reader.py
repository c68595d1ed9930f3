"""How rows of a GPU shard are read: one launch per row form, for all groups of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels import pool, rows
from shoal.kernels.tables import CallGroups
from shoal.lookup import PoolPlan
from shoal.table.cuda.calls import CallShape, PlanCache, check_bags
from shoal.table.cuda.insert import CudaInsert
from shoal.table.spec import TableSpec


class CudaRead(CudaInsert):
    """Reads rows by handle, plain or pooled. Arguments as `CudaShard`'s."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int,
        device: str | torch.device,
        host_rows: bool,
    ) -> None:
        super().__init__(specs, seed=seed, device=device, host_rows=host_rows)
        self._plans = PlanCache(self._forms, self._form_of, self._device)

    def _found_rows(self, shape: CallShape, call: CallGroups) -> tuple[tuple[Tensor, ...], Tensor]:
        """Search and copy out: one [n_g, D_g] per group, and bool [N]."""
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        outs = self._outs(shape)
        for form, starts_G, out in zip(shape.forms, shape.starts_FG, outs, strict=True):
            rows_G = None if len(shape.tables) == 1 else starts_G
            rows.gather_found(
                self._layout,
                self._forms[form],
                call,
                found_N,
                out,
                rows_G,
                global_step=self._last_step,
            )
        return self._by_group(shape, outs), found_N

    def _rows_of(
        self,
        shape: CallShape,
        call: CallGroups,
        handles_N: Tensor,
        global_step: int,
        *,
        initial: bool,
    ) -> tuple[Tensor, ...]:
        """Rows of handles, one [n_g, D_g] per group; -1 reads as zeros or as the initial value."""
        places_N, outs = self._places_N(shape, handles_N), self._outs(shape)
        for form, starts_G, out in zip(shape.forms, shape.starts_FG, outs, strict=True):
            rows.gather(
                self._layout,
                self._forms[form],
                call,
                places_N,
                out,
                None if len(shape.forms) == 1 else starts_G,
                initial=initial,
                global_step=global_step,
            )
        return self._by_group(shape, outs)

    def _places_N(self, shape: CallShape, handles_N: Tensor) -> Tensor:
        """Where the rows of these handles are read: at home, but for a cache's rows."""
        return handles_N

    def _outs(self, shape: CallShape) -> list[Tensor]:
        forms = [self._forms[form] for form in shape.forms]
        return [
            torch.empty(shape.rooms[place], form.dim, dtype=form.real, device=self._device)
            for place, form in zip(shape.forms, forms, strict=True)
        ]

    def _by_group(self, shape: CallShape, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if len(outs) == 1:
            return torch.split(outs[0], list(shape.sizes))
        return tuple(
            outs[place][first : first + shape.sizes[g]]
            for g, (place, first) in enumerate(shape.firsts)
        )

    def _pooled(
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
    ) -> tuple[Tensor, ...]:
        compiled = self._plans.of(plan, shape.tables)
        check_bags(shape, offsets_GB1, weights_N, self._device)
        return pool.gather_pooled(
            self._layout,
            compiled.lines,
            call,
            self._places_N(shape, handles_N),
            offsets_GB1,
            weights_N,
            initial=initial,
            global_step=global_step,
        )
