"""EmbeddingCollection: declarations, layouts, what a batch must hold, and modes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature, Layout
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, UnknownName
from shoal.optim import SparseOptimizer
from shoal.ragged import KeyedRagged
from support.shards import SHARD_KINDS, ShardFactory, interpreted_too, shard_factory
from support.toy_collections import (
    BATCH,
    FEATURES,
    ITEMS,
    USERS,
    collection,
    rows,
    slices,
    table,
)


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


class TestLayouts:
    def test_default_gives_each_feature_its_whole_rows(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        out = owner(BATCH)
        assert {name: tuple(value.shape) for name, value in out.items()} == {
            "user": (3, 5),
            "item": (3, 7),
            "history": (3, 2, 7),
            "clicks": (3, 2, 7),
        }
        assert list(out) == ["user", "item", "history", "clicks"]
        one, two, three = rows(owner, "users", [1, 2, 3])
        torch.testing.assert_close(out["user"], torch.stack([one + two, one * 0, three]))
        seven, eight, nine, ten = rows(owner, "items", [7, 8, 9, 10])
        zero = seven * 0
        mean = torch.stack([(2 * seven + eight) / 3, nine, zero])
        torch.testing.assert_close(out["item"], mean)
        first = torch.stack([seven, zero, zero, zero, eight, nine]).view(3, 2, 7)
        torch.testing.assert_close(out["history"], first)
        assert not torch.equal(ten, zero)

    @interpreted_too
    def test_each_kind(self, make_shard: ShardFactory) -> None:
        plain = collection(make_shard)
        plain(BATCH)
        whole = plain(BATCH)
        owner = collection(
            make_shard,
            [
                Layout("bias", "addn", slices("item/s0", "user/s0")),
                Layout("wide", "concat", slices("item/s1", "user/s1", "item/s2")),
                Layout("pair", "stack", slices("user/s1", "item/s1")),
                Layout("lone", "none", slices("user", "item/s2")),
                Layout("steps", "concat", slices("clicks/s2", "history/s1")),
                Layout("paths", "stack", slices("history/s1", "clicks/s1")),
            ],
        )
        out = owner(BATCH)
        user, item, history, clicks = whole.values()
        expected = {
            "bias": item[:, :1] + user[:, :1],
            "wide": torch.cat([item[:, 1:5], user[:, 1:], item[:, 5:]], dim=1),
            "pair": torch.stack([user[:, 1:], item[:, 1:5]], dim=1),
            "user": user,
            "item/s2": item[:, 5:],
            "steps": torch.cat([clicks[..., 5:], history[..., 1:5]], dim=2),
            "paths": torch.stack([history[..., 1:5], clicks[..., 1:5]], dim=1),
        }
        assert list(out) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(out[name], value, msg=name)

    def test_one_feature_twice_in_a_sum(self, make_shard: ShardFactory) -> None:
        spec = table("t", 2, 2)
        layout = Layout("sum", "addn", slices("a/s1", "a/s0"))
        owner = collection(make_shard, [layout], [Feature("a", "t")], [spec])
        out = owner(KeyedRagged.from_lists({"a": [[5], [5, 6]]}))["sum"]
        five, six = rows(owner, "t", [5, 6])
        torch.testing.assert_close(out[0], five[:2] + five[2:])
        torch.testing.assert_close(out[1], five[:2] + five[2:] + six[:2] + six[2:])

    def test_stack_is_a_view(self, make_shard: ShardFactory) -> None:
        layout = Layout("pair", "stack", slices("user/s1", "item/s1"))
        rest = Layout("rest", "none", slices("history", "clicks"))
        out = collection(make_shard, [layout, rest])(BATCH)["pair"]
        assert out._base is not None and out._base.shape == (3, 8)

    def test_weights_multiply_rows(self, make_shard: ShardFactory) -> None:
        features = [
            Feature("s", "t"),
            Feature("m", "t", ReduceMean()),
            Feature("f", "t", FirstN(2)),
        ]
        owner = collection(make_shard, None, features, [table("t", 3)])
        ids = {name: [[1, 2], [3]] for name in "smf"}
        weights = {name: [[0.5, 2.0], [-1.0]] for name in "smf"}
        out = owner(KeyedRagged.from_lists(ids, weights))
        one, two, three = rows(owner, "t", [1, 2, 3])
        torch.testing.assert_close(out["s"], torch.stack([one / 2 + two * 2, -three]))
        torch.testing.assert_close(out["m"], torch.stack([one / 4 + two, -three]))
        torch.testing.assert_close(out["f"][0], torch.stack([one / 2, two * 2]))

    def test_no_examples(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        none: list[list[int]] = []
        out = owner(KeyedRagged.from_lists({feature.name: none for feature in FEATURES}))
        assert tuple(out["history"].shape) == (0, 2, 7) and tuple(out["user"].shape) == (0, 5)
        sum(value.sum() for value in out.values()).backward()
        SparseOptimizer(owner).step()
        assert len(owner.table("users")) == 0


class TestDeclarations:
    def build(self, layouts: Sequence[Layout] | None = None, **more: object) -> None:
        arguments = {"features": FEATURES, "tables": (USERS, ITEMS), **more}
        tables = arguments["tables"]
        shard = shard_factory("reference")(tables)  # type: ignore[arg-type]
        EmbeddingCollection(
            tables,  # type: ignore[arg-type]
            arguments["features"],  # type: ignore[arg-type]
            layouts,
            shard=shard,
        )

    @pytest.mark.parametrize(
        ("features", "match"),
        [
            ([Feature("user", "user")], "unknown table.*'user'.*allowed: .*users"),
            ([Feature("a", "users"), Feature("a", "items")], "'a' twice"),
            ([], "features: got none"),
        ],
    )
    def test_features(self, features: list[Feature], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            self.build(features=features)

    @pytest.mark.parametrize(
        ("layout", "match"),
        [
            (Layout("l", "concat", slices("usr")), "unknown feature in layout 'l'.*user"),
            (Layout("l", "concat", slices("user/s7")), "unknown segment of table 'users'.*s0"),
            (Layout("l", "addn", slices("history", "clicks")), "got sequences"),
            (Layout("l", "addn", slices("user", "item")), "one shape"),
            (Layout("l", "stack", slices("user", "item")), "one shape"),
            (Layout("l", "concat", slices("user", "history")), "one length"),
            (Layout("l", "concat", slices("user")), r"without a layout.*\['item', 'history'"),
            (Layout("l", "none", slices("user", "user")), r"\['user'\] twice"),
        ],
    )
    def test_layouts(self, layout: Layout, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            self.build([layout])

    def test_kinds_and_lengths(self) -> None:
        with pytest.raises(UnknownName, match=r"kind of layout 'l'.*'CONCAT'.*concat"):
            Layout("l", "CONCAT", slices("user"))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"max_length.*got 0"):
            Feature("a", "t", max_length=0)
        with pytest.raises(ConfigError, match=r"max_length.*got True"):
            Feature("a", "t", max_length=True)
        own = Feature("a", "t", FirstN(np.int64(2)), max_length=np.int64(3))
        assert own == Feature("a", "t", FirstN(2), max_length=3)
        assert (type(own.max_length), type(own.pooling[1])) == (int, int)

    def test_tables(self) -> None:
        with pytest.raises(ConfigError, match="distinct names"):
            self.build(tables=(USERS, USERS, ITEMS))

    def test_a_given_shard_must_host_the_tables(self) -> None:
        shard = shard_factory("reference")([ITEMS])
        with pytest.raises(UnknownName, match=r"table of the given shard.*'users'"):
            EmbeddingCollection([USERS], [Feature("user", "users")], shard=shard)
        other = table("items", 3)
        with pytest.raises(ConfigError, match="another spec"):
            EmbeddingCollection([other], [Feature("item", "items")], shard=shard)


class TestBatches:
    def test_key_order_and_further_keys_do_not_matter(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        lists = {"extra": [[1], [2], [3]], **dict(reversed(BATCH.to_lists().items()))}
        torch.testing.assert_close(owner(KeyedRagged.from_lists(lists)), owner(BATCH))

    def test_missing_features(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        with pytest.raises(InputError, match=r"without \['item', 'user'\]"):
            owner(BATCH.select(["history", "clicks"]))
        assert len(owner.table("items")) == 0

    def test_a_list_longer_than_declared(self, make_shard: ShardFactory) -> None:
        features = [Feature("a", "users"), Feature("b", "users", max_length=2)]
        owner = collection(make_shard, None, features, [USERS])
        owner(KeyedRagged.from_lists({"a": [[1, 2, 3]], "b": [[1, 2]]}))
        with pytest.raises(ShapeError, match="feature 'b': got 3; allowed: at most 2"):
            owner(KeyedRagged.from_lists({"a": [[8], [9]], "b": [[1], [5, 6, 7]]}))
        assert len(owner.table("users")) == 3

    def test_other_things(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        with pytest.raises(DTypeError, match="got dict; allowed: KeyedRagged"):
            owner({"user": [[1]]})
        for time_s in (-1, 1 << 32):
            with pytest.raises(InputError, match="event_time_s"):
                owner(BATCH, event_time_s=time_s)
        weights = torch.ones(BATCH.values_N.numel(), requires_grad=True)
        weighted = KeyedRagged(BATCH.keys, BATCH.values_N, BATCH.offsets_FB1, weights)
        with pytest.raises(InputError, match="require grad"):
            owner(weighted)


class TestModes:
    def test_training_inserts_and_reads_initial_values(self, make_shard: ShardFactory) -> None:
        owner = collection(make_shard)
        out = owner(BATCH)["user"]
        assert len(owner.table("users")) == 3 and bool((out[2] != 0).all())
        assert out.requires_grad

    @pytest.mark.parametrize("how", ["eval", "no_grad"])
    def test_reading_does_not_insert(self, make_shard: ShardFactory, how: str) -> None:
        owner = collection(make_shard)
        owner(
            KeyedRagged.from_lists({"user": [[1]], "item": [[]], "history": [[]], "clicks": [[]]})
        )
        owner.train(how != "eval")
        with torch.set_grad_enabled(how != "no_grad"):
            out = owner(BATCH)
        assert len(owner.table("users")) == 1 and len(owner.table("items")) == 0
        torch.testing.assert_close(out["user"][0], rows(owner, "users", [1])[0])
        assert not out["user"][2].any() and not out["user"].requires_grad

    def test_without_init_on_lookup_rows_come_with_gradients(
        self, make_shard: ShardFactory
    ) -> None:
        owner = collection(make_shard, init_on_lookup=False)
        optimizer = SparseOptimizer(owner)
        out = owner(BATCH)
        assert len(owner.table("users")) == 0 and not out["user"].any()
        (out["user"].sum() + out["history"].sum()).backward()
        optimizer.step()
        twin = collection(make_shard)
        twin(BATCH)
        for name, ids in (("users", [1, 2, 3]), ("items", [7, 8, 9, 10, 12])):
            started, now = rows(twin, name, ids), rows(owner, name, ids)
            got_gradient = [[1.0] * 3, [1.0, 1.0, 1.0, 0.0, 0.0]][name == "items"]
            torch.testing.assert_close(now, started - torch.tensor(got_gradient)[:, None].double())

    @interpreted_too
    def test_rows_that_come_with_gradients_step_as_others_do(
        self, make_shard: ShardFactory
    ) -> None:
        """Of a linear loss, whose gradient does not depend on what forward read."""
        features = [Feature(str(c), "t", c) for c in (ReduceSum(), ReduceMean(), FirstN(2))]
        lists = {feature.name: [[1, 2, 1], [], [3, 4]] for feature in features}
        weights = {name: [[0.5, 2.0, -1.0], [], [3.0, 0.25]] for name in lists}
        batches = [KeyedRagged.from_lists(lists), KeyedRagged.from_lists(lists, weights)]
        moved = []
        for mode in (True, False):
            owner = collection(make_shard, None, features, [table("t", 1, 3)], init_on_lookup=mode)
            optimizer = SparseOptimizer(owner)
            generator = torch.Generator().manual_seed(3)
            for batch in batches:
                for value in owner(batch).values():
                    value.backward(torch.rand(value.shape, generator=generator).double())
            optimizer.step()
            moved.append(rows(owner, "t", [1, 2, 3, 4]))
        torch.testing.assert_close(*moved)


def test_unknown_devices() -> None:
    with pytest.raises(ConfigError, match=r"'tpu'.*cpu, cuda"):
        EmbeddingCollection([USERS], [Feature("user", "users")], device="tpu")
