"""How ranks start and talk: launchers, groups, collectives, and Monolith's names for them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shoal.comm.backends.shared_memory import SharedMemoryCollectives
from shoal.comm.backends.torch import TorchCollectives
from shoal.comm.benchmarks import bps_comm_benchmark, byteps_benchmark_a2a, byteps_benchmark_ar
from shoal.comm.collectives import (
    Collectives,
    LocalCollectives,
    Part,
    Pending,
    PendingSizes,
    ReduceOp,
    Sizes,
)
from shoal.comm.launch import current, early_control, init, shutdown
from shoal.comm.launch_environment import Launch, detect
from shoal.comm.mesh import Mesh

__all__ = [
    "Collectives",
    "Launch",
    "LocalCollectives",
    "Mesh",
    "Part",
    "Pending",
    "PendingSizes",
    "ReduceOp",
    "SessionConfig",
    "SharedMemoryCollectives",
    "Sizes",
    "SyncFlags",
    "TorchCollectives",
    "bps_comm_benchmark",
    "bps_init",
    "byteps_benchmark_a2a",
    "byteps_benchmark_ar",
    "current",
    "detect",
    "early_control",
    "enable_sync_training",
    "get_device_str",
    "get_mpi_local_rank",
    "get_mpi_local_size",
    "get_mpi_rank",
    "get_mpi_size",
    "get_sync_run_hooks",
    "init",
    "init_sync_train_and_update_conf",
    "shutdown",
    "try_init_cuda",
    "update_session_config_for_gpu",
    "use_flags",
]


def __getattr__(name: str) -> Any:
    """Monolith's names, from `shoal.compat.monolith.sync_training`, a room above this one."""
    if name in __all__:
        return getattr(import_module("shoal.compat.monolith.sync_training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
