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

from shoal.comm.collectives import (
    Call,
    Part,
    Pending,
    PendingSizes,
    ReduceOp,
    Sizes,
    check_parts,
    check_sizes,
    check_source,
    check_values,
    gathered_objects,
)
from shoal.comm.watch import Group
from shoal.errors import CollectiveFailed

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_HALF = (torch.float16, torch.bfloat16)  # MPI has no such types
_SPIN_S = 0.01
_POLL_S = 50e-6


class MpiCollectives:
    """Collectives of a communicator's ranks, from one thread.

    They run on a duplicate of `comm`, so other messages do not meet them. Making one is itself a
    collective call. When one fails, the end of this process aborts the job: MPI's own end would
    wait for the rank that is gone.

    Args:
        comm: all ranks of it take part.
        timeout_s: how long a rank waits for a collective. Messages move while it waits, and hardly
            before, so what came before the wait does not count.
        watched: notes the calls; see `Watch`.
    """

    def __init__(
        self, comm: MPI.Intracomm, timeout_s: float = 1800.0, *, watched: Group | None = None
    ) -> None:
        self._comm = comm.Dup()
        self.rank = int(self._comm.Get_rank())
        self.world_size = int(self._comm.Get_size())
        self.device = torch.device("cpu")
        self.step = 0
        self.timeout_s = timeout_s
        self.watched = watched or Group()
        self._closed = False
        self._failure: CollectiveFailed | None = None
        self._rows: dict[int, MPI.Datatype] = {}
        self._under_way: set[_Call] = set()
        atexit.register(self._abort_if_failed)

    def all_to_all(self, parts: Sequence[Part], *, what: str) -> Pending:
        """See `Collectives`."""
        check_parts(parts, self, what)
        call = _Call(self, what)
        results = []
        for part in parts:
            shape = (sum(part.receive), *part.data.shape[1:])
            source = part.data.detach().contiguous()
            result = torch.empty(shape, dtype=source.dtype, device="cpu")
            results.append(result)
            row_bytes = source.element_size() * source.shape[1:].numel()
            if row_bytes:
                row = self._row(row_bytes)
                call.begin(
                    self._comm.Ialltoallv,
                    [_as_bytes(source), list(part.send), None, row],
                    [_as_bytes(result), list(part.receive), None, row],
                )
        return _Arriving(call, tuple(results))

    def exchange_sizes(self, sizes_WX: Tensor, *, what: str) -> PendingSizes:
        """See `Collectives`."""
        check_sizes(sizes_WX, self, what)
        call = _Call(self, what)
        sent_WX = sizes_WX.detach().clone(memory_format=torch.contiguous_format)
        received_WX = torch.empty_like(sent_WX)
        if sent_WX.numel():
            call.begin(self._comm.Ialltoall, sent_WX.numpy(), received_WX.numpy())
        return _ArrivingSizes(call, Sizes(sent_WX, received_WX))

    def all_reduce(self, values: Tensor, op: ReduceOp, *, what: str) -> Pending:
        """See `Collectives`; float16 and bfloat16 are combined as float32."""
        check_values(values, op, self, what)
        call = _Call(self, what)
        source = values.detach().contiguous()
        if values.dtype in _HALF:
            source = source.float()
        result = torch.empty_like(source)
        if source.numel():
            call.begin(self._comm.Iallreduce, source.numpy(), result.numpy(), _OPS[op])
        return _Arriving(call, (result,), values.dtype)

    def broadcast(self, values: Tensor, source: int, *, what: str) -> None:
        """See `Collectives`."""
        check_source(values, source, self, what)
        whole = values.detach().contiguous()
        call = _Call(self, what)
        row = self._row(whole.element_size())
        call.begin(self._comm.Ibcast, [_as_bytes(whole), whole.numel(), row], source)
        call.wait()
        if whole.data_ptr() != values.data_ptr():
            values.detach().copy_(whole)

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        """See `Collectives`."""
        return gathered_objects(self, value, what)

    def barrier(self, *, what: str) -> None:
        """See `Collectives`."""
        call = _Call(self, what)
        call.begin(self._comm.Ibarrier)
        call.wait()

    def close(self) -> None:
        """See `Collectives`; a collective call where none has failed."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            atexit.unregister(self._abort_if_failed)
            for row in self._rows.values():
                row.Free()
            self._comm.Free()

    def _row(self, size: int) -> MPI.Datatype:
        """A type of `size` bytes: MPI counts in 32 bits, so rows are counted, not bytes."""
        if size not in self._rows:
            self._rows[size] = MPI.BYTE.Create_contiguous(size).Commit()
        return self._rows[size]

    def _abort_if_failed(self) -> None:
        if self._failure is not None:
            self._comm.Abort(1)


class _Call(Call):
    """One collective under way."""

    def __init__(self, owner: MpiCollectives, what: str) -> None:
        super().__init__(owner, what)
        self._owner = owner
        self._requests: list[MPI.Request] = []
        self._buffers: list[object] = []
        if owner._closed:
            raise self.failed("the collectives were closed before it")
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
        deadline, spun = began + self._owner.timeout_s, began + _SPIN_S
        try:
            while not MPI.Request.Testall(self._requests):
                if self._owner._failure is not None:
                    raise self._owner._failure
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
        self._owner._under_way.discard(self)


class _Arriving:
    """A `Pending` of MPI."""

    def __init__(
        self, call: _Call, results: tuple[Tensor, ...], dtype: torch.dtype | None = None
    ) -> None:
        self._call, self._results, self._dtype = call, results, dtype

    def wait(self) -> tuple[Tensor, ...]:
        """See `Pending`."""
        self._call.wait()
        if self._dtype is not None:
            self._results = tuple(result.to(self._dtype) for result in self._results)
        return self._results


class _ArrivingSizes:
    """A `PendingSizes` of MPI."""

    def __init__(self, call: _Call, sizes: Sizes) -> None:
        self._call, self._sizes = call, sizes

    def wait(self) -> Sizes:
        """See `PendingSizes`."""
        self._call.wait()
        return self._sizes


def _as_bytes(values: Tensor) -> Any:
    """The bytes of a contiguous tensor as NumPy's array, without a copy."""
    return values.view(-1).view(torch.uint8).numpy()
