"""What a synchronous run does around its steps: Monolith's `get_sync_run_hooks`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from shoal.comm.backends import read_flags
from shoal.comm.collectives import Collectives
from shoal.comm.launch import init
from shoal.comm.launchers import open_mpi
from shoal.comm.sync_training import SyncFlags, enable_sync_training

__all__ = ["BroadcastInitialState", "RunHook", "TelemetryReport", "get_sync_run_hooks"]

_log = logging.getLogger("shoal.comm")

TELEMETRY_STEPS = 50


class RunHook(Protocol):
    """Called by a training loop: once with the model before the first step, then after each."""

    def begin(self, module: torch.nn.Module) -> None:
        """Before the first step."""
        ...

    def after_step(self, step: int) -> None:
        """After step number `step`, which counts from 1."""
        ...


class BroadcastInitialState:
    """Gives every rank the parameters and buffers of rank 0 before the first step.

    Args:
        collectives: of all ranks, on the module's device; those of `shoal.comm.init` by default,
            made when it is needed.
        source: the rank whose state is given.
    """

    def __init__(self, collectives: Collectives | None = None, source: int = 0) -> None:
        self._collectives = collectives
        self._source = source

    def begin(self, module: torch.nn.Module) -> None:
        """Overwrite the module's state with rank `source`'s."""
        own = self._collectives is None
        collectives = self._collectives or init().collectives("initial state")
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in named.items():
            collectives.broadcast(tensor.data, self._source, what=f"initial {name}")
        if own:
            collectives.close()

    def after_step(self, step: int) -> None:
        """Nothing."""


class TelemetryReport:
    """Logs what the run tells about itself every `interval` steps, on rank 0.

    Args:
        read: figures by name, say `Telemetry.snapshot`; None reports the pace only.
        interval: steps between two reports.
        rank: of this process.
        clock: seconds.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, float]] | None = None,
        interval: int = TELEMETRY_STEPS,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._rank, self._clock = read, rank, clock
        self.interval = interval
        self._last_step = 0
        self._last_s = clock()

    def begin(self, module: torch.nn.Module) -> None:
        """Start the clock."""
        self._last_s = self._clock()

    def after_step(self, step: int) -> None:
        """Log, if `interval` steps went by since the last time."""
        if step < self._last_step + self.interval:
            return
        now_s = self._clock()
        if self._rank == 0:
            pace = (step - self._last_step) / max(now_s - self._last_s, 1e-9)
            figures = {} if self._read is None else self._read()
            said = "".join(f", {name} {value:g}" for name, value in sorted(figures.items()))
            _log.info("step %d: %.4g steps/s%s", step, pace, said)
        self._last_step, self._last_s = step, now_s


def get_sync_run_hooks(
    is_full_sync: bool = False,
    *,
    flags: SyncFlags | None = None,
    environ: Mapping[str, str] | None = None,
    collectives: Collectives | None = None,
    telemetry: Callable[[], Mapping[str, float]] | None = None,
) -> list[RunHook]:
    """Hooks of a synchronous run.

    None outside synchronous training, nor with MONOLITH_WITH_BYTEPS_BCAST=-1 under BytePS.
    Otherwise the broadcast of the initial state; and telemetry every 50 steps where BytePS's
    broadcast is chosen (MONOLITH_WITH_BYTEPS=1, _BCAST not 0) and all is synchronous.

    Args:
        is_full_sync: dense and sparse are both synchronous.
        flags, environ: the process's when left out.
        collectives: of the broadcast; see `BroadcastInitialState`.
        telemetry: figures to report, say `Telemetry.snapshot`.

    Raises:
        ConfigError: a backend flag with a value that it cannot have.
    """
    environ = os.environ if environ is None else environ
    if not enable_sync_training(flags, environ):
        return []
    chosen = read_flags(environ)
    if chosen.byteps and chosen.byteps_bcast == -1:
        return []
    hooks: list[RunHook] = [BroadcastInitialState(collectives)]
    if chosen.byteps and chosen.byteps_bcast:
        _log.info("broadcast of initial state in BytePS's place")
        if is_full_sync:
            rank = open_mpi(environ).rank or 0
            hooks.append(TelemetryReport(telemetry, TELEMETRY_STEPS, rank=rank))
    return hooks
