"""Variables that launchers set, and those that a node is given for BytePS."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import comm
from shoal.comm.flags import FLAGS
from shoal.compat.monolith import sync_training
from shoal.compat.monolith.byteps import node_environment
from shoal.compat.monolith.sync_training import SyncFlags


def mpi(rank: int, size: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


def no_network(interface: str) -> str:
    return {"eth0": "10.0.0.5", "eth1": "10.0.1.5", "eth2": "10.0.2.5", "ib0": "10.1.0.5"}[
        interface
    ]


def environment_of(environ: dict[str, str], folder: Path = Path("/somewhere")) -> dict[str, str]:
    node = node_environment("job7", environ, address_of=no_network, folder=folder)
    return dict(node.variables)


def unlaunched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A process that no launcher started, until this ends."""
    monkeypatch.setattr(sync_training._Process, "flags", SyncFlags())
    monkeypatch.setattr(sync_training._Process, "started", None)
    for name in (*mpi(0, 1, 1), *(flag.variable for flag in FLAGS.values())):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO, logger="shoal.comm")
    yield
    comm.shutdown()
