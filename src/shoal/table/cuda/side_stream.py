"""Runs of a lookup's rows, found on another stream while rows are gathered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.kernels.gradients import Runs, region_starts, runs_of

_SEEN_BEFORE = 3  # lookups of a size before it is recorded
_MOST_GRAPHS = 4  # of one size: lookups whose tickets are alive at a time
_MOST_SIZES = 4
_GRAPH_BYTES = 96  # a position, at most: sorted pairs, their scratch, runs and pieces


class _Recorded:
    """`runs_of` one size as a graph, with the memory it reads and writes."""

    def __init__(self, n: int, rooms: Sequence[int], device: torch.device) -> None:
        self.handles_N = torch.full((n,), -1, dtype=torch.int32, device=device)
        self.met_N = torch.empty(n, dtype=torch.int8, device=device)
        # Held, for every replay reads it.
        self._starts_FW = region_starts(rooms, device)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(capture_error_mode="thread_local")
        try:
            self.runs = runs_of(self.handles_N, None, rooms, starts_FW=self._starts_FW)
        finally:
            self.graph.capture_end()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.replayed = False  # and nobody has waited for it yet


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile: to destroy what is on the GPU would fail a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Lease:
    """A recorded graph in use; goes back to its pool when nobody holds the lease.

    handles_N: int32 [N], what the graph reads: to be written before `SideStream.start`; met_N: int8
    [N], memory for the lookup.
    """

    __slots__ = ("handles_N", "met_N", "pool", "recorded")

    def __init__(self, recorded: _Recorded, pool: list[_Recorded]) -> None:
        self.recorded = recorded
        self.handles_N, self.met_N = recorded.handles_N, recorded.met_N
        self.pool = pool

    def __del__(self) -> None:
        self.pool.append(self.recorded)


@dataclass(slots=True)
class _Size:
    """Lookups of one size: how many came, and their graphs that are free."""

    seen: int = 0
    made: int = 0
    failed: bool = False  # to record one: it is not tried again
    pool: list[_Recorded] = field(default_factory=list)


# Streams of a device that torch gives out in turn.
_POOL = 32
_SIDES: weakref.WeakSet[SideStream] = weakref.WeakSet()


def reader_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for who reads a shard next to its steps: none on which a `SideStream` may record.

    What another thread does on a stream that is recorded, freeing memory too, ends the process.
    """
    taken = {side.number for side in tuple(_SIDES)}
    for _ in range(_POOL):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in taken:
            break
    return stream


class SideStream:
    """A stream parallel to the shard's, for work that only the step needs; none when interpreted.

    device: the shard's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._begin = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._sizes: dict[int, _Size] = {}
        _SIDES.add(self)

    @property
    def number(self) -> int:
        """Of the stream; 0 when interpreted."""
        return 0 if self._stream is None else self._stream.cuda_stream

    def start(
        self,
        work: Callable[[], Runs],
        read: Sequence[Tensor],
        lease: Lease | None,
        main: torch.cuda.Stream | None,
    ) -> Callable[[torch.cuda.Stream | None], Runs]:
        """Start `runs_of` on the side, after all that `main` has been given.

        Args:
            work: calls `runs_of`.
            read: what it reads: the handles, and whatever else may be dropped meanwhile.
            lease: a recorded graph that does it instead, whose handles are written.

        Returns:
            a call that makes the stream it gets wait for the runs, and returns them. They are
            good for as long as that call is held.
        """
        side, begin = self._stream, self._begin
        if side is None or begin is None or main is None:
            made_already = work()
            return lambda _: made_already
        # Waiting for all of `main` also means that what an earlier step freed here, or an earlier
        # replay wrote, is not written while that step still reads it.
        begin.record(main)
        side.wait_event(begin)
        torch.cuda.set_stream(side)
        try:
            if lease is None:
                made, done = work(), torch.cuda.Event()  # type: ignore[no-untyped-call]
            else:
                lease.recorded.graph.replay()
                made, done = lease.recorded.runs, lease.recorded.done
                lease.recorded.replayed = True
        finally:
            torch.cuda.set_stream(main)
        done.record(side)
        if lease is None:
            for tensor in read:
                tensor.record_stream(side)

        def joined(stream: torch.cuda.Stream | None) -> Runs:
            (main if stream is None else stream).wait_event(done)
            if lease is not None:
                lease.recorded.replayed = False
            return made

        return joined

    def lease(self, n: int, rooms: Sequence[int], main: torch.cuda.Stream | None) -> Lease | None:
        """A graph for lookups of n ids, whose handles `main` may write; None where they have not
        come often, graphs are out or cannot be recorded, or there are several row forms.

        rooms: capacity in positions of each row form.
        """
        if self._stream is None or main is None or n == 0 or len(rooms) != 1:
            return None
        size = self._sizes.get(n)
        if size is None:
            if len(self._sizes) >= _MOST_SIZES:
                rare = min(self._sizes, key=lambda other: self._sizes[other].seen)
                if self._sizes[rare].made:
                    return None
                del self._sizes[rare]
            size = self._sizes[n] = _Size()
        size.seen += 1
        if size.seen <= _SEEN_BEFORE:
            return None
        if not size.pool:
            if size.failed or size.made >= _MOST_GRAPHS:
                return None
            if torch.cuda.mem_get_info(self._device)[0] < 2 * _GRAPH_BYTES * n:
                return None
            # The side's memory: an earlier step that freed some may still read it on `main`.
            self._stream.wait_stream(main)
            try:
                with torch.cuda.stream(self._stream), _uncollected():
                    made = _Recorded(n, rooms, self._device)
            except RuntimeError:  # of memory too: the lookup does without
                size.failed = True
                return None
            finally:
                main.wait_stream(self._stream)
            size.made += 1
            size.pool.append(made)
        recorded = size.pool.pop()
        if recorded.replayed:  # by a lookup that was never stepped
            main.wait_event(recorded.done)
        return Lease(recorded, size.pool)
