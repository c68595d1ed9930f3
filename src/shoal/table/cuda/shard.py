"""`CudaShard`: the Shard interface in Triton kernels, on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shoal.lookup import PoolPlan
from shoal.table.cuda.calls import check_counts, occurrences
from shoal.table.cuda.snapshot import CudaSnapshots
from shoal.table.cuda.ticket import CudaTicket
from shoal.table.factory import shard_copied
from shoal.table.shard import Found, IdGroups, StepContext
from shoal.table.spec import TableSpec
from shoal.uncompiled import uncompiled


@uncompiled
class CudaShard(CudaSnapshots):
    """Tables in a GPU's memory; see `shoal.table.shard.Shard` for every verb.

    Args:
        specs: the tables; names must be distinct.
        seed: with the table's name and the id, the key of every initial value.
        device: a CUDA device; "cpu" where Triton interprets its kernels.

    Ids, offsets, weights, gradients and results are on the device; splits and tables of groups,
    exported rows and states are on the CPU. Verbs run in the order of calls, on the stream that
    is current at the call, and return before the device has run them, except where a docstring
    says that they wait. Thread-safe. Summation order is fixed.

    Under nan_policy="raise" rows with a non-finite gradient are left as they are by the kernel;
    NonFiniteGradient is raised by a later verb that knows, at the latest by `check()`.

    Raises:
        DeviceUnavailable: no such device here, or no Triton.
        OutOfDeviceMemory: no room for the expected rows.
    """

    _HOST_ROWS: ClassVar[bool] = False

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        seed: int = 0,
        device: str | torch.device = "cuda",
    ) -> None:
        super().__init__(specs, seed=seed, device=device, host_rows=self._HOST_ROWS)

    __reduce__ = shard_copied

    def find(self, groups: IdGroups) -> Found:
        """Read rows; never inserts."""
        with self._turn():
            shape, call = self._call(groups)
            return Found(*self._found_rows(shape, call))

    def find_pooled(
        self, groups: IdGroups, plan: PoolPlan, offsets_GB1: Tensor, weights_N: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`find`, pooled: one [B, width] per output."""
        with self._turn():
            shape, call = self._call(groups)
            handles_N, _ = self._probe(call)
            return self._pooled(
                shape, call, handles_N, plan, offsets_GB1, weights_N, self._last_step, initial=False
            )

    def find_or_init(
        self, groups: IdGroups, counts_N: Tensor | None = None, *, ctx: StepContext
    ) -> CudaTicket:
        """Probe, decide admission once, insert admitted ids with their initial value.

        Waits for the device only where a table may reach its `capacity_rows` and have to refuse,
        and, while tables grow, until the device is one call behind.
        """
        with self._turn():
            shape, call = self._call(groups)
            check_counts(shape, counts_N, self._device)
            self._tell()
            handles_N, met_N = self._inserted(shape, call, counts_N, ctx)
            counts = occurrences(counts_N)
            # Growth replaces the columns of chunks while the side may still read the old ones.
            read = (handles_N, self._layout.chunks_WC) if len(self._forms) > 1 else (handles_N,)
            runs = self._side.start(
                lambda: self._runs_of(handles_N, shape.rooms), read, shape.rooms, self._stream
            )
            ticket = CudaTicket(
                self, groups, shape, handles_N, met_N, counts, ctx.event_time_s, runs, self._stream
            )
            self._live.add(ticket)
            return ticket

    def gather(self, ticket: object, *, ctx: StepContext) -> tuple[Tensor, ...]:
        """Read the ticket's rows now: one [n_g, D_g] per group."""
        with self._turn():
            own = self._own(ticket)
            call = own.shape.groups(own.groups.ids_N)
            initial = self._may_lack_rows(own.shape)
            return self._rows_of(own.shape, call, own.handles_N, ctx.global_step, initial=initial)

    def gather_pooled(
        self,
        ticket: object,
        plan: PoolPlan,
        offsets_GB1: Tensor,
        weights_N: Tensor | None,
        *,
        ctx: StepContext,
    ) -> tuple[Tensor, ...]:
        """Read and pool the ticket's rows now: one [B, width] per output."""
        with self._turn():
            own = self._own(ticket)
            call = own.shape.groups(own.groups.ids_N)
            return self._pooled(
                own.shape,
                call,
                own.handles_N,
                plan,
                offsets_GB1,
                weights_N,
                ctx.global_step,
                initial=self._may_lack_rows(own.shape),
            )
