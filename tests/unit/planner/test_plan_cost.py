"""Terms of the cost model, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.planner.cost import PHASES, CostModel, Price, Workload
from shoal.planner.options import Option
from shoal.planner.problem import REST_S, PartialPlan
from shoal.planner.statistics import zipf
from shoal.planner.topology import Rates, Topology, row_seconds
from support.planning import problem, table

BATCH = 10_000
# A row of up to 256 bytes is read in 1 us; of up to 512 bytes with state it is stepped in 2 us.
RATES = Rates(
    copy=1e9,
    gather=((256, 256e6),),
    update=((512, 512e6),),
    host_link=1e9,
    intra=1e9,
    cross=1e9,
    intra_latency_s=0.0,
    cross_latency_s=0.0,
    id_s=1e-7,
    occurrence_s=1e-6,
    flops=1e9,
    slice_s=1e-3,
    repeat=0.5,
    table_s=1e-4,
)


def priced(sharding: Any, slices: int = 1) -> dict[str, float]:
    """On two ranks, a table of 64 columns and 4 ids, all of which are in every batch."""
    topology = Topology(nodes=1, local_size=2, device="cpu", rates=RATES)
    model = CostModel(topology, Workload(batch_size=BATCH))
    one = table(rows=4.0, statistics=zipf(4, 0.0, ids_per_sample=1.0))
    price: Price = model.price(one, Option(sharding, slices, "device", 1.0, "float32"))
    return {**dict(zip(PHASES, price.phases, strict=True)), "every": price.every_s}


def test_ids_go_to_every_holder_of_columns() -> None:
    columns, rows = priced("column_wise", 2), priced("row_wise")
    # 4 ids from each of 2 ranks; rows split: half of them, and one standard deviation of
    # sqrt(4 x 4 / 2 x 1/2) = 2. Half of them cross a link, 12 bytes each.
    assert columns["ids"] == pytest.approx(8 * 6e-9) and rows["ids"] == pytest.approx(6 * 6e-9)
    assert columns["probe"] == pytest.approx(8e-7) and rows["probe"] == pytest.approx(6e-7)
    # Half a row takes as long to find in memory as a whole one.
    assert columns["read"] == pytest.approx(8e-6) and rows["read"] == pytest.approx(6e-6)
    # As many bytes: 8 halves of a row of 256 bytes, 6 whole ones.
    assert columns["rows"] == pytest.approx(8 * 64e-9) and rows["rows"] == pytest.approx(6 * 128e-9)
    # 4 rows, and 4 more gradients of them at half the time; 2 rows, and 4 more gradients.
    assert columns["update"] == pytest.approx(6 * 2e-6)
    assert rows["update"] == pytest.approx(4 * 2e-6)


def test_each_column_slice_has_the_positions_of_every_rank() -> None:
    assert priced("row_wise")["every"] == priced("table_wise")["every"] == 0
    # 10,000 positions, forward and backward, for each slice but the first.
    assert priced("column_wise", 2)["every"] == pytest.approx(2 * BATCH * 1e-6)
    assert priced("column_wise", 4)["every"] == pytest.approx(3 * 2 * BATCH * 1e-6)


def test_every_rank_of_a_replicated_table_does_the_work_of_all() -> None:
    copied, whole = priced("data_parallel"), priced("table_wise")
    for phase in ("ids", "probe", "read", "update", "slices"):
        assert copied[phase] == whole[phase]
    assert copied["rows"] == 0 < whole["rows"]
    # 8 gradients of 256 bytes: half over a link, one pass over all, and two to repeat them.
    assert whole["gradients"] == pytest.approx(8 * 256e-9 * (0.5 + 1))
    assert copied["gradients"] == pytest.approx(8 * 256e-9 * (0.5 + 3))


def test_seconds_of_a_row_lie_between_those_of_measured_widths() -> None:
    curve = ((100.0, 100e6), (300.0, 100e6), (500.0, 250e6))  # 1, 3 and 2 us
    found = [row_seconds(curve, width) for width in (1, 100, 200, 300, 400, 500, 1000)]
    assert found == pytest.approx([1e-6, 1e-6, 2e-6, 3e-6, 2.5e-6, 2e-6, 4e-6])


def test_ranks_without_a_slice_pay_for_slices() -> None:
    made = problem([table()], Topology(nodes=1, local_size=4))
    choices = made.choices[0]
    (option,) = [
        k
        for k, one in enumerate(choices.options)
        if (one.sharding, one.slices) == ("column_wise", 2)
    ]
    state = PartialPlan(made)
    before = state.loads_4W.copy()
    state.put(0, option, np.array([0, 2]))
    added = (state.loads_4W - before)[REST_S]
    every, held = choices.every_O[option], choices.loads_4O[REST_S, option]
    assert every > 0 and added == pytest.approx([every + held, every, every + held, every])
    state.take(0)
    np.testing.assert_allclose(state.loads_4W, before, rtol=1e-12)
