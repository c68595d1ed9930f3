"""What the ranks' optimizers decide, they decide together."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.distributed import DistributedModelParallel
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import ConfigError, NonFiniteGradient
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from shoal.ragged import KeyedRagged
from shoal.rules.compressors import Compressor, OneBit
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD, Adagrad
from shoal.rules.schedules import Polynomial
from shoal.table.spec import Segment, TableSpec
from support.ranks import run_ranks
from support.spread_model import (
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

PLACINGS = ({"users": "data_parallel", "items": "column_wise"}, None)
NORMS = (2.0, 1.0, float("inf"))


def ids(*lists: list[int]) -> KeyedRagged:
    return KeyedRagged.from_lists({"a": list(lists)})


def one_table(mesh: Mesh | None, rule: Any = None, **options: Any) -> nn.Module:
    segment = Segment(name="s", dim=2, optimizer=rule or SGD(lr=1.0), initializer=Zeros())
    spec = TableSpec(name="t", segments=(segment,), dtype="float64")
    tables = EmbeddingCollection([spec], [Feature("a", "t")])
    if mesh is None:
        return tables
    return DistributedModelParallel(tables, mesh=mesh, exchange_path="torch", **options)


def clipped(model: nn.Module, rank: int, world_size: int, norm_type: float) -> Outcome:
    """Training with a clipped norm and rates by name; the outcome's losses are the norms."""
    sparse = SparseOptimizer(model, rates={"users": 0.02, ("items", "s"): Polynomial(0.1, 2)})
    dense = torch.optim.Adagrad(model.parameters(), lr=0.05)
    norms = []
    for whole in batches(3):
        loss_of(model, part_of(whole, rank, world_size), 8, world_size).backward()
        norm = clip_grad_norm_(model.parameters(), sparse, 0.05, norm_type)
        norms.append(float(norm) / world_size)
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
    return outcome_of(model, norms)


def scaled(mesh: Mesh, **options: Any) -> dict[str, Any]:
    """Rank 0 sends infinity to one row in the second of three steps."""
    tables = one_table(mesh, **options)
    weight = nn.Parameter(torch.ones(2).double())
    sparse = SparseOptimizer(tables)
    joint = JointOptimizer([sparse, torch.optim.SGD([weight], lr=1.0)])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for lap in range(3):
        bad = float("inf") if lap == 1 and mesh.rank == 0 else 1.0
        rows = bad * tables(ids([1], [2, 3]))["a"].sum()
        scaler.scale(rows + weight.sum()).backward()
        scaler.step(joint)
        scaler.update()
        joint.zero_grad()
    return {
        "scale": scaler.get_scale(),
        "steps": sparse.global_step,
        "dense": weight.tolist(),
        "rows": rows_of(tables).get("t", {}),
    }


def refused(mesh: Mesh) -> dict[str, Any]:
    """The last rank sends NaN to one row, under the policy "raise"."""
    tables = one_table(mesh)
    sparse = SparseOptimizer(tables)
    bad = float("nan") if mesh.rank == mesh.world_size - 1 else 1.0
    (bad * tables(ids([1], [2, 3]))["a"]).sum().backward()
    try:
        sparse.step()
    except NonFiniteGradient as error:
        said = str(error)
    else:
        said = ""
    before = rows_of(tables)["t"]
    sparse.zero_grad()
    tables(ids([1], [2, 3]))["a"].sum().backward()
    sparse.step()
    return {"said": said, "before": before, "after": rows_of(tables)["t"]}


def overflowing(mesh: Mesh) -> list[Any]:
    """Every rank sends row 1 a gradient that only their sum over ranks makes infinite."""
    tables = one_table(mesh, grad_reduce="sum")
    sparse = SparseOptimizer(tables)
    (1.5e308 * tables(ids([1], [2]))["a"] * torch.tensor([[1.0], [1e-308]])).sum().backward()
    with pytest.raises(NonFiniteGradient):
        sparse.step()
    assert sparse.global_step == 0
    sparse.zero_grad()
    return list(rows_of(tables).get("t", {}).values())


def sender_by_sender(mesh: Mesh) -> dict[str, Any]:
    tables = one_table(mesh, Adagrad(lr=0.5), grad_reduce="sum", per_sender_steps=True)
    sparse = SparseOptimizer(tables)
    scale = float(mesh.rank + 1)
    for _ in range(2):
        (scale * tables(ids([1], [2, 1]))["a"]).sum().backward()
        (scale * tables(ids([3]))["a"]).sum().backward()
        sparse.step()
        sparse.zero_grad()
    tables(ids([1]))["a"].sum().backward()
    with pytest.raises(ConfigError, match="per_sender_steps"):
        _ = sparse.proxies[0].grad
    with pytest.raises(ConfigError, match="per_sender_steps"):
        clip_grad_norm_([], sparse, 1.0)
    return {"rows": rows_of(tables)["t"]}


def two_collections(mesh: Mesh | None, compressor: Compressor) -> nn.ModuleDict:
    """Tables a and b of one shard, each read by a collection of its own."""
    tables = [
        TableSpec(
            name=name,
            segments=(Segment(dim=2, optimizer=SGD(lr=1.0), compressor=compressor),),
        )
        for name in ("a", "b")
    ]
    first = EmbeddingCollection(tables, [Feature("a", "a")])
    second = EmbeddingCollection(tables, [Feature("b", "b")], shard=first.shard)
    both = nn.ModuleDict({"a": first, "b": second})
    if mesh is None:
        return both
    placing = {"a": "table_wise", "b": "table_wise"}
    wrapped = DistributedModelParallel(both, placing, mesh=mesh, exchange_path="torch")
    return cast(nn.ModuleDict, wrapped.module)


def monolith(mesh: Mesh) -> list[list[list[float]]]:
    """DistributedMultiTypeHashTableMpi's contract: outputs before and after one step."""
    rates = {"1": 1.0, "2": Polynomial(1.0, 10, end=2.0)}
    specs_12 = [
        TableSpec(name=name, segments=(Segment(dim=dim, optimizer=SGD(), initializer=Zeros()),))
        for name, dim in (("1", 1), ("2", 2))
    ]
    tables = EmbeddingCollection(specs_12, [Feature("1", "1"), Feature("2", "2")])
    model = DistributedModelParallel(tables, mesh=mesh, grad_reduce="sum", exchange_path="torch")
    sparse = SparseOptimizer(model, rates=rates)

    def batch() -> KeyedRagged:
        return KeyedRagged.from_lists({"1": [[1], [1]], "2": [[2], []]})

    out = model(batch())
    grads = [torch.tensor([[0.5], [0.5]]), torch.tensor([[0.5, 1.0], [0.0, 0.0]])]
    torch.autograd.backward([out["1"], out["2"]], grads)
    sparse.step()
    after = model(batch())
    return [values[name].tolist() for values in (out, after) for name in ("1", "2")]


def sharpened(mesh: Mesh | None) -> list[list[float]]:
    """What inference reads of a table that the last steps left alone: OneBit reads the step."""
    tables = two_collections(mesh, OneBit(step_size=1))
    sparse = SparseOptimizer(tables)
    for name in ("b", "a", "a"):
        tables[name](KeyedRagged.from_lists({name: [[1, 2]]}))[name].sum().backward()
        sparse.step()
        sparse.zero_grad()
    tables.eval()
    read: Tensor = tables["b"](KeyedRagged.from_lists({"b": [[1], [2]]}))["b"]
    return read.tolist()


def senders_refused(mesh: Mesh) -> list[str]:
    """Sums where each sender steps: ranks without a table refuse them too."""
    tables = one_table(mesh, placement={"t": "table_wise"}, per_sender_steps=True)
    sparse = SparseOptimizer(tables)
    tables(ids([1]))["a"].sum().backward()
    said = []
    for act in (
        lambda: clip_grad_norm_([], sparse, 1.0),
        lambda: [param.grad for param in sparse.param_groups[0]["params"]],
    ):
        with pytest.raises(ConfigError) as caught:
            act()
        said.append(str(caught.value))
    return said


def on_rank(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i, placing in enumerate(PLACINGS):
        for norm_type in NORMS:
            model = SpreadModel(specs())
            model = DistributedModelParallel(model, placing, mesh=mesh, exchange_path="torch")
            found[f"clip {i} {norm_type}"] = clipped(model, mesh.rank, mesh.world_size, norm_type)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found["scaled"] = scaled(mesh)
        found["scaled on one rank"] = scaled(mesh, placement={"t": "table_wise"})
    found["monolith"] = monolith(mesh)
    found["sharpened"] = sharpened(mesh)
    found["senders refused"] = senders_refused(mesh)
    found["refused"] = refused(mesh)
    found["overflowing"] = overflowing(mesh)
    found["senders"] = sender_by_sender(mesh)
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    ranks = run_ranks(request.param, on_mesh, on_rank)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def joined(parts: list[dict[int, list[float]]]) -> dict[int, list[float]]:
    return {id_: row for part in parts for id_, row in part.items()}


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("placing", range(len(PLACINGS)))
def test_clipping(found: dict[str, list[Any]], placing: int, norm_type: float) -> None:
    expected = clipped(SpreadModel(specs()), 0, 1, norm_type)
    outcomes = found[f"clip {placing} {norm_type}"]
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    check_equal(outcomes, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaled", "scaled on one rank"])
def test_all_ranks_skip_a_step_or_none(found: dict[str, list[Any]], name: str) -> None:
    ranks = found[name]
    for rank in ranks:
        assert (rank["scale"], rank["steps"], rank["dense"]) == (4.0, 2, [-1.0, -1.0])
    rows = joined([rank["rows"] for rank in ranks])
    assert rows == {id_: [-2.0, -2.0] for id_ in (1, 2, 3)}


def test_all_ranks_refuse_a_gradient_or_none(found: dict[str, list[Any]]) -> None:
    ranks = found["refused"]
    for rank in ranks:
        assert "NaN or infinity" in rank["said"]
    assert joined([rank["before"] for rank in ranks]) == {k: [0.0, 0.0] for k in (1, 2, 3)}
    assert joined([rank["after"] for rank in ranks]) == {k: [-1.0, -1.0] for k in (1, 2, 3)}


def test_all_ranks_refuse_a_sum_over_ranks_that_overflows(found: dict[str, list[Any]]) -> None:
    assert [row for rank in found["overflowing"] for row in rank] == [[0.0, 0.0]] * 2


def test_one_step_per_sender(found: dict[str, list[Any]]) -> None:
    ranks = found["senders"]
    table = one_table(None, Adagrad(lr=0.5)).table("t")  # type: ignore[operator]
    for step in range(2):
        for rank in range(len(ranks)):
            grads = torch.full((3, 2), float(rank + 1)).double()
            grads[0] *= 2
            table.apply([1, 2, 3], grads, global_step=step)
    want: Tensor = table.lookup([1, 2, 3])
    rows = joined([rank["rows"] for rank in ranks])
    for id_, row in zip((1, 2, 3), want.tolist(), strict=True):
        assert rows[id_] == pytest.approx(row, rel=1e-12)


def test_monolith_distributed_multi_type_hash_table(found: dict[str, list[Any]]) -> None:
    w = len(found["monolith"])
    for first, second, *after in found["monolith"]:
        assert (first, second) == ([[0.0]] * 2, [[0.0] * 2] * 2)
        assert after == [[[-1.0 * w]] * 2, [[-0.5 * w, -1.0 * w], [0.0, 0.0]]]


def test_reads_know_the_step_on_ranks_that_had_no_part_in_it(found: dict[str, list[Any]]) -> None:
    assert all(rank == sharpened(None) for rank in found["sharpened"])


def test_all_ranks_refuse_sums_where_each_sender_steps(found: dict[str, list[Any]]) -> None:
    for said in found["senders refused"]:
        assert all("per_sender_steps" in text for text in said)
