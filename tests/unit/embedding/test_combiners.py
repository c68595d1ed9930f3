from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from shoal.embedding.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature
from shoal.errors import ConfigError, ShapeError
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.ragged import Ragged
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
    """Looks like a sum to a shard."""

    def combine(self, ragged: Ragged, embeddings_ND: torch.Tensor) -> torch.Tensor:
        return embeddings_ND.amax(0, keepdim=True)


class Nameless:
    """A combiner that shards know by no name."""

    max_seq_length = 0

    def combine(self, ragged: Ragged, embeddings_ND: torch.Tensor) -> torch.Tensor:
        return embeddings_ND


@pytest.mark.parametrize(
    "combiner",
    [Max(), Nameless(), ReduceSum, "mean", None],
    ids=["max", "nameless", "class", "text", "none"],
)
def test_a_feature_refuses_what_no_shard_would_call(combiner: Any) -> None:
    with pytest.raises(ConfigError, match=r"combiner of feature 'f'.*FirstN.*pool them"):
        Feature("f", "t", combiner)


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
