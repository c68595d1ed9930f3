"""Collectives over a process group of torch.distributed: Gloo on the CPU, NCCL on CUDA."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SPIN_S = 2e-3
_POLL_S = 50e-6
_COLUMNS = 16  # sizes on the CPU are sent in so many, so that messages of most calls are alike
_LOOK_S = 0.1  # between looks at what other ranks wait for


class TorchCollectives:
    """Collectives of a group's ranks; rows of any dtype travel as bytes.

    Args:
        group: its backend must serve `device`. Whoever made it destroys it. Its own timeout should
            not be shorter than `timeout_s`, nor (Gloo) much longer: a process waits for Gloo's
            threads when it ends.
        device: where tensors are.
        timeout_s: how long a collective may take, counted from its call. On CUDA it is counted
            where the host waits (sizes, barriers).
        release: called once by `close`, with the group.
        watched: notes the calls; see `Watch`.
        sizes_group: sizes go over it; released like `group`. Gloo ends the process where messages
            of two sizes meet, so that those of ranks in different calls should not.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        *,
        release: Callable[[dist.ProcessGroup], None] | None = None,
        watched: Group | None = None,
        sizes_group: dist.ProcessGroup | None = None,
    ) -> None:
        device = torch.empty(0, device=device).device  # with its index
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device
        self.step = 0
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = group
        self._sizes_group: dist.ProcessGroup | None = sizes_group or group
        self._release = release
        self.watched = watched or Group()
        self._failure: CollectiveFailed | None = None
        # Sizes are copied to the host beside the caller's stream, which need not wait for them.
        self._sizes_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def all_to_all(self, parts: Sequence[Part], *, what: str) -> Pending:
        """See `Collectives`."""
        check_parts(parts, self, what)
        sent, received, results, splits = [], [], [], []
        for part in parts:
            shape = (sum(part.receive), *part.data.shape[1:])
            result = torch.empty(shape, dtype=part.data.dtype, device=self.device)
            row_bytes = part.data.shape[1:].numel() * part.data.element_size()
            sent.append(_as_bytes(part.data.detach().contiguous()))
            received.append(_as_bytes(result))
            results.append(result)
            splits.append(
                ([n * row_bytes for n in part.receive], [n * row_bytes for n in part.send])
            )
        call = _Call(self, what)
        for output, source, (receive, send) in zip(received, sent, splits, strict=True):
            call.begin(
                partial(dist.all_to_all_single, output, source, receive, send, async_op=True)
            )
        return _Arriving(call, tuple(results), tuple(sent))

    def exchange_sizes(self, sizes_WX: Tensor, *, what: str) -> PendingSizes:
        """See `Collectives`."""
        check_sizes(sizes_WX, self, what)
        ranks, columns = sizes_WX.shape
        room = columns if self.device.type == "cuda" else -(-columns // _COLUMNS) * _COLUMNS
        both = torch.empty((2, ranks, room), dtype=torch.int64, device=self.device)
        both[0, :, :columns].copy_(sizes_WX.detach(), non_blocking=True)
        call = _Call(self, what)
        exchange = partial(dist.all_to_all_single, both[1], both[0], async_op=True)
        call.begin(exchange, self._sizes_group)
        if self._sizes_stream is None:
            return _ArrivingSizes(call, both[:, :, :columns])
        return _sizes_on_host(call, both, self._sizes_stream)

    def all_reduce(self, values: Tensor, op: ReduceOp, *, what: str) -> Pending:
        """See `Collectives`."""
        check_values(values, op, self, what)
        result = values.detach().clone(memory_format=torch.contiguous_format)
        call = _Call(self, what)
        call.begin(partial(dist.all_reduce, result, op=_OPS[op], async_op=True))
        return _Arriving(call, (result,), ())

    def broadcast(self, values: Tensor, source: int, *, what: str) -> None:
        """See `Collectives`."""
        check_source(values, source, self, what)
        whole = values.detach().contiguous()
        call = _Call(self, what)
        call.begin(partial(dist.broadcast, _as_bytes(whole), group_src=source, async_op=True))
        _Arriving(call, (whole,), ()).wait()
        if whole.data_ptr() != values.data_ptr():
            values.detach().copy_(whole)

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        """See `Collectives`."""
        return gathered_objects(self, value, what)

    def barrier(self, *, what: str) -> None:
        """See `Collectives`; on CUDA, the device has reached it too."""
        sizes_W1 = torch.zeros((self.world_size, 1), dtype=torch.int64, device="cpu")
        self.exchange_sizes(sizes_W1, what=what).wait()

    def close(self) -> None:
        """See `Collectives`; the group itself belongs to whoever made it."""
        groups = {group for group in (self._group, self._sizes_group) if group is not None}
        self._group = self._sizes_group = None
        for group in groups:
            if self._release is not None:
                self._release(group)


class _Call(Call):
    """One collective under way."""

    def __init__(self, owner: TorchCollectives, what: str) -> None:
        super().__init__(owner, what)
        self._owner = owner
        self._works: list[dist.Work] = []

    def begin(self, operation: Callable[..., Any], group: dist.ProcessGroup | None = None) -> None:
        """Start one operation of torch.distributed, given its group."""
        if self._owner._group is None:
            raise self.failed("the collectives were closed before it")
        try:
            self._works.append(operation(group=group or self._owner._group))
        except (RuntimeError, ValueError) as error:  # ValueError: of a group that is gone
            raise self.failed(_reason(error)) from error

    def wait(self) -> None:
        """CPU: block until all has arrived. CUDA: order the present stream behind it."""
        try:
            for work in self._works:
                if self._owner.device.type == "cuda":
                    work.wait()  # a timeout here would make the host wait
                else:
                    self._arrived(work)
        except RuntimeError as error:
            raise self.failed(_reason(error)) from error

    def _arrived(self, work: dist.Work) -> None:
        while True:
            most_s = max(min(self.left_s(), _LOOK_S), 1e-3)
            try:
                work.wait(datetime.timedelta(seconds=most_s))
                return
            except RuntimeError:
                if self.left_s() <= 0:
                    raise
            if work.is_completed():  # it failed, or ended just after that wait
                work.wait()
                return
            self.look()


class _Arriving:
    """A `Pending` of torch.distributed; keeps what is sent alive until it has been."""

    def __init__(self, call: _Call, results: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        self._call, self._results, self._sent = call, results, sent

    def wait(self) -> tuple[Tensor, ...]:
        """See `Pending`."""
        self._call.wait()
        if self._results and self._results[0].is_cuda:
            # The buffers may be of another stream: their memory must outlast this one's use, and
            # this one runs behind the collective.
            stream = torch.cuda.current_stream(self._results[0].device)
            for buffer in (*self._results, *self._sent):
                buffer.record_stream(stream)
        self._sent = ()
        return self._results


class _ArrivingSizes:
    """A `PendingSizes` on the CPU."""

    def __init__(self, call: _Call, both: Tensor) -> None:
        self._call, self._both = call, both

    def wait(self) -> Sizes:
        """See `PendingSizes`."""
        self._call.wait()
        return Sizes(self._both[0], self._both[1])


class _SizesOnHost:
    """A `PendingSizes` on CUDA: both sizes in page-locked memory once the event has passed."""

    def __init__(self, call: _Call, host: Tensor, copied: torch.cuda.Event) -> None:
        self._call, self._host, self._copied = call, host, copied

    def wait(self) -> Sizes:
        """See `PendingSizes`."""
        spun = time.monotonic() + _SPIN_S
        try:
            while not self._copied.query():  # type: ignore[no-untyped-call]
                if self._call.left_s() < 0:
                    raise self._call.failed("sizes did not arrive")
                if time.monotonic() > spun:
                    self._call.look()
                time.sleep(0 if time.monotonic() < spun else _POLL_S)
        except CollectiveFailed:
            raise
        except RuntimeError as error:
            raise self._call.failed(_reason(error)) from error
        return Sizes(self._host[0], self._host[1])


def _sizes_on_host(call: _Call, both: Tensor, stream: torch.cuda.Stream) -> PendingSizes:
    host = torch.empty(both.shape, dtype=torch.int64, pin_memory=True, device="cpu")
    with torch.cuda.stream(stream):
        call.wait()
        host.copy_(both, non_blocking=True)
        both.record_stream(stream)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
    return _SizesOnHost(call, host, copied)


def _as_bytes(values: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [its bytes], without a copy."""
    return values.view(-1).view(torch.uint8)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
