"""The communication environment of a node, as Monolith's `bps_init` sets it up, as a value."""

from __future__ import annotations

import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from shoal.comm.flags import read_flags
from shoal.comm.launch_environment import choice, detect, open_mpi, whole
from shoal.errors import ConfigError, LaunchError

GPUS_PER_NIC = 2
_ALL_NICS = "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,eth0,eth1,eth2,eth3"
_BUFFER_BYTES = 2_048_000 * 128 * 2
_MANY_RANKS = 128
_SIOCGIFADDR = 0x8915

# Variables that keep a value which is there already.
_DEFAULTS: Mapping[str, str] = {
    "BYTEPS_ALLTOALL_SESSION_SIZE": "3",
    "PSLITE_UCX_TLS": "rc_x,tcp,self,cuda",
    "DMLC_ENABLE_UCX": "1",
    "BYTEPS_OMP_THREAD_PER_GPU": "1",
    "BYTEPS_TELEMETRY_ON": "0",
    "BYTEPS_LOG_LEVEL": "info",
    "BYTEPS_SERVER_DIRECT_RESPONSE": "2",
    "BYTEPS_KEY_HASH_FN": "djb2-colocate",
    "BYTEPS_UCX_SHORT_THRESH": "0",
    "PSLITE_UCX_RNDV_THRESH": "8192",
    "BYTEPS_WORKER_LOCAL_ROOT": "-1",
}
# Variables that are set whatever was there.
_FIXED: Mapping[str, str] = {
    "DMLC_ROLE": "joint",
    "BYTEPS_FORCE_DISTRIBUTED": "1",
    "BYTEPS_UCX_FORCE_REQ_ORDER": "1",
}


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """Where a rank stands and what its communication libraries should read.

    Args:
        uuid: of the job.
        rank, size: this rank among all.
        local_rank, local_size: among those of its node.
        node: its number, rank // local_size.
        interface, address: network interface and its IPv4 address.
        socket_folder: local sockets of this job's ranks on this node.
        variables: what `apply_environment` sets.
    """

    uuid: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    interface: str
    address: str
    socket_folder: Path
    variables: Mapping[str, str]


def node_environment(
    uuid: str,
    environ: Mapping[str, str] | None = None,
    *,
    address_of: Callable[[str], str] | None = None,
    folder: Path | None = None,
) -> NodeEnvironment:
    """Compute a node's communication environment; changes nothing.

    With BYTEPS_GPU_NIC_BINDING_MODE=0 (default) all GPUs use DMLC_INTERFACE (default eth0); else
    GPUs 0 and 1 use eth0, 2 and 3 eth1, and so on, and the GDR flags show a process its GPU only.

    Args:
        uuid: of the job: distinguishes those that share a node.
        environ: variables to read; the process's own when left out.
        address_of: IPv4 address of an interface; asks the operating system when left out.
        folder: parent of the socket folder; the folder of temporary files when left out.

    Raises:
        LaunchError: no launcher says rank and size.
        ConfigError: a value that a variable cannot have, a missing BYTEPS_NUMA_ID, or an
            interface that is not here.
    """
    environ = os.environ if environ is None else environ
    rank, size, local_size = _place(environ)
    node, local_rank = divmod(rank, local_size)
    where = Path(tempfile.gettempdir()) if folder is None else folder
    socket_folder = where / f"bps_{uuid}_socket_{node}"
    variables = {name: environ.get(name, value) for name, value in _DEFAULTS.items()}
    variables |= _FIXED
    nic, bound = _nic(environ, local_rank)
    variables |= bound
    address = (address_of or interface_address)(nic)
    variables |= {
        "UCX_RDMA_CM_SOURCE_ADDRESS": address,
        "DMLC_NODE_HOST": address,
        "DMLC_WORKER_ID": str(rank),
        "DMLC_NUM_WORKER": str(size),
        "DMLC_NUM_SERVER": str(size),
        "BYTEPS_UUID": uuid,
        "BYTEPS_LOCAL_RANK": str(local_rank),
        "BYTEPS_LOCAL_SIZE": str(local_size),
        "BYTEPS_SOCKET_PATH": str(socket_folder),
    }
    bytes_by_name = {
        "BYTEPS_P2P_PARTITION_BYTES": _BUFFER_BYTES // size,
        "BYTEPS_PARTITION_BYTES": 1_024_000 if size < _MANY_RANKS else 512_000,
    }
    variables |= {name: environ.get(name) or str(value) for name, value in bytes_by_name.items()}
    variables |= _mapped(environ, nic, variables)
    return NodeEnvironment(
        uuid, rank, size, local_rank, local_size, node, nic, address, socket_folder, variables
    )


def apply_environment(
    node: NodeEnvironment, environ: MutableMapping[str, str] | None = None
) -> None:
    """Make the socket folder and set the variables, in the process's environment by default."""
    environ = os.environ if environ is None else environ
    node.socket_folder.mkdir(parents=True, exist_ok=True)
    environ.update(node.variables)


def interface_address(interface: str) -> str:
    """IPv4 address of a network interface of this host, say of "eth0".

    Raises:
        ConfigError: no such interface, or it has no IPv4 address.
    """
    if sys.platform != "linux":
        raise _no_address(interface, f"{sys.platform}, where it cannot be asked for")
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise _no_address(interface, error.strerror) from error
    return socket.inet_ntoa(answer[20:24])


def _no_address(interface: str, got: object) -> ConfigError:
    here = ", ".join(name for _, name in socket.if_nameindex())
    what = f"IPv4 address of network interface {interface!r}"
    allowed = f"an interface of this host that has one, of {here}"
    return ConfigError(what, got, allowed, "Name it in DMLC_INTERFACE.")


def _place(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, size and local size; BYTEPS_LOCAL_SIZE goes before the launcher's."""
    mpi = open_mpi(environ)
    if mpi.rank is not None and mpi.size is not None:
        rank, size, local_size = mpi.rank, mpi.size, mpi.local_size
    else:
        launched = detect(environ)
        if launched.launcher == "single":
            what = "rank and size of the node's environment"
            got = "no OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"
            allowed = "a process started by mpirun, torchrun or srun"
            raise LaunchError(what, got, allowed, "Start it with mpirun -n <ranks>.")
        rank, size, local_size = launched.rank, launched.world_size, launched.local_world_size
    local_size = whole(environ, "BYTEPS_LOCAL_SIZE", local_size or 0)
    if local_size < 1:
        raise LaunchError(
            "ranks of this node",
            got=local_size,
            allowed="OMPI_COMM_WORLD_LOCAL_SIZE or BYTEPS_LOCAL_SIZE, 1 or more",
            remedy="Set BYTEPS_LOCAL_SIZE to the number of ranks on each node.",
        )
    return rank, size, local_size


def _nic(environ: Mapping[str, str], local_rank: int) -> tuple[str, dict[str, str]]:
    """The interface of a local rank, and what binding it to one sets."""
    if not choice(environ, "BYTEPS_GPU_NIC_BINDING_MODE", 0):
        return environ.get("DMLC_INTERFACE") or "eth0", {}
    number = local_rank // GPUS_PER_NIC
    bound = {"BYTEPS_USE_GDR_ALLREDUCE": str(choice(environ, "BYTEPS_USE_GDR_ALLREDUCE", 1))}
    if read_flags(environ).gdr:
        if not environ.get("BYTEPS_NUMA_ID"):
            raise ConfigError(
                "BYTEPS_NUMA_ID",
                got="nothing",
                allowed="the NUMA node of this rank's GPU, with the GDR flags",
                remedy="Set it per rank, or unset MONOLITH_WITH_BYTEPS_FWD_GDR and _BWD_GDR.",
            )
        bound |= {
            "CUDA_VISIBLE_DEVICES": str(local_rank),
            "BYTEPS_PIN_MEMORY": "1",
            "BYTEPS_PIN_MEMORY_CPU": str(choice(environ, "BYTEPS_PIN_MEMORY_CPU", 1)),
            "DMLC_NUM_CPU_DEV": "0",
            "DMLC_NUM_GPU_DEV": "1",
        }
    every_nic = choice(environ, "BYTEPS_WITH_ALL_NICS", 0)
    bound["UCX_NET_DEVICES"] = _ALL_NICS if every_nic else f"mlx5_{number}:1"
    return f"eth{number}", bound


def _mapped(
    environ: Mapping[str, str], interface: str, variables: Mapping[str, str]
) -> dict[str, str]:
    """What NCCL, Gloo and UCX read, unless it is set already."""
    mapped = {
        "NCCL_SOCKET_IFNAME": f"={interface}",  # "=": this one, not all that begin so
        "GLOO_SOCKET_IFNAME": interface,
    }
    # BytePS's own defaults would take shared memory away from an MPI over UCX: chosen ones only.
    for theirs, ours in (
        ("PSLITE_UCX_TLS", "UCX_TLS"),
        ("PSLITE_UCX_RNDV_THRESH", "UCX_RNDV_THRESH"),
    ):
        if environ.get(theirs):
            mapped[ours] = environ[theirs]
    cards = [
        name for name in variables.get("UCX_NET_DEVICES", "").split(",") if name.startswith("mlx")
    ]
    if cards:
        mapped["NCCL_IB_HCA"] = "=" + ",".join(cards)
    if variables.get("BYTEPS_USE_GDR_ALLREDUCE") == "0":
        mapped["NCCL_NET_GDR_LEVEL"] = "LOC"  # never
    elif read_flags(environ).gdr:
        mapped["NCCL_NET_GDR_LEVEL"] = "PHB"  # within a NUMA node
        mapped["NCCL_NET_GDR_READ"] = "1"
    return {name: environ.get(name, value) for name, value in mapped.items()}
