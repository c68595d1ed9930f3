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
    Arriving,
    Call,
    Collectives,
    Part,
    Pending,
    PendingSizes,
    ReduceOp,
    Sizes,
    after,
)
from shoal.comm.mismatched_calls import Calls
from shoal.errors import CollectiveFailed

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SPIN_S = 2e-3
_POLL_S = 50e-6
_COLUMNS = 16  # sizes on the CPU are sent in so many, so that messages of most calls are alike
_LOOK_S = 0.1  # between looks at what other ranks wait for


class TorchCollectives(Collectives):
    """Collectives of a group's ranks; rows of any dtype travel as bytes.

    Args:
        group: its backend must serve `device`. Whoever made it destroys it. Its own timeout should
            not be shorter than `timeout_s`, nor (Gloo) much longer: a process waits for Gloo's
            threads when it ends.
        device: where tensors are.
        timeout_s: how long a collective may take, counted from its call. On CUDA it is counted
            where the host waits (sizes, barriers).
        release: called with its groups when it is closed or gone; with none after that.
        watched: notes the calls; see `Watchdog`.
        sizes_group: sizes go over it; released like `group`. Gloo ends the process where messages
            of two sizes meet, so that those of ranks in different calls should not.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        *,
        release: Callable[[set[dist.ProcessGroup]], None] = lambda _: None,
        watched: Calls | None = None,
        sizes_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._sizes_group: dist.ProcessGroup | None = sizes_group or group
        self._release = release
        device = torch.empty(0, device=device).device  # with its index
        super().__init__(
            dist.get_rank(group), dist.get_world_size(group), device, timeout_s, watched
        )
        # Sizes are copied to the host next to the caller's stream, which need not wait for them.
        self._sizes_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """See `Collectives`; the group itself belongs to whoever made it."""
        groups = {group for group in (self._group, self._sizes_group) if group is not None}
        self._group = self._sizes_group = None
        self._release(groups)

    __del__ = close

    def _all_to_all(self, parts: Sequence[Part], results: tuple[Tensor, ...], what: str) -> Pending:
        call = _TorchCall(self, what)
        for part, result in zip(parts, results, strict=True):
            row_bytes = part.data.shape[1:].numel() * part.data.element_size()
            receive, send = ([n * row_bytes for n in rows] for rows in (part.receive, part.send))
            into, source = _as_bytes(result), _as_bytes(part.data)
            call.begin(partial(dist.all_to_all_single, into, source, receive, send, async_op=True))
        return self._arriving(call, results, [part.data for part in parts])

    def _exchange_sizes(self, sizes_WX: Tensor, what: str) -> PendingSizes:
        ranks, columns = sizes_WX.shape
        padded = columns if self.device.type == "cuda" else -(-columns // _COLUMNS) * _COLUMNS
        both = torch.empty((2, ranks, padded), dtype=torch.int64, device=self.device)
        both[0, :, :columns].copy_(sizes_WX, non_blocking=True)
        call = _TorchCall(self, what)
        call.begin(partial(dist.all_to_all_single, both[1], both[0], async_op=True), sizes=True)
        if self._sizes_stream is not None:
            return _sizes_on_host(call, both, self._sizes_stream)
        return after(call.wait, lambda: Sizes(both[0, :, :columns], both[1, :, :columns]))

    def _all_reduce(self, values: Tensor, op: ReduceOp, what: str) -> Pending:
        result = values.clone()
        call = _TorchCall(self, what)
        call.begin(partial(dist.all_reduce, result, op=_OPS[op], async_op=True))
        return self._arriving(call, (result,), [])

    def _broadcast(self, values: Tensor, source: int, what: str) -> None:
        call = _TorchCall(self, what)
        call.begin(partial(dist.broadcast, _as_bytes(values), group_src=source, async_op=True))
        self._arriving(call, (values,), []).wait()

    def _arriving(
        self, call: _TorchCall, results: tuple[Tensor, ...], sent: list[Tensor]
    ) -> Pending:
        """The results, once there; keeps what is sent alive until it has been."""

        def arrived() -> tuple[Tensor, ...]:
            call.wait()
            if self.device.type == "cuda":
                # The buffers may be of another stream: their memory must outlast this one's use,
                # and this one runs behind the collective.
                stream = torch.cuda.current_stream(self.device)
                for buffer in (*results, *sent):
                    buffer.record_stream(stream)
            sent.clear()
            return results

        return Arriving(arrived, repeated=self.device.type == "cuda")


class _TorchCall(Call):
    """One collective under way."""

    def __init__(self, owner: TorchCollectives, what: str) -> None:
        super().__init__(owner, what, closed=owner._group is None)
        self._torch, self._groups = owner, (owner._group, owner._sizes_group)
        self._works: list[dist.Work] = []

    def begin(self, operation: Callable[..., Any], *, sizes: bool = False) -> None:
        """Start one operation of torch.distributed, given its group."""
        try:
            self._works.append(operation(group=self._groups[sizes]))
        except (RuntimeError, ValueError) as error:  # ValueError: of a group that is gone
            raise self.failed(_reason(error)) from error

    def wait(self) -> None:
        """CPU: block until all has arrived. CUDA: order the present stream behind it."""
        try:
            for work in self._works:
                if self._torch.device.type == "cuda":
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


def _sizes_on_host(call: _TorchCall, both: Tensor, stream: torch.cuda.Stream) -> PendingSizes:
    """Both sizes in pinned memory once the event has passed."""
    host = torch.empty(both.shape, dtype=torch.int64, pin_memory=True, device="cpu")
    with torch.cuda.stream(stream):
        call.wait()
        host.copy_(both, non_blocking=True)
        both.record_stream(stream)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)

    def arrived() -> Sizes:
        spun = time.monotonic() + _SPIN_S
        try:
            while not copied.query():  # type: ignore[no-untyped-call]
                if call.left_s() < 0:
                    raise call.failed("sizes did not arrive")
                if time.monotonic() > spun:
                    call.look()
                time.sleep(0 if time.monotonic() < spun else _POLL_S)
        except CollectiveFailed:
            raise
        except RuntimeError as error:
            raise call.failed(_reason(error)) from error
        return Sizes(host[0], host[1])

    return Arriving(arrived)


def _as_bytes(values: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [its bytes], without a copy."""
    return values.view(-1).view(torch.uint8)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
