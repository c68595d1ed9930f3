"""Verbs of a GPU shard that write rows by id: assign, add, initial values again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels.row_copy import Metadata, read_metadata, write_metadata, write_values
from shoal.kernels.row_write import write_weights
from shoal.rules.initializers import initial_values
from shoal.table import checks
from shoal.table.cuda_step import CudaStep
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import TableSpec

__all__ = ["CudaWrite"]


class CudaWrite(CudaStep):
    """Upserts rows. Arguments as `CudaShard`'s."""

    def assign(self, groups: IdGroups, weights: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Upsert weights; optimizer state of existing rows untouched. The last duplicate wins."""
        self._write(groups, weights, ctx, add=False)

    def assign_add(self, groups: IdGroups, deltas: Sequence[Tensor], *, ctx: StepContext) -> None:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        self._write(groups, deltas, ctx, add=True)

    def _write(
        self, groups: IdGroups, values: Sequence[Tensor], ctx: StepContext, *, add: bool
    ) -> None:
        with self._turn():
            shape, call = self._call(groups)
            ready = checks.grads(values, self._group_shapes(shape), self._device)
            handles_N, _ = self._inserted(shape, call, None, ctx, admit_all=True)
            self._keep(handles_N, forms=shape.forms)
            for form in shape.forms:
                mine = [g for g, k in enumerate(shape.tables) if self._form_of[k] == form]
                cuts = [(shape.splits[g], shape.splits[g + 1]) for g in mine]
                write_weights(
                    self._layout,
                    self._forms[form],
                    torch.cat([handles_N[start:stop] for start, stop in cuts]),
                    torch.cat([ready[g] for g in mine]),
                    add=add,
                    epoch=self._epoch,
                    event_time_s=ctx.event_time_s,
                )

    def reinitialize(self, groups: IdGroups, *, ctx: StepContext) -> Tensor:
        """Initial value and state again: int32 [N], 1 existed, 0 inserted, in input order.

        Waits for the device.
        """
        with self._turn():
            shape, call = self._call(groups)
            existed_N = self._probe(call)[1]
            handles_N, _ = self._inserted(shape, call, None, ctx, admit_all=True)
            for g, k in enumerate(shape.tables):
                part = slice(shape.splits[g], shape.splits[g + 1])
                again_M = torch.unique(handles_N[part][existed_N[part]])
                if again_M.numel():
                    self._restart_rows(k, again_M, ctx)
            return existed_N.to(torch.int32)

    def _restart_rows(self, table: int, handles_M: Tensor, ctx: StepContext) -> None:
        spec, form = self._specs[table], self._forms[self._form_of[table]]
        self._keep(handles_M, forms=(self._form_of[table],))
        metadata_4M = read_metadata(self._layout, handles_M)
        ids_M = metadata_4M[0].cpu()
        weights = _initial_weights(spec, ids_M, self._seed).to(form.dtype)
        state = torch.cat([s.optimizer.init_state(s.dim, form.real) for s in spec.segments])
        state_MS = state.expand(len(ids_M), -1).contiguous()
        write_values(
            self._layout,
            form,
            handles_M,
            weights.to(self._device),
            state_MS.to(self._device),
        )
        epoch_M = torch.full_like(metadata_4M[1], self._epoch)
        seen_M = metadata_4M[2].clamp(min=ctx.event_time_s)
        write_metadata(self._layout, handles_M, Metadata(versions=epoch_M, last_seen_s=seen_M))


def _initial_weights(spec: TableSpec, ids_M: Tensor, seed: int) -> Tensor:
    parts, start = list[Tensor](), spec.first_column
    for segment in spec.segments:
        parts.append(
            initial_values(
                segment.initializer,
                ids_M,
                seed=seed,
                table=spec.hash_name,
                column_start=start,
                dim=segment.dim,
            )
        )
        start += segment.dim
    return torch.cat(parts, dim=1)
