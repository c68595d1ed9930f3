"""Admission on GPU tables: counts and decisions of the rule's own counters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shoal.errors import ShapeError
from shoal.ids import salt
from shoal.kernels.admission import count_refused
from shoal.kernels.tables import COUNT_REFUSED
from shoal.rules.admission import Admission
from shoal.table.cuda.admission import AdmissionCounters
from support.admission_counters import Counter, ExactCounter, SketchCounter, make_counter
from support.device_fill import LANE
from support.device_tables import TableSize, make_tables

SIZE = TableSize(salt=salt("t"))
RULES = (
    Admission(threshold=3, per_slot=((1, 0),)),
    Admission(threshold=2, on="after", per_slot=((0, 0), (1, 4))),
    Admission(threshold=0, per_slot=((1, 5),)),
    Admission(threshold=3, per_slot=((1, 1), (2, 6)), counter="sketch", sketch_width=1 << 4),
    Admission(threshold=2, on="after", counter="sketch", sketch_width=1 << 6, sketch_depth=2),
)
IDS = (*range(9), -1, 2**63 - 1, -(2**63), -(2**63) + 1, *(1 << 48 | i for i in range(5)), 2 << 48)


def reference_totals(
    rule: Admission, counter: Counter, counters: Mapping[int, int]
) -> dict[int, bool]:
    """Decisions on a call's distinct ids by the rule's own counter."""
    ids_U = torch.tensor(list(counters), dtype=torch.int64)
    needed_U = rule.required_N(ids_U)
    kept = needed_U > 1
    totals_U = torch.full_like(needed_U, 1)
    counts_U = torch.tensor(list(counters.values()), dtype=torch.int64)
    totals_U[kept] = counter.add(ids_U[kept], counts_U[kept])
    return dict(zip(ids_U.tolist(), (totals_U >= needed_U).tolist(), strict=True))


def kept_state(counter: Counter) -> tuple[dict[int, int], bytes]:
    if isinstance(counter, SketchCounter):
        return {}, counter._cells.to(torch.uint32).numpy().tobytes()
    assert isinstance(counter, ExactCounter)
    return {id_: count for id_, count in counter._counts.items() if count}, b""


def state_of(counters: AdmissionCounters, table: int) -> tuple[dict[int, int], bytes]:
    state = counters.state(table)
    return dict(zip(state.ids.tolist(), state.counts.tolist(), strict=True)), state.cells


@pytest.mark.parametrize("device", LANE)
class TestAdmissionCounters:
    @pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
    def test_decisions_of_the_rule(self, device: str, rule: Admission) -> None:
        rng = random.Random(5)
        tables = make_tables([SIZE, SIZE], device)
        counters = AdmissionCounters([("other", None), ("t", rule)], device)
        counter = make_counter(rule, "t")
        rows: set[int] = set()
        refused = 0
        for _ in range(8):
            ids = rng.choices(IDS, k=20)
            counts = [rng.choice((0, 1, 1, 2)) for _ in ids]
            call = tables.groups((0, [7, 7]), (1, ids))
            wanted = [True, True, *(id_ not in rows for id_ in ids)]
            wanted_N = torch.tensor(wanted, device=device)
            counts_N = torch.tensor([1, 1, *counts], device=device)
            admitted_N = counters.add(call, counts_N, wanted_N, {0: 2, 1: len(ids)})
            fresh: dict[int, int] = {}
            for id_, count in zip(ids, counts, strict=True):
                if id_ not in rows:
                    fresh[id_] = fresh.get(id_, 0) + count
            decided = reference_totals(rule, counter, fresh)
            assert admitted_N.tolist() == [True, True, *(decided.get(id_, False) for id_ in ids)]
            count_refused(tables.layout, call, wanted_N, admitted_N)
            refused += sum(not yes for yes in decided.values())
            assert tables.count(1, COUNT_REFUSED) == refused
            assert tables.count(0, COUNT_REFUSED) == 0
            counters.forget(call, admitted_N)
            new = [id_ for id_, yes in decided.items() if yes]
            counter.forget(torch.tensor(new, dtype=torch.int64))
            rows.update(new)
            assert state_of(counters, 1) == kept_state(counter)

    @pytest.mark.parametrize("kind", ["exact", "sketch"])
    def test_counts_stop_at_the_largest(self, device: str, kind: Any) -> None:
        top = 2**32 - 1
        rule = Admission(threshold=top - 1, counter=kind, sketch_width=4)
        counters, counter = AdmissionCounters([("t", rule)], device), make_counter(rule, "t")
        tables = make_tables([SIZE], device)
        for counts in ([top - 3, 1, 0], [1, 5, 7], [top, top, top], [1, 1, 1]):
            call = tables.groups((0, [9, 9, 11]))
            wanted_N = torch.ones(3, dtype=torch.bool, device=device)
            counts_N = torch.tensor(counts, device=device)
            admitted_N = counters.add(call, counts_N, wanted_N, {0: 3})
            decided = reference_totals(rule, counter, {9: sum(counts[:2]), 11: counts[2]})
            assert admitted_N.tolist() == [decided[9], decided[9], decided[11]]
        assert state_of(counters, 0) == kept_state(counter)

    def test_growth_keeps_counts(self, device: str) -> None:
        rule = Admission(threshold=3)
        counters, tables = AdmissionCounters([("t", rule)], device), make_tables([SIZE], device)
        rng = random.Random(2)
        seen: dict[int, int] = {}
        for part in range(5):
            # One id in four gets its row and is forgotten again.
            ids = [*rng.sample(range(-500, 500), 300), -(2**63), -(2**63) + 1]
            call = tables.groups((0, ids))
            wanted_N = torch.ones(len(ids), dtype=torch.bool, device=device)
            admitted_N = counters.add(call, None, wanted_N, {0: len(ids)})
            for id_ in ids:
                seen[id_] = seen.get(id_, 0) + 1
            assert admitted_N.tolist() == [seen[id_] >= 3 for id_ in ids], part
            counters.forget(call, admitted_N)
            seen = {id_: count for id_, count in seen.items() if count < 3}
            assert state_of(counters, 0) == (seen, b"")
        assert counters.nbytes(0) < 1 << 17

    def test_undo(self, device: str) -> None:
        rules = [("a", Admission(threshold=4)), ("b", RULES[3])]
        counters, tables = AdmissionCounters(rules, device), make_tables([SIZE, SIZE], device)
        call = tables.groups((0, [1, 2, 1]), (1, [1, 5, 5]))
        wanted_N = torch.ones(6, dtype=torch.bool, device=device)
        counters.add(call, None, wanted_N, {0: 3, 1: 3})
        before = [state_of(counters, table) for table in range(2)]
        other = tables.groups((0, [1, 3, 3]), (1, [1, 5, 8]))
        counters.add(other, None, wanted_N, {0: 3, 1: 3})
        counters.undo(other, None, wanted_N)
        assert [state_of(counters, table) for table in range(2)] == before

    @pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
    def test_state_round_trip(self, device: str, rule: Admission) -> None:
        tables = make_tables([SIZE], device)
        counters = AdmissionCounters([("t", rule)], device)
        ids = [*IDS, *IDS[:4]]
        call = tables.groups((0, ids))
        wanted_N = torch.ones(len(ids), dtype=torch.bool, device=device)
        counters.add(call, None, wanted_N, {0: len(ids)})
        other = AdmissionCounters([("t", rule)], device)
        other.load(0, counters.state(0))
        assert state_of(other, 0) == state_of(counters, 0)
        for one in (counters, other):
            one.add(call, None, wanted_N, {0: len(ids)})
        assert state_of(other, 0) == state_of(counters, 0)
        other.clear(0)
        assert not any(state_of(other, 0)[0]) and not any(state_of(other, 0)[1])

    def test_a_sketch_of_another_size_is_refused(self, device: str) -> None:
        small = AdmissionCounters(
            [("t", Admission(threshold=2, counter="sketch", sketch_width=8))], device
        )
        large = AdmissionCounters(
            [("t", Admission(threshold=2, counter="sketch", sketch_width=16))], device
        )
        with pytest.raises(ShapeError, match="sketch_width"):
            large.load(0, small.state(0))
