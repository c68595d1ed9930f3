"""What is sent to a shard's device, and that nobody waits for it: on the meta device."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from shoal.data import Batch
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import FirstN, ReduceMean
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.errors import (
    DTypeError,
    InputError,
    OutOfDeviceMemory,
    ShapeError,
    out_of_device_memory,
)
from shoal.optim import JointOptimizer, SparseOptimizer
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import SGD
from shoal.table.facade import Table
from shoal.table.spec import Segment, TableSpec
from support.meta_shard import MetaShard
from support.shards import shard_factory

USERS = TableSpec(name="users", segments=(Segment(dim=4, optimizer=SGD(lr=1.0)),))
ITEMS = TableSpec(name="items", segments=(Segment(dim=2, optimizer=SGD(lr=1.0)),))
FEATURES = (
    Feature("user", "users", max_length=2),
    Feature("item", "items", ReduceMean()),
    Feature("path", "items", FirstN(3)),
)
LISTS = {"user": [[1, 2], []], "item": [[7], [8, 9, 9]], "path": [[], [7]]}
WEIGHTS = {key: [[0.5] * len(row) for row in rows] for key, rows in LISTS.items()}


def collection(*, init_on_lookup: bool = True) -> EmbeddingCollection:
    tables = (USERS, ITEMS)
    shard = MetaShard(tables)
    return EmbeddingCollection(tables, FEATURES, shard=shard, init_on_lookup=init_on_lookup)


def shard_of(owner: EmbeddingCollection) -> MetaShard:
    assert isinstance(owner.shard, MetaShard)
    return owner.shard


def batches() -> dict[str, KeyedRagged]:
    plain = KeyedRagged.from_lists(LISTS)
    turned = KeyedRagged.from_lists({"extra": [[1], [2]], **dict(reversed(LISTS.items()))})
    return {
        "cpu": plain,
        "weighted": KeyedRagged.from_lists(LISTS, WEIGHTS),
        "moved": plain.to("meta"),
        "moved, weighted": KeyedRagged.from_lists(LISTS, WEIGHTS).to("meta"),
        "other order": turned,
        "moved, other order": turned.to("meta"),
        "no examples": KeyedRagged.from_lists({key: [] for key in LISTS}),
    }


@pytest.mark.parametrize("name", list(batches()))
def test_a_step_waits_for_nothing(name: str) -> None:
    batch, owner = batches()[name], collection()
    dense = nn.Linear(4, 1, device="meta")
    sparse = SparseOptimizer(owner)
    joint = JointOptimizer([sparse, torch.optim.SGD(dense.parameters(), lr=1.0)])
    for _ in range(2):
        out = owner(batch)
        assert {value.device.type for value in out.values()} == {"meta"}
        (dense(out["user"]).sum() + out["item"].sum() + out["path"].sum()).backward()
        joint.step()
        joint.zero_grad()
    verbs = ["find_or_init", "gather_pooled", "apply"]
    assert shard_of(owner).calls == verbs * 2
    assert all(ticket.ended for ticket in shard_of(owner).tickets)
    joint.check()
    assert shard_of(owner).calls[-1] == "check"


def test_outputs_without_a_gradient() -> None:
    owner = collection()
    owner(batches()["cpu"])["item"].sum().backward()
    SparseOptimizer(owner).step()
    assert shard_of(owner).calls[-1] == "apply"


@pytest.mark.parametrize("name", ["cpu", "moved"])
def test_reading(name: str) -> None:
    owner = collection().eval()
    assert owner(batches()[name])["path"].shape == (2, 3, 2)
    lazy = collection(init_on_lookup=False)
    assert lazy(batches()[name])["path"].device.type == "meta"
    assert shard_of(owner).calls == shard_of(lazy).calls == ["find_pooled"]


def test_proxies_lie_where_their_sums_do() -> None:
    owner = collection()
    optimizer = SparseOptimizer(owner)
    sum(value.sum() for value in owner(batches()["cpu"]).values()).backward()
    for proxy in optimizer.proxies:
        assert proxy.device.type == "meta"
        assert proxy.grad is not None and proxy.grad.device.type == "meta"
        proxy.grad.mul_(2.0)
    optimizer.step()
    assert shard_of(owner).calls[-1] == "apply_summed"


@pytest.mark.parametrize("how", ["cpu", "moved", "turned"])
def test_long_lists_are_found_on_the_host(how: str) -> None:
    lists = {**LISTS, "user": [[1], [1, 2, 3]]}
    if how == "turned":
        lists = dict(reversed(lists.items()))
    batch = KeyedRagged.from_lists(lists)
    owner = collection()
    with pytest.raises(ShapeError, match="feature 'user': got 3; allowed: at most 2"):
        owner(batch if how == "cpu" else batch.to("meta"))
    assert not shard_of(owner).calls


def test_a_batch_changed_after_it_was_sent() -> None:
    batch, owner = batches()["cpu"], collection()
    out = owner(batch)["user"].sum()
    batch.values_N.add_(1)
    with pytest.raises(InputError, match="change in place"):
        out.backward()


def test_a_batch_on_a_device_that_the_shard_cannot_read() -> None:
    for kind in ("reference", "cpu"):
        shard = shard_factory(kind)((USERS, ITEMS))
        owner = EmbeddingCollection((USERS, ITEMS), FEATURES, shard=shard)
        with pytest.raises(DTypeError, match="device of a batch: got meta; allowed: cpu"):
            owner(batches()["moved"])


def test_copies_stay_on_their_device() -> None:
    copy = pickle.loads(pickle.dumps(collection()))
    assert copy.shard.device.type == "meta" and copy(batches()["cpu"])["user"].is_meta


def test_views_of_outputs() -> None:
    layouts = [
        Layout("pair", "stack", (LayoutSlice("item"), LayoutSlice("item"))),
        Layout("user", "none", (LayoutSlice("user"),)),
        Layout("paths", "concat", (LayoutSlice("path"), LayoutSlice("path"))),
    ]
    shard = MetaShard((USERS, ITEMS))
    owner = EmbeddingCollection((USERS, ITEMS), FEATURES, layouts, shard=shard)
    out = owner(batches()["cpu"])
    assert out["pair"].shape == (2, 2, 2) and out["paths"].shape == (2, 3, 4)


class TestTable:
    def test_everything_given_is_sent(self) -> None:
        shard = MetaShard((USERS,))
        one = Table(USERS, shard=shard)
        for ids in ([1, 2], torch.tensor([1, 2]), torch.tensor([1, 2], device="meta")):
            weights, found_N = one.find(ids)
            assert weights.is_meta and found_N.is_meta
            ticket = one.find_or_init(ids, counts=[1, 3])
            assert one.gather(ticket).is_meta
            one.apply(ids, [[1.0] * 4] * 2, counts=torch.ones(2).long())
            one.assign(ids, torch.ones(2, 4))
            one.assign_add(ids, torch.ones(2, 4, device="meta"))
            assert one.reinitialize(ids).is_meta
        one.check()
        assert shard.calls[-1] == "check"

    def test_what_a_cpu_table_thinks_of_a_device(self) -> None:
        one = Table(USERS, shard=shard_factory("cpu")([USERS]))
        with pytest.raises(DTypeError, match="meta"):
            one.find(torch.tensor([1], device="meta"))


class TestBatches:
    def host(self, batch: KeyedRagged) -> list[int]:
        assert batch.values_N.is_meta and batch.host_splits.is_cpu
        return batch.host_splits.tolist()

    def test_edges_travel(self) -> None:
        batch = batches()["cpu"]
        edges = batch.key_splits.tolist()
        assert batch.host_splits.tolist() == edges == [0, 2, 6, 7]
        moved = batch.to("meta")
        assert self.host(moved) == self.host(moved.to("meta")) == edges
        assert moved.longest.tolist() == batch.longest.tolist() == [2, 3, 1]
        assert self.host(moved.select(["path", "user"])) == [0, 1, 3]
        assert self.host(moved.select(["user", "item"])) == [0, 2, 6]
        assert self.host(KeyedRagged.cat([moved, moved])) == [0, 4, 12, 14]
        parts = {key: moved[key] for key in moved.keys}
        assert self.host(KeyedRagged.from_dict(parts)) == edges
        assert moved["item"].values.numel() == 4
        weighted = batches()["moved, weighted"].weights_of("item")
        assert weighted is not None and weighted.numel() == 4

    def test_a_batch_built_on_a_device_is_read(self) -> None:
        """On the meta device reading fails, so here it can only be seen to try."""
        parts = batches()["moved"]
        built = KeyedRagged(parts.keys, parts.values_N, parts.offsets_FB1)
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            built.host_splits  # noqa: B018

    def test_the_offsets_of_a_cpu_batch_are_read_anew(self) -> None:
        batch = KeyedRagged(("a",), torch.arange(4), torch.tensor([0, 1, 4]))
        assert batch.longest.tolist() == [3]
        batch.offsets_FB1[1] = 2
        assert batch.longest.tolist() == [2] and batch.host_splits.tolist() == [0, 4]

    def test_examples_move_whole(self) -> None:
        batch = Batch(
            ids=batches()["cpu"],
            labels=torch.ones(2),
            dense=torch.ones(2, 3),
            weights=torch.ones(2),
            times_B=torch.ones(2).long(),
            event_time_s=5,
            position=2,
        )
        assert batch.pin_memory().ids.to_lists() == LISTS
        moved = batch.to("meta")
        tensors = (moved.labels, moved.dense, moved.weights, moved.event_times_B)
        assert all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors)
        assert moved.ids.values_N.is_meta and (moved.event_time_s, moved.position) == (5, 2)
        plain = Batch(ids=batch.ids, labels=torch.ones(2), event_time_s=7).to("meta")
        assert plain.dense is None and plain.event_times_B.is_meta


def test_running_out_of_memory_says_how_much_and_what_to_do() -> None:
    error = out_of_device_memory("rows of table 'users'", 3 << 30, 1 << 20)
    assert isinstance(error, OutOfDeviceMemory) and isinstance(error, MemoryError)
    for part in ("'users'", "3,221,225,472 bytes wanted", "1,048,576 bytes free", "row budget"):
        assert part in str(error)
