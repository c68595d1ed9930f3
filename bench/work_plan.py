"""What ranks do in the planner's bench: calibrate, time steps under five plans, predict them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.comm import init, shutdown
from shoal.placement import (
    Hosted,
    Placement,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from shoal.planner import calibrate
from shoal.train.stepping import TableLoad, fitted, predicted, timed_steps

__all__ = ["five_plans"]

Placing = Callable[[int, TableLoad, int], tuple[Hosted, ...]]
PLANS: dict[str, Placing] = {
    "all tables on rank 0": lambda k, t, ranks: table_wise(t.name, t.dim, 0),
    "three quarters on rank 0": lambda k, t, ranks: table_wise(t.name, t.dim, int(k % 4 == 3)),
    "tables in turns": lambda k, t, ranks: table_wise(t.name, t.dim, k % ranks),
    "rows split": lambda k, t, ranks: row_wise(t.name, t.dim, ranks),
    "columns split": lambda k, t, ranks: column_wise(t.name, t.dim, range(ranks)),
    "replicated": lambda k, t, ranks: data_parallel(t.name, t.dim, ranks),
}


def five_plans(*, device: str, quick: bool) -> dict[str, Any]:
    """Measured and predicted seconds of a step by plan, and the speeds that were measured."""
    mesh = init(device=device)
    scale = calibrate.QUICK if quick else calibrate.Scale()
    topology = calibrate.measure(mesh, scale=scale)
    topology = fitted(mesh, topology, steps=6 if quick else 40)
    rows, batch = (2_000, 256) if quick else (50_000, 2048)
    loads = [
        TableLoad(name=f"t{k}", rows=rows, dim=64, ids_per_sample=4, exponent=0.8) for k in range(8)
    ]
    placements = {
        name: Placement(
            mesh.world_size,
            tuple(h for k, t in enumerate(loads) for h in placing(k, t, mesh.world_size)),
        )
        for name, placing in PLANS.items()
    }
    found: dict[str, list[float]] = {name: [] for name in PLANS}
    for seed in range(1 if quick else 3):
        for name, placement in placements.items():
            steps = 4 if quick else 15
            found[name].append(timed_steps(mesh, loads, placement, batch, steps=steps, seed=seed))
    result = {
        "measured": {name: min(seconds) for name, seconds in found.items()},
        "predicted": {
            name: predicted(topology, loads, placement, batch)
            for name, placement in placements.items()
        },
        "rates": calibrate.lines_of(topology.rates),
    }
    shutdown()
    return result
