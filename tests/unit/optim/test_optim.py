"""SparseOptimizer: when rows step, with which rate, and how scalers and clipping see them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteGradient,
    ShapeError,
    UnknownName,
)
from shoal.optim import SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.compressors import OneBit
from shoal.rules.initializers import Ones
from shoal.rules.optimizers import SGD
from shoal.rules.schedules import Polynomial
from shoal.table.spec import Segment, TableSpec
from support.shards import (
    CUDA,
    RAISES_LATE,
    SHARD_KINDS,
    SHARDS,
    ShardFactory,
    interpreted_too,
    shard_factory,
)
from support.toy_collections import (
    BATCH,
    IDS,
    ITEMS,
    USERS,
    batch,
    collection,
    columns,
    moved,
    one_table,
    rows,
)


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


class TestAccumulation:
    def test_backward_alone_changes_nothing(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        SparseOptimizer(owner)
        change = moved(owner, lambda: owner(batch(IDS))["a"].sum().backward())
        assert not change.any()

    def test_all_of_a_step_adds_up(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)

        def act() -> None:
            out = owner(batch([1, 2], [2]))["a"]
            out[0].sum().backward(retain_graph=True)
            (3 * out[1]).sum().backward()
            (10 * owner(batch([3, 1]))["a"]).sum().backward()
            optimizer.step()

        torch.testing.assert_close(moved(owner, act), columns(11, 4, 10))

    def test_a_step_takes_each_gradient_once(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)

        def act() -> None:
            owner(batch([1]))["a"].sum().backward()
            optimizer.step()
            optimizer.step()
            owner(batch([2]))["a"].sum().backward()
            optimizer.zero_grad()
            optimizer.step()

        torch.testing.assert_close(moved(owner, act), columns(1, 0, 0))
        assert optimizer.global_step == 3

    def test_closure(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = owner(batch([1]))["a"].sum()
            loss.backward()
            return loss

        owner(batch(IDS))
        loss = owner(batch([1]))["a"].sum()
        torch.testing.assert_close(optimizer.step(closure), loss)
        torch.testing.assert_close(owner(batch([1]))["a"].sum(), loss - 2)

    @interpreted_too
    def test_two_collections_on_one_shard_step_as_one(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        other = EmbeddingCollection(owner.shard.specs, [Feature("b", "t")], shard=owner.shard)
        owner(batch([1]))["a"].sum().backward()
        other(KeyedRagged.from_lists({"b": [[1]]}))["b"].sum().backward()
        optimizer = SparseOptimizer([nn.ModuleList([owner]), other])
        (proxy,) = optimizer.proxies
        torch.testing.assert_close(proxy.grad, columns(2))
        torch.testing.assert_close(moved(owner, optimizer.step), columns(2, 0, 0))

    @interpreted_too
    def test_event_times_stamp_rows(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)
        owner(batch([1]), event_time_s=10)
        for time_s in (50, 40):
            owner(batch([1, 1]), event_time_s=time_s)["a"].sum().backward()
        optimizer.step()
        entry = owner.table("t").entry(1)
        assert entry is not None and (entry.last_seen_s, entry.count) == (50, 4)


class TestProxies:
    def test_sums_are_made_only_when_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        owner = one_table(shard_factory("cpu"))
        optimizer = SparseOptimizer(owner)
        calls: list[int] = []
        inner = owner.shard.sum_grads
        monkeypatch.setattr(
            owner.shard, "sum_grads", lambda records: calls.append(len(records)) or inner(records)
        )
        for _ in range(2):
            owner(batch([1, 2]))["a"].sum().backward()
        optimizer.step()
        assert not calls
        owner(batch([1, 2]))["a"].sum().backward()
        (proxy,) = optimizer.proxies
        assert proxy.grad is proxy.grad and calls == [1]
        optimizer.step()
        assert calls == [1]

    def test_grad_is_the_sum_per_id(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        users, items = optimizer.proxies
        assert (users.table, items.table) == ("users", "items")
        assert users.grad is None and users.ids is None
        out = owner(BATCH)
        (2 * out["user"] + out["item"][:, :5]).sum().backward()
        assert users.ids is not None and users.ids.tolist() == [1, 2, 3]
        torch.testing.assert_close(users.grad, torch.full((3, 5), 2.0).double())
        assert items.grad is not None and items.ids is not None
        shares = dict(zip(items.ids.tolist(), items.grad[:, 0].tolist(), strict=True))
        assert shares == pytest.approx({7: 2 / 3, 8: 1 / 3, 9: 1, 10: 0, 11: 0, 12: 0})
        optimizer.zero_grad()
        assert users.grad is None

    @interpreted_too
    def test_changes_in_place_are_applied(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)
        (proxy,) = optimizer.proxies

        def act() -> None:
            owner(batch([3, 1]))["a"].sum().backward()
            assert proxy.grad is not None
            proxy.grad.mul_(0.5)
            (10 * owner(batch([2, 3]))["a"]).sum().backward()
            torch.testing.assert_close(proxy.grad.sum(), torch.tensor(42.0).double())
            optimizer.step()

        torch.testing.assert_close(moved(owner, act), columns(0.5, 10, 10.5))
        entry = owner.table("t").entry(3)
        assert entry is not None and entry.count == 2

    def test_none_drops_a_table(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        optimizer = SparseOptimizer(owner)
        users, items = optimizer.proxies
        out = owner(BATCH)
        before = rows(owner, "users", IDS), rows(owner, "items", [9])
        (out["user"].sum() + out["item"].sum()).backward()
        users.grad = None
        assert users.grad is None and items.grad is not None
        optimizer.step()
        torch.testing.assert_close(rows(owner, "users", IDS), before[0])
        torch.testing.assert_close(rows(owner, "items", [9]), before[1] - 1)

    def test_other_sums_in_their_place(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)
        (proxy,) = optimizer.proxies
        proxy.grad = None
        owner(batch([1]))["a"].sum().backward()
        with pytest.raises(ShapeError, match=r"got \(3, 2\)"):
            proxy.grad = torch.ones(3, 2).double()
        proxy.grad = torch.full((1, 2), 7.0).double()
        torch.testing.assert_close(moved(owner, optimizer.step), columns(7, 0, 0))

    def test_without_init_on_lookup(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard, init_on_lookup=False)
        optimizer = SparseOptimizer(owner)
        users, _ = optimizer.proxies
        for factor in (1.0, 3.0):
            (factor * owner(BATCH)["user"]).sum().backward()
        torch.testing.assert_close(users.grad, torch.full((3, 5), 4.0).double())
        assert users.grad is not None
        users.grad.zero_()
        optimizer.step()
        fresh = collection(make_shard)
        fresh(BATCH)
        torch.testing.assert_close(rows(owner, "users", IDS), rows(fresh, "users", IDS))
        entry = owner.table("users").entry(1)
        assert entry is not None and entry.count == 1


def lap(owner: EmbeddingCollection, optimizer: SparseOptimizer) -> tuple[Tensor, Tensor]:
    """How far a row of each table falls in a step with gradient 1."""
    out = owner(BATCH)
    before = rows(owner, "users", [3])[0], rows(owner, "items", [9])[0]
    (out["user"].sum() + out["item"].sum()).backward()
    optimizer.step()
    after = rows(owner, "users", [3])[0], rows(owner, "items", [9])[0]
    return before[0] - after[0], before[1] - after[1]


class TestRates:
    def test_names_bind(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        rates = {("items", "s1"): 0.5, "items": Polynomial(2.0, 10, end=1.0)}
        optimizer = SparseOptimizer(owner, rates=rates)
        expected = [[2.0] + [0.5] * 4 + [2.0] * 2, [1.9] + [0.5] * 4 + [1.9] * 2]
        for want in expected:
            users, items = lap(owner, optimizer)
            torch.testing.assert_close(users, torch.ones(5).double())
            torch.testing.assert_close(items, torch.tensor(want).double())
        assert optimizer.rates() == {"items": pytest.approx((1.8, 0.5, 1.8))}

    @interpreted_too
    def test_lookups_know_the_step(self, make_shard: ShardFactory) -> None:
        segment = Segment(
            dim=1,
            optimizer=SGD(lr=0.0),
            initializer=Ones(),
            compressor=OneBit(step_size=1, amplitude=1.0),
        )
        spec = TableSpec(name="t", segments=(segment,), dtype="float64")
        owner = EmbeddingCollection([spec], [Feature("a", "t")], shard=make_shard([spec]))
        optimizer = SparseOptimizer(owner)
        for step in range(3):
            out = owner(batch([1]))["a"]
            scale = (1 + 0.005 * step) ** 0.5
            torch.testing.assert_close(out.detach(), torch.tensor([[scale]]).double().tanh())
            out.sum().backward()
            optimizer.step()

    def test_unknown_names(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        with pytest.raises(UnknownName, match=r"table in rates.*'item'.*items"):
            SparseOptimizer(owner, rates={"item": 1.0})
        with pytest.raises(UnknownName, match=r"segment of table 'items' in rates.*'s3'.*s0"):
            SparseOptimizer(owner, rates={("items", "s3"): 1.0})
        with pytest.raises(ConfigError, match="value"):
            SparseOptimizer(owner, rates={"items": -1.0})
        with pytest.raises(UnknownName, match=r"nan_policy.*'ignore'.*raise"):
            SparseOptimizer(owner, nan_policy="ignore")  # type: ignore[arg-type]

    def test_a_name_of_two_tables(self, make_shard: ShardFactory) -> None:
        both = nn.ModuleList([collection(make_shard), collection(make_shard)])
        with pytest.raises(ConfigError, match="2 shards"):
            SparseOptimizer(both, rates={"items": 1.0})

    def test_the_step_survives_a_save(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        schedule = Polynomial(1.0, 2, end=0.0)
        optimizer = SparseOptimizer(owner, rates={"users": schedule})
        lap(owner, optimizer)
        assert optimizer.state_dict() == {"global_step": 1}
        other = SparseOptimizer(owner, rates={"users": schedule})
        other.load_state_dict(optimizer.state_dict())
        torch.testing.assert_close(lap(owner, other)[0], torch.full((5,), 0.5).double())
        for wrong in ({}, {"global_step": "1"}, {"global_step": -1}, {"global_step": 1, "x": 2}):
            with pytest.raises(CheckpointError, match="SparseOptimizer"):
                other.load_state_dict(wrong)
        with pytest.raises(ConfigError, match="state_dict"):
            copy.deepcopy(optimizer)


class TestNonFinite:
    def gradient(self, owner: EmbeddingCollection) -> None:
        factors = torch.tensor([[1.0], [float("nan")], [float("-inf")]]).double()
        (owner(batch([1], [2], [3]))["a"] * factors).sum().backward()

    @pytest.mark.parametrize("kind", sorted(set(SHARDS) - RAISES_LATE))
    def test_raise_changes_nothing(self, kind: str) -> None:
        owner = one_table(shard_factory(kind))
        optimizer = SparseOptimizer(owner)

        def act() -> None:
            self.gradient(owner)
            with pytest.raises(NonFiniteGradient):
                optimizer.step()
            assert optimizer.global_step == 0
            optimizer.zero_grad()
            optimizer.step()
            optimizer.check()

        assert not moved(owner, act).any()

    @pytest.mark.parametrize("make_shard", [CUDA], indirect=True)
    def test_a_late_raise_leaves_bad_rows_alone(self, make_shard: ShardFactory) -> None:
        owner = one_table(make_shard)
        optimizer = SparseOptimizer(owner)
        owner(batch(IDS))
        before = owner.table("t").export()
        self.gradient(owner)
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
            optimizer.check()
        optimizer.zero_grad()
        optimizer.check()
        after = owner.table("t").export()
        rows = dict(zip(after.ids.tolist(), before.weights - after.weights, strict=True))
        torch.testing.assert_close(torch.stack([rows[i] for i in IDS]), columns(1, 0, 0))

    def test_skip_and_clip(self, make_shard: ShardFactory) -> None:
        for policy, want in (("skip", (1, 0, 0)), ("clip", (1, 0, -5))):
            owner = one_table(make_shard)
            optimizer = SparseOptimizer(owner, nan_policy=policy, nan_clip=5.0)

            def act(owner: EmbeddingCollection, optimizer: SparseOptimizer) -> None:
                self.gradient(owner)
                optimizer.step()

            change = moved(owner, lambda o=owner, s=optimizer: act(o, s))
            torch.testing.assert_close(change, columns(*want))
            skipped = owner.table("t").stats().nonfinite_skipped
            assert skipped == (2 if policy == "skip" else 0)

    @interpreted_too
    def test_no_shard_steps_when_one_refuses(self, make_shard: ShardFactory) -> None:
        good, bad = one_table(make_shard), one_table(make_shard)
        optimizer = SparseOptimizer([good, bad])

        def act() -> None:
            good(batch([1]))["a"].sum().backward()
            self.gradient(bad)
            with pytest.raises(NonFiniteGradient):
                optimizer.step()

        assert not moved(good, act).any()


class TestWatchers:
    """What torch's own wrapper of `step` does, which a step that nobody watches does without."""

    def test_hooks(self) -> None:
        optimizer, seen = SparseOptimizer(one_table(SHARDS["cpu"])), []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append(str(optimizer.global_step)))
        optimizer.step(lambda: seen.append("closure"))
        assert seen == ["before", "closure", "1"]

    def test_hooks_of_all_optimizers(self) -> None:
        optimizer, seen = SparseOptimizer(one_table(SHARDS["cpu"])), []
        hook = register_optimizer_step_post_hook(lambda *_: seen.append(1))
        optimizer.step()
        hook.remove()
        optimizer.step()
        assert seen == [1] and optimizer.global_step == 2

    def test_a_profiler(self) -> None:
        optimizer = SparseOptimizer(one_table(SHARDS["cpu"]))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
        names = [event.key for event in profile.key_averages()]
        assert "Optimizer.step#SparseOptimizer.step" in names


def test_modules_without_a_collection() -> None:
    with pytest.raises(ConfigError, match="no EmbeddingCollection"):
        SparseOptimizer(nn.Linear(1, 1))


def test_modes_may_not_mix_on_one_shard() -> None:
    shard = shard_factory("reference")([USERS, ITEMS])
    parts = [
        EmbeddingCollection([USERS], [Feature("user", "users")], shard=shard, init_on_lookup=mode)
        for mode in (True, False)
    ]
    with pytest.raises(ConfigError, match="init_on_lookup"):
        SparseOptimizer(parts)


def test_gradients_changed_between_backward_and_step() -> None:
    owner = one_table(shard_factory("reference"))
    optimizer = SparseOptimizer(owner)
    out = owner(batch([1]))["a"]
    grad = torch.ones_like(out)
    out.backward(grad)
    grad.mul_(2)
    (proxy,) = optimizer.proxies
    with pytest.raises(InputError, match="change in place"):
        proxy.grad  # noqa: B018
