"""What `DistributedModelParallel` takes along, wraps and refuses."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shoal.comm import launch
from shoal.comm.mesh import Mesh, Path
from shoal.distributed import DistributedModelParallel
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import CollectiveFailed, ConfigError, ShoalError, TicketError, UnknownName
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.wire import Wire
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from shoal.placement import Placement, row_wise
from shoal.ragged import KeyedRagged
from support.ranks import run_ranks, start_ranks
from support.spread_model import (
    DENSE,
    Data,
    Outcome,
    SpreadModel,
    batches,
    check_equal,
    loss_of,
    on_mesh,
    outcome_of,
    part_of,
    rows_of,
    specs,
)

pytestmark = pytest.mark.multiproc

KINDS = {"users": "data_parallel", "items": "column_wise"}


class TwoCollections(nn.Module):
    """A model over two collections, on one shard or on two."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first = EmbeddingCollection(
            specs(), [Feature("user", "users"), Feature("item", "items")], seed=5
        )
        features = [Feature("history", "items")]
        if shared:
            self.second = EmbeddingCollection(specs()[1:], features, shard=self.first.shard)
        else:
            self.second = EmbeddingCollection(specs()[1:], features, seed=6)
        torch.manual_seed(3)
        self.head = nn.Linear(4 + 8 + 8 + DENSE, 1).double()

    def forward(self, batch: KeyedRagged, dense_BD: Tensor) -> Tensor:
        out = {**self.second(batch), **self.first(batch)}
        parts = [out["user"], out["item"], out["history"], dense_BD]
        logits: Tensor = self.head(torch.cat(parts, dim=1).tanh())[:, 0]
        return logits


def train(
    model: nn.Module, rank: int, world_size: int, data: list[Data], *, clip: bool = False
) -> Outcome:
    sparse = SparseOptimizer(model)
    dense = torch.optim.Adagrad(model.parameters(), lr=0.05)
    joint, losses = JointOptimizer([sparse, dense]), []
    for whole in data:
        loss = loss_of(model, part_of(whole, rank, world_size), len(whole.labels), world_size)
        loss.backward()
        if clip:
            clip_grad_norm_(model.parameters(), sparse, 0.1)
        joint.step()
        joint.zero_grad()
        losses.append(float(loss.detach()) / world_size)
    if not clip:
        return outcome_of(model, losses)
    # FSDP2 splits parameters: read them whole.
    state = {
        name: getattr(value, "full_tensor", lambda value=value: value)().tolist()
        for name, value in model.state_dict().items()
    }
    return Outcome(losses, rows_of(model), state)


def pretrained(norm: bool = False) -> SpreadModel:
    """A model that has trained in one process; the same in each."""
    model = SpreadModel(specs(), norm=norm)
    train(model, 0, 1, batches(2, seed=8))
    return model


def ragged_train(model: nn.Module, rank: int, world_size: int) -> Outcome:
    """Rank 0 has all examples of some batches; the others idle in those."""
    sparse = SparseOptimizer(model)
    dense = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    for i, whole in enumerate(batches(4)):
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        total = len(whole.labels)
        mine = whole if i % 2 else part_of(whole, rank, world_size)
        if i % 2 and rank:
            assert isinstance(model, DistributedModelParallel)
            model.idle_step(lambda ids: model(ids, torch.zeros(1, DENSE).double()).sum())
            losses.append(0.0)
        else:
            loss = loss_of(model, mine, total, world_size)
            loss.backward()
            losses.append(float(loss.detach()) / world_size)
        for optimizer in (sparse, dense):
            optimizer.step()
    return outcome_of(model, losses)


def verbs(model: nn.Module, rank: int) -> dict[str, Any]:
    tables = next(p for p in model.modules() if isinstance(p, EmbeddingCollection))
    users = tables.table("users")
    users.assign([1, 2, 3], torch.arange(12).reshape(3, 4).double())
    # Every rank calls; what each asks for adds up.
    mine = [2] if rank == 0 else []
    users.assign_add(mine, torch.ones(len(mine), 4).double())
    return {"rows": users.lookup([1, 2, 3]).tolist(), "again": users.reinitialize([1]).tolist()}


def refusals(mesh: Mesh) -> dict[str, str]:
    def wrap(model: nn.Module, placement: Any = None) -> DistributedModelParallel:
        return DistributedModelParallel(model, placement, mesh=mesh, exchange_path="torch")

    def said(kind: type[ShoalError], act: Callable[[], object]) -> str:
        with pytest.raises(kind) as caught:
            act()
        return str(caught.value)

    def before() -> object:
        model = SpreadModel(specs())
        kept = SparseOptimizer(model)
        return wrap(model), kept

    def open_route() -> object:
        model = SpreadModel(specs())
        data = batches(1)[0]
        kept = model(data.batch(), data.tensors()[0])
        return wrap(model), kept

    model = wrap(SpreadModel(specs()))
    other = Placement(mesh.world_size + 1, row_wise("users", 4, mesh.world_size + 1))
    found = {
        "copy": said(ConfigError, lambda: copy.deepcopy(model)),
        "pickle": said(ConfigError, lambda: pickle.dumps(model.module.tables)),
        "ranks": said(ConfigError, lambda: wrap(SpreadModel(specs(zeros=mesh.rank == 1)))),
        "table": said(UnknownName, lambda: wrap(SpreadModel(specs()), {"user": "row_wise"})),
        "kind": said(ConfigError, lambda: wrap(SpreadModel(specs()), {"users": "rowwise"})),
        "world": said(ConfigError, lambda: wrap(SpreadModel(specs()), other)),
        "optimizer": said(ConfigError, before),
        "open": said(TicketError, open_route),
    }
    assert isinstance(model.module.tables.exchange, AllToAllExchange)
    return found


def on_rank(mesh: Mesh) -> dict[str, Any]:
    rank, world_size = mesh.rank, mesh.world_size

    def wrap(model: nn.Module, **options: Any) -> DistributedModelParallel:
        options = {"exchange_path": "torch", **options}
        return DistributedModelParallel(model, mesh=mesh, **options)

    data = batches(3)
    found: dict[str, Any] = {
        "moved": train(wrap(pretrained(), placement=KINDS), rank, world_size, data),
        "fsdp2": train(
            wrap(SpreadModel(specs()), dense="fsdp2"), rank, world_size, data, clip=True
        ),
        "ragged": ragged_train(wrap(SpreadModel(specs())), rank, world_size),
        "verbs": verbs(wrap(SpreadModel(specs()), placement=KINDS), rank),
        "buffers": outcome_of(wrap(pretrained(norm=True)), []).state,
        "idle norm": idle_norm(wrap(pretrained(norm=True))),
        "refusals": refusals(mesh),
    }
    made = torch.compile
    with patch.object(torch, "compile", lambda part, mode: made(part, backend="aot_eager")):
        for dense in ("ddp", "fsdp2"):
            model = wrap(SpreadModel(specs()), dense=dense, compile=True)
            found[f"compiled {dense}"] = train(model, rank, world_size, data, clip=True)
    for shared in (True, False):
        model = wrap(TwoCollections(shared=shared), placement=KINDS)
        found[f"two {shared}"] = train(model, rank, world_size, data)
    model = wrap(pretrained(), placement=KINDS, exchange_path="auto").eval()
    found["eval"] = model(data[0].batch(), data[0].tensors()[0]).tolist()
    found["size"] = rows_of(model)
    return found


def idle_norm(model: DistributedModelParallel) -> Any:
    model.train()
    model.idle_step(lambda ids: model(ids, torch.zeros(1, DENSE).double()).sum())
    assert all(part.training for part in model.modules())
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)
    return outcome_of(model, []).state


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    ranks = run_ranks(request.param, on_mesh, on_rank)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.slow
def test_rows_that_exist_move_to_their_owners(found: dict[str, list[Any]]) -> None:
    check_equal(found["moved"], train(pretrained(), 0, 1, batches(3)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp2", "compiled ddp", "compiled fsdp2"])
def test_a_dense_part_that_fsdp2_splits_or_that_is_compiled(
    found: dict[str, list[Any]], how: str
) -> None:
    check_equal(found[how], train(SpreadModel(specs()), 0, 1, batches(3), clip=True))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_two_collections(found: dict[str, list[Any]], shared: bool) -> None:
    expected = train(TwoCollections(shared=shared), 0, 1, batches(3))
    if shared:
        check_equal(found[f"two {shared}"], expected)
        return
    # Both shards have a table of one name; the losses and parameters tell them apart.
    outcomes = found[f"two {shared}"]
    losses = [sum(parts) for parts in zip(*[o.losses for o in outcomes], strict=True)]
    assert losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.slow
def test_ranks_without_data_idle(found: dict[str, list[Any]]) -> None:
    check_equal(found["ragged"], ragged_train(SpreadModel(specs()), 0, 1))
    for state in (*found["buffers"], *found["idle norm"]):
        assert state == found["buffers"][0]


def test_verbs_reach_rows_on_all_ranks(found: dict[str, list[Any]]) -> None:
    for rank in found["verbs"]:
        assert rank["rows"] == [[0, 1, 2, 3], [5, 6, 7, 8], [8, 9, 10, 11]]
        assert rank["again"] == [1]


@pytest.mark.slow
def test_reading_inserts_nothing(found: dict[str, list[Any]]) -> None:
    model, data = pretrained().eval(), batches(3)[0]
    want = model(data.batch(), data.tensors()[0]).tolist()
    for logits in found["eval"]:
        assert logits == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("copy", "spread over ranks"),
        ("pickle", "checkpoint"),
        ("ranks", "others on rank 1"),
        ("table", "'user'"),
        ("kind", "rowwise"),
        ("world", "world_size"),
        ("optimizer", "SparseOptimizer"),
        ("open", "not done"),
    ],
)
def test_refusals(found: dict[str, list[Any]], what: str, text: str) -> None:
    for said in found["refusals"]:
        assert text in said[what]


@pytest.mark.slow
def test_one_rank_needs_no_group() -> None:
    model = run_ranks(1, on_mesh, alone)[0]
    check_equal([model], train(SpreadModel(specs()), 0, 1, batches(2)), exactly=True)


def alone(mesh: Mesh) -> Outcome:
    assert not torch.distributed.is_initialized()
    return train(DistributedModelParallel(SpreadModel(specs()), mesh=mesh), 0, 1, batches(2))


def wrapped_again(mesh: Mesh) -> str:
    whole = mesh.collectives

    def fails(name: str, **how: Any) -> Any:
        if name.startswith("tables"):
            raise CollectiveFailed(f"no {name}")
        return whole(name, **how)

    with patch.object(mesh, "collectives", fails), pytest.raises(CollectiveFailed) as error:
        DistributedModelParallel(SpreadModel(specs()), mesh=mesh)
    model = DistributedModelParallel(SpreadModel(specs()), mesh=mesh)
    loss_of(model, part_of(batches(1)[0], mesh.rank, 2), 4, 2).backward()
    return str(error.value)


@pytest.mark.slow
def test_an_exchange_that_cannot_be_made_is_told_by_the_wrapper() -> None:
    for said in run_ranks(2, on_mesh, wrapped_again):
        assert "no tables" in said


def left_behind() -> tuple[bool, int]:
    """After a model was dropped: whether it is there; threads that are left once all is closed."""
    threads = set(threading.enumerate())
    mesh = launch.init(device="cpu", timeout_s=120)
    model = DistributedModelParallel(SpreadModel(specs()), mesh=mesh)
    train(model, mesh.rank, 2, batches(1))
    kept = weakref.ref(model.module.tables.shard)
    del model
    gc.collect()
    ends = time.monotonic() + 60  # a thread may hold its last work for a while
    while (there := kept() is not None) and time.monotonic() < ends:
        time.sleep(0.05)
    launch.shutdown()
    new = [one for one in threading.enumerate() if one not in threads]
    for one in new:
        one.join(60)
    return there, sum(one.is_alive() for one in new)


@pytest.mark.slow
def test_a_model_that_is_dropped_goes_and_a_closed_mesh_leaves_no_threads() -> None:
    assert run_ranks(2, left_behind) == [(False, 0)] * 2


def held() -> int:
    return sum(len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))


def in_turn(mesh: Mesh, path: Path) -> list[int]:
    """Threads and open files after each of four models, used and dropped."""
    counted: list[int] = []
    for _ in range(4):
        model = DistributedModelParallel(SpreadModel(specs()), mesh=mesh, exchange_path=path)
        train(model, mesh.rank, 2, batches(1))
        ends = time.monotonic() + 60  # a thread that has ended may be in /proc for a while
        while len(counted) == 3 and held() > max(counted[:2]) and time.monotonic() < ends:
            time.sleep(0.05)
        counted.append(held())
        del model
        gc.collect()
    return counted


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize("path", ["torch", "shared_memory"])
def test_models_in_turn_under_one_mesh_keep_no_threads_or_files(path: Path) -> None:
    for counted in run_ranks(2, on_mesh, in_turn, path):
        assert counted[-1] <= max(counted[:2])  # as many as of one


def killed_in_backward(mesh: Mesh) -> str:
    model = DistributedModelParallel(SpreadModel(specs()), mesh=mesh)
    sparse = SparseOptimizer(model)
    dense = torch.optim.Adagrad(model.parameters(), lr=0.05)
    joint, data = JointOptimizer([sparse, dense]), part_of(batches(1)[0], mesh.rank, 3)
    for step in range(3):
        if step == 2 and mesh.rank == 1:
            parameter = next(model.module.parameters())
            parameter.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss = loss_of(model, data, 4, 3)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        joint.step()
        joint.zero_grad()
    return "nothing"


@pytest.mark.slow
def test_a_rank_that_dies_before_dense_gradients_are_averaged_is_named() -> None:
    found = start_ranks(3, on_mesh, killed_in_backward).outcomes()
    assert not found[1][0]
    for rank in (0, 2):
        good, said = found[rank]
        assert good, said
        assert "'gradients of the dense part'" in said
        assert f"at step 2 on rank {rank} of 3" in said


def other_dense_part(mesh: Mesh) -> str:
    model = SpreadModel(specs())
    model.extra = nn.Linear(2 + mesh.rank, 1)
    with pytest.raises(ConfigError) as error:
        DistributedModelParallel(model, mesh=mesh, exchange_path="torch")
    return str(error.value)


@pytest.mark.slow
def test_ranks_that_build_other_dense_parts_are_told() -> None:
    for said in run_ranks(2, on_mesh, other_dense_part):
        assert "parameters and buffers of a model: got extra.weight" in said


def wires(mesh: Mesh) -> list[Wire]:
    found = []
    for wire in (None, Wire(rows="bfloat16")):
        model = DistributedModelParallel(SpreadModel(specs()), mesh=mesh, wire=wire)
        loss_of(model, part_of(batches(1)[0], mesh.rank, 2), 4, 2).backward()
        exchange = next(iter(model.collections().values())).exchange
        assert isinstance(exchange, AllToAllExchange)
        found.append(exchange.wire)
    return found


@pytest.mark.slow
def test_a_flag_casts_gradients_unless_a_wire_is_given() -> None:
    environ = {"MONOLITH_WITH_BYTEPS": "1", "MONOLITH_WITH_BYTEPS_BWD_CAST": "16"}
    for found in run_ranks(2, on_mesh, wires, environ=environ):
        assert found == [Wire(grads="float16"), Wire(rows="bfloat16")]
