"""How ids come into a GPU shard, and how rows are read: the launches behind the lookup verbs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shoal.kernels import initial_values, row_pool, row_read, table_index
from shoal.kernels.table_layout import CallGroups
from shoal.table.cuda_core import CudaCore
from shoal.table.device_calls import CallShape, check_bags
from shoal.table.device_counters import Counts
from shoal.table.shard import PoolPlan, StepContext

__all__ = ["CudaInsert"]


class CudaInsert(CudaCore):
    """Claims rows and reads them; owns what admission knows of ids without rows."""

    def _probe(self, call: CallGroups) -> tuple[Tensor, Tensor]:
        """Handles int32 [N], -1 where there is none, and bool [N]; inserts nothing."""
        handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        table_index.probe(self._layout, call, handles_N, found_N, None, insert=False)
        return handles_N, found_N

    def _inserted(
        self,
        shape: CallShape,
        call: CallGroups,
        counts_N: Tensor | None,
        ctx: StepContext,
        *,
        admit_all: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Insert what is missing and admitted: handles int32 [N] and what was found, bool [N].

        Raises:
            TableFull, OutOfDeviceMemory: no room; nothing was inserted.
        """
        wanted_N = None if admit_all else self._wanted(shape, call, counts_N)
        new_K = self._budgeted(shape, call, wanted_N)
        self._memory.reserve(new_K)
        handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        table_index.probe(self._layout, call, handles_N, found_N, wanted_N, insert=True)
        for form in shape.forms:
            initial_values.initialise(
                self._layout,
                self._forms[form],
                form,
                call.ids_N.numel(),
                epoch=self._epoch,
                event_time_s=ctx.event_time_s,
            )
        self._memory.counters.send(self._layout)
        return handles_N, found_N

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
        flats = []
        for form, starts_G, total in zip(shape.forms, shape.starts_FG, shape.totals, strict=True):
            row = self._forms[form]
            out = torch.empty(total, dtype=row.real, device=self._device)
            row_read.gather(
                self._layout,
                row,
                call,
                handles_N,
                out,
                starts_G,
                initial=initial,
                global_step=global_step,
            )
            flats.append(out)
        parts = []
        for g, (place, first) in enumerate(shape.firsts):
            n, dim = shape.splits[g + 1] - shape.splits[g], self._dims[shape.tables[g]]
            parts.append(flats[place][first : first + n * dim].view(n, dim))
        return tuple(parts)
