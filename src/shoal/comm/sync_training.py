"""Monolith's `distribution_utils` for synchronous training, under its own names.

Flags are values: each function takes `SyncFlags` and an environment, and reads the settings of
`use_flags` and the process's environment where they are left out.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.comm import backends
from shoal.comm.byteps_environment import NodeEnvironment, apply_environment, node_environment
from shoal.comm.launchers import open_mpi
from shoal.errors import DeviceUnavailable, ShoalError

__all__ = [
    "SyncFlags",
    "bps_init",
    "enable_sync_training",
    "flags_or_settings",
    "get_device_str",
    "get_mpi_local_rank",
    "get_mpi_local_size",
    "get_mpi_rank",
    "get_mpi_size",
    "init_sync_train_and_update_conf",
    "try_init_cuda",
    "use_flags",
]

_log = logging.getLogger("shoal.comm")

Config = TypeVar("Config")
Start = Callable[[backends.Choice], backends.Started]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFlags:
    """Monolith's command-line flags that its `distribution_utils` reads.

    Args:
        enable_sync_training: train synchronously, if MPI started the process.
        enable_gpu_training: put the dense model on a card.
        num_ps: parameter servers; above 0 device names carry a job and a task.
        gpu_placement_allowed: what Monolith's `device_utils.enable_gpu_training()` switches on.
    """

    enable_sync_training: bool = False
    enable_gpu_training: bool = False
    num_ps: int = 0
    gpu_placement_allowed: bool = False


class _Process:
    """What this process was told, and what it started."""

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
    """Show this process its own card, and start the collectives if it trains synchronously.

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
        config: has these fields and uuid. A frozen dataclass is copied, anything else changed.
        start: starts what was chosen.

    Returns:
        The changed configuration; as it was, after a warning, where the backend is missing.
    """
    _log.info("Entering synchronous training.")
    given: Any = config
    first = _Process.started is None
    try:
        if first and backends.read_flags().byteps:
            bps_init(given.uuid, start=start)
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
    if first and not given.merge_sync_training_ckpt:
        own = f"index-{_Process.started.rank:04}"
        changes["model_dir"] = os.path.join(given.model_dir, given.uuid, own)
    return _changed(config, changes)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    given: Any = config
    parameters = getattr(given, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        copied: Config = dataclasses.replace(given, **changes)
        return copied
    for name, value in changes.items():
        setattr(given, name, value)
    return config
