"""Monolith's distribution_utils: every variable, flag and default, over a matrix of both."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal import comm
from shoal.comm.benchmarks import benchmark_settings
from shoal.comm.collectives import LocalCollectives
from shoal.comm.flags import FLAGS, Backend, BackendFlags, Started, choose, read_flags, start
from shoal.compat.monolith import sync_training
from shoal.compat.monolith.sync_training import (
    BroadcastInitialState,
    SessionConfig,
    SyncFlags,
    TelemetryReport,
    apply_session_config,
)
from shoal.errors import ConfigError, LaunchError
from support.launcher_variables import environment_of, mpi, unlaunched

SYNC = SyncFlags(enable_sync_training=True)
LOCAL_RANK = {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def product(*values: Iterable[object]) -> list[tuple[object, ...]]:
    return list(itertools.product(*values))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield from unlaunched(monkeypatch, caplog)


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
        self.choices: list[Backend] = []

    def __call__(self, choice: Backend) -> Started:
        self.choices.append(choice)
        if self.error is not None:
            raise self.error
        return Started(choice, 2, 4)


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


def test_init_sync_train_takes_a_plain_dict() -> None:
    config = {"uuid": "job", "model_dir": "/models", "merge_sync_training_ckpt": False}
    assert comm.init_sync_train_and_update_conf(config, start=Starts()) is config
    assert config == {
        "uuid": "job",
        "model_dir": "/models/job/index-0002",
        "merge_sync_training_ckpt": False,
        "num_ps": 0,
        "reorder_fids_in_data_pipeline": True,
        "index": 2,
        "num_workers": 4,
        "enable_variable_partition": False,
    }


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


def test_bps_init(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    applied: dict[str, str] = {}
    monkeypatch.setattr(sync_training, "apply_environment", lambda n: applied.update(n.variables))
    for name, value in {**mpi(1, 2, 2), "DMLC_INTERFACE": "lo"}.items():
        monkeypatch.setenv(name, value)
    starts = Starts()
    node = comm.bps_init("u", start=starts)
    comm.bps_init("u", start=starts)
    place = (node.variables["DMLC_WORKER_ID"], node.variables["DMLC_NODE_HOST"])
    assert place == ("1", "127.0.0.1")
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
    words = ("false", "no", "Off", "N", "f"), ("true", "Yes", "ON", "y", "T")
    for value in (0, 1) if {0, 1} <= set(flag.allowed) else ():
        for word in words[value]:
            assert getattr(read_flags({flag.variable: f" {word} "}), field) == value
    assert getattr(read_flags({flag.variable: ""}), field) == flag.default
    for wrong in ("7", "maybe", "1.0", "٣"):
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
    assert choice == ("horovod" if wanted and here else "torch")
    said = {"horovod": "collectives over Horovod", "torch": "collectives over torch.distributed"}
    assert said[choice] in caplog.text
    assert ("does not import" in caplog.text) is (wanted and not here)


def test_horovod_itself_is_started() -> None:
    found = start("horovod", load=lambda name: HOROVOD)
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
    page = (Path(__file__).parents[3] / "docs" / "coming-from-monolith.md").read_text()
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
