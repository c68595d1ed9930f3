"""Timing of calls on a GPU, and its copy bandwidth."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from harness import Measured, median

__all__ = ["Clock", "Times"]

WARMUP = 5
HELD_WARMUP = 3  # queued calls whose times are not kept
HOLD_CYCLES = 1 << 22  # of the kernel that says how long a cycle is


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds a call.

    Args:
        steps: of each call, between two events, calls following each other; what the host
            launches is in it, for the second event waits for the last launch.
        held: of each of some calls, between two events, all of it launched while the device was
            kept busy by something else: launches are not in it. Empty where the host waits for
            the device within a call, and on "cpu".
        wall: of the first by the clock, from the first to the end of the last, over their number.
        host: of each of some calls until it returned, the device idle before.
        alone: of those calls until the device was done.
    """

    steps: Sequence[float]
    held: Sequence[float]
    wall: float
    host: Sequence[float]
    alone: Sequence[float]

    @property
    def ms(self) -> float:
        """Of a call among calls that follow each other: the slower of host and device."""
        return median(self.steps)

    @property
    def device_ms(self) -> float | None:
        """What the device needs, launches not counted; None where it cannot be told."""
        return median(self.held) if self.held else None

    @property
    def host_ms(self) -> float:
        """What the host needs."""
        return median(self.host)

    def note(self, more: str = "") -> str:
        """The other figures, for the row's note."""
        text = (
            f"{len(self.steps)} calls: {self.ms:.3f} ms between events, wall {self.wall:.3f}, "
            f"alone {median(self.alone):.3f}"
        )
        return f"{more}; {text}" if more else text

    def row(self, ours: float, more: str = "", **figures: float) -> Measured:
        """A row with device and host time in columns of their own."""
        return Measured(
            ours=ours,
            device_ms=self.device_ms,
            host_ms=self.host_ms,
            note=self.note(more),
            **figures,
        )


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
        numbers = iter(range(first, first + self.calls(repeats)))
        for number in itertools.islice(numbers, WARMUP):
            run(number)
        gc.collect()
        self.wait()
        began = time.perf_counter()
        steps = [self._timed(run, number) for number in itertools.islice(numbers, repeats)]
        self.wait()
        wall = 1e3 * (time.perf_counter() - began) / repeats
        host, alone = [], []
        for number in itertools.islice(numbers, _few(repeats)):
            returned, done = self.apart(run, number)
            host.append(returned)
            alone.append(done)
        held = self._held(run, numbers, 2 * median(host) + 0.2)
        return Times(steps=[step() for step in steps], held=held, wall=wall, host=host, alone=alone)

    def calls(self, repeats: int) -> int:
        """Calls that `measure` makes."""
        held = HELD_WARMUP + _few(repeats) if self.cuda else 0
        return WARMUP + repeats + _few(repeats) + held

    def once(self, run: Callable[[int], object], number: int) -> float:
        """Milliseconds of one call by the clock, the device idle before and after."""
        return self.apart(run, number)[1]

    def apart(self, run: Callable[[int], object], number: int) -> tuple[float, float]:
        """Milliseconds by the clock until a call returned, and until the device was done."""
        self.wait()
        start = time.perf_counter()
        run(number)
        returned = time.perf_counter()
        self.wait()
        return 1e3 * (returned - start), 1e3 * (time.perf_counter() - start)

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written a second by a plain copy."""
        source = torch.ones(self._copy_bytes // 4, device=self._device)
        target = torch.empty_like(source)
        times = self.measure(lambda _: target.copy_(source), 20)
        return 2 * source.numel() * source.element_size() / (times.ms / 1e3)

    def _timed(self, run: Callable[[int], object], number: int) -> Callable[[], float]:
        """Call; the milliseconds can be asked for when the device is done."""
        if not self.cuda:
            start = time.perf_counter()
            run(number)
            took = 1e3 * (time.perf_counter() - start)
            return lambda: took
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(number)
        end.record()
        return lambda: begin.elapsed_time(end)

    def _held(
        self, run: Callable[[int], object], numbers: Iterator[int], hold_ms: float
    ) -> list[float]:
        """Milliseconds of the device of each call, launched while a kernel held the device."""
        if not self.cuda:
            return []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1)  # the first one loads the kernel
        begin.record()
        torch.cuda._sleep(HOLD_CYCLES)
        end.record()
        self.wait()
        cycles = int(hold_ms * HOLD_CYCLES / begin.elapsed_time(end))
        calls: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []
        for number in numbers:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(cycles)
            begin.record()
            run(number)
            end.record()
            passed = begin.query()
            calls.append((passed, begin, end))
            if passed and len(calls) <= HELD_WARMUP:
                cycles *= 2
        self.wait()
        # A call whose beginning had passed when it returned was waiting for its launches.
        return [b.elapsed_time(e) for passed, b, e in calls[HELD_WARMUP:] if not passed]


def _few(repeats: int) -> int:
    return max(1, repeats // 3)
