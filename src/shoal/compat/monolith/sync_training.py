"""Monolith's `distribution_utils` for synchronous training, under its own names."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from shoal.comm import flags as backends
from shoal.comm.collectives import Collectives
from shoal.comm.flags import read_flags
from shoal.comm.launch import init
from shoal.comm.launch_environment import open_mpi
from shoal.compat.monolith.byteps import NodeEnvironment, apply_environment, node_environment
from shoal.errors import DeviceUnavailable, ShoalError
from shoal.pipeline.train_pipeline import RunHook

Config = TypeVar("Config")
Start = Callable[[backends.Backend], backends.Started]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFlags:
    """Monolith's command-line flags that its `distribution_utils` reads.

    Args:
        enable_sync_training: train synchronously, if MPI started the process.
        enable_gpu_training: put the dense model on a GPU.
        num_ps: parameter servers; above 0 device names carry a job and a task.
        gpu_placement_allowed: what Monolith's `device_utils.enable_gpu_training()` switches on.
    """

    enable_sync_training: bool = False
    enable_gpu_training: bool = False
    num_ps: int = 0
    gpu_placement_allowed: bool = False


class _Process:
    """The settings of this process, and what it started."""

    flags = SyncFlags()
    started: backends.Started | None = None


def use_flags(flags: SyncFlags) -> None:
    """Make `flags` the settings of calls that pass none."""
    _Process.flags = flags


def flags_or_settings(flags: SyncFlags | None) -> SyncFlags:
    """`flags`, or the settings of the process."""
    return _Process.flags if flags is None else flags


def get_mpi_rank(environ: Mapping[str, str] | None = None) -> int:
    """OMPI_COMM_WORLD_RANK; 0 with a warning where it is missing."""
    return _or_default("get_mpi_rank", open_mpi(environ).rank, 0)


def get_mpi_local_rank(environ: Mapping[str, str] | None = None) -> int:
    """OMPI_COMM_WORLD_LOCAL_RANK; 0 with a warning where it is missing."""
    return _or_default("get_mpi_local_rank", open_mpi(environ).local_rank, 0)


def get_mpi_size(environ: Mapping[str, str] | None = None) -> int:
    """OMPI_COMM_WORLD_SIZE; 1 with a warning where it is missing."""
    return _or_default("get_mpi_size", open_mpi(environ).size, 1)


def get_mpi_local_size(environ: Mapping[str, str] | None = None) -> int:
    """OMPI_COMM_WORLD_LOCAL_SIZE; 1 with a warning where it is missing."""
    return _or_default("get_mpi_local_size", open_mpi(environ).local_size, 1)


def _or_default(name: str, value: int | None, default: int) -> int:
    if value is None:
        _log.warning("%s use default %d", name, default)
        return default
    return value


def _under_mpi(environ: Mapping[str, str] | None) -> bool:
    return open_mpi(environ).local_rank is not None


def enable_sync_training(
    flags: SyncFlags | None = None, environ: Mapping[str, str] | None = None
) -> bool:
    """Whether this process trains synchronously: the flag is set and Open MPI started it.

    False, too, where OMPI_COMM_WORLD_* cannot be read.
    """
    try:
        return flags_or_settings(flags).enable_sync_training and _under_mpi(environ)
    except ShoalError:
        return False


def get_device_str(
    force_on_cpu: bool = False,
    flags: SyncFlags | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Monolith's name of the device that this process computes on.

    "/device:GPU:0" or "/device:CPU:0" outside synchronous training; in it, "" without parameter
    servers, and with them the chief (rank 0) or worker rank - 1 in front.
    """
    flags = flags_or_settings(flags)
    on_gpu = (flags.enable_gpu_training or flags.gpu_placement_allowed) and not force_on_cpu
    device = f"/device:{'GPU' if on_gpu else 'CPU'}:0"
    if not (_under_mpi(environ) and flags.enable_sync_training):
        return device
    if flags.num_ps <= 0:
        return ""
    rank = get_mpi_rank(environ)
    job, task = ("chief", 0) if rank == 0 else ("worker", rank - 1)
    return f"/job:{job}/replica:0/task:{task}{device}"


def try_init_cuda(
    flags: SyncFlags | None = None,
    environ: MutableMapping[str, str] | None = None,
    *,
    start: Start = backends.start,
) -> None:
    """Show this process its own GPU, and start the collectives if it trains synchronously.

    Under Open MPI and where CUDA_VISIBLE_DEVICES is not set, sets it to the local rank and
    CUDA_DEVICE_ORDER to PCI_BUS_ID; so call this before anything uses CUDA. What cannot start is
    logged, as in Monolith.
    """
    environ = os.environ if environ is None else environ
    if not _under_mpi(environ):
        return
    if "CUDA_VISIBLE_DEVICES" not in environ:
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environ["CUDA_VISIBLE_DEVICES"] = str(get_mpi_local_rank(environ))
    if _Process.started is not None or not flags_or_settings(flags).enable_sync_training:
        return
    chosen = backends.read_flags(environ)
    if not (chosen.byteps or chosen.horovod or chosen.optimized_horovod):
        _log.info("no allreduce tools found! Set MONOLITH_WITH_HOROVOD=1 or MONOLITH_WITH_BYTEPS=1")
        return
    try:
        _Process.started = start(backends.choose(chosen))
    except (ImportError, ShoalError) as error:
        _log.info("%s", error)


def bps_init(uuid: str, *, start: Start = backends.start) -> NodeEnvironment:
    """Set up this node's communication environment, start the collectives, and return the former.

    Raises:
        LaunchError, ConfigError: as `node_environment`; nothing is set then.
        CollectiveFailed: the other ranks did not come within the timeout.
    """
    node = node_environment(uuid)
    apply_environment(node)
    if _Process.started is None:
        _Process.started = start(backends.choose(backends.read_flags()))
    return node


def init_sync_train_and_update_conf(config: Config, *, start: Start = backends.start) -> Config:
    """Start the collectives once, and fit a training configuration to this rank.

    Sets num_ps 0, reorder_fids_in_data_pipeline, index (the rank), num_workers (the ranks) and no
    enable_variable_partition. The first call gives each rank a model_dir of its own,
    model_dir/uuid/index-<rank>, unless merge_sync_training_ckpt is set.

    Args:
        config: has these fields and uuid, or is a dict of them. A frozen dataclass is copied,
            anything else changed.
        start: starts what was chosen.

    Returns:
        The changed configuration; as it was, after a warning, where the backend is missing.
    """
    _log.info("Entering synchronous training.")
    given: Any = config
    first = _Process.started is None
    try:
        if first and backends.read_flags().byteps:
            bps_init(_of(given, "uuid"), start=start)
        elif first:
            _Process.started = start(backends.choose(backends.read_flags()))
    except (ImportError, DeviceUnavailable) as error:
        _log.warning("init_sync_train_and_update_conf: no backend: %s", error)
        return config
    assert _Process.started is not None
    changes: dict[str, Any] = {
        "num_ps": 0,
        "reorder_fids_in_data_pipeline": True,
        "index": _Process.started.rank,
        "num_workers": _Process.started.size,
        "enable_variable_partition": False,
    }
    if first and not _of(given, "merge_sync_training_ckpt"):
        own = f"index-{_Process.started.rank:04}"
        changes["model_dir"] = os.path.join(_of(given, "model_dir"), _of(given, "uuid"), own)
    return _changed(config, changes)


def _of(config: Any, name: str) -> Any:
    """A field, or what a plain dict has under its name."""
    return config[name] if isinstance(config, MutableMapping) else getattr(config, name)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    given: Any = config
    parameters = getattr(given, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        copied: Config = dataclasses.replace(given, **changes)
        return copied
    if isinstance(given, MutableMapping):
        given.update(changes)
        return config
    for name, value in changes.items():
        setattr(given, name, value)
    return config


_log = logging.getLogger("shoal.comm")

_GDR_MEMORY_FRACTION = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """TensorFlow's GPU options that Monolith sets.

    Args:
        allow_growth: take memory as it is needed. torch always does.
        per_process_gpu_memory_fraction: share of the GPU's memory that this process may take;
            None is all. Rows of tables take no more when they and what torch holds are that much;
            torch itself counts only what it holds.
        visible_device_list: number of the one GPU that it uses; "" leaves it open.
        force_gpu_compatible: pin host buffers that travel to the GPU.
    """

    allow_growth: bool = False
    per_process_gpu_memory_fraction: float | None = None
    visible_device_list: str = ""
    force_gpu_compatible: bool = False


def update_session_config_for_gpu(
    config: SessionConfig, flags: SyncFlags | None = None, environ: Mapping[str, str] | None = None
) -> SessionConfig:
    """A configuration that fits this rank.

    In synchronous training the visible GPU is the local rank, and MONOLITH_FORCE_GPU_COMPATIBLE
    (default 1) pins host buffers. Under BytePS with a GDR flag a process may take 0.4 of
    the GPU and does not grow, since memory is registered ahead; otherwise memory grows.

    Raises:
        ConfigError: a backend flag with a value that it cannot have.
    """
    if not enable_sync_training(flags, environ):
        return replace(config, allow_growth=True)
    chosen = read_flags(environ)
    if chosen.force_gpu_compatible:
        config = replace(config, force_gpu_compatible=True)
        _log.info("set force_gpu_compatible=True")
    config = replace(config, visible_device_list=str(open_mpi(environ).local_rank))
    if not (chosen.byteps and chosen.gdr):
        return replace(config, allow_growth=True)
    return replace(config, allow_growth=False, per_process_gpu_memory_fraction=_GDR_MEMORY_FRACTION)


def apply_session_config(config: SessionConfig) -> torch.device | None:
    """Make torch follow a configuration: its GPU and its share of memory.

    A process that sees one GPU takes that one, whatever its number on the host.

    Returns:
        The GPU, None where there is no CUDA.
    """
    if not torch.cuda.is_available():
        return None
    number = int(config.visible_device_list or 0)
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else number)
    torch.cuda.set_device(device)
    if config.per_process_gpu_memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(config.per_process_gpu_memory_fraction, device)
    return device


TELEMETRY_STEPS = 50


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
    """Logs the run's counters every `interval` steps, on rank 0.

    Args:
        read: figures by name; None reports the pace only.
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
        telemetry: gives the figures to report, by name.

    Raises:
        ConfigError: a backend flag with a value that it cannot have.
    """
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
