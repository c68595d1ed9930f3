"""Which shard serves a device, and whether the device is here."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from shoal.errors import ConfigError, DeviceUnavailable
from shoal.table.shard import Shard
from shoal.table.spec import HostRows, TableSpec
from shoal.table.values import AdmissionState, RowChunk

_KNOWN = "cpu, cuda, cuda:N"


def make_shard(
    specs: Sequence[TableSpec],
    *,
    seed: int = 0,
    device: str = "cpu",
    host_rows: HostRows | None = None,
) -> Shard:
    """Make the shard that hosts some tables on a device: "cpu", "cuda" or "cuda:N".

    host_rows: keep the rows of a GPU's tables in host memory; None: on the device.

    Raises:
        ConfigError: no such device, or host_rows on a CPU.
        DeviceUnavailable: torch finds no such GPU, or Triton is not installed.
    """
    where = _parsed(device)
    # Each shard is imported here only: specs and rules work where its machinery is missing.
    if where.type == "cpu":
        if host_rows is not None:
            raise ConfigError(
                "host_rows",
                got=f"{host_rows} with device {device!r}",
                allowed="a GPU's tables: on a CPU, rows are in host memory anyway",
                remedy="Leave host_rows out, or choose device='cuda'.",
            )
        from shoal.table.cpu.shard import CpuShard

        return CpuShard(specs, seed=seed)
    if small := [spec.name for spec in specs if spec.dtype == "int8"]:
        raise ConfigError(
            "int8 rows",
            got=f"tables {small} on {device}",
            allowed="tables on a CPU",
            remedy="Serve them from a CPU, or as float16.",
        )
    missing = missing_device(where)
    if missing is not None:
        raise missing
    cuda = importlib.import_module("shoal.table.cuda.shard")
    return cast(Shard, cuda.CudaShard(specs, seed=seed, device=device, host_rows=host_rows))


_Made = tuple[type[Any], Sequence[TableSpec], int, str, Mapping[str, Any]]


def _made(shard: Shard, specs: Sequence[TableSpec]) -> _Made:
    """What a shard of such tables is made of: kind, tables, seed, device and settings."""
    return type(shard), specs, shard.seed, str(shard.device), getattr(shard, "settings", {})


def _remade(made: _Made) -> Shard:
    kind, specs, seed, device, settings = made
    # Kinds that live on one device only do not ask for it.
    asks = "device" in inspect.signature(kind).parameters
    named = {"device": device} if asks else {}
    return cast(Shard, kind(specs, seed=seed, **named, **settings))


def shard_like(shard: Shard, specs: Sequence[TableSpec]) -> Shard:
    """An empty shard of other tables, otherwise as a given one."""
    return _remade(_made(shard, specs))


def shard_copied(shard: Shard) -> tuple[Any, ...]:
    """How pickle, deepcopy and torch.save carry a shard: its rows and counts; no tickets."""
    every = range(len(shard.specs))
    rows, admission = [shard.export(k) for k in every], [shard.admission_state(k) for k in every]
    return _copied, (_made(shard, shard.specs), shard.last_step, rows, admission)


def _copied(
    made: _Made, last_step: int, rows: Sequence[RowChunk], admission: Sequence[AdmissionState]
) -> Shard:
    shard = _remade(made)
    shard.last_step = last_step
    for k, chunk in enumerate(rows):
        shard.load(k, chunk)
    for k, state in enumerate(admission):
        shard.load_admission_state(k, state)
    return shard


def resolve_device(device: str) -> str:
    """The device that "auto" means here: "cuda" where tables can live on it, else "cpu".

    Other names are returned as they are.
    """
    if device != "auto":
        return device
    return "cpu" if missing_device(torch.device("cuda")) is not None else "cuda"


def _parsed(device: str) -> torch.device:
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        remedy = "Name the kind of device, and the number of a GPU if there are several."
        got = repr(device)
        raise ConfigError("device of a table", got=got, allowed=_KNOWN, remedy=remedy)
    return where


def missing_device(where: torch.device) -> DeviceUnavailable | None:
    """What a CUDA shard would lack here; None: nothing."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            got = f"torch {torch.__version__}, a build without CUDA"
            remedy = "Install a CUDA build of torch (pytorch.org says which), or use device='cpu'."
        else:
            got = f"torch for CUDA {torch.version.cuda} that finds no GPU"
            remedy = "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or use device='cpu'."
        return _unavailable(where, got, "torch with a CUDA device", remedy)
    count = torch.cuda.device_count()
    if where.index is not None and where.index >= count:
        allowed = ", ".join(f"cuda:{index}" for index in range(count))
        return _unavailable(where, f"{count} GPUs", allowed, "Name one of those.")
    if importlib.util.find_spec("triton") is None:
        remedy = "pip install triton, or use device='cpu'."
        return _unavailable(where, "no Triton", "torch and Triton", remedy)
    return None


def _unavailable(where: torch.device, got: str, allowed: str, remedy: str) -> DeviceUnavailable:
    what = f"tables on device {str(where)!r}"
    return DeviceUnavailable(what, got=got, allowed=allowed, remedy=remedy)
