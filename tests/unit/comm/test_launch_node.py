"""The environment that Monolith's distribution_utils gives a node for BytePS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.compat.monolith.byteps import apply_environment, interface_address, node_environment
from shoal.errors import ConfigError, LaunchError
from support.launcher_variables import environment_of, mpi, no_network, unlaunched


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield from unlaunched(monkeypatch, caplog)


def test_node_defaults() -> None:
    found = environment_of(mpi(5, 8, 4))
    assert found == {
        "BYTEPS_ALLTOALL_SESSION_SIZE": "3",
        "BYTEPS_FORCE_DISTRIBUTED": "1",
        "BYTEPS_KEY_HASH_FN": "djb2-colocate",
        "BYTEPS_LOCAL_RANK": "1",
        "BYTEPS_LOCAL_SIZE": "4",
        "BYTEPS_LOG_LEVEL": "info",
        "BYTEPS_OMP_THREAD_PER_GPU": "1",
        "BYTEPS_P2P_PARTITION_BYTES": str(2048000 * 128 * 2 // 8),
        "BYTEPS_PARTITION_BYTES": "1024000",
        "BYTEPS_SERVER_DIRECT_RESPONSE": "2",
        "BYTEPS_SOCKET_PATH": "/somewhere/bps_job7_socket_1",
        "BYTEPS_TELEMETRY_ON": "0",
        "BYTEPS_UCX_FORCE_REQ_ORDER": "1",
        "BYTEPS_UCX_SHORT_THRESH": "0",
        "BYTEPS_UUID": "job7",
        "BYTEPS_WORKER_LOCAL_ROOT": "-1",
        "DMLC_ENABLE_UCX": "1",
        "DMLC_NODE_HOST": "10.0.0.5",
        "DMLC_NUM_SERVER": "8",
        "DMLC_NUM_WORKER": "8",
        "DMLC_ROLE": "joint",
        "DMLC_WORKER_ID": "5",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "PSLITE_UCX_RNDV_THRESH": "8192",
        "PSLITE_UCX_TLS": "rc_x,tcp,self,cuda",
        "UCX_RDMA_CM_SOURCE_ADDRESS": "10.0.0.5",
    }


KEPT = {
    "BYTEPS_ALLTOALL_SESSION_SIZE": "5",
    "BYTEPS_KEY_HASH_FN": "naive",
    "BYTEPS_LOG_LEVEL": "warning",
    "BYTEPS_OMP_THREAD_PER_GPU": "4",
    "BYTEPS_P2P_PARTITION_BYTES": "4096",
    "BYTEPS_PARTITION_BYTES": "2048",
    "BYTEPS_SERVER_DIRECT_RESPONSE": "1",
    "BYTEPS_TELEMETRY_ON": "1",
    "BYTEPS_UCX_SHORT_THRESH": "64",
    "BYTEPS_WORKER_LOCAL_ROOT": "0",
    "DMLC_ENABLE_UCX": "0",
    "GLOO_SOCKET_IFNAME": "ib0",
    "NCCL_SOCKET_IFNAME": "ib0",
    "PSLITE_UCX_RNDV_THRESH": "1024",
    "PSLITE_UCX_TLS": "tcp",
}
OVERWRITTEN = {
    "BYTEPS_FORCE_DISTRIBUTED": "0",
    "BYTEPS_LOCAL_RANK": "9",
    "BYTEPS_SOCKET_PATH": "/x",
    "BYTEPS_UCX_FORCE_REQ_ORDER": "0",
    "BYTEPS_UUID": "other",
    "DMLC_NODE_HOST": "1.2.3.4",
    "DMLC_NUM_SERVER": "9",
    "DMLC_NUM_WORKER": "9",
    "DMLC_ROLE": "worker",
    "DMLC_WORKER_ID": "9",
    "UCX_RDMA_CM_SOURCE_ADDRESS": "1.2.3.4",
}


@pytest.mark.parametrize("variable", KEPT)
def test_node_keeps_what_is_set(variable: str) -> None:
    assert environment_of({**mpi(0, 2, 2), variable: KEPT[variable]})[variable] == KEPT[variable]


@pytest.mark.parametrize("variable", OVERWRITTEN)
def test_node_overwrites_what_must_be(variable: str) -> None:
    plain = environment_of(mpi(0, 2, 2))
    assert environment_of({**mpi(0, 2, 2), variable: OVERWRITTEN[variable]}) == plain


def test_ucx_follows_only_what_the_user_chose() -> None:
    found = environment_of({**mpi(0, 2, 2), "PSLITE_UCX_TLS": "tcp", "PSLITE_UCX_RNDV_THRESH": "9"})
    assert (found["UCX_TLS"], found["UCX_RNDV_THRESH"]) == ("tcp", "9")


def test_local_size_of_byteps_goes_first() -> None:
    node = node_environment("u", {**mpi(5, 8, 4), "BYTEPS_LOCAL_SIZE": "2"}, address_of=no_network)
    local = [node.variables[f"BYTEPS_LOCAL_{name}"] for name in ("RANK", "SIZE")]
    assert (local, node.socket_folder.name) == (["1", "2"], "bps_u_socket_2")


def test_what_an_environment_says() -> None:
    node = node_environment("u", mpi(5, 8, 4), address_of=no_network)
    assert (node.uuid, node.rank, node.size, node.node) == ("u", 5, 8, 1)
    assert (node.local_rank, node.local_size) == (1, 4)
    assert (node.interface, node.address) == ("eth0", "10.0.0.5")


@pytest.mark.parametrize(("size", "bytes_"), [(2, "1024000"), (127, "1024000"), (128, "512000")])
def test_partition_bytes(size: int, bytes_: str) -> None:
    found = environment_of(mpi(0, size, 1))
    assert found["BYTEPS_PARTITION_BYTES"] == bytes_
    assert found["BYTEPS_P2P_PARTITION_BYTES"] == str(int(2048000 * 128 * 2 / size))


def test_named_interface() -> None:
    found = environment_of({**mpi(0, 2, 2), "DMLC_INTERFACE": "ib0"})
    assert found["DMLC_NODE_HOST"] == "10.1.0.5"
    assert found["NCCL_SOCKET_IFNAME"] == "=ib0"


@pytest.mark.parametrize(("rank", "nic"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_two_cards_share_a_nic(rank: int, nic: int) -> None:
    environ = {**mpi(rank, 6, 6), "BYTEPS_GPU_NIC_BINDING_MODE": "1", "DMLC_INTERFACE": "ib0"}
    found = environment_of(environ)
    assert found["DMLC_NODE_HOST"] == f"10.0.{nic}.5"
    assert found["UCX_NET_DEVICES"] == f"mlx5_{nic}:1"
    assert found["NCCL_IB_HCA"] == f"=mlx5_{nic}:1"
    assert found["NCCL_SOCKET_IFNAME"] == f"=eth{nic}"
    assert found["BYTEPS_USE_GDR_ALLREDUCE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert "NCCL_NET_GDR_LEVEL" not in found


def test_all_nics() -> None:
    environ = {
        **mpi(2, 4, 4),
        "BYTEPS_GPU_NIC_BINDING_MODE": "1",
        "BYTEPS_WITH_ALL_NICS": "1",
        "BYTEPS_USE_GDR_ALLREDUCE": "0",
    }
    found = environment_of(environ)
    cards = "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1"
    assert found["UCX_NET_DEVICES"] == f"{cards},eth0,eth1,eth2,eth3"
    assert found["NCCL_IB_HCA"] == f"={cards}"
    assert found["NCCL_NET_GDR_LEVEL"] == "LOC"


@pytest.mark.parametrize("way", ["FWD", "BWD"])
@pytest.mark.parametrize("bound", [False, True])
def test_gdr(way: str, bound: bool) -> None:
    environ = {
        **mpi(3, 4, 4),
        f"MONOLITH_WITH_BYTEPS_{way}_GDR": "1",
        "BYTEPS_GPU_NIC_BINDING_MODE": str(int(bound)),
        "BYTEPS_NUMA_ID": "1",
    }
    found = environment_of(environ)
    assert (found["NCCL_NET_GDR_LEVEL"], found["NCCL_NET_GDR_READ"]) == ("PHB", "1")
    wanted = {
        "CUDA_VISIBLE_DEVICES": "3",
        "BYTEPS_PIN_MEMORY": "1",
        "BYTEPS_PIN_MEMORY_CPU": "1",
        "DMLC_NUM_CPU_DEV": "0",
        "DMLC_NUM_GPU_DEV": "1",
    }
    for name, value in wanted.items():
        assert found.get(name) == (value if bound else None)


NODE_REFUSALS = {
    "no launcher": ({}, LaunchError, "OMPI_COMM_WORLD_RANK"),
    "binding mode": (
        {**mpi(0, 2, 2), "BYTEPS_GPU_NIC_BINDING_MODE": "maybe"},
        ConfigError,
        "BYTEPS_GPU_NIC_BINDING_MODE",
    ),
    "no NUMA node": (
        {
            **mpi(0, 2, 2),
            "BYTEPS_GPU_NIC_BINDING_MODE": "1",
            "MONOLITH_WITH_BYTEPS_FWD_GDR": "1",
        },
        ConfigError,
        "BYTEPS_NUMA_ID",
    ),
    "local size": ({**mpi(0, 2, 2), "BYTEPS_LOCAL_SIZE": "two"}, ConfigError, "BYTEPS_LOCAL_SIZE"),
    "no local size": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        LaunchError,
        "BYTEPS_LOCAL_SIZE",
    ),
}


@pytest.mark.parametrize("case", NODE_REFUSALS)
def test_node_refusals(case: str) -> None:
    environ, error, said = NODE_REFUSALS[case]
    with pytest.raises(error, match=said):
        node_environment("u", environ, address_of=no_network)


def test_node_of_a_torchrun_rank() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    node = node_environment("u", {**environ, "MASTER_ADDR": "a"}, address_of=no_network)
    names = ("DMLC_WORKER_ID", "DMLC_NUM_WORKER", "BYTEPS_LOCAL_RANK")
    assert [node.variables[name] for name in names] == ["3", "4", "1"]
    assert node.socket_folder.name == "bps_u_socket_1"


def test_the_system_knows_its_addresses() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'nic9'.*DMLC_INTERFACE"):
        interface_address("nic9")


def test_apply_makes_the_folder_and_sets_the_variables(tmp_path: Path) -> None:
    node = node_environment("u", mpi(0, 2, 2), address_of=no_network, folder=tmp_path)
    assert not node.socket_folder.exists()
    environ: dict[str, str] = {}
    apply_environment(node, environ)
    assert node.socket_folder.is_dir()
    assert environ == dict(node.variables)
    apply_environment(node, environ)
