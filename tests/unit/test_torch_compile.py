"""Models with tables under torch.compile and torch.export."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from shoal import (
    DistributedModelParallel,
    EmbeddingCollection,
    Feature,
    JointOptimizer,
    KeyedRagged,
    Layout,
    LayoutSlice,
    Segment,
    SparseOptimizer,
    TableSpec,
    clip_grad_norm_,
    compiling,
    optimizers,
)
from shoal.comm.collectives import LocalCollectives
from shoal.errors import DeviceUnavailable, ShoalError
from shoal.uncompiled import uncompiled

# Of the compiler itself: it looks at `.grad` of everything.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SPEC = TableSpec(name="t", segments=(Segment(dim=4, optimizer=optimizers.SGD(lr=0.5)),))
FEATURES = [Feature("a", "t"), Feature("b", "t")]


class Net(nn.Module):
    def __init__(self, layouts: list[Layout] | None = None) -> None:
        super().__init__()
        self.rows = EmbeddingCollection([SPEC], FEATURES, layouts, seed=3)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: KeyedRagged) -> Tensor:
        return self.head(torch.cat([*self.rows(batch).values()], dim=1)).squeeze(1)


def batch(size: int) -> KeyedRagged:
    ids = [[k, k + 1] for k in range(size)]
    return KeyedRagged.from_lists({"a": ids, "b": ids[::-1]})


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "DistributedModelParallel"])
@pytest.mark.parametrize("layouts", [None, "concat"])
def test_training_and_evaluation_are_as_eager(wrapped: bool, layouts: str | None) -> None:
    slices = (LayoutSlice("a"), LayoutSlice("b"))
    net = Net(layouts and [Layout("both", layouts, slices)])  # type: ignore[arg-type]
    twins = [net, copy.deepcopy(net)]
    if wrapped:
        twins = [DistributedModelParallel(twin) for twin in twins]
    compiled = torch.compile(twins[1], backend="eager", dynamic=True)
    steps = [
        JointOptimizer([SparseOptimizer(twin), torch.optim.SGD(list(twin.parameters()), lr=0.1)])
        for twin in twins
    ]
    # A mode is compiled once; after that no batch size compiles anything again.
    with torch._dynamo.config.patch(error_on_recompile=not wrapped):
        for size in (3, 2, 5, 7):
            seen = []
            for run, step, twin in zip((twins[0], compiled), steps, twins, strict=True):
                loss = run(batch(size)).square().sum()
                step.zero_grad()
                loss.backward()
                sparse = step.optimizers[0]
                assert isinstance(sparse, SparseOptimizer)
                clip_grad_norm_(twin.parameters(), sparse, 1.0)
                step.step()
                seen.append(loss.detach())
            assert torch.equal(*seen)
    if not wrapped:
        assert breaks() == 1
    for twin in (*twins, compiled):
        twin.eval()
    assert torch.equal(twins[0](batch(4)), compiled(batch(4)))


def test_a_wrapper_compiles_what_holds_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode: made(f, backend="eager"))
    net = Net()
    models = [
        DistributedModelParallel(copy.deepcopy(net)),
        DistributedModelParallel(net, compile="default"),
    ]
    steps = [
        JointOptimizer([SparseOptimizer(one), torch.optim.SGD(list(one.parameters()), lr=0.1)])
        for one in models
    ]
    # Ids are new in every batch, and so are sizes: one graph more, for all of them.
    for size in (3, 2, 5, 7):
        seen = []
        for model, step in zip(models, steps, strict=True):
            loss = model(batch(size)).square().sum()
            step.zero_grad()
            loss.backward()
            step.step()
            seen.append(loss.detach())
        assert torch.equal(*seen)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not breaks()
    states = [model.state_dict() for model in models]
    assert list(states[0]) == list(states[1])
    models[0].load_state_dict(states[1])


@pytest.mark.parametrize("mode", ["fast", "reduce-overhead"])
def test_modes_that_cannot_be_are_refused(mode: str) -> None:
    with pytest.raises(ShoalError, match=f"{mode}"):
        DistributedModelParallel(Net(), compile=mode)  # type: ignore[arg-type]


def test_a_split_dense_part_has_no_cuda_graphs() -> None:
    with pytest.raises(ShoalError, match="compile with dense=fsdp2: got max-autotune"):
        DistributedModelParallel(Net(), compile="max-autotune", dense="fsdp2")


def test_another_rank_without_a_compiler_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(self: LocalCollectives, value: object, *, what: str) -> list[object]:
        return [value, ("no g++", None)]

    monkeypatch.setattr(LocalCollectives, "gather_objects", gathered)
    with pytest.raises(DeviceUnavailable, match="on rank 1: no g"):
        DistributedModelParallel(Net(), compile=True)


@pytest.mark.parametrize("training", [True, False])
def test_each_forward_begins_a_step(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(compiling, "has_cuda_graphs", lambda how: True)
    monkeypatch.setattr(compiling, "check_compile", lambda *_: None)
    monkeypatch.setattr(compiling, "begin_step", lambda: begun.append(True))
    model = DistributedModelParallel(Net()).train(training)
    for _ in range(2):
        model(batch(2))
    assert len(begun) == 2


@pytest.mark.slow
def test_whole_training_step_in_a_compiled_function() -> None:
    nets = [Net(), Net()]
    nets[1].head.load_state_dict(nets[0].head.state_dict())
    sparse = [SparseOptimizer(net) for net in nets]

    def step(net: Net, optimizer: SparseOptimizer, given: KeyedRagged) -> Tensor:
        loss = net(given).square().sum()
        loss.backward()
        clip_grad_norm_(net.parameters(), optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    for size in (2, 3, 4):
        want = step(nets[0], sparse[0], batch(size))
        assert torch.equal(compiled(nets[1], sparse[1], batch(size)), want)
    ids = torch.arange(5)
    assert torch.equal(nets[0].rows.table("t").lookup(ids), nets[1].rows.table("t").lookup(ids))


def test_verbs_of_a_table_in_a_compiled_function() -> None:
    table = Net().rows.table("t")

    def write_and_read(ids: Tensor, rows: Tensor) -> Tensor:
        table.assign(ids, rows * 2)
        return table.lookup(ids) + 1

    compiled = torch.compile(write_and_read, backend="eager")
    for size in (2, 3):
        rows = torch.rand(size, 4)
        assert torch.equal(compiled(torch.arange(size), rows), rows * 2 + 1)


def test_a_ticket_in_a_compiled_function() -> None:
    table = Net().rows.table("t")

    def admitted(ids: Tensor) -> tuple[Tensor, Tensor]:
        ticket = table.find_or_init(ids)
        return table.gather(ticket) * 2, ticket.admitted_N

    rows, flags = torch.compile(admitted, backend="eager")(torch.arange(3))
    assert flags.all()
    assert torch.equal(rows, table.lookup(torch.arange(3)) * 2)


def test_the_dense_part_exports_and_the_collection_says_why_it_does_not() -> None:
    net = Net()
    outputs = torch.cat([*net.rows(batch(3)).values()], dim=1)
    sizes = {0: torch.export.Dim("batch")}
    program = torch.export.export(net.head, (outputs.detach(),), dynamic_shapes=(sizes,))
    assert torch.equal(program.module()(outputs[:2]), net.head(outputs[:2]))
    with pytest.raises(Exception, match="live outside of the graph"):
        torch.compile(net, backend="eager", fullgraph=True)(batch(2))


def test_marking_leaves_functions_of_others_alone() -> None:
    def own() -> None: ...

    def other() -> None: ...

    other.__module__ = "dataclasses"
    uncompiled(type("Marked", (), {"own": own, "other": other, "__module__": __name__}))
    assert hasattr(own, "_torchdynamo_disable")
    assert not hasattr(other, "_torchdynamo_disable")


@pytest.mark.slow
def test_marking_does_not_import_the_compiler() -> None:
    code = "import sys, shoal; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
