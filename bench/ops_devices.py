"""What differs between devices: how they are timed, waited for, copied on, and left clean."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

from harness import Runner, interleave
from ops_plan import Scale

__all__ = ["Cpu", "Cuda", "Device", "device_of"]

BUDGET_S = 1.5  # of all turns of a case on the CPU, within these bounds
LEAST, MOST = 3, 15
ROUNDS = 9  # turns of a case on CUDA, plus one that is not counted
WINDOW_S = 0.005  # launches of one turn on CUDA last about this long
MOST_LAUNCHES = 64


class Device:
    """A device with two buffers to copy between.

    Args:
        scale: sizes, and the device's name.
    """

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.name = scale.device
        self._source = torch.ones(scale.copy_bytes // 4, device=scale.device)
        self._target = torch.empty_like(self._source)

    @property
    def copied_bytes(self) -> int:
        """Bytes that one `copy` reads and writes."""
        return 2 * self.scale.copy_bytes

    def copy(self) -> None:
        """Copy one buffer to the other."""
        self._target.copy_(self._source)

    def seconds(self, runners: Sequence[Runner]) -> dict[str, list[float]]:
        """Seconds of each run by runner name; they take turns."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until all that was asked of the device is done."""

    def tidy(self) -> None:
        """Give back the memory of the case before."""
        gc.collect()

    def title(self) -> str:
        """The device name in a row."""
        return self.name


class Cpu(Device):
    """Timed by the clock, with `harness.interleave`."""

    def seconds(self, runners: Sequence[Runner]) -> dict[str, list[float]]:
        if self.scale.quick:
            return interleave(runners, batches=1, passes=2, warmup=1)
        start = time.perf_counter()
        for runner in runners:
            runner.run(0)
        once = time.perf_counter() - start
        passes = min(max(int(BUDGET_S / once), LEAST), MOST)
        return interleave(runners, batches=1, passes=passes, warmup=1)


class Cuda(Device):
    """Timed by events around many launches, so that the device is never idle between them.

    A contender that waits for the device (its output's size depends on data) is timed with that
    wait: it is part of the call.
    """

    def seconds(self, runners: Sequence[Runner]) -> dict[str, list[float]]:
        launches = {runner.name: self._launches(runner) for runner in runners}
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        events = {runner.name: [] for runner in runners}
        for turn in range(ROUNDS + 1):
            for runner in runners if turn % 2 == 0 else reversed(runners):
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(launches[runner.name]):
                    runner.run(0)
                end.record()
                events[runner.name].append((begin, end))
        self.wait()
        return {
            name: [begin.elapsed_time(end) / 1e3 / launches[name] for begin, end in pairs[1:]]
            for name, pairs in events.items()
        }

    def _launches(self, runner: Runner) -> int:
        """How many launches fill a turn, from one that is timed alone after a warm-up."""
        runner.run(0)
        self.wait()
        start = time.perf_counter()
        runner.run(0)
        self.wait()
        once = time.perf_counter() - start
        return min(max(round(WINDOW_S / once), 1), MOST_LAUNCHES)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def tidy(self) -> None:
        super().tidy()
        torch.cuda.empty_cache()

    def title(self) -> str:
        return torch.cuda.get_device_name()


def device_of(scale: Scale) -> Device:
    """The device a scale names."""
    return Cuda(scale) if scale.device == "cuda" else Cpu(scale)
