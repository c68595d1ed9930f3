"""Table: the verbs of one table, by lists and by tensors."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from shoal.errors import (
    ConfigError,
    DeviceUnavailable,
    DTypeError,
    InputError,
    NonFiniteGradient,
    ShapeError,
    TableFull,
    TicketError,
    UnknownName,
)
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Constant, Ones, Zeros
from shoal.rules.optimizers import SGD, Adagrad, DelayCompensated
from shoal.rules.schedules import Polynomial
from shoal.table.facade import Table
from shoal.table.factory import resolve_device
from shoal.table.spec import OnFull, Segment, TableSpec
from support.shards import (
    RAISES_LATE,
    SHARD_KINDS,
    WITH_INTERPRETED,
    ShardFactory,
    interpreted_too,
    shard_factory,
)

EXTREMES = [-(1 << 63), -1, 0, (1 << 63) - 1]


@pytest.fixture(params=SHARD_KINDS)
def make_shard(request: pytest.FixtureRequest) -> ShardFactory:
    return shard_factory(request.param)


def segment(dim: int = 2, name: str = "vec", **more: object) -> Segment:
    settings = {"initializer": Zeros(), "optimizer": SGD(lr=0.5), **more}
    return Segment(dim=dim, name=name, **settings)  # type: ignore[arg-type]


def table(make_shard: ShardFactory, *segments: Segment, **more: object) -> Table:
    spec = TableSpec(name="t", segments=segments or (segment(),), dtype="float64", **more)  # type: ignore[arg-type]
    return Table(spec, shard=make_shard([spec]))


def near(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


class TestVerbs:
    def test_find_never_inserts(self, make_shard: ShardFactory) -> None:
        one = table(make_shard)
        one.assign([7], [[1.0, 2.0]])
        weights, found = one.find([8, 7, 8])
        near(weights, [[0, 0], [1, 2], [0, 0]])
        assert found.tolist() == [False, True, False] and len(one) == 1
        near(one.lookup(torch.tensor([7])), [[1, 2]])

    @interpreted_too
    def test_find_or_init_and_gather(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(initializer=Ones()), admission=Admission(threshold=2))
        one.assign([1], [[5.0, 6.0]])
        ticket = one.find_or_init([1, 2, 3, 3])
        assert ticket.found_N.tolist() == [True, False, False, False]
        assert ticket.admitted_N.tolist() == [True, False, True, True]
        near(one.gather(ticket), [[5, 6], [1, 1], [1, 1], [1, 1]])
        assert len(one) == 2
        one.assign([1], [[7.0, 8.0]])
        near(one.gather(ticket)[:1], [[7, 8]])
        ticket.end()
        with pytest.raises(TicketError):
            one.gather(ticket)
        assert one.find_or_init([2], counts=[5]).admitted_N.tolist() == [True]

    def test_apply_sums_duplicates_then_steps_once(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(1, optimizer=Adagrad(lr=1.0, initial_accumulator=1.0)))
        one.apply([4, 5, 4], [[1.0], [3.0], [2.0]], event_time_s=9)
        near(one.lookup([4, 5]), [[-3 / 10**0.5], [-3 / 10**0.5]])
        entry = one.entry(4)
        assert entry is not None
        near(entry.state, [10])
        assert (entry.id, entry.count, entry.last_seen_s) == (4, 2, 9)
        assert one.entry(6) is None

    def test_apply_takes_rates(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(1, "a"), segment(2, "b"))
        one.apply([1], [[1.0, 1.0, 1.0]])
        one.apply([2], [[1.0, 1.0, 1.0]], learning_rates=2.0)
        one.apply([3], [[1.0, 1.0, 1.0]], learning_rates=[1.0, 3.0])
        near(one.lookup([1, 2, 3]), [[-0.5] * 3, [-2] * 3, [-1, -3, -3]])
        with pytest.raises(ShapeError, match="3 rates"):
            one.apply([3], [[0.0] * 3], learning_rates=[1.0, 2.0, 3.0])

    def test_schedules_see_the_global_step(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(1, optimizer=SGD(lr=Polynomial(1.0, 10, end=2.0))))
        one.apply([1], [[1.0]])
        one.apply([2], [[1.0]], global_step=5)
        near(one.lookup([1, 2]), [[-1.0], [-1.5]])

    def test_assign_keeps_state_and_the_last_wins(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(1, optimizer=Adagrad(lr=1.0, initial_accumulator=1.0)))
        one.apply([1], [[3.0]])
        one.assign([1, 2, 1], [[9.0], [8.0], [7.0]], event_time_s=4)
        near(one.lookup([1, 2]), [[7], [8]])
        entry = one.entry(1)
        assert entry is not None
        near(entry.state, [10])

    def test_assign_add_starts_from_the_initial_value(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(1, initializer=Constant(2.0)))
        one.assign_add([1, 1, 2], [[1.0], [10.0], [0.5]])
        one.assign_add([2], [[0.5]])
        near(one.lookup([1, 2]), [[13], [3]])

    @interpreted_too
    def test_reinitialize(self, make_shard: ShardFactory) -> None:
        rule = Adagrad(lr=1.0, initial_accumulator=1.0)
        one = table(make_shard, segment(1, initializer=Ones(), optimizer=rule))
        one.apply([1], [[3.0]])
        assert one.reinitialize([2, 1, 3]).tolist() == [0, 1, 0]
        near(one.lookup([1, 2, 3]), [[1]] * 3)
        entry = one.entry(1)
        assert entry is not None
        near(entry.state, [1])

    @interpreted_too
    def test_evict_by_age(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, expiry=Expiry(ttl_s=10))
        for id_, time_s in ((1, 0), (2, 5), (3, 6)):
            one.apply([id_], [[1.0, 1.0]], event_time_s=time_s)
        ticket = one.find_or_init([1])
        assert one.evict(15) == 1 and one.find([1, 2, 3])[1].tolist() == [True, False, True]
        ticket.end()
        assert one.evict(15) == 1 and len(one) == 1

    @interpreted_too
    def test_cut_stamps_versions(self, make_shard: ShardFactory) -> None:
        one = table(make_shard)
        one.assign([1, 2], [[1.0, 1.0]] * 2)
        closed = one.close_version()
        one.assign([2], [[2.0, 2.0]])
        first, second = one.entry(1), one.entry(2)
        assert first is not None and second is not None
        assert (first.version, second.version) == (closed, closed + 1)
        assert one.close_version() == closed + 1

    @interpreted_too
    def test_export_and_load(self, make_shard: ShardFactory) -> None:
        rule = Adagrad(lr=1.0, initial_accumulator=1.0)
        one = table(make_shard, segment(2, optimizer=rule))
        one.apply(EXTREMES, [[1.0, 2.0]] * 4, event_time_s=3)
        chunk = one.export()
        assert sorted(chunk.ids.tolist()) == EXTREMES and chunk.table == "t"
        two = table(make_shard, segment(2, optimizer=rule))
        two.load(chunk)
        again = two.export()
        for name in ("ids", "weights", "state", "last_seen_s", "counts"):
            torch.testing.assert_close(getattr(again, name), getattr(chunk, name))

    @interpreted_too
    def test_clear_and_stats(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, admission=Admission(threshold=2))
        one.assign([1, 2], [[1.0, 1.0]] * 2)
        ticket = one.find_or_init([1, 3])
        stats = one.stats()
        assert (stats.name, stats.rows, stats.inserted, stats.refused) == ("t", 2, 2, 1)
        assert stats.bytes_total >= stats.bytes_weights + stats.bytes_index > 0
        with pytest.raises(TicketError):
            one.clear()
        ticket.end()
        one.clear()
        assert len(one) == 0

    @interpreted_too
    def test_nothing_at_all(self, make_shard: ShardFactory) -> None:
        one = table(make_shard)
        weights, found = one.find([])
        assert weights.shape == (0, 2) and found.shape == (0,)
        one.apply([], [])
        one.assign([], torch.empty(0, 2, dtype=torch.float64))
        assert one.gather(one.find_or_init([])).shape == (0, 2)
        assert one.reinitialize([]).tolist() == [] and len(one) == 0

    @interpreted_too
    def test_all_ids_are_legal(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(1))
        one.apply(EXTREMES, [[1.0], [2.0], [3.0], [4.0]])
        near(one.lookup(torch.tensor(EXTREMES)), [[-0.5], [-1], [-1.5], [-2]])

    def test_delay_compensation_of_a_fresh_gradient_is_none(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, segment(1, optimizer=DelayCompensated(inner=SGD(lr=1.0))))
        one.apply([1], [[2.0]])
        near(one.lookup([1]), [[-2]])


class TestLimits:
    @interpreted_too
    def test_a_full_table_refuses_whole(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, capacity_rows=2)
        one.assign([1], [[1.0, 1.0]])
        acts = (
            lambda: one.find_or_init([1, 2, 3]),
            lambda: one.apply([1, 2, 3], [[1.0, 1.0]] * 3),
            lambda: one.assign([1, 2, 3], [[1.0, 1.0]] * 3),
        )
        for act in acts:
            with pytest.raises(TableFull, match="'t'"):
                act()
            near(one.lookup([1, 2, 3]), [[1, 1], [0, 0], [0, 0]])
        one.find_or_init([1, 2])
        assert len(one) == 2

    @interpreted_too
    @pytest.mark.parametrize("on_full", ["lru", "lfu"])
    def test_a_step_of_more_ids_than_rows_says_so(
        self, make_shard: ShardFactory, on_full: OnFull
    ) -> None:
        one = table(make_shard, capacity_rows=2, on_full=on_full)
        one.find_or_init([1, 2])
        words = rf"got 2 on top of 1 rows in use; .*on_full='{on_full}' drops no row.*smaller batch"
        with pytest.raises(TableFull, match=words):
            one.find_or_init([2, 3, 4])
        with pytest.raises(TableFull, match="got 3 on top of 0 rows in use"):
            one.find_or_init([3, 4, 5])
        assert one.find([1, 2])[1].all()

    @interpreted_too
    def test_least_recently_used_rows_make_room(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, capacity_rows=2, on_full="lru")
        one.apply([1], [[1.0, 1.0]], event_time_s=20)
        one.apply([2], [[1.0, 1.0]], event_time_s=10)
        one.apply([3], [[1.0, 1.0]], event_time_s=30)
        assert one.find([1, 2, 3])[1].tolist() == [True, False, True]

    @interpreted_too
    def test_least_frequently_used_rows_make_room(self, make_shard: ShardFactory) -> None:
        one = table(make_shard, capacity_rows=2, on_full="lfu")
        one.apply([1, 1], [[1.0, 1.0]] * 2, event_time_s=1)
        one.apply([2], [[1.0, 1.0]], event_time_s=2)
        one.apply([3], [[1.0, 1.0]], event_time_s=3)
        assert one.find([1, 2, 3])[1].tolist() == [True, False, True]


class TestBadInput:
    @pytest.mark.parametrize(
        ("ids", "error", "match"),
        [
            (torch.tensor([1], dtype=torch.int32), DTypeError, r"ids: got torch.int32.*int64"),
            (torch.tensor([[1]]), ShapeError, r"shape of ids: got \[1, 1\]"),
            ([1.5], DTypeError, "dtype of ids"),
            ([[1], [2, 3]], ShapeError, "ids: got"),
            (["a"], ShapeError, "ids: got"),
            ([1 << 63], InputError, "ids: got"),
        ],
    )
    def test_ids(self, ids: object, error: type[Exception], match: str) -> None:
        one = table(shard_factory("reference"))
        with pytest.raises(error, match=match):
            one.find(ids)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("grads", "error", "match"),
        [
            (torch.ones(2, 2), DTypeError, r"grads: got torch.float32.*float64"),
            (torch.ones(2, 3).double(), ShapeError, r"shape of grads: got \[2, 3\].*\[2, 2\]"),
            ([[1.0, 2.0]], ShapeError, r"got \[1, 2\]"),
        ],
    )
    def test_grads(
        self, make_shard: ShardFactory, grads: object, error: type[Exception], match: str
    ) -> None:
        one = table(make_shard)
        with pytest.raises(error, match=match):
            one.apply([1, 2], grads)  # type: ignore[arg-type]
        assert len(one) == 0

    @pytest.mark.parametrize("kind", WITH_INTERPRETED)
    def test_a_gradient_that_is_not_finite(self, kind: str) -> None:
        one = table(shard_factory(kind))
        with pytest.raises(NonFiniteGradient, match="gradient"):
            one.apply([1, 2], [[1.0, float("nan")], [1.0, 1.0]])
            one.check()
        assert kind in RAISES_LATE or len(one) == 0

    @interpreted_too
    def test_counts(self, make_shard: ShardFactory) -> None:
        one = table(make_shard)
        with pytest.raises(ShapeError, match="counts"):
            one.find_or_init([1, 2], counts=[1])
        with pytest.raises(ShapeError, match="counts"):
            one.find_or_init([], counts=[1])
        with pytest.raises(DTypeError, match="counts"):
            one.find_or_init([1], counts=torch.ones(1))
        assert len(one) == 0


class TestWhere:
    SPEC = TableSpec(name="t", segments=(Segment(dim=1),))

    def test_cpu_is_the_default(self) -> None:
        one = Table(self.SPEC, seed=3)
        one.find_or_init([1])
        assert len(one) == 1 and one.shard.seed == 3 and one.spec is self.SPEC
        assert repr(one) == "Table('t', dim=1, rows=1)"

    def test_other_devices(self) -> None:
        for device in ("tpu", "meta", "cuda:x", ""):
            with pytest.raises(ConfigError, match=f"'{device}'.*cpu, cuda, cuda:N"):
                Table(self.SPEC, device=device)

    @pytest.mark.parametrize(
        ("devices", "build", "triton", "got", "remedy"),
        [
            (0, None, True, "a build without CUDA", "Install a CUDA build of torch"),
            (0, "12.8", True, "for CUDA 12.8 that finds no GPU", "nvidia-smi"),
            (1, "12.8", True, "1 GPUs; allowed: cuda:0", "Name one"),
            (2, "12.8", False, "no Triton", "pip install triton"),
        ],
    )
    def test_a_device_that_is_not_here(
        self,
        monkeypatch: pytest.MonkeyPatch,
        devices: int,
        build: str | None,
        triton: bool,
        got: str,
        remedy: str,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
        with pytest.raises(DeviceUnavailable, match=rf"device 'cuda:1': got .*{got}.*{remedy}"):
            Table(self.SPEC, device="cuda:1")
        works = devices > 0 and triton
        assert resolve_device("auto") == ("cuda" if works else "cpu")
        assert resolve_device("cuda:1") == "cuda:1"

    @interpreted_too
    def test_a_table_of_a_shared_shard(self, make_shard: ShardFactory) -> None:
        other = TableSpec(name="u", segments=(Segment(dim=3, initializer=Zeros()),))
        shard = make_shard([self.SPEC, other])
        one, two = Table(self.SPEC, shard=shard), Table(other, shard=shard)
        two.find_or_init([1, 2])
        assert (len(one), len(two)) == (0, 2) and two.lookup([1]).shape == (1, 3)
        with pytest.raises(UnknownName, match="'v'"):
            Table(TableSpec(name="v", segments=self.SPEC.segments), shard=shard)
        with pytest.raises(ConfigError, match="another spec"):
            Table(TableSpec(name="t", segments=other.segments), shard=shard)
