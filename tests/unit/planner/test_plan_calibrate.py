"""Calibration: what is measured can be read, planned with, and is positive."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.launch import init
from shoal.distributed import timed_steps
from shoal.placement import Placement, row_wise
from shoal.planner import Topology, Workload, calibrate, make_plan, read_topology
from shoal.planner.topology import ASSUMED
from support.planning import kept, table
from support.ranks import run_ranks


def test_one_process(tmp_path: Path) -> None:
    mesh = init(device="cpu")
    found = calibrate.measure(mesh, scale=calibrate.QUICK)
    assert found.device == "cpu" and found.world_size == 1
    assert found.rates.intra == ASSUMED["cpu"].intra  # one rank has no links
    assert min(found.rates.copy, found.rates.flops, found.rates.id_s) > 0
    path = kept(tmp_path, found)
    again = read_topology(path)
    assert again == found and "processor" in path.read_text()
    assert make_plan([table()], again, Workload(batch_size=8)).world_size == 1
    assert any("rows updated" in line for line in calibrate.lines_of(found.rates))


def measured() -> Topology:
    torch.set_num_threads(1)
    mesh = init(device="cpu")
    return timed_steps.fitted(mesh, calibrate.measure(mesh, scale=calibrate.QUICK), quick=True)


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_measure_their_links_and_whole_steps() -> None:
    found = run_ranks(2, measured)[0]
    assert (found.nodes, found.local_size) == (1, 2)
    rates = found.rates
    assert rates.intra != ASSUMED["cpu"].intra and rates.intra_latency_s > 0
    assert min(rates.step_s, rates.table_s, rates.slice_s, rates.occurrence_s) >= 0
    assert rates.repeat > 0
    assert rates.step_s + rates.table_s + rates.slice_s + rates.occurrence_s > 0


def measured_links() -> Topology:
    os.environ["LOCAL_RANK"] = "0"
    return calibrate.measure(init(device="cpu"), scale=calibrate.QUICK)


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_nodes_measure_the_link_between_them() -> None:
    first, second = run_ranks(2, measured_links, environ={"LOCAL_WORLD_SIZE": "1"})
    assert (first.nodes, first.local_size) == (2, 1)
    assert first.rates.intra == ASSUMED["cpu"].intra
    for name in ("cross", "cross_latency_s"):
        assert getattr(first.rates, name) == getattr(second.rates, name) > 0
        assert getattr(first.rates, name) != getattr(ASSUMED["cpu"], name)


def test_links_are_fitted_over_all_sizes() -> None:
    sizes = [0.0, 1e6, 4e6, 16e6]
    exact = [2e-4 + size / 5e9 for size in sizes]
    assert calibrate.fitted_line(sizes, exact) == pytest.approx((2e-4, 5e9))
    # One slow call does not become the speed or the latency of the link.
    latency_s, speed = calibrate.fitted_line(sizes, [*exact[:-1], 2 * exact[-1]])
    assert 1e-4 < latency_s < 3e-4 and 3.5e9 < speed < 5e9
    latency_s, speed = calibrate.fitted_line(sizes, [3e-4, 2e-4, 2e-4, 1e-4])
    assert latency_s > 0 and speed > 0


def test_more_of_a_batch_is_predicted_to_take_longer() -> None:
    topology = Topology(nodes=1, local_size=2, device="cpu", rates=ASSUMED["cpu"])
    load = timed_steps.TableLoad(name="t", rows=1000, dim=16)
    placement = Placement(2, row_wise("t", 16, 2))
    times = [timed_steps.predicted(topology, [load], placement, batch) for batch in (64, 512, 4096)]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 24])
def test_timed_steps_tell_what_each_thing_costs(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    names = ("step_s", "table_s", "slice_s", "occurrence_s", "replica_s")
    # One rank has no replicas.
    wanted = (3e-3, 3e-5, 2e-4, 5e-8, 2e-9 * (ranks > 1))
    topology = Topology(nodes=1, local_size=ranks, device="cpu", rates=ASSUMED["cpu"])
    machine = replace(
        topology, rates=replace(topology.rates, **dict(zip(names, wanted, strict=True)))
    )
    noise = itertools.cycle((1.0, 1.02, 1.01, 1.03))

    def timed(mesh: Any, *plan: Any, noisy: bool, **settings: Any) -> float:
        return timed_steps.predicted(machine, *plan) * (next(noise) if noisy else 1.0)

    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    for noisy, off in ((False, 1e-6), (True, 0.25)):
        monkeypatch.setattr(timed_steps, "timed_steps", partial(timed, noisy=noisy))
        rates = timed_steps.fitted(mesh, topology).rates
        found = [getattr(rates, name) for name in names]
        assert found == pytest.approx(wanted, rel=off)


def test_nothing_takes_less_than_no_time() -> None:
    matrix = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    assert timed_steps.least_squares(
        matrix, matrix @ torch.tensor([1.0, 2.0]).double()
    ) == pytest.approx([1, 2])
    # Best would be 4 - x: then what is left is the mean.
    assert timed_steps.least_squares(
        matrix, torch.tensor([3.0, 2.0, 1.0]).double()
    ) == pytest.approx([2, 0])
    assert timed_steps.least_squares(matrix, -matrix[:, 0]) == [0, 0]


def timed_on_one_rank() -> list[float]:
    torch.set_num_threads(1)
    mesh = init(device="cpu")
    rates = timed_steps.fitted(
        mesh, calibrate.measure(mesh, scale=calibrate.QUICK), quick=True
    ).rates
    return [rates.step_s, rates.table_s, rates.slice_s, rates.occurrence_s]


@pytest.mark.slow
@pytest.mark.multiproc
def test_one_rank_measures_what_slices_of_several_cost() -> None:
    (found,) = run_ranks(1, timed_on_one_rank)
    assert min(found) >= 0 and sum(found) > 0
