"""Pickle, deepcopy, torch.save: everything public survives them, or says why not."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import (
    Admission,
    DistributedModelParallel,
    EmbeddingCollection,
    Expiry,
    Feature,
    FirstN,
    JointOptimizer,
    KeyedRagged,
    Layout,
    LayoutSlice,
    Segment,
    SparseOptimizer,
    StepContext,
    Table,
    TableSpec,
    compressors,
    create_train_pipeline,
    errors,
    initializers,
    metrics,
    models,
    optimizers,
    schedules,
)
from shoal.rules.optimizers import RuleContext
from shoal.table.values import Cursor


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


HOW: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
}
how = pytest.mark.parametrize("how", HOW.values(), ids=HOW)


def spec(dtype: str = "float32", **more: Any) -> TableSpec:
    rule = optimizers.Adam(lr=schedules.ConstantRate(0.1))
    return TableSpec(name="t", segments=(Segment(dim=2, optimizer=rule),), dtype=dtype, **more)


def table(dtype: str = "float32") -> Table:
    made = Table(spec(dtype), seed=4)
    real = torch.float64 if dtype == "float64" else torch.float32
    made.apply([1, 2], torch.ones(2, 2, dtype=real), global_step=3)
    made.shard.close_version()
    return made


def collection() -> EmbeddingCollection:
    made = EmbeddingCollection([spec()], [Feature("f", "t")], seed=1)
    made.table("t").apply([1, 2], torch.ones(2, 2))
    return made


def tensors_of(value: Any) -> list[torch.Tensor]:
    if dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return [part for part in parts if isinstance(part, torch.Tensor)]
    return []


BATCH = KeyedRagged.from_lists({"f": [[1], [2, 3]]}, {"f": [[0.5], [1, 2]]})
CHUNKS = {
    f"{what}-{dtype}": made
    for dtype in ("float32", "float16", "float64")
    for what, made in (
        ("export", lambda dtype=dtype: table(dtype).export()),
        ("entry", lambda dtype=dtype: table(dtype).entry(1)),
    )
}
VALUES: dict[str, Callable[[], Any]] = {
    **CHUNKS,
    "keyed": lambda: BATCH,
    "ragged": lambda: BATCH["f"],
    "found": lambda: table().shard.find(table()._groups([1, 5])),
    "cursor": lambda: Cursor(3, 1),
    "occurrences": lambda: table().shard.admission_state(0),
}
REQUIRED = {"Constant": {"value": 0.5}, "DelayCompensated": {"inner": optimizers.SGD()}}
PLAIN: dict[str, Callable[[], Any]] = {
    "spec": lambda: spec("bfloat16", admission=Admission(threshold=3), expiry=Expiry()),
    "feature": lambda: Feature("f", "t", FirstN(3), max_length=4),
    "layout": lambda: Layout("l", "concat", (LayoutSlice("f"),)),
    "context": lambda: StepContext(global_step=1, learning_rates={"t": (0.1,)}),
    "constant": lambda: schedules.ConstantRate(0.1),
    **{
        f"{room.__name__}.{name}": partial(made, **REQUIRED.get(name, {}))
        for room in (initializers, optimizers, compressors)
        for name in room.__all__
        if dataclasses.is_dataclass(made := getattr(room, name)) and made is not RuleContext
    },
}


@how
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_values_with_tensors(make: Callable[[], Any], how: Callable[[Any], Any]) -> None:
    value = make()
    twin = how(value)
    assert type(twin) is type(value)
    for mine, other in zip(tensors_of(value), tensors_of(twin), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@how
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_declarations(make: Callable[[], Any], how: Callable[[Any], Any]) -> None:
    value = make()
    assert how(value) == value


@how
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_table_carries_rows_and_continues_alike(dtype: str, how: Callable[[Any], Any]) -> None:
    one = table(dtype)
    two = how(one)
    for made in (one, two):
        real = torch.float64 if dtype == "float64" else torch.float32
        made.apply([2, 7], torch.ones(2, 2, dtype=real), global_step=4)
    assert len(two) == len(one) == 3
    assert two.spec == one.spec
    # Versions count from the copy on: its feed is its own.
    chunks = [dataclasses.replace(made.export(), versions=torch.empty(0)) for made in (one, two)]
    for mine, other in zip(*map(tensors_of, chunks), strict=True):
        assert torch.equal(mine, other)


@how
def test_modules_carry_rows(how: Callable[[Any], Any]) -> None:
    for model in (
        collection(),
        nn.Sequential(collection()),
        DistributedModelParallel(collection()),
    ):
        twin = how(model)
        found = [
            next(part for part in made.modules() if isinstance(part, EmbeddingCollection))
            for made in (model, twin)
        ]
        assert torch.equal(*[owner.table("t").lookup([1, 2]) for owner in found])
        twin(BATCH)["f"].sum().backward()
        assert len(found[0].ledger) == 0


@how
def test_tables_that_share_a_shard_go_on_sharing_it(how: Callable[[Any], Any]) -> None:
    owner = collection()
    twin, other = how((owner, owner.table("t")))
    other.assign([9], torch.ones(1, 2))
    assert twin.table("t").lookup([9]).tolist() == [[1.0, 1.0]]


@how
@pytest.mark.parametrize("name", metrics.__all__)
def test_metrics_and_models(name: str, how: Callable[[Any], Any]) -> None:
    made = getattr(metrics, name)
    assert how(made) is made or isinstance(how(made), type(made))
    net = models.MLP(4, (2,)) if hasattr(models, "MLP") else nn.Linear(4, 2)
    how(net)


@how
def test_what_cannot_be_copied_says_what_to_do(how: Callable[[Any], Any]) -> None:
    sparse = SparseOptimizer(owner := collection())
    joint = JointOptimizer([sparse])
    pipeline = create_train_pipeline(owner, sparse, loss_of=lambda out, batch: out["f"].sum())
    rows = table()
    parts = (rows.find_or_init([1]), rows.shard.snapshot())
    for value in (sparse, joint, sparse.proxies[0], pipeline, *parts):
        with pytest.raises((errors.ShoalError, TypeError), match=r"allowed: .*\. [A-Z]"):
            how(value)


def test_states_load_with_weights_only() -> None:
    owner = collection()
    sparse = SparseOptimizer(owner)
    file = io.BytesIO()
    joint = JointOptimizer([sparse])
    torch.save([owner.state_dict(), sparse.state_dict(), joint.state_dict()], file)
    file.seek(0)
    assert torch.load(file, weights_only=True)[1] == {"global_step": 0}
    assert shoal.__all__
