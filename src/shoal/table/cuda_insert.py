"""How ids come into a GPU shard: admission, room, and the launches that claim rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels import initial_values, table_index
from shoal.kernels.refusals import count_refused
from shoal.kernels.row_segments import device_form
from shoal.kernels.table_layout import CallGroups
from shoal.table.cuda_budget import CudaBudget
from shoal.table.device_admission import Sights
from shoal.table.device_calls import CallShape
from shoal.table.shard import StepContext
from shoal.table.spec import TableSpec

__all__ = ["CudaInsert"]


class CudaInsert(CudaBudget):
    """Claims rows; owns what admission knows of ids without rows. Arguments as `CudaShard`'s."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int,
        device: str | torch.device,
        host_rows: bool,
    ) -> None:
        super().__init__(specs, seed=seed, device=device, host_rows=host_rows)
        self._sights = Sights([(s.hash_name, s.admission) for s in self._specs], self._device)

    def _may_lack_rows(self, shape: CallShape) -> bool:
        """Whether admission may have refused ids of a training lookup."""
        return self._sights.counts_any({k: 1 for k in shape.tables})

    def _inserted(
        self,
        shape: CallShape,
        call: CallGroups,
        counts_N: Tensor | None,
        ctx: StepContext,
        *,
        admit_all: bool = False,
        may_drop: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Insert what is missing and admitted: handles int32 [N] and what was found, bool [N].

        Args:
            admit_all: ask no admission.
            may_drop: make room in a full table as its spec says; False raises.

        Raises:
            TableFull, OutOfDeviceMemory: no room; nothing was inserted. Only where a full table
                is trimmed may memory run out later: its new rows are there then, beyond the
                budget until the next call.
        """
        sizes = {k: int(n) for k, n in enumerate(shape.new_K) if n}
        counting = self._sights.counts_any(sizes)
        handles_N = torch.empty_like(call.ids_N, dtype=torch.int32)
        found_N = torch.empty_like(call.ids_N, dtype=torch.bool)
        missing_N = ~self._probe(call)[1] if counting else None
        wanted_N = missing_N
        if missing_N is not None and not admit_all:
            wanted_N = self._sights.add(call, counts_N, missing_N, sizes)
        try:
            loose = self._trimmed_after(shape) if may_drop else ()
            self._memory.reserve(
                self._with_room(shape, call, wanted_N, loose=loose, may_drop=may_drop)
            )
            self._memory.make_free_lists(loose)
            for form in shape.forms:
                device_form(self._forms[form], self._device)
            if missing_N is not None and wanted_N is not None and not admit_all:
                count_refused(self._layout, call, missing_N, wanted_N)
        except Exception:
            if missing_N is not None and not admit_all:
                self._sights.undo(call, counts_N, missing_N)
            raise
        # From here on nothing is allocated until all new rows are written.
        if wanted_N is not None:
            self._sights.forget(call, wanted_N)
        table_index.probe(self._layout, call, handles_N, found_N, wanted_N, insert=True)
        self._initialise(shape, ctx)
        try:
            if loose:
                self._trim(loose, shape, handles_N)
        finally:
            self._memory.counters.send(self._layout, self._stream)
        return handles_N, found_N

    def _initialise(self, shape: CallShape, ctx: StepContext) -> None:
        for form in shape.forms:
            initial_values.initialise(
                self._layout,
                self._forms[form],
                form,
                shape.rooms[form],
                epoch=self._epoch,
                event_time_s=ctx.event_time_s,
            )
