"""EmbeddingCollection's autograd node: gradients, tickets, recomputation, copies."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import InputError, TicketError
from shoal.optim import SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD
from shoal.table.spec import Segment, TableSpec
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory
from support.toy_collections import BATCH, collection, rows, table


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


class TestBackward:
    def test_expanded_gradients(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        out = owner(BATCH)
        before = rows(owner, "items", [7, 8, 9, 10])
        out["item"].sum().backward()
        optimizer.step()
        moved = before - rows(owner, "items", [7, 8, 9, 10])
        share = torch.tensor([2 / 3, 1 / 3, 1.0, 0.0]).double()
        torch.testing.assert_close(moved, share[:, None].expand(4, 7))

    def test_outputs_may_be_changed_in_place(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        out = owner(BATCH)
        before = rows(owner, "users", [3])
        out["user"].mul_(2.0)
        out["history"].mul_(3.0).sum().backward(retain_graph=True)
        out["user"].sum().backward()
        optimizer.step()
        torch.testing.assert_close(
            before - rows(owner, "users", [3]), torch.full((1, 5), 2.0).double()
        )

    def test_a_graph_runs_once_unless_retained(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        loss = owner(BATCH)["user"].sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert len(owner.ledger) == 2
        with pytest.raises(TicketError, match="not retained"):
            loss.backward()

    @interpreted_too
    def test_each_output_may_go_backward_on_its_own(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        out = owner(BATCH)
        before = rows(owner, "users", [3]), rows(owner, "items", [9])
        out["user"].sum().backward()
        (2 * out["item"]).sum().backward()
        with pytest.raises(TicketError, match="not retained"):
            out["user"].sum().backward()
        optimizer.step()
        torch.testing.assert_close(rows(owner, "users", [3]), before[0] - 1)
        torch.testing.assert_close(rows(owner, "items", [9]), before[1] - 2)

    def test_second_derivatives_are_refused(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        loss = owner(BATCH)["user"].square().sum()
        with pytest.raises(InputError, match="create_graph=True"):
            loss.backward(create_graph=True)
        assert len(owner.ledger) == 0

    def test_penalty_on_the_gradient_of_an_output(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        out = owner(BATCH)["user"]
        before = rows(owner, "users", [3])
        (slope,) = torch.autograd.grad(out.pow(3).sum(), out, create_graph=True)
        slope.sum().backward()
        optimizer.step()
        torch.testing.assert_close(rows(owner, "users", [3]), before - 6 * before)

    def test_backward_after_the_step(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        loss = owner(BATCH)["user"].sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(TicketError, match="gradient was applied"):
            loss.backward()

    def test_ids_changed_in_place(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        batch = KeyedRagged(BATCH.keys, BATCH.values_N.clone(), BATCH.offsets_FB1)
        loss = owner(batch)["user"].sum()
        batch.values_N.add_(1)
        with pytest.raises(InputError, match="a change in place since forward"):
            loss.backward()

    @interpreted_too
    def test_ids_of_inference_mode(self, make_shard: ShardFactory) -> None:
        found = []
        for mode in (False, True):
            owner = collection(make_shard)
            optimizer = SparseOptimizer(owner)
            with torch.inference_mode(mode):
                batch = KeyedRagged(BATCH.keys, BATCH.values_N.clone(), BATCH.offsets_FB1.clone())
            owner(batch)["user"].square().sum().backward()
            optimizer.step()
            found.append(owner.table("users").lookup(BATCH.values_N))
        assert torch.equal(*found)

    def test_a_gradient_changed_in_place(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        before = rows(owner, "users", [1, 2, 3])
        out = owner(BATCH)["user"]
        grad = torch.ones_like(out)
        out.backward(grad)
        grad.zero_()
        with pytest.raises(InputError, match="change in place"):
            optimizer.step()
        optimizer.zero_grad()
        assert not before.any()
        assert bool((rows(owner, "users", [3]) != 0).all())


class TestTickets:
    def held(self, owner: EmbeddingCollection) -> bool:
        gc.collect()
        try:
            owner.table("users").clear()
        except TicketError:
            return True
        return False

    @pytest.mark.slow
    def test_a_dropped_graph_lets_go(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        out = owner(BATCH)
        assert self.held(owner)
        del out
        assert not self.held(owner)

    @pytest.mark.slow
    @interpreted_too
    def test_step_lets_go(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        loss = owner(BATCH)["user"].sum()
        loss.backward()
        assert self.held(owner)
        optimizer.step()
        assert not self.held(owner)

    def test_zero_grad_lets_go_of_what_went_backward(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        out = owner(BATCH)
        loss = sum(value.sum() for value in out.values())
        loss.backward()
        optimizer.zero_grad()
        assert not self.held(owner)
        assert loss.requires_grad

    def test_zero_grad_between_forward_and_backward(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        loss = owner(BATCH)["user"].sum()
        before = rows(owner, "users", [3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(rows(owner, "users", [3]), before - 1)

    def test_zero_grad_keeps_a_retained_graph_usable(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        loss = owner(BATCH)["user"].sum()
        before = rows(owner, "users", [3])
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(rows(owner, "users", [3]), before - 1)

    @interpreted_too
    def test_a_recomputed_forward_is_one_occurrence(self, make_shard: ShardFactory) -> None:
        spec = table("t", 2, admission=Admission(threshold=2))
        owner = collection(make_shard, None, [Feature("a", "t")], [spec])
        optimizer = SparseOptimizer(owner)
        batch = KeyedRagged.from_lists({"a": [[4]]})

        def run(batch: KeyedRagged) -> Tensor:
            return owner(batch)["a"].square().sum()

        checkpoint(run, batch, use_reentrant=False).backward()
        assert len(owner.ledger) == 1
        optimizer.step()
        assert len(owner.table("t")) == 0
        checkpoint(run, batch, use_reentrant=False).backward()
        before = rows(owner, "t", [4])
        optimizer.step()
        torch.testing.assert_close(rows(owner, "t", [4]), before - 2 * before)

    def test_the_same_batch_after_a_step_is_a_new_occurrence(
        self, make_shard: ShardFactory
    ) -> None:
        spec = table("t", 2, admission=Admission(threshold=3))
        owner = collection(make_shard, None, [Feature("a", "t")], [spec])
        optimizer = SparseOptimizer(owner)
        batch = KeyedRagged.from_lists({"a": [[4]]})
        for expected in (0, 0, 1):
            owner(batch)["a"].sum().backward()
            optimizer.step()
            assert len(owner.table("t")) == expected

    def test_a_retained_graph_does_not_hand_on_its_ended_ticket(
        self, make_shard: ShardFactory
    ) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        loss = owner(BATCH)["user"].sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        before = rows(owner, "users", [3])
        owner(BATCH)["user"].sum().backward()
        optimizer.step()
        torch.testing.assert_close(rows(owner, "users", [3]), before - 1)
        assert loss.requires_grad


class TestCopies:
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_copies_carry_rows_and_live_apart(self, make_shard: ShardFactory, how: str) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        owner(BATCH)["user"].sum().backward()
        twin = copy.deepcopy(owner) if how == "deepcopy" else pickle.loads(pickle.dumps(owner))
        ids = [1, 2, 3]
        before = rows(owner, "users", ids)
        torch.testing.assert_close(rows(twin, "users", ids), before)
        optimizer.step()
        torch.testing.assert_close(rows(twin, "users", ids), before)
        assert not torch.equal(rows(owner, "users", ids), before)
        torch.testing.assert_close(twin(BATCH)["item"], owner(BATCH)["item"])

    def test_rows_are_not_in_the_state_dict(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        owner(BATCH)
        assert not owner.state_dict() and not list(owner.parameters())
        owner.load_state_dict({})


def test_a_gradient_with_a_lazy_sign_is_read_with_it() -> None:
    moved = []
    for sign in (torch.neg, torch._neg_view):
        spec = TableSpec(name="t", segments=(Segment(dim=2, optimizer=SGD(lr=1.0)),))
        rows = EmbeddingCollection([spec], [Feature("f", "t")], seed=1)
        stepper = SparseOptimizer(rows)
        rows(KeyedRagged.from_lists({"f": [[1]]}))["f"].backward(sign(torch.ones(1, 2)))
        stepper.step()
        moved.append(rows.table("t").lookup([1]))
    assert torch.equal(*moved)
