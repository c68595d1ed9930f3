"""How a process uses its card: Monolith's `update_session_config_for_gpu` as a value."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shoal.comm.backends import read_flags
from shoal.comm.launchers import open_mpi
from shoal.comm.sync_training import SyncFlags, enable_sync_training

__all__ = ["SessionConfig", "apply_session_config", "update_session_config_for_gpu"]

_log = logging.getLogger("shoal.comm")

_GDR_MEMORY_FRACTION = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """TensorFlow's GPU options that Monolith sets.

    Args:
        allow_growth: take memory as it is needed. torch always does.
        per_process_gpu_memory_fraction: share of the card's memory that this process may take;
            None is all.
        visible_device_list: number of the one card that it uses; "" leaves it open.
        force_gpu_compatible: page-lock host buffers that travel to the card.
    """

    allow_growth: bool = False
    per_process_gpu_memory_fraction: float | None = None
    visible_device_list: str = ""
    force_gpu_compatible: bool = False


def update_session_config_for_gpu(
    config: SessionConfig,
    flags: SyncFlags | None = None,
    environ: Mapping[str, str] | None = None,
) -> SessionConfig:
    """A configuration that fits this rank.

    In synchronous training the visible card is the local rank, and MONOLITH_FORCE_GPU_COMPATIBLE
    (default 1) page-locks host buffers. Under BytePS with a GDR flag a process may take 0.4 of
    the card and does not grow, since memory is registered ahead; otherwise memory grows.

    Raises:
        ConfigError: a backend flag with a value that it cannot have.
    """
    environ = os.environ if environ is None else environ
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
    """Make torch follow a configuration: its card and its share of memory.

    A process that sees one card takes that one, whatever its number on the host.

    Returns:
        The card, None where there is no CUDA.
    """
    if not torch.cuda.is_available():
        return None
    number = int(config.visible_device_list or 0)
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else number)
    torch.cuda.set_device(device)
    if config.per_process_gpu_memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(config.per_process_gpu_memory_fraction, device)
    return device
