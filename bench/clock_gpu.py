"""Timing of calls on a GPU, and its copy bandwidth."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness import median

__all__ = ["Clock", "Times"]

WARMUP = 5


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds a call.

    Args:
        device: of each call, between two events, calls following each other; what the host
            launches is in it, for the second event waits for the last launch.
        host: of each of those calls until it returned.
        wall: of those calls by the clock, from the first to the end of the last, over their number.
        alone: of each of some calls by the clock, the device idle before and after.
    """

    device: Sequence[float]
    host: Sequence[float]
    wall: float
    alone: Sequence[float]

    @property
    def ms(self) -> float:
        """The figure of a row: the median between events."""
        return median(self.device)

    def note(self, more: str = "") -> str:
        """The other figures, for the row's note."""
        text = (
            f"{len(self.device)} calls: events {self.ms:.3f} ms, wall {self.wall:.3f}, "
            f"alone {median(self.alone):.3f}, host {median(self.host):.3f}"
        )
        return f"{more}; {text}" if more else text


class Clock:
    """Times calls on "cuda"; on "cpu" everything is by the clock.

    Calls get rising numbers, so that no two need handle the same batch.
    """

    def __init__(self, device: str, copy_bytes: int) -> None:
        self.cuda = device == "cuda"
        self._device = device
        self._copy_bytes = copy_bytes

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""
        if self.cuda:
            torch.cuda.synchronize()

    def measure(self, run: Callable[[int], object], repeats: int, *, first: int = 0) -> Times:
        """Time `run(first)`, `run(first + 1)`, ...; `calls(repeats)` of them."""
        number = first
        for number in range(first, first + WARMUP):
            run(number)
        gc.collect()
        self.wait()
        marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        host: list[float] = []
        began = time.perf_counter()
        for number in range(first + WARMUP, first + WARMUP + repeats):
            start = time.perf_counter()
            if self.cuda:
                marks.append(self._between(run, number))
            else:
                run(number)
            host.append(1e3 * (time.perf_counter() - start))
        self.wait()
        wall = 1e3 * (time.perf_counter() - began) / repeats
        device = [begin.elapsed_time(end) for begin, end in marks] if self.cuda else host
        alone = [self.once(run, number + 1 + k) for k in range(_alone(repeats))]
        return Times(device=device, host=host, wall=wall, alone=alone)

    @staticmethod
    def calls(repeats: int) -> int:
        """Calls that `measure` makes."""
        return WARMUP + repeats + _alone(repeats)

    def once(self, run: Callable[[int], object], number: int) -> float:
        """Milliseconds of one call by the clock, the device idle before and after."""
        self.wait()
        start = time.perf_counter()
        run(number)
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written a second by a plain copy."""
        source = torch.ones(self._copy_bytes // 4, device=self._device)
        target = torch.empty_like(source)
        times = self.measure(lambda _: target.copy_(source), 20)
        return 2 * source.numel() * source.element_size() / (times.ms / 1e3)

    @staticmethod
    def _between(
        run: Callable[[int], object], number: int
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(number)
        end.record()
        return begin, end


def _alone(repeats: int) -> int:
    return max(1, repeats // 3)
