"""Gradients of rows that no optimizer steps: said once, and not kept."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch

from shoal.embedding import gradients
from shoal.embedding.collection import EmbeddingCollection
from shoal.optim import SparseOptimizer
from support.shards import shard_factory
from support.toy_collections import batch, columns, moved, one_table

SAID = "no SparseOptimizer over them"


def owner_of_rows() -> EmbeddingCollection:
    return one_table(shard_factory("cpu"))


def train(owner: EmbeddingCollection, times: int) -> None:
    for _ in range(times):
        owner(batch([1, 2]))["a"].sum().backward()


def test_one_warning_and_one_record() -> None:
    owner = owner_of_rows()
    with pytest.warns(UserWarning, match=rf"tables 't'.*{SAID}.*SparseOptimizer\(model\)") as said:
        train(owner, 20)
    assert len(said) == 1 and len(owner.ledger) == 1


def test_an_optimizer_that_is_gone_counts_for_none() -> None:
    owner = owner_of_rows()
    optimizer = SparseOptimizer(owner)
    train(owner, 2)
    del optimizer
    with pytest.warns(UserWarning, match=SAID):
        train(owner, 2)
    assert len(owner.ledger) == 1


def test_an_optimizer_of_another_collection() -> None:
    stepped, forgotten = owner_of_rows(), owner_of_rows()
    optimizer = SparseOptimizer(stepped)
    with pytest.warns(UserWarning, match=SAID):
        for _ in range(3):
            (stepped(batch([1]))["a"] + forgotten(batch([1]))["a"]).sum().backward()
            optimizer.step()
    assert len(forgotten.ledger) == 1 and not len(stepped.ledger)


def test_an_optimizer_made_after_the_first_backward_applies_it() -> None:
    """All of one batch's losses too, and of batches that were looked up together."""
    owner = owner_of_rows()

    def act() -> None:
        first, second = owner(batch([1]))["a"], owner(batch([2]))["a"]
        first.sum().backward(retain_graph=True)
        (2 * first).sum().backward()
        second.sum().backward()
        SparseOptimizer(owner).step()

    torch.testing.assert_close(moved(owner, act), columns(3, 1, 0))


def test_reading_says_nothing() -> None:
    owner = owner_of_rows()
    train(owner, 1)
    owner.eval()
    for _ in range(3):
        owner(batch([1]))
    owner.train()
    with torch.no_grad():
        owner(batch([1]))
    assert len(owner.ledger) == 1


def test_backward_passes_that_are_never_applied() -> None:
    """A model's zero_grad() does not reach rows, and an optimizer may be forgotten."""
    owner = owner_of_rows()
    optimizer = SparseOptimizer(owner)
    with mock.patch.object(gradients, "_MANY", 4):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                train(owner, 3)
                optimizer.zero_grad()
        with pytest.warns(UserWarning, match="4 backward passes since the last step") as said:
            for _ in range(3):
                train(owner, 3)
                owner.zero_grad()
    assert len(said) == 1 and len(owner.ledger) == 9
