"""What crosses into tables is refused before anything changes, with a message that helps."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import ConfigError, DTypeError, InputError, NonFiniteGradient, ShapeError
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.optim import JointOptimizer, SparseOptimizer
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD
from shoal.table import checks
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.shards import CUDA, RAISES_LATE, WITH_INTERPRETED, shard_factory
from support.toy_collections import batch, one_table

Verb = Callable[[Table], object]

HELPFUL = r".+: got .+; allowed: .+\. .+"
MAX_TIME_S = (1 << 32) - 1
# What these numbers hold is on the device, where only kernels read it: they clamp and go on.
UNREAD_LATE = {"counts below 0", "counts above 31 bits", "weights NaN", "weights infinite"}


@pytest.fixture(params=["cpu", CUDA])
def one(request: pytest.FixtureRequest) -> Iterator[Table]:
    """A table with rows, which no test may change: they share it."""
    table, before = filled(request.param)
    yield table
    assert rows_of(table) == before


@functools.cache
def filled(kind: str) -> tuple[Table, list[Any]]:
    """A table of a kind of shard, and its rows."""
    spec = TableSpec(name="t", segments=(Segment(dim=2, optimizer=SGD(lr=1.0)),))
    table = Table(spec, shard=shard_factory(kind)([spec]))
    table.apply([1, 2, -3], [[1.0, 2.0]] * 3, event_time_s=100)
    return table, rows_of(table)


def rows_of(table: Table) -> list[Any]:
    chunk = table.export()
    columns = (chunk.ids, chunk.weights, chunk.state, chunk.last_seen_s, chunk.counts)
    return [column.tolist() for column in (*columns, chunk.versions)]


def step(**values: Any) -> Verb:
    return lambda table: table.apply([1], [[1.0, 1.0]], **values)


def context(**values: Any) -> Verb:
    return lambda table: StepContext(**values)


def load(**values: Any) -> Verb:
    return lambda table: table.load(replace(table.export(), **values))


def pooled(output: int = 0, weight: float | None = None) -> Verb:
    def verb(table: Table) -> object:
        ids_N = torch.tensor([1, 9])
        groups = IdGroups(ids_N, torch.tensor([0, 2]), torch.tensor([0], dtype=torch.int32))
        plan = PoolPlan((Pool("sum", (Slice(0, 2, output, 0),)),), (Output(2),))
        weights_N = None if weight is None else torch.tensor([1.0, weight])
        return table.shard.find_pooled(groups, plan, torch.tensor([0, 2]), weights_N)

    return verb


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rates_after_the_check(table: Table) -> None:
    rates = {"t": (1.0,)}
    ctx = StepContext(learning_rates=rates)
    rates["t"] = (math.nan,)
    groups = IdGroups(whole(1), whole(0, 1), torch.tensor([0], dtype=torch.int32))
    table.shard.apply_ids(groups, (torch.ones(1, 2),), ctx=ctx)


def spec(**values: Any) -> Verb:
    settings = {"name": "s", "segments": (Segment(dim=1),), **values}
    return lambda table: TableSpec(**settings)


REFUSED: dict[str, tuple[Verb, type[Exception]]] = {
    "time below 0": (step(event_time_s=-1), InputError),
    "time above 32 bits": (step(event_time_s=MAX_TIME_S + 1), InputError),
    "time as float": (step(event_time_s=1.0), DTypeError),
    "time as bool": (context(event_time_s=True), DTypeError),
    "step below 0": (step(global_step=-1), InputError),
    "step as float": (step(global_step=0.5), DTypeError),
    "policy": (context(nan_policy="ignore"), InputError),
    "clip of 0": (context(nan_clip=0.0), InputError),
    "clip of infinity": (context(nan_clip=math.inf), InputError),
    "clip as text": (context(nan_clip="1"), DTypeError),
    "rate NaN": (step(learning_rates=math.nan), InputError),
    "rate infinite": (step(learning_rates=[-math.inf]), InputError),
    "rate as text": (context(learning_rates={"t": ("1",)}), DTypeError),
    "rate changed later": (rates_after_the_check, InputError),
    "evict before 1970": (lambda table: table.evict(-1), InputError),
    "evict at a float": (lambda table: table.evict(1e9), DTypeError),  # type: ignore[arg-type]
    "entry beyond int64": (lambda table: table.entry(1 << 63), InputError),
    "entry of a float": (lambda table: table.entry(1.0), DTypeError),  # type: ignore[arg-type]
    "dtype": (spec(dtype="float8"), ConfigError),
    "dtype of torch": (spec(dtype=torch.float32), ConfigError),
    "on_full": (spec(on_full="fifo"), ConfigError),
    "capacity as float": (spec(capacity_rows=10.0), ConfigError),
    "capacity of 0": (spec(capacity_rows=0), ConfigError),
    "expected below 0": (spec(expected_rows=-1), ConfigError),
    "expected above 31 bits": (spec(expected_rows=(1 << 31) - 1), ConfigError),
    "empty name": (spec(name=""), ConfigError),
    "name as int": (spec(name=3), ConfigError),
    "dim as float": (lambda table: Segment(dim=2.0), ConfigError),  # type: ignore[arg-type]
    "dim as bool": (lambda table: Segment(dim=True), ConfigError),
    "counts below 0": (step(counts=[-1]), InputError),
    "counts above 31 bits": (lambda table: table.find_or_init([9], [1 << 31]), InputError),
    "weights NaN": (pooled(weight=math.nan), InputError),
    "weights infinite": (pooled(weight=math.inf), InputError),
    "output beyond the plan's": (pooled(output=1), ShapeError),
    "output below 0": (pooled(output=-1), ShapeError),
    "rows of another table": (load(table="other"), InputError),
    "rows twice": (load(ids=whole(5, 5, 6)), InputError),
    "versions below 0": (load(versions=whole(1, -1, 1)), InputError),
    "times above 32 bits": (load(last_seen_s=whole(1, 1, MAX_TIME_S + 1)), InputError),
    "loaded counts below 0": (load(counts=whole(-5, 1, 1)), InputError),
    "null id": (lambda table: table.find([1, None]), InputError),  # type: ignore[list-item]
    "unsigned id": (lambda table: table.find([1 << 63]), InputError),
    "table below 0": (lambda table: checks.table_index(-1, 2), InputError),
    "table too high": (lambda table: checks.table_index(2, 2), InputError),
    "table as bool": (lambda table: checks.table_index(True, 2), DTypeError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_unchanged(one: Table, case: str, request: pytest.FixtureRequest) -> None:
    verb, error = REFUSED[case]
    if case in UNREAD_LATE and request.node.callspec.params["one"] in RAISES_LATE:
        pytest.skip("not read by the host")
    with pytest.raises(error, match=HELPFUL):
        verb(one)


def test_limits_themselves_pass() -> None:
    table = Table(TableSpec(name="t", segments=(Segment(dim=1),), expected_rows=0))
    table.assign([-(1 << 63), (1 << 63) - 1], [[1.0], [2.0]], event_time_s=MAX_TIME_S)
    table.find_or_init([5], [(1 << 31) - 1]).end()
    table.evict(MAX_TIME_S)
    assert table.entry((1 << 63) - 1) is not None and len(table) == 3


@pytest.mark.parametrize(
    ("ids", "words"),
    [([1, None], ["null", "position 1", "Drop"]), ([0, 0, 1 << 63], ["position 2", "int64"])],
)
def test_list_errors_name_the_position(one: Table, ids: list[int], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        one.find(ids)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_empty_sums_have_the_dtype_of_their_table(dtype: Any) -> None:
    tables = [
        TableSpec(name="a", segments=(Segment(dim=2),)),
        TableSpec(name="b", segments=(Segment(dim=2),), dtype=dtype),
    ]
    owner = EmbeddingCollection(tables, [Feature("a", "a"), Feature("b", "b")])
    optimizer = SparseOptimizer(owner)
    made = owner(type(batch()).from_lists({"a": [[1]], "b": [[]]}))
    (made["a"].sum() + made["b"].sum()).backward()
    grad = optimizer.proxies[1].grad
    assert grad is not None and grad.shape == (0, 2)
    assert grad.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("sparse_first", [True, False])
@pytest.mark.parametrize("read", [True, False])
def test_joint_steps_all_or_none(sparse_first: bool, read: bool) -> None:
    owners = [one_table(shard_factory("cpu")) for _ in range(2)]
    sparse = [SparseOptimizer(owner) for owner in owners]
    weight = nn.Parameter(torch.ones(1).double())
    members = [*sparse, torch.optim.SGD([weight], lr=1.0)]
    joint = JointOptimizer(members if sparse_first else members[::-1])
    outs = [owner(batch([1]))["a"].sum() for owner in owners]
    before = [rows_of(owner.table("t")) for owner in owners]
    bad = outs[1 if sparse_first else 0] * math.nan
    (weight.sum() + outs[0] + outs[1] + bad).backward()
    if read:
        assert all(member.proxies[0].grad is not None for member in sparse)
    with pytest.raises(NonFiniteGradient, match=HELPFUL):
        joint.step()
    assert weight.tolist() == [1.0]
    assert [rows_of(owner.table("t")) for owner in owners] == before


@pytest.mark.parametrize("kind", WITH_INTERPRETED)
@pytest.mark.parametrize("counter", ["exact", "sketch"])
def test_copies_carry_occurrences(kind: str, counter: Any) -> None:
    admission = Admission(threshold=3, counter=counter, sketch_width=64, sketch_depth=2)
    spec = TableSpec(name="t", segments=(Segment(dim=1),), admission=admission)
    shard = shard_factory(kind)([spec])
    owner = EmbeddingCollection([spec], [Feature("a", "t")], shard=shard)
    owner(batch([7, 7]))
    copy = pickle.loads(pickle.dumps(owner))
    assert len(copy.table("t")) == 0
    copy(batch([7], [8]))
    assert copy.table("t").find([7, 8])[1].tolist() == [True, False]


def test_pickle_keeps_the_kind_of_shard() -> None:
    owner = one_table(shard_factory("cpu"))
    assert isinstance(pickle.loads(pickle.dumps(owner)).shard, CpuShard)
