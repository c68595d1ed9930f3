"""Admission thresholds and the counters of occurrences."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ConfigError
from shoal.placement import Placement, hash_ids, ranks_of, row_wise
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD
from shoal.table.hosting import check_placement
from shoal.table.spec import Segment, TableSpec
from support.admission_counters import Counter, make_counter

COUNTERS = ["exact", "sketch"]


def decide(admission: Admission, counter: Counter, ids: list[int]) -> list[bool]:
    """Admit or refuse each id of one step, duplicates summed first."""
    unique_U, inverse_N, counts_U = torch.tensor(ids).unique(
        return_inverse=True, return_counts=True
    )
    admitted_U = counter.add(unique_U, counts_U) >= admission.required_N(unique_U)
    return admitted_U[inverse_N].tolist()


@pytest.mark.parametrize(
    ("threshold", "on", "required"),
    [
        (0, "reach", 1),
        (0, "after", 1),
        (1, "reach", 1),
        (1, "after", 2),
        (3, "reach", 3),
        (3, "after", 4),
    ],
)
def test_occurrences_needed(threshold: int, on: str, required: int) -> None:
    admission = Admission(threshold=threshold, on=on)  # type: ignore[arg-type]
    assert admission.required(0) == required
    assert admission.required_N(torch.tensor([5, -1])).tolist() == [required] * 2


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize(
    ("on", "expected"),
    [("reach", [False, False, True, True]), ("after", [False, False, False, True])],
)
def test_threshold_three_over_four_steps(counter: str, on: str, expected: list[bool]) -> None:
    admission = Admission(threshold=3, on=on, counter=counter, sketch_width=1 << 10)  # type: ignore[arg-type]
    counters = make_counter(admission, "t")
    assert [decide(admission, counters, [7])[0] for _ in range(4)] == expected


@pytest.mark.parametrize("counter", COUNTERS)
def test_repeats_in_a_step_count_and_are_decided_once(counter: str) -> None:
    # Monolith decides per occurrence (0,0,1 in step 2); all occurrences of a step share one here.
    admission = Admission(threshold=3, on="after", counter=counter, sketch_width=1 << 10)  # type: ignore[arg-type]
    counters = make_counter(admission, "t")
    steps = [decide(admission, counters, [1, 3 << 17, 1]) for _ in range(4)]
    assert steps == [[False] * 3, [True, False, True], [True, False, True], [True] * 3]


def test_thresholds_above_fifteen_admit() -> None:
    admission = Admission(threshold=1000)
    counters = make_counter(admission, "t")
    assert counters.add(torch.tensor([4]), torch.tensor([999])).tolist() == [999]
    assert decide(admission, counters, [4]) == [True]


@pytest.mark.parametrize(("layout", "shift"), [("v1", 54), ("v2", 48)])
def test_thresholds_by_slot(layout: str, shift: int) -> None:
    admission = Admission(threshold=2, per_slot=((5, 9), (6, 0)), fid_layout=layout)  # type: ignore[arg-type]
    ids_N = torch.tensor([(5 << shift) + 1, (6 << shift) + 1, (7 << shift) + 1])
    assert admission.required_N(ids_N).tolist() == [9, 1, 2]
    assert [admission.required(slot) for slot in (5, 6, 7)] == [9, 1, 2]


def test_slots_of_negative_v1_ids() -> None:
    admission = Admission(per_slot=((1023, 4),), fid_layout="v1")
    assert admission.required_N(torch.tensor([-1])).tolist() == [4]


def test_exact_counter_forgets() -> None:
    counters = make_counter(Admission(), "t")
    ids_U = torch.tensor([1, 2])
    counters.add(ids_U, torch.tensor([3, 4]))
    counters.forget(torch.tensor([1, 99]))
    assert counters.add(ids_U, torch.tensor([1, 1])).tolist() == [1, 5]


@pytest.mark.parametrize("counter", COUNTERS)
def test_all_ids_count_and_empty_input_is_fine(counter: str) -> None:
    counters = make_counter(Admission(counter=counter, sketch_width=64), "t")  # type: ignore[arg-type]
    extremes_U = torch.tensor([-(1 << 63), -1, 0, (1 << 63) - 1])
    assert (counters.add(extremes_U, torch.ones(4, dtype=torch.int64)) >= 1).all()
    empty_U = torch.zeros(0, dtype=torch.int64)
    assert counters.add(empty_U, empty_U).shape == (0,)


@pytest.mark.parametrize("counter", COUNTERS)
def test_counts_stop_at_the_largest_u32(counter: str) -> None:
    counters = make_counter(Admission(counter=counter, sketch_width=64), "t")  # type: ignore[arg-type]
    id_U, many_U = torch.tensor([1]), torch.tensor([(1 << 32) - 2])
    counters.add(id_U, many_U)
    assert counters.add(id_U, many_U).tolist() == [(1 << 32) - 1]


def test_sketch_never_counts_too_few() -> None:
    counters = make_counter(Admission(counter="sketch", sketch_width=64, sketch_depth=3), "t")
    counts_U = torch.randint(1, 9, (500,), generator=torch.Generator().manual_seed(0))
    totals_U = counters.add(torch.arange(500), counts_U)
    assert (totals_U >= counts_U).all()


def test_sketch_is_exact_while_sparse_and_blind_to_order() -> None:
    admission = Admission(counter="sketch", sketch_width=1 << 16)
    ids_U, counts_U = torch.arange(100), torch.arange(100) + 1
    forward, backward = make_counter(admission, "t"), make_counter(admission, "t")
    totals_U = forward.add(ids_U, counts_U)
    assert torch.equal(totals_U, counts_U)
    assert torch.equal(backward.add(ids_U.flip(0), counts_U.flip(0)).flip(0), totals_U)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"threshold": -1}, "threshold"),
        ({"threshold": 1.5}, "threshold"),
        ({"on": "sometimes"}, "on"),
        ({"counter": "fuzzy"}, "counter"),
        ({"sketch_width": 1000}, "sketch_width"),
        ({"sketch_depth": 0}, "sketch_depth"),
        ({"fid_layout": "v3"}, "fid_layout"),
        ({"per_slot": ((1 << 15, 1),)}, "slot"),
        ({"per_slot": ((1024, 1),), "fid_layout": "v1"}, "slot"),
        ({"per_slot": ((1, -1),)}, "slot 1"),
        ({"per_slot": ((1, 1), (1, 2))}, "per_slot"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        Admission(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "ranks"), [(64, 2), (64, 4), (1 << 12, 8), (1 << 20, 3), (1 << 20, 7), (1 << 21, 5)]
)
def test_a_sketch_decides_alike_on_any_number_of_ranks(width: int, ranks: int) -> None:
    """Ids of one rank's buckets never count in the cells of another's."""
    admission = Admission(threshold=4, counter="sketch", sketch_width=width, sketch_depth=2)
    spec = TableSpec(name="t", segments=(Segment(dim=4, optimizer=SGD()),), admission=admission)
    check_placement([spec], Placement(ranks, row_wise("t", 4, ranks)))
    ids_U = torch.arange(30 * min(width, 4096) // 16)
    counts_U = ids_U % 5 + 1
    whole = make_counter(admission, "t").add(ids_U, counts_U)
    owners_U = ranks_of(hash_ids("t", ids_U), ranks)
    for rank in range(ranks):
        mine = owners_U == rank
        shares = make_counter(admission, "t").add(ids_U[mine], counts_U[mine])
        assert torch.equal(shares, whole[mine])
    if width < 1 << 20:
        assert not torch.equal(whole, counts_U)  # some do meet in a cell


@pytest.mark.parametrize(("width", "ranks"), [(64, 3), (64, 8), (1 << 18, 3), (8, 2)])
def test_a_sketch_too_narrow_for_its_ranks_is_refused(width: int, ranks: int) -> None:
    admission = Admission(threshold=4, counter="sketch", sketch_width=width)
    spec = TableSpec(name="t", segments=(Segment(dim=4, optimizer=SGD()),), admission=admission)
    with pytest.raises(ConfigError, match=r"sketch_width of table 't'.*2\^20 or more"):
        check_placement([spec], Placement(ranks, row_wise("t", 4, ranks)))
