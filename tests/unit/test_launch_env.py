"""Monolith's distribution_utils: every variable, flag and default, over a matrix of both."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal import comm
from shoal.comm import sync_training
from shoal.comm.backends import FLAGS, BackendFlags, Choice, Started, choose, read_flags, start
from shoal.comm.benchmarks import benchmark_settings
from shoal.comm.byteps_environment import apply_environment, interface_address, node_environment
from shoal.comm.collectives import LocalCollectives
from shoal.comm.run_hooks import BroadcastInitialState, TelemetryReport
from shoal.comm.session import SessionConfig, apply_session_config
from shoal.comm.sync_training import SyncFlags
from shoal.errors import ConfigError, LaunchError

SYNC = SyncFlags(enable_sync_training=True)
LOCAL_RANK = {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def product(*values: Iterable[object]) -> list[tuple[object, ...]]:
    return list(itertools.product(*values))


def mpi(rank: int, size: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(sync_training._Process, "flags", SyncFlags())
    monkeypatch.setattr(sync_training._Process, "started", None)
    for name in (*mpi(0, 1, 1), *(flag.variable for flag in FLAGS.values())):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO, logger="shoal.comm")
    yield
    comm.shutdown()


MPI_NUMBERS = {
    "get_mpi_rank": ("OMPI_COMM_WORLD_RANK", 0),
    "get_mpi_local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK", 0),
    "get_mpi_size": ("OMPI_COMM_WORLD_SIZE", 1),
    "get_mpi_local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE", 1),
}


@pytest.mark.parametrize("name", MPI_NUMBERS)
def test_mpi_numbers(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, (variable, default) = getattr(comm, name), MPI_NUMBERS[name]
    assert function({variable: "3"}) == 3
    assert not caplog.records
    assert function({}) == default
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert f"{name} use default {default}" in caplog.text
    monkeypatch.setenv(variable, "4")
    assert function() == 4
    with pytest.raises(LaunchError, match=variable):
        function({variable: "many"})


@pytest.mark.parametrize(("flag", "under_mpi"), product((False, True), (False, True)))
def test_enable_sync_training(flag: bool, under_mpi: bool) -> None:
    flags = SyncFlags(enable_sync_training=flag)
    environ = LOCAL_RANK if under_mpi else {}
    assert comm.enable_sync_training(flags, environ) is (flag and under_mpi)


def test_enable_sync_training_is_false_where_it_cannot_tell() -> None:
    assert comm.enable_sync_training(SYNC, {"OMPI_COMM_WORLD_LOCAL_RANK": "x"}) is False


def test_flags_default_to_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    assert comm.enable_sync_training() is False
    comm.use_flags(SYNC)
    assert comm.enable_sync_training() is True


@pytest.mark.parametrize(
    ("force", "gpu", "allowed", "sync", "num_ps", "rank"),
    product((False, True), (False, True), (False, True), (False, True), (0, 2), (None, 0, 1, 3)),
)
def test_device_str(
    force: bool, gpu: bool, allowed: bool, sync: bool, num_ps: int, rank: int | None
) -> None:
    flags = SyncFlags(
        enable_sync_training=sync,
        enable_gpu_training=gpu,
        num_ps=num_ps,
        gpu_placement_allowed=allowed,
    )
    found = comm.get_device_str(force, flags, {} if rank is None else mpi(rank, 4, 4))
    device = f"/device:{'GPU' if (gpu or allowed) and not force else 'CPU'}:0"
    if rank is None or not sync:
        assert found == device
    elif not num_ps:
        assert found == ""
    else:
        where = {
            0: "/job:chief/replica:0/task:0",
            1: "/job:worker/replica:0/task:0",
            3: "/job:worker/replica:0/task:2",
        }
        assert found == where[rank] + device


class Starts:
    """Stands in for the start of a backend."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.choices: list[Choice] = []

    def __call__(self, choice: Choice) -> Started:
        self.choices.append(choice)
        if self.error is not None:
            raise self.error
        return Started(choice.backend, 2, 4)


@pytest.mark.parametrize("visible", [None, "5"])
def test_try_init_cuda_shows_the_card_of_the_local_rank(visible: str | None) -> None:
    environ = dict(LOCAL_RANK)
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    starts = Starts()
    comm.try_init_cuda(SyncFlags(), environ, start=starts)
    assert environ["CUDA_VISIBLE_DEVICES"] == (visible or "1")
    assert environ.get("CUDA_DEVICE_ORDER") == (None if visible else "PCI_BUS_ID")
    assert not starts.choices


def test_try_init_cuda_outside_mpi_changes_nothing() -> None:
    environ: dict[str, str] = {"MONOLITH_WITH_HOROVOD": "1"}
    comm.try_init_cuda(SYNC, environ, start=Starts())
    assert environ == {"MONOLITH_WITH_HOROVOD": "1"}


def test_try_init_cuda_starts_once(caplog: pytest.LogCaptureFixture) -> None:
    starts = Starts()
    comm.try_init_cuda(SYNC, dict(LOCAL_RANK), start=starts)
    assert not starts.choices
    assert "no allreduce tools found" in caplog.text
    for variable in ("MONOLITH_WITH_BYTEPS", "MONOLITH_WITH_HOROVOD"):
        comm.try_init_cuda(SYNC, {**LOCAL_RANK, variable: "1"}, start=starts)
    assert len(starts.choices) == 1


def test_try_init_cuda_logs_what_cannot_start(caplog: pytest.LogCaptureFixture) -> None:
    environ = {**LOCAL_RANK, "MONOLITH_WITH_BYTEPS": "1"}
    comm.try_init_cuda(SYNC, environ, start=Starts(ImportError("no such backend")))
    assert "no such backend" in caplog.text


@dataclass(frozen=True)
class Training:
    uuid: str = "job"
    model_dir: str = "/models"
    merge_sync_training_ckpt: bool = True
    num_ps: int = 3
    reorder_fids_in_data_pipeline: bool = False
    index: int = 0
    num_workers: int = 1
    enable_variable_partition: bool = True


def test_init_sync_train_fits_the_configuration() -> None:
    starts = Starts()
    config = comm.init_sync_train_and_update_conf(Training(), start=starts)
    assert config == Training(
        num_ps=0,
        reorder_fids_in_data_pipeline=True,
        index=2,
        num_workers=4,
        enable_variable_partition=False,
    )
    comm.init_sync_train_and_update_conf(config, start=starts)
    assert len(starts.choices) == 1


def test_init_sync_train_separates_model_folders_once() -> None:
    changed = SimpleNamespace(**vars(Training(merge_sync_training_ckpt=False)))
    assert comm.init_sync_train_and_update_conf(changed, start=Starts()) is changed
    assert changed.model_dir == "/models/job/index-0002"
    comm.init_sync_train_and_update_conf(changed, start=Starts())
    assert changed.model_dir == "/models/job/index-0002"


def test_init_sync_train_without_a_backend(caplog: pytest.LogCaptureFixture) -> None:
    config = comm.init_sync_train_and_update_conf(Training(), start=Starts(ImportError("gone")))
    assert config == Training()
    assert [r.levelname for r in caplog.records if "gone" in r.message] == ["WARNING"]


def test_init_sync_train_over_torch_distributed() -> None:
    config = comm.init_sync_train_and_update_conf(Training())
    assert (config.index, config.num_workers) == (0, 1)
    mesh = comm.current()
    assert mesh is not None
    assert mesh is comm.init()


@pytest.mark.parametrize(
    ("sync", "byteps", "bcast", "full"),
    product((False, True), (None, "0", "1"), (None, "-1", "0", "1"), (False, True)),
)
def test_run_hooks(sync: bool, byteps: str | None, bcast: str | None, full: bool) -> None:
    environ = dict(LOCAL_RANK)
    if byteps is not None:
        environ["MONOLITH_WITH_BYTEPS"] = byteps
    if bcast is not None:
        environ["MONOLITH_WITH_BYTEPS_BCAST"] = bcast
    hooks = comm.get_sync_run_hooks(
        full, flags=SyncFlags(enable_sync_training=sync), environ=environ
    )
    kinds = [type(hook) for hook in hooks]
    if not sync or (byteps == "1" and bcast == "-1"):
        assert kinds == []
    elif byteps == "1" and bcast != "0" and full:
        assert kinds == [BroadcastInitialState, TelemetryReport]
        assert hooks[1].interval == 50  # type: ignore[attr-defined]
    else:
        assert kinds == [BroadcastInitialState]


def test_telemetry_every_fifty_steps(caplog: pytest.LogCaptureFixture) -> None:
    now = iter([0.0, 0.0, 5.0, 10.0])
    hook = TelemetryReport(lambda: {"rows_s": 1.5}, clock=lambda: next(now))
    hook.begin(torch.nn.Linear(1, 1))
    for step in range(1, 120):
        hook.after_step(step)
    assert [record.message for record in caplog.records] == [
        "step 50: 10 steps/s, rows_s 1.5",
        "step 100: 10 steps/s, rows_s 1.5",
    ]


def test_broadcast_reaches_parameters_and_buffers() -> None:
    class Noted(LocalCollectives):
        def broadcast(self, values: torch.Tensor, source: int, *, what: str) -> None:
            names.append(what)

    names: list[str] = []
    BroadcastInitialState(Noted()).begin(torch.nn.BatchNorm1d(2))
    assert names == [
        f"initial {name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]


@pytest.mark.parametrize(
    ("sync", "byteps", "fwd", "bwd", "compatible"),
    product((False, True), "01", "01", "01", (None, "0", "1")),
)
def test_session_config(
    sync: bool, byteps: str, fwd: str, bwd: str, compatible: str | None
) -> None:
    environ = {
        **LOCAL_RANK,
        "MONOLITH_WITH_BYTEPS": byteps,
        "MONOLITH_WITH_BYTEPS_FWD_GDR": fwd,
        "MONOLITH_WITH_BYTEPS_BWD_GDR": bwd,
    }
    if compatible is not None:
        environ["MONOLITH_FORCE_GPU_COMPATIBLE"] = compatible
    given = SessionConfig()
    found = comm.update_session_config_for_gpu(given, SyncFlags(enable_sync_training=sync), environ)
    assert given == SessionConfig()
    if not sync:
        assert found == SessionConfig(allow_growth=True)
        return
    gdr = byteps == "1" and "1" in (fwd, bwd)
    assert found == SessionConfig(
        allow_growth=not gdr,
        per_process_gpu_memory_fraction=0.4 if gdr else None,
        visible_device_list="1",
        force_gpu_compatible=compatible != "0",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a card")
def test_session_config_without_a_card() -> None:
    assert apply_session_config(SessionConfig(visible_device_list="1")) is None


# --- the node's environment


def no_network(interface: str) -> str:
    return {"eth0": "10.0.0.5", "eth1": "10.0.1.5", "eth2": "10.0.2.5", "ib0": "10.1.0.5"}[
        interface
    ]


def environment_of(environ: dict[str, str], folder: Path = Path("/somewhere")) -> dict[str, str]:
    node = node_environment("job7", environ, address_of=no_network, folder=folder)
    return dict(node.variables)


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
    assert (node.local_rank, node.node, node.local_size) == (1, 2, 2)


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
        {**mpi(0, 2, 2), "BYTEPS_GPU_NIC_BINDING_MODE": "yes"},
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
    assert (node.rank, node.size, node.local_rank, node.node) == (3, 4, 1, 1)


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


def test_bps_init(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    applied: dict[str, str] = {}
    monkeypatch.setattr(sync_training, "apply_environment", lambda n: applied.update(n.variables))
    for name, value in {**mpi(1, 2, 2), "DMLC_INTERFACE": "lo"}.items():
        monkeypatch.setenv(name, value)
    starts = Starts()
    node = comm.bps_init("u", start=starts)
    comm.bps_init("u", start=starts)
    assert (node.rank, node.address) == (1, "127.0.0.1")
    assert applied["BYTEPS_UUID"] == "u"
    assert len(starts.choices) == 1


# --- the table of backends

DEFAULTS = {
    "MONOLITH_WITH_HOROVOD": 0,
    "MONOLITH_WITH_OPTIMIZED_HOROVOD": 0,
    "MONOLITH_WITH_HOROVOD_FID_G2G": 1,
    "MONOLITH_WITH_HOROVOD_FWD_G2G": 1,
    "MONOLITH_WITH_HOROVOD_BWD_G2G": 1,
    "MONOLITH_WITH_BYTEPS": 0,
    "MONOLITH_WITH_BYTEPS_FID": 1,
    "MONOLITH_WITH_BYTEPS_FWD": 1,
    "MONOLITH_WITH_BYTEPS_BWD": 1,
    "MONOLITH_WITH_BYTEPS_BWD_CAST": 32,
    "MONOLITH_WITH_BYTEPS_BWD_FAKE_CAST": 0,
    "MONOLITH_WITH_BYTEPS_FWD_GDR": 0,
    "MONOLITH_WITH_BYTEPS_FWD_GDR_G2G": 0,
    "MONOLITH_WITH_BYTEPS_BWD_GDR": 0,
    "MONOLITH_WITH_BYTEPS_BWD_GDR_G2G": 0,
    "MONOLITH_WITH_BYTEPS_BCAST": 1,
    "MONOLITH_WITH_BYTEPS_ALLREDUCE": 1,
    "MONOLITH_FORCE_GPU_COMPATIBLE": 1,
}


def test_flags_and_their_defaults() -> None:
    found = read_flags({})
    assert found == BackendFlags()
    assert {flag.variable: getattr(found, field) for field, flag in FLAGS.items()} == DEFAULTS


@pytest.mark.parametrize("field", FLAGS)
def test_every_flag_is_read_and_checked(field: str) -> None:
    flag = FLAGS[field]
    for value in flag.allowed:
        assert getattr(read_flags({flag.variable: str(value)}), field) == value
    for wrong in ("7", "true", ""):
        with pytest.raises(ConfigError, match=flag.variable):
            read_flags({flag.variable: wrong})


def test_a_misspelt_flag_is_told(caplog: pytest.LogCaptureFixture) -> None:
    read_flags({"MONOLITH_WITH_BYTEPS_FWD_GRD": "1"})
    assert "MONOLITH_WITH_BYTEPS_FWD_GRD is no known variable" in caplog.text
    assert "MONOLITH_WITH_BYTEPS_FWD_GDR is" in caplog.text


def absent(name: str) -> object:
    raise ImportError(f"No module named {name!r}")


HOROVOD = SimpleNamespace(init=lambda: None, rank=lambda: 1, size=lambda: 3)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (BackendFlags(), False),
        (BackendFlags(horovod=1), True),
        (BackendFlags(optimized_horovod=1), True),
        (BackendFlags(byteps=1), False),
        (BackendFlags(byteps=1, horovod=1), False),
        (BackendFlags(byteps=1, byteps_bcast=0), True),
        (BackendFlags(byteps=1, byteps_allreduce=0), True),
        (BackendFlags(byteps_allreduce=0), False),
    ],
)
def test_choice_of_backend(
    flags: BackendFlags, wanted: bool, here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    choice = choose(flags, load=(lambda name: HOROVOD) if here else absent)
    assert choice.backend == ("horovod" if wanted and here else "torch")
    said = {"horovod": "collectives over Horovod", "torch": "collectives over torch.distributed"}
    assert said[choice.backend] in caplog.text
    assert ("does not import" in caplog.text) is (wanted and not here)


def test_horovod_itself_is_started() -> None:
    found = start(Choice("horovod", ""), load=lambda name: HOROVOD)
    assert found == Started("horovod", 1, 3)


def test_wire_of_gradients() -> None:
    assert BackendFlags(byteps_bwd_cast=16).gradient_wire is None
    assert BackendFlags(byteps=1, byteps_bwd_cast=16).gradient_wire == "float16"
    assert replace(BackendFlags(byteps=1)).gradient_wire is None


# --- the benchmarks

BENCHMARK_VARIABLES = {
    "MONOLITH_BENCHMARK_ITERS": ("iterations", 200),
    "MONOLITH_BENCHMARK_BPS_AR_LEN": ("all_reduce_length", 65_536_000),
    "MONOLITH_BENCHMARK_BPS_A2A_LEN": ("all_to_all_length", 65_536_000),
}


@pytest.mark.parametrize("variable", BENCHMARK_VARIABLES)
def test_benchmark_numbers(variable: str) -> None:
    field, default = BENCHMARK_VARIABLES[variable]
    chosen = {"MONOLITH_BENCHMARK_BPS": "ar"}
    assert getattr(benchmark_settings(chosen), field) == default
    assert getattr(benchmark_settings({**chosen, variable: "64"}), field) == 64
    for wrong in ("many", "0"):
        with pytest.raises(ConfigError, match=variable):
            benchmark_settings({**chosen, variable: wrong})


@pytest.mark.parametrize("which", ["c2g", "g2g", "c2c", "g2c", "ar", "all"])
def test_benchmark_choice(which: str) -> None:
    assert benchmark_settings({"MONOLITH_BENCHMARK_BPS": which}).which == which


@pytest.mark.parametrize("environ", [{}, {"MONOLITH_BENCHMARK_BPS": "none"}])
def test_a_benchmark_must_be_chosen(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"MONOLITH_BENCHMARK_BPS: got none; allowed: c2g, g2g"):
        benchmark_settings(environ)


def test_documentation_names_every_variable() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from-monolith.md").read_text()
    for flag in FLAGS.values():
        values = ", ".join(map(str, flag.allowed))
        assert f"| {flag.variable} | {flag.default} | {values} | {flag.here} |" in page
    binding = {
        "BYTEPS_GPU_NIC_BINDING_MODE": "1",
        "MONOLITH_WITH_BYTEPS_FWD_GDR": "1",
        "BYTEPS_NUMA_ID": "0",
    }
    for name in (*environment_of({**mpi(0, 2, 2), **binding}), *binding, *BENCHMARK_VARIABLES):
        assert name in page
