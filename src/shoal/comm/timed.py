"""How long a rank waits for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, Part, Pending, PendingSizes, ReduceOp, Sizes

__all__ = ["TimedCollectives", "Waiting"]


class Waiting:
    """Seconds that went into collectives, all that share this clock together.

    On the CPU the host's time in calls and waits; on CUDA the time streams stood still for them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._host_s = 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def total_s(self) -> float:
        """All so far; on CUDA it waits for the streams."""
        for before, after in self._stalls:
            after.synchronize()
            self._host_s += before.elapsed_time(after) / 1e3
        self._stalls.clear()
        return self._host_s

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Count what a block takes."""
        if device.type == "cuda":
            before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(device)
            before.record(stream)
            yield
            after.record(stream)
            self._stalls.append((before, after))
        else:
            start_s = self._clock()
            try:
                yield
            finally:
                self._host_s += self._clock() - start_s


class TimedCollectives:
    """Collectives that count the time they take.

    Args:
        inner: what does the work.
        waiting: where time is counted.
    """

    def __init__(self, inner: Collectives, waiting: Waiting) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.device = inner.device
        self._waiting = waiting

    @property
    def step(self) -> int:
        """What errors name."""
        return self.inner.step

    @step.setter
    def step(self, step: int) -> None:
        self.inner.step = step

    def all_to_all(self, parts: Sequence[Part], *, what: str) -> Pending:
        """See `Collectives`."""
        with self._counted():
            pending = self.inner.all_to_all(parts, what=what)
        return _Timed(pending, self)

    def exchange_sizes(self, sizes_WX: Tensor, *, what: str) -> PendingSizes:
        """See `Collectives`."""
        with self._counted():
            pending = self.inner.exchange_sizes(sizes_WX, what=what)
        return _TimedSizes(pending, self)

    def all_reduce(self, values: Tensor, op: ReduceOp, *, what: str) -> Pending:
        """See `Collectives`."""
        with self._counted():
            pending = self.inner.all_reduce(values, op, what=what)
        return _Timed(pending, self)

    def broadcast(self, values: Tensor, source: int, *, what: str) -> None:
        """See `Collectives`."""
        with self._counted():
            self.inner.broadcast(values, source, what=what)

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        """See `Collectives`."""
        with self._counted():
            return self.inner.gather_objects(value, what=what)

    def barrier(self, *, what: str) -> None:
        """See `Collectives`."""
        with self._counted():
            self.inner.barrier(what=what)

    def close(self) -> None:
        """See `Collectives`."""
        self.inner.close()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._waiting.counted(self.device):
            yield


class _Timed:
    def __init__(self, inner: Pending, owner: TimedCollectives) -> None:
        self._inner, self._owner = inner, owner

    def wait(self) -> tuple[Tensor, ...]:
        """See `Pending`."""
        with self._owner._counted():
            return self._inner.wait()


class _TimedSizes:
    def __init__(self, inner: PendingSizes, owner: TimedCollectives) -> None:
        self._inner, self._owner = inner, owner

    def wait(self) -> Sizes:
        """See `PendingSizes`."""
        with self._owner._counted():
            return self._inner.wait()
