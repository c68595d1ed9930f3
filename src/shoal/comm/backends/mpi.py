"""Collectives over MPI, through mpi4py; tensors stay on the host."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from shoal.comm.collectives import Call, Collectives, Part, Pending, ReduceOp, after
from shoal.comm.mismatched_calls import Calls

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_HALF = (torch.float16, torch.bfloat16)  # MPI has no such types
_SPIN_S = 0.01
_POLL_S = 50e-6


class MpiCollectives(Collectives):
    """Collectives of a communicator's ranks, from one thread.

    They run on a duplicate of `comm`, so other messages do not meet them. Making one is itself a
    collective call. When one fails, the end of this process aborts the job: MPI's own end would
    wait for the rank that is gone.

    Args:
        comm: all ranks of it take part.
        timeout_s: how long a rank waits for a collective. Messages move while it waits, and hardly
            before, so what came before the wait does not count.
        watched: notes the calls; see `Watchdog`.
    """

    def __init__(
        self, comm: MPI.Intracomm, timeout_s: float = 1800.0, *, watched: Calls | None = None
    ) -> None:
        self._comm = comm.Dup()
        rank, size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        super().__init__(rank, size, torch.device("cpu"), timeout_s, watched)
        self._closed = False
        self._rows_of: dict[int, MPI.Datatype] = {}
        self._under_way: set[_MpiCall] = set()
        atexit.register(self._abort_if_failed)

    def close(self) -> None:
        """See `Collectives`; a collective call where none has failed."""
        if self._closed:
            return
        self._closed = True
        if self.failure is None:
            atexit.unregister(self._abort_if_failed)
            for row in self._rows_of.values():
                row.Free()
            self._comm.Free()

    def _all_to_all(self, parts: Sequence[Part], results: tuple[Tensor, ...], what: str) -> Pending:
        call = _MpiCall(self, what)
        for part, result in zip(parts, results, strict=True):
            row_bytes = part.data.element_size() * part.data.shape[1:].numel()
            if row_bytes:
                row = self._row(row_bytes)
                call.begin(
                    self._comm.Ialltoallv,
                    [_as_bytes(part.data), list(part.send), None, row],
                    [_as_bytes(result), list(part.receive), None, row],
                )
        return after(call.wait, lambda: results)

    def _all_reduce(self, values: Tensor, op: ReduceOp, what: str) -> Pending:
        call = _MpiCall(self, what)
        source = values.float() if values.dtype in _HALF else values
        result = torch.empty_like(source)
        if source.numel():
            call.begin(self._comm.Iallreduce, source.numpy(), result.numpy(), _OPS[op])
        return after(call.wait, lambda: (result.to(values.dtype),))

    def _broadcast(self, values: Tensor, source: int, what: str) -> None:
        call = _MpiCall(self, what)
        row = self._row(values.element_size())
        call.begin(self._comm.Ibcast, [_as_bytes(values), values.numel(), row], source)
        call.wait()

    def _row(self, size: int) -> MPI.Datatype:
        """A type of `size` bytes: MPI counts in 32 bits, so rows are counted, not bytes."""
        if size not in self._rows_of:
            self._rows_of[size] = MPI.BYTE.Create_contiguous(size).Commit()
        return self._rows_of[size]

    def _abort_if_failed(self) -> None:
        if self.failure is not None:
            self._comm.Abort(1)


class _MpiCall(Call):
    """One collective under way."""

    def __init__(self, owner: MpiCollectives, what: str) -> None:
        super().__init__(owner, what, closed=owner._closed)
        self._mpi = owner
        self._requests: list[MPI.Request] = []
        self._buffers: list[object] = []
        owner._under_way.add(self)  # MPI keeps no buffer alive, and nobody may ever wait for this

    def begin(self, operation: Callable[..., MPI.Request], *arguments: Any) -> None:
        """Start one operation of MPI."""
        try:
            self._requests.append(operation(*arguments))
        except MPI.Exception as error:
            raise self.failed(str(error)) from error
        self._buffers.append(arguments)

    def wait(self) -> None:
        """Block until all has arrived."""
        began = time.monotonic()
        deadline, spun = began + self._mpi.timeout_s, began + _SPIN_S
        try:
            while not MPI.Request.Testall(self._requests):
                if self._mpi.failure is not None:
                    raise self._mpi.failure
                now = time.monotonic()
                if now > deadline:
                    raise self.failed("not every rank took part")
                # Messages move while MPI is asked, so it is asked often at first.
                if now < spun:
                    os.sched_yield()
                else:
                    self.look()
                    time.sleep(_POLL_S)
        except MPI.Exception as error:
            raise self.failed(str(error)) from error
        self._buffers.clear()
        self._mpi._under_way.discard(self)


def _as_bytes(values: Tensor) -> Any:
    """The bytes of a contiguous tensor as NumPy's array, without a copy."""
    return values.view(-1).view(torch.uint8).numpy()
