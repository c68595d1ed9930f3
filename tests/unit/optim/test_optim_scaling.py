"""Sparse gradients under clipping and loss scaling, beside dense ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import CheckpointError, ConfigError
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory
from support.toy_collections import IDS, batch, columns, moved, one_table


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


class TestClipping:
    @pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
    @pytest.mark.parametrize("max_norm", [0.1, 1e6])
    def test_equals_torch_on_a_dense_table(
        self, make_shard: ShardFactory, norm_type: float, max_norm: float
    ) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)
        owner(batch(IDS))
        dense = nn.EmbeddingBag.from_pretrained(
            owner.table("t").lookup([0, *IDS]), freeze=False, mode="sum"
        )
        layer = nn.Linear(2, 1).double()
        twin = copy.deepcopy(layer)
        layer(owner(batch([1, 2], [2]))["a"]).square().sum().backward()
        twin(dense(torch.tensor([1, 2, 2]), torch.tensor([0, 2]))).square().sum().backward()
        ours = clip_grad_norm_(layer.parameters(), optimizer, max_norm, norm_type)
        theirs = nn.utils.clip_grad_norm_([*twin.parameters(), dense.weight], max_norm, norm_type)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
        assert dense.weight.grad is not None
        change = moved(owner, optimizer.step)
        torch.testing.assert_close(change, dense.weight.grad[1:])

    def test_a_norm_that_is_not_finite(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner, nan_policy="skip")
        (float("inf") * owner(batch([1]))["a"]).sum().backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_([], optimizer, 1.0, error_if_nonfinite=True)
        assert torch.isinf(clip_grad_norm_([], [optimizer], 1.0))
        (proxy,) = optimizer.proxies
        assert proxy.grad is not None and bool(proxy.grad.isnan().all())

    def test_no_gradients_at_all(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        assert float(clip_grad_norm_([], SparseOptimizer(owner), 1.0)) == 0.0
        owner(batch([]))["a"].sum().backward()
        assert float(clip_grad_norm_([], SparseOptimizer(owner), 1.0, float("inf"))) == 0.0


class TestScaler:
    def make(
        self, make_shard: ShardFactory, scale: float = 8.0
    ) -> tuple[EmbeddingCollection, SparseOptimizer, torch.amp.GradScaler]:
        owner = one_table(make_shard)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
        return owner, SparseOptimizer(owner), scaler

    @pytest.mark.parametrize("explicit", [True, False])
    def test_the_scale_cancels(self, make_shard: ShardFactory, explicit: bool) -> None:
        owner, optimizer, scaler = self.make(make_shard)

        def act() -> None:
            scaler.scale(owner(batch([1, 3]))["a"].sum()).backward()
            if explicit:
                scaler.unscale_(optimizer)
                (proxy,) = optimizer.proxies
                torch.testing.assert_close(proxy.grad, columns(1, 1))
            scaler.step(optimizer)
            scaler.update()

        torch.testing.assert_close(moved(owner, act), columns(1, 0, 1))
        assert optimizer.global_step == 1

    @interpreted_too
    def test_overflow_skips_the_step(self, make_shard: ShardFactory) -> None:
        owner, optimizer, scaler = self.make(make_shard)

        def act() -> None:
            for factor in (float("inf"), 1.0):
                scaler.scale(factor * owner(batch([1]))["a"].sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        torch.testing.assert_close(moved(owner, act), columns(1, 0, 0))
        assert scaler.get_scale() == 4.0 and optimizer.global_step == 1

    def test_a_batch_without_ids_is_finite(self, make_shard: ShardFactory) -> None:
        owner, optimizer, scaler = self.make(make_shard)
        scaler.scale(owner(batch([]))["a"].sum()).backward()
        scaler.step(optimizer)
        assert optimizer.global_step == 1

    @pytest.mark.parametrize("where", ["dense", "sparse"])
    def test_joint_members_skip_together(self, make_shard: ShardFactory, where: str) -> None:
        owner, sparse, scaler = self.make(make_shard)
        weight = nn.Parameter(torch.ones(2).double())
        joint = JointOptimizer([torch.optim.SGD([weight], lr=1.0), sparse])

        def lap(dense_factor: float, sparse_factor: float) -> None:
            out = owner(batch([1]))["a"].sum()
            loss = dense_factor * weight.sum() + sparse_factor * out
            scaler.scale(loss).backward()
            scaler.step(joint)
            scaler.update()
            joint.zero_grad()

        bad = (float("inf"), 1.0) if where == "dense" else (1.0, float("inf"))
        change = moved(owner, lambda: (lap(*bad), lap(1.0, 1.0)))
        torch.testing.assert_close(change, columns(1, 0, 0))
        torch.testing.assert_close(weight.detach(), torch.zeros(2).double())
        assert sparse.global_step == 1

    def test_joint_state_and_rates(self, make_shard: ShardFactory) -> None:
        owner, sparse, _ = self.make(make_shard)
        weight = nn.Parameter(torch.ones(2))
        dense = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        joint = JointOptimizer([dense, sparse])
        schedule = torch.optim.lr_scheduler.StepLR(dense, 1, gamma=0.1)
        weight.sum().backward()
        loss = joint.step(lambda: torch.tensor(3.0))
        schedule.step()
        assert float(loss) == 3.0 and joint.param_groups[0]["lr"] == pytest.approx(0.1)
        state = joint.state_dict()
        other = JointOptimizer(
            [torch.optim.SGD([weight], lr=1.0, momentum=0.5), SparseOptimizer(owner)]
        )
        other.load_state_dict(state)
        assert other.param_groups[0]["lr"] == pytest.approx(0.1)
        assert other.state_dict()["optimizers"][1] == {"global_step": 1}
        with pytest.raises(CheckpointError, match="0 states"):
            other.load_state_dict({})
        with pytest.raises(ConfigError, match="a parameter twice"):
            JointOptimizer([dense, dense])
