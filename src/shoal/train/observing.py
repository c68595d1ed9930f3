"""What is watched next to the metrics of a model: waiting, devices, exchanges, a profile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.config import RunConfig
from shoal.distributed.metrics import AllToAllMetrics
from shoal.errors import ConfigError
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.table.cuda.mapped import mapped_bytes
from shoal.train.learner import Learner
from shoal.train.ranks import Ranks

_log = logging.getLogger("shoal.train")

_WAIT_STEPS, _WARMUP_STEPS, _PROFILED_STEPS = 2, 2, 6


class RunObserver:
    """Share of time that goes into communication, use of the device, exchanges, and a profile.

    Args:
        config: `profile` and the flags of `distributed`.
        ranks: who trains together.
        main: the model whose exchange is looked at.
        on_step: called after each step.

    Raises:
        ConfigError: the folder of the profile cannot be made.
    """

    def __init__(
        self, config: RunConfig, ranks: Ranks, main: Learner, on_step: Callable[[], None]
    ) -> None:
        self._on_step = on_step
        self._ranks = ranks
        self._device = torch.device(config.device)
        self._since_s = self._waited_s = 0.0
        settings = config.distributed
        self._per_slot = settings.enable_alltoall_metrics_for_slot
        self._watches = settings.enable_alltoall_metrics or self._per_slot
        self._main = main
        self._exchanged: AllToAllMetrics | None = None
        self._profile = profiler(config.profile, ranks.rank) if config.profile else None

    def __enter__(self) -> RunObserver:
        self._since_s = time.perf_counter()
        if self._ranks.waiting is not None:
            self._waited_s = self._ranks.waiting.total_s
        if self._watches and self._ranks.many:
            exchange = self._main.tables.exchange
            if isinstance(exchange, AllToAllExchange):
                self._exchanged = AllToAllMetrics(exchange, by_table=self._per_slot)
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._profile.stop()

    def stepped(self) -> None:
        """A step is done."""
        self._on_step()
        if self._profile is not None:
            self._profile.step()

    def scalars(self) -> dict[str, float]:
        """This rank's scalars since the last call; the same names on every rank."""
        now_s, found = time.perf_counter(), {}
        if self._ranks.waiting is not None:
            waited_s = self._ranks.waiting.total_s
            found["time/communication_share"] = (waited_s - self._waited_s) / max(
                now_s - self._since_s, 1e-9
            )
            self._waited_s = waited_s
        self._since_s = now_s
        if self._device.type == "cuda":
            found |= _device_use(self._device)
        if self._main.staleness is not None:
            found |= self._main.staleness.scalars()
        if self._exchanged is not None:
            found |= self._exchanged.scalars()
            if self._per_slot and self._ranks.leads:
                hot = ", ".join(self._exchanged.hot_ids())
                _log.info("hot ids of the last batch on rank 0: %s", hot)
        return found

    def completed(self, scalars: dict[str, float]) -> dict[str, float]:
        """The scalars of a point, means over ranks, with those that follow from them."""
        to = [v for name, v in scalars.items() if name.startswith("alltoall/ids_to_rank/")]
        if to and sum(to):
            scalars = scalars | {"alltoall/imbalance": max(to) * len(to) / sum(to)}
        return scalars


def _device_use(device: torch.device) -> dict[str, float]:
    used = torch.cuda.memory_allocated(device) + mapped_bytes(device)
    found = {"device/memory_bytes": float(used)}
    try:
        found["device/utilisation"] = torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):  # no NVML here, or one that does not answer
        found["device/utilisation"] = float("nan")
    return found


def profiler(folder: str, rank: int) -> torch.profiler.profile:
    """A profile of some steps, written into a folder as rankR.json.

    Raises:
        ConfigError: the folder cannot be made.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got, allowed = f"{folder} ({error.strerror})", "a folder that can be written"
        raise ConfigError("profile", got, allowed, "Set profile=FOLDER.") from error

    def ready(profile: torch.profiler.profile) -> None:
        try:
            profile.export_chrome_trace(str(place / f"rank{rank}.json"))
        except (OSError, RuntimeError) as error:
            _log.warning("no profile in %s: %s", place, error)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(
        wait=_WAIT_STEPS, warmup=_WARMUP_STEPS, active=_PROFILED_STEPS, repeat=1
    )
    return torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=ready)
