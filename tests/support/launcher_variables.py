"""Variables that launchers set, and those that a node is given for BytePS."""

from __future__ import annotations

from pathlib import Path

from shoal.comm.byteps_environment import node_environment


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
