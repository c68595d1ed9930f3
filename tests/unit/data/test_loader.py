"""Batches: order, passes, ranks, read-ahead, resuming."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shoal.data import Batch, Loader, Order, RankShare, TensorSource
from shoal.errors import ConfigError, DataError
from shoal.ragged import Ragged

SIZE = 23


def source(size: int = SIZE) -> TensorSource:
    rows = torch.arange(size)
    lists = Ragged.from_lists([[row] * (row % 3) for row in range(size)])
    return TensorSource(
        {"id": rows, "list": lists}, (rows % 2).float(), dense=rows[:, None], times_s=rows * 10
    )


def numbers(batches: Any) -> list[list[int]]:
    return [batch.ids["id"].values.tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [number for batch in numbers(batches) for number in batch]


ORDERS = [
    Order(),
    Order(passes=3, shuffle="always", seed=5),
    Order(passes=2, shuffle="replays", window=7, seed=5),
]


def test_in_order_with_a_short_last_batch():
    loader = Loader(source(), 5)
    assert numbers(loader) == [list(range(start, min(start + 5, 23))) for start in range(0, 23, 5)]
    assert (len(loader), loader.examples) == (5, 23)
    assert [batch.position for batch in loader] == [5, 10, 15, 20, 23]
    last = list(loader)[-1]
    assert last.ids.to_lists()["list"] == [[20, 20], [], [22]]
    assert last.event_time_s == 220
    assert last.dense is not None
    assert last.dense.tolist() == [[20], [21], [22]]


@pytest.mark.parametrize("order", ORDERS)
def test_every_pass_has_every_example_once(order: Order):
    seen = flat(Loader(source(), 4, order=order))
    assert len(seen) == SIZE * order.passes
    for start in range(0, len(seen), SIZE):
        assert sorted(seen[start : start + SIZE]) == list(range(SIZE))


def test_shuffles_follow_seed_and_pass():
    order = Order(passes=2, shuffle="always", seed=5)
    seen = flat(Loader(source(), 4, order=order))
    assert seen == flat(Loader(source(), 9, order=order))
    assert seen[:SIZE] != seen[SIZE:]
    assert seen[:SIZE] != list(range(SIZE))
    assert seen != flat(Loader(source(), 4, order=Order(passes=2, shuffle="always", seed=6)))


def test_replays_come_first_in_the_order_of_the_source():
    seen = flat(Loader(source(), 4, order=Order(passes=2, shuffle="replays")))
    assert seen[:SIZE] == list(range(SIZE))
    assert seen[SIZE:] != list(range(SIZE))


def test_a_window_bounds_how_far_examples_move():
    seen = flat(Loader(source(), 4, order=Order(shuffle="always", window=6)))
    assert [number // 6 for number in seen] == sorted(number // 6 for number in range(SIZE))
    assert seen != list(range(SIZE))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_ranks_share_out_each_batch(order: Order, world_size: int):
    whole = list(Loader(source(), 5, order=order))
    ranks = [
        list(Loader(source(), 5, order=order, share=RankShare(rank, world_size)))
        for rank in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {len(whole)}
    for at, batch in enumerate(whole):
        parts = [batches[at] for batches in ranks]
        assert [n for part in numbers(parts) for n in part] == batch.ids["id"].values.tolist()
        assert {part.position for part in parts} == {batch.position}
        sizes = [part.labels.numel() for part in parts]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("order", ORDERS)
def test_going_on_from_any_batch_equals_never_having_stopped(order: Order):
    loader = Loader(source(), 5, order=order)
    whole = list(loader)
    for at, batch in enumerate(whole):
        assert numbers(loader.batches(batch.position)) == numbers(whole[at + 1 :])


def test_a_run_may_go_on_with_another_number_of_ranks():
    order = Order(passes=2, shuffle="always")
    position = next(iter(Loader(source(), 5, order=order))).position
    rest = [
        numbers(Loader(source(), 5, order=order, share=RankShare(rank, 2)).batches(position))
        for rank in range(2)
    ]
    joined = [left + right for left, right in zip(*rest, strict=True)]
    assert joined == numbers(Loader(source(), 5, order=order))[1:]


def test_read_ahead_changes_nothing():
    order = Order(passes=2, shuffle="always")
    plain = Loader(source(), 5, order=order, prefetch=0)
    assert numbers(plain) == numbers(Loader(source(), 5, order=order, prefetch=3))


class _Failing(TensorSource):
    def take(self, rows_B: torch.Tensor) -> Batch:
        if int(rows_B[0]) >= 10:
            raise DataError("broken row group")
        return super().take(rows_B)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_source_reach_the_caller(prefetch: int):
    failing = _Failing({"id": torch.arange(SIZE)}, torch.zeros(SIZE))
    got = []
    with pytest.raises(DataError, match="broken row group"):
        for batch in Loader(failing, 5, prefetch=prefetch):
            got.append(batch.position)  # noqa: PERF401 - what came before the error counts
    assert got == [5, 10]


def test_a_loop_that_stops_early_leaves_no_thread():
    before = set(threading.enumerate())
    batches = iter(Loader(source(), 1))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    after = [one for one in threading.enumerate() if one.name == "shoal-loader"]
    assert not set(after) - before


@pytest.mark.parametrize("position", [-5, 3, 24, 51])
def test_a_position_inside_a_batch_is_refused(position: int):
    with pytest.raises(ConfigError, match="position"):
        Loader(source(), 5, order=Order(passes=2)).batches(position)


def test_the_end_is_a_position():
    assert list(Loader(source(), 5).batches(SIZE)) == []


def test_wrong_settings_are_refused():
    for arguments in ({"passes": 0}, {"window": 0}, {"shuffle": "sometimes"}, {"seed": -1}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            Order(**arguments)  # type: ignore[arg-type]
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="rank"):
            RankShare(rank, world_size)
    with pytest.raises(ConfigError, match="batch_size"):
        Loader(source(), 0)
    with pytest.raises(ConfigError, match="prefetch"):
        Loader(source(), 5, prefetch=-1)
    with pytest.raises(DataError, match="examples of a source"):
        Loader(source(0), 5)


def test_batches_without_times_happen_at_their_event_time():
    batch = Batch(ids=source().take(torch.arange(2)).ids, labels=torch.zeros(2), event_time_s=9)
    assert batch.event_times_B.tolist() == [9, 9]


def test_page_locked_batches_hold_the_same():
    plain, pinned = (list(Loader(source(), 5, pin_memory=pins)) for pins in (False, True))
    assert numbers(plain) == numbers(pinned)
    here = torch.cuda.is_available()
    assert {batch.ids.values_N.is_pinned() for batch in pinned} == {here}
    assert [batch.position for batch in pinned] == [5, 10, 15, 20, SIZE]


def test_a_last_batch_that_is_too_short_joins_the_one_before():
    loader = Loader(source(11), 5, order=Order(passes=2), least=2)
    assert [len(batch) for batch in numbers(loader)] == [5, 6, 5, 6]
    assert flat(loader) == 2 * list(range(11))
    assert (len(loader), loader.examples, loader.dropped) == (4, 22, 0)
    assert [batch.position for batch in loader] == [5, 11, 16, 22]


def test_a_last_batch_that_is_too_short_is_dropped_and_counted():
    loader = Loader(source(11), 5, order=Order(passes=2), least=2, short="drop")
    assert numbers(loader) == 2 * [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (len(loader), loader.examples, loader.dropped) == (4, 20, 2)
    # What was dropped counts as consumed.
    assert [batch.position for batch in loader] == [5, 11, 16, 22]


@pytest.mark.parametrize("size", [10, 12, 4, 5])
@pytest.mark.parametrize("short", ["merge", "drop"])
def test_last_batches_that_are_long_enough_stay(size: int, short: Any):
    loader = Loader(source(size), 5, least=2, short=short)
    assert numbers(loader) == numbers(Loader(source(size), 5))
    assert (loader.short_examples, loader.examples) == (0, size)


@pytest.mark.parametrize("short", ["merge", "drop"])
@pytest.mark.parametrize("order", ORDERS)
def test_going_on_with_short_batches_equals_never_having_stopped(order: Order, short: Any):
    loader = Loader(source(), 11, order=order, least=2, short=short)
    whole = list(loader)
    for at, batch in enumerate(whole):
        assert numbers(loader.batches(batch.position)) == numbers(whole[at + 1 :])
    with pytest.raises(ConfigError, match="position"):
        loader.batches(22)


@pytest.mark.parametrize("short", ["merge", "drop"])
def test_ranks_share_out_a_merged_batch(short: Any):
    whole = list(Loader(source(), 11, least=2, short=short))
    shares = [RankShare(rank, 4) for rank in range(4)]
    ranks = [list(Loader(source(), 11, least=2, short=short, share=one)) for one in shares]
    for at, batch in enumerate(whole):
        parts = [batches[at] for batches in ranks]
        assert [n for part in numbers(parts) for n in part] == batch.ids["id"].values.tolist()
        assert {part.position for part in parts} == {batch.position}


def test_too_few_examples_or_too_small_batches_are_refused():
    with pytest.raises(DataError, match="examples of a source: got 1; allowed: at least 2"):
        Loader(source(1), 5, least=2)
    with pytest.raises(ConfigError, match="batch_size"):
        Loader(source(), 1, least=2)
    with pytest.raises(ConfigError, match="short"):
        Loader(source(), 5, short="keep")  # type: ignore[arg-type]
