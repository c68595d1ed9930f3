"""Monolith's numbers for its tables, over 1 to 3 parameter servers and in one process (0).

Sections are those of spec/monolith-training.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.transport import Client
from shoal.compat.monolith.native_training.distributed_ps_factory import (
    create_in_worker_multi_type_hash_table,
    create_in_worker_native_multi_hash_table,
    create_multi_type_hash_table,
    create_native_multi_hash_table,
)
from shoal.compat.monolith.native_training.multi_type_hash_table import MergedMultiTypeHashTable
from shoal.errors import ConfigError, DTypeError, UnknownName
from shoal.rules.initializers import Uniform, Zeros
from shoal.rules.optimizers import FTRL, Adagrad, Adam
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.monolith import GROWING, near, rows, spec
from support.monolith_cluster import Cluster, Clusters, same_rows


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def values(*numbers: float, dim: int = 1) -> Tensor:
    return torch.tensor(rows(*numbers, dim=dim), dtype=torch.float32)


def grads_of(loss: Callable[[Tensor], Tensor], looked_up: Tensor) -> Tensor:
    """Gradients of a loss of looked-up rows."""
    leaf = looked_up.clone().requires_grad_()
    (grads,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return grads


class TestDistributedHashTable:
    """3.2: SGD with rate 1, rows start at zero."""

    def test_basic(self, cluster: Cluster) -> None:
        table = cluster.one(spec("t", 2))
        assert table.dim_size == 2
        table = table.assign_add(ids(1, 2, 3), values(1, 2, 3, dim=2))
        assert table.lookup(ids(1, 2, 3)).tolist() == [[1, 1], [2, 2], [3, 3]]

    def test_assign(self, cluster: Cluster) -> None:
        table = cluster.one(spec("t", 2)).assign(ids(1, 2, 3), values(1, 2, 3, dim=2))
        assert table.lookup(ids(1, 2, 3)).tolist() == [[1, 1], [2, 2], [3, 3]]
        table = table.assign(ids(2, 3, 4), values(1, 2, 3, dim=2), req_time=ids(5, 7))
        assert table.lookup(ids(1, 2, 3, 4)).tolist() == [[1, 1], [1, 1], [2, 2], [3, 3]]
        entry = table.table.entry(4)
        assert entry is not None and entry.last_seen_s == 7

    def test_lookup_dedup(self, cluster: Cluster) -> None:
        table = cluster.one(spec("t", 2)).assign_add(ids(1, 2, 3), values(1, 2, 3, dim=2))
        assert table.lookup(ids(1, 1, 3)).tolist() == [[1, 1], [1, 1], [3, 3]]

    @pytest.mark.parametrize(
        ("looked_up", "bp_ids", "factor", "want"),
        [
            pytest.param(ids(0, 1), ids(0, 1), 2, [[-2], [-2]], id="apply_gradients"),
            pytest.param(
                ids(0, 3, 0, 1), ids(0, 3, 0, 1), 2, [[-4], [-2], [-4], [-2]], id="duplicates"
            ),
            pytest.param(ids(1, 0), ids(1, 1), -2, [[4], [0]], id="different_ids"),
        ],
    )
    def test_apply_gradients(
        self, cluster: Cluster, looked_up: Tensor, bp_ids: Tensor, factor: int, want: list[Any]
    ) -> None:
        table = cluster.one(spec("t", 1))
        grads = grads_of(lambda v: factor * v, table.lookup(looked_up))
        table = table.apply_gradients(bp_ids, grads, torch.tensor(0))
        assert table.lookup(looked_up).tolist() == want

    def test_learning_rate_function(self, cluster: Cluster) -> None:
        table = cluster.one(spec("t", 1, GROWING))
        for step, want in enumerate((-2, -4.2)):
            grads = grads_of(lambda v: 2 * v, table.lookup(ids(0, 1)))
            table = table.apply_gradients(ids(0, 1), grads, torch.tensor(step))
            near(table.lookup(ids(0, 1)), rows(want, want))

    def test_benchmark(self, cluster: Cluster) -> None:
        """Each id twice, gradients .3, rows that start at 1."""
        table = cluster.one(spec("t", 16))
        twice = torch.arange(2000) // 2
        table.assign(torch.arange(1000), torch.ones(1000, 16))
        table.apply_gradients(twice, torch.full((2000, 16), 0.3), 0)
        near(table.lookup(twice), torch.full((2000, 16), 0.4))


CONFIGS = {"1": spec("any", 1), "2": spec("any", 2)}
FIRST = {"1": (ids(1, 2), values(-1, -2)), "2": (ids(3), values(-3, dim=2))}
HALF = {slot: (id_, value / 2) for slot, (id_, value) in FIRST.items()}
ASKED = {slot: id_ for slot, (id_, _) in FIRST.items()}


def as_lists(looked_up: Mapping[str, Tensor]) -> dict[str, Any]:
    return {slot: found.tolist() for slot, found in looked_up.items()}


class TestDistributedMultiTypeHashTable:
    """3.2: slot "1" of width 1, slot "2" of width 2, SGD with rate 1."""

    def test_basic(self, cluster: Cluster) -> None:
        table = cluster.several(CONFIGS).assign_add(FIRST)
        assert as_lists(table.lookup(ASKED)) == {"1": [[-1], [-2]], "2": [[-3, -3]]}
        table = table.apply_gradients(HALF, torch.tensor(0), req_time=torch.tensor(0))
        assert as_lists(table.lookup(ASKED)) == {"1": [[-0.5], [-1]], "2": [[-1.5, -1.5]]}
        assert table.get_table_dim_sizes() == [1, 2]

    def test_assign_and_reinitialize(self, cluster: Cluster) -> None:
        table = cluster.several(CONFIGS).assign(FIRST)
        assert as_lists(table.lookup(ASKED)) == {"1": [[-1], [-2]], "2": [[-3, -3]]}
        table = table.assign(HALF)
        assert as_lists(table.lookup(ASKED)) == {"1": [[-0.5], [-1]], "2": [[-1.5, -1.5]]}
        table, status = table.reinitialize("1", ids(1, 2, 3))
        assert status.tolist() == [1, 1, 0]
        table, status = table.reinitialize("3", ids(1, 2, 3))
        assert status.dtype == torch.int32 and status.tolist() == [-1, -1, -1]
        found = table.lookup({"1": ids(1, 2, 3), "2": ids(3)})
        assert as_lists(found) == {"1": [[0], [0], [0]], "2": [[-1.5, -1.5]]}

    def test_status_is_in_the_order_of_the_ids(self, cluster: Cluster) -> None:
        table = cluster.several(CONFIGS)
        here = torch.arange(0, 100, 3)
        table.assign({"1": (here, torch.ones(len(here), 1))})
        order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
        _, status = table.reinitialize("1", order)
        assert status.tolist() == [int(id_ % 3 == 0) for id_ in order.tolist()]

    def test_learning_rate_function(self, cluster: Cluster) -> None:
        configs = {"1": spec("any", 1, GROWING), "2": spec("any", 2)}
        table = cluster.several(configs).assign_add(FIRST)
        table = table.apply_gradients(HALF, torch.tensor(0))
        assert as_lists(table.lookup(ASKED)) == {"1": [[-0.5], [-1]], "2": [[-1.5, -1.5]]}
        table = table.apply_gradients(HALF, torch.tensor(1))
        found = table.lookup(ASKED)
        near(found["1"], [[0.05], [0.1]])
        near(found["2"], [[0, 0]])

    def test_float16(self, cluster: Cluster) -> None:
        configs = {"1": spec("any", 1, dtype="float16"), "2": spec("any", 2, dtype="float16")}
        table = cluster.several(configs, transfer_float16=True)
        grads = {"1": (ids(1, 2), values(2, 2)), "2": (ids(3), values(3, dim=2))}
        table = table.apply_gradients(grads, global_step=torch.tensor(1))
        assert as_lists(table.lookup(ASKED)) == {"1": [[-2], [-2]], "2": [[-3, -3]]}

    def test_float16_is_of_the_wire_only(self, clusters: Clusters) -> None:
        exact = 1 + 2.0**-20
        for num_ps, want in ((2, 1.0), (0, exact)):
            table = clusters(num_ps).several({"1": spec("any", 1)}, transfer_float16=True)
            table.assign({"1": (ids(1), values(exact))})
            assert table.lookup({"1": ids(1)})["1"].item() == want

    def test_one_slot_of_two(self, clusters: Clusters) -> None:
        found = clusters(2).several(CONFIGS).lookup({"1": ids(1, 2)})
        assert list(found) == ["1"] and found["1"].shape == (2, 1)

    def test_no_ids(self, clusters: Clusters) -> None:
        table = clusters(2).several(CONFIGS)
        assert table.assign({}).lookup({}) == {}
        assert table.lookup({"2": ids()})["2"].shape == (0, 2)

    def test_a_call_asks_each_server_once(
        self, clusters: Clusters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = clusters(2).several(CONFIGS)
        calls: list[tuple[str, int]] = []
        call = Client.call

        def counted(self: Client, server: int, head: bytes, *rest: Any, **more: Any) -> Any:
            calls.append((json.loads(head)["method"], server))
            return call(self, server, head, *rest, **more)

        monkeypatch.setattr(Client, "call", counted)
        many = {slot: torch.arange(50) for slot in CONFIGS}
        table.lookup(many)
        table.apply_gradients({s: (i, torch.ones(50, int(s))) for s, i in many.items()}, 0)
        assert calls == [("find", 0), ("find", 1), ("apply", 0), ("apply", 1)]

    def test_times(self, clusters: Clusters) -> None:
        table = clusters(0).several(CONFIGS)
        for id_, req_time, want in ((1, ids(), 0), (2, ids(3, 9, 4), 9), (3, 5, 5), (4, None, 0)):
            table.assign({"1": (ids(id_), values(1))}, req_time=req_time)
            assert table.rows.entry(0, id_).last_seen_s == want

    def test_bad_input(self, clusters: Clusters) -> None:
        table = clusters(2).several(CONFIGS)
        with pytest.raises(UnknownName, match="'3'"):
            table.lookup({"3": ids(1)})
        with pytest.raises(DTypeError, match="ids of slot '1'"):
            table.lookup({"1": torch.ones(1)})

    def test_groups_of_no_table_over_the_wire(self, clusters: Clusters) -> None:
        table = clusters(2).several(CONFIGS).assign(FIRST)
        tables = torch.tensor([7, 0, -1, 1], dtype=torch.int32)
        groups = IdGroups(ids(1, 3, 1, 2, 3, 3), ids(0, 1, 3, 5, 6), tables)
        status = table.rows.reinitialize(groups, ctx=StepContext())
        assert status.tolist() == [-1, 0, 1, -1, -1, 1]


class TestMergedMultiTypeHashTable:
    """3.1"""

    SLOTS: Mapping[str, TableSpec] = {
        "slot0": spec("any", 1),
        "slot1": spec("any", 2),
        "slot2": spec("other", 2),
    }

    def test_equal_configs_share_rows(self, cluster: Cluster) -> None:
        table = MergedMultiTypeHashTable(self.SLOTS, cluster.several)
        one, two = ids(1), {"slot1": values(2, dim=2), "slot2": values(4, dim=2)}
        table.assign_add({"slot0": (one, values(1)), **{s: (one, v) for s, v in two.items()}})
        asked = dict.fromkeys(self.SLOTS, one)
        both = as_lists(table.lookup(asked))
        assert both == {"slot0": [[1]], "slot1": [[6, 6]], "slot2": [[6, 6]]}
        grads = {"slot0": (one, values(-1)), **{s: (one, values(1, dim=2)) for s in two}}
        table.apply_gradients(grads, 0)
        both = as_lists(table.lookup(asked))
        assert both == {"slot0": [[2]], "slot1": [[4, 4]], "slot2": [[4, 4]]}

    def test_an_id_of_two_slots_takes_one_step(self, cluster: Cluster) -> None:
        segments = (Segment(dim=1, initializer=Zeros(), optimizer=Adagrad(lr=1.0)),)
        configs = dict.fromkeys(("a", "b"), TableSpec(name="any", segments=segments))
        table = MergedMultiTypeHashTable(configs, cluster.several)
        table.apply_gradients(dict.fromkeys(("a", "b"), (ids(1), values(1))), 0)
        near(table.lookup({"a": ids(1)})["a"], [[-2 / math.sqrt(4.1)]])

    def test_names(self) -> None:
        same = dict.fromkeys(("slot1", "slot0"), spec("any", 1))
        table = MergedMultiTypeHashTable(same)
        assert set(table.slot_mapping.values()) == {"e21904dd414d1780e5fc904866dc69c2"}

    def test_rates_are_part_of_a_config(self) -> None:
        table = MergedMultiTypeHashTable({"a": spec("any", 1), "b": spec("any", 1, GROWING)})
        assert len(set(table.slot_mapping.values())) == 2


class TestFactories:
    SLOTS: Mapping[str, TableSpec] = dict.fromkeys(("1", "2"), spec("any", 4, 0.1))

    def test_multi_type(self, cluster: Cluster) -> None:
        table = cluster.closing(
            create_multi_type_hash_table(
                cluster.num_ps,
                self.SLOTS,
                [None] * cluster.num_ps,
                reduce_network_packets=True,
                table_factory=cluster.factory,
            )
        )
        table.apply_gradients({"1": (ids(5), values(1, dim=4))}, 0)
        near(table.lookup({"2": ids(5)})["2"], rows(-0.1, dim=4))

    def test_native(self, cluster: Cluster) -> None:
        table = cluster.closing(
            create_native_multi_hash_table(
                cluster.num_ps, self.SLOTS, table_factory=cluster.factory
            )
        )
        table.apply_gradients({"1": (ids(5), values(1, dim=4))}, 0)
        near(table.lookup({"1": ids(5)})["1"], rows(-0.1, dim=4))
        near(table.lookup({"2": ids(5)})["2"], rows(0, dim=4))

    def test_in_worker(self) -> None:
        for shard_num in (0, 1):
            merged = create_in_worker_multi_type_hash_table(shard_num, self.SLOTS, None)
            native = create_in_worker_native_multi_hash_table(shard_num, self.SLOTS, None)
            for table, want in ((merged, -0.1), (native, 0)):
                table.apply_gradients({"1": (ids(5), values(1, dim=4))}, 0)
                near(table.lookup({"2": ids(5)})["2"], rows(want, dim=4))

    def test_what_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="hash_filters"):
            create_multi_type_hash_table(0, self.SLOTS, [object()])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="hash_filter"):
            create_in_worker_multi_type_hash_table(1, self.SLOTS, object())  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="factory of tables on 2 servers"):
            create_native_multi_hash_table(2, self.SLOTS)
        with pytest.raises(ConfigError, match="shard_num"):
            create_in_worker_multi_type_hash_table(5, self.SLOTS)


@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_servers_have_the_bits_of_one_process(clusters: Clusters, num_ps: int) -> None:
    configs = {
        "wide": TableSpec(
            name="any",
            segments=(
                Segment(name="bias", dim=1, initializer=Zeros(), optimizer=FTRL(lr=0.5)),
                Segment(name="vec", dim=7, initializer=Uniform(), optimizer=Adagrad(lr=GROWING)),
            ),
        ),
        "half": TableSpec(
            name="any", segments=(Segment(dim=3, optimizer=Adam()),), dtype="float16"
        ),
        "double": TableSpec(name="any", segments=(Segment(dim=2),), dtype="float64"),
    }
    tables = [clusters(count).several(configs) for count in (num_ps, 0)]
    widths = {"wide": (8, torch.float32), "half": (3, torch.float32), "double": (2, torch.float64)}
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        drawn = {
            slot: (
                torch.randint(-40, 40, (64,), generator=generator),
                torch.randn(64, dim, generator=generator, dtype=dtype),
            )
            for slot, (dim, dtype) in widths.items()
        }
        looked_up = []
        for table in tables:
            table.apply_gradients(drawn, step, req_time=step)
            table.assign_add({"wide": drawn["wide"]})
            table.assign({"half": (drawn["half"][0][:9], drawn["half"][1][:9])})
            _, status = table.reinitialize("double", drawn["double"][0][::5])
            looked_up.append(
                [*table.lookup({s: id_ for s, (id_, _) in drawn.items()}).values(), status]
            )
        for one, other in zip(*looked_up, strict=True):
            assert torch.equal(one, other)
    same_rows(*(table.rows for table in tables))
