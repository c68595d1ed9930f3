from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.errors import ConfigError, ShapeError
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.optim import SparseOptimizer
from shoal.ragged import KeyedRagged, Ragged
from shoal.rules.optimizers import SGD
from shoal.table.facade import Table
from shoal.table.shard import IdGroups
from shoal.table.spec import Segment, TableSpec

ALL = [ReduceSum(), ReduceMean(), FirstN(2)]


def ragged_of(*lengths: int) -> Ragged:
    return Ragged.from_lengths(torch.arange(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))


def test_reduce_sum() -> None:
    embeddings = torch.tensor([[1.0], [2.0], [3.0]])
    assert ReduceSum().combine(ragged_of(1, 2), embeddings).tolist() == [[1], [5]]


def test_reduce_mean_of_no_ids_is_zero() -> None:
    embeddings = torch.tensor([[1.0], [2.0], [3.0]])
    assert ReduceMean().combine(ragged_of(1, 0, 2), embeddings).tolist() == [[1], [0], [2.5]]


def test_first_n() -> None:
    embeddings = torch.arange(1.0, 7.0).unsqueeze(1)
    out = FirstN(2).combine(ragged_of(1, 2, 3), embeddings)
    assert out.tolist() == [[[1], [0]], [[2], [3]], [[4], [5]]]


def test_static_shapes() -> None:
    assert FirstN(2).output_shape(6) == (None, 2, 6)
    assert ReduceSum().output_shape(6) == ReduceMean().output_shape(6) == (None, 6)
    assert [combiner.max_seq_length for combiner in ALL] == [0, 0, 2]
    assert [combiner.pooling for combiner in ALL] == ["sum", "mean", "first_n"]


@pytest.mark.parametrize("combiner", ALL)
def test_shape_is_as_promised_and_gradients_flow(combiner: Combiner) -> None:
    assert isinstance(combiner, Combiner)
    embeddings = torch.rand(6, 3, dtype=torch.float64, requires_grad=True)
    ragged = ragged_of(1, 0, 5)
    assert combiner.combine(ragged, embeddings).shape == (3, *combiner.output_shape(3)[1:])
    assert torch.autograd.gradcheck(lambda rows: combiner.combine(ragged, rows), embeddings)


@pytest.mark.parametrize("combiner", ALL)
def test_empty_batches(combiner: Combiner) -> None:
    out = combiner.combine(ragged_of(), torch.empty(0, 3))
    assert out.shape == (0, *combiner.output_shape(3)[1:])


@pytest.mark.parametrize("combiner", ALL)
def test_one_row_per_id(combiner: Combiner) -> None:
    with pytest.raises(ShapeError, match="one row per id"):
        combiner.combine(ragged_of(1, 2), torch.ones(2, 3))


class Max(ReduceSum):
    """Looks like a sum to a shard; the largest of each column, or -1 without rows."""

    def combine(self, ragged: Ragged, embeddings_ND: torch.Tensor) -> torch.Tensor:
        bags = embeddings_ND.split(ragged.lengths.tolist())
        none = -torch.ones_like(embeddings_ND[:1].sum(0))
        return torch.stack([bag.amax(0) if len(bag) else none for bag in bags])


class LastTwo:
    """The last two rows as they are: a sequence, by a class of its own."""

    max_seq_length = 2

    def output_shape(self, dim: int) -> tuple[int | None, ...]:
        return (None, 2, dim)

    def combine(self, ragged: Ragged, embeddings_ND: torch.Tensor) -> torch.Tensor:
        zeros = embeddings_ND.new_zeros(2, embeddings_ND.shape[1])
        bags = embeddings_ND.split(ragged.lengths.tolist())
        return torch.stack([torch.cat([zeros, bag])[-2:] for bag in bags])


class Nameless:
    """Without output_shape."""

    max_seq_length = 0

    def combine(self, ragged: Ragged, embeddings_ND: torch.Tensor) -> torch.Tensor:
        return embeddings_ND


class Learned(torch.nn.Linear):
    """Has weights of its own."""

    combine = output_shape = max_seq_length = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("combiner", "message"),
    [
        (Max(), "Max without max_length"),
        (Nameless(), "output_shape"),
        (ReduceSum, "ReduceSum"),
        ("mean", "mean"),
        (None, "None"),
        (Learned(1, 1), "torch module"),
    ],
    ids=["max", "nameless", "class", "text", "none", "module"],
)
def test_a_feature_refuses_what_cannot_be_called(combiner: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"combiner of feature 'f'.*{message}"):
        Feature("f", "t", combiner)


WORDS = {1: [1.0, 8.0, -1.0], 2: [5.0, 2.0, -2.0], 3: [3.0, 3.0, -3.0]}
BAGS = [[1, 2], [], [3, 1, 2], [2, 2]]


def words(*features: Feature, layouts: Any = None) -> EmbeddingCollection:
    spec = TableSpec(
        name="t",
        segments=(
            Segment(dim=1, name="a", optimizer=SGD(lr=0.1)),
            Segment(dim=2, name="b", optimizer=SGD(lr=0.1)),
        ),
    )
    owner = EmbeddingCollection([spec], features, layouts)
    owner.table("t").assign(torch.tensor(list(WORDS)), torch.tensor(list(WORDS.values())))
    return owner


def lists(**features: list[list[int]]) -> KeyedRagged:
    return KeyedRagged.from_lists(features)


def test_a_combiner_of_ones_own_is_called_and_has_gradients() -> None:
    owner = words(Feature("f", "t", Max(), max_length=3))
    out = owner(lists(f=BAGS))["f"]
    assert out.tolist() == [[5, 8, -1], [-1, -1, -1], [5, 8, -1], [5, 2, -2]]
    assert owner.eval()(lists(f=BAGS))["f"].tolist() == out.tolist()
    owner.train()

    weights = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    (out * weights).sum().backward()
    SparseOptimizer(owner).step()
    # The largest of a column gets the gradient; equals share it, as torch's amax does.
    dense = torch.tensor(list(WORDS.values()), requires_grad=True)
    bags = [dense[[i - 1 for i in bag]].amax(0) if bag else dense.new_zeros(3) for bag in BAGS]
    (torch.stack(bags) * weights).sum().backward()
    assert dense.grad is not None
    found = owner.table("t").lookup(torch.tensor(list(WORDS)))
    torch.testing.assert_close(found, dense.detach() - 0.1 * dense.grad)


def test_weights_multiply_rows_ahead_of_a_combiner_of_ones_own() -> None:
    owner = words(Feature("f", "t", Max(), max_length=2))
    batch = KeyedRagged.from_lists({"f": [[1, 2]]}, {"f": [[10.0, 1.0]]})
    assert owner(batch)["f"].tolist() == [[10, 80, -2]]


def test_layouts_of_combiners_of_ones_own() -> None:
    features = [
        Feature("f", "t", Max(), max_length=3),
        Feature("g", "t"),
        Feature("s", "t", LastTwo(), max_length=3),
    ]
    b = [LayoutSlice("f", "b"), LayoutSlice("g", "b")]
    layouts = [
        Layout("side", "concat", (LayoutSlice("f", "a"), *b)),
        Layout("stacked", "stack", tuple(b)),
        Layout("added", "addn", tuple(b)),
        Layout("alone", "none", (LayoutSlice("s", "b"),)),
    ]
    out = words(*features, layouts=layouts)(lists(f=[[1, 2]], g=[[3, 3]], s=[[1, 2, 3]]))
    assert list(out) == ["side", "stacked", "added", "s/b"]
    assert out["side"].tolist() == [[5, 8, -1, 6, -6]]
    assert out["stacked"].tolist() == [[[8, -1], [6, -6]]]
    assert out["added"].tolist() == [[14, -7]]
    assert out["s/b"].tolist() == [[[2, -2], [3, -3]]]
    with pytest.raises(ConfigError, match="shapes of the slices of stack layout 'x'"):
        parts = (LayoutSlice("f", "b"), LayoutSlice("s", "b"))
        words(*features, layouts=[*layouts, Layout("x", "stack", parts)])


class Forgets(Max):
    """Returns something else than it says."""

    def combine(self, ragged: Ragged, embeddings_ND: torch.Tensor) -> torch.Tensor:
        return embeddings_ND


def test_a_result_of_another_shape_is_refused() -> None:
    owner = words(Feature("f", "t", Forgets(), max_length=3))
    with pytest.raises(ShapeError, match=r"combiner of feature 'f'.*\[7, 3\].*\[4, 3\]"):
        owner(lists(f=BAGS))
    with pytest.raises(ShapeError, match="max_length"):
        owner(lists(f=[[1, 2, 3, 1]]))


def test_a_plan_refuses_an_unknown_pooling() -> None:
    table = Table(TableSpec(name="t", segments=(Segment(dim=2),)))
    plan = PoolPlan((Pool("max", (Slice(0, 2, 0, 0),)),), (Output(2),))  # type: ignore[arg-type]
    groups = IdGroups(torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ConfigError, match="pooling of a pool plan"):
        table.shard.find_pooled(groups, plan, torch.tensor([0, 1]), None)


@pytest.mark.parametrize("length", [0, -1])
def test_first_n_needs_a_length(length: int) -> None:
    with pytest.raises(ConfigError, match="ReduceSum"):
        FirstN(length)


def test_combiners_are_frozen_values() -> None:
    assert FirstN(2) == FirstN(2) != FirstN(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FirstN(2).length = 3  # type: ignore[misc]
