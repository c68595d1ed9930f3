"""What ranks do in the planner's bench: calibrate, time steps under five plans, predict them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import median
from shoal.comm import init, shutdown
from shoal.distributed.timed_steps import TableLoad, fitted, predicted, timed_steps
from shoal.placement import (
    Hosted,
    Placement,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from shoal.planner import calibrate

__all__ = ["five_plans"]

Placing = Callable[[int, TableLoad, int], tuple[Hosted, ...]]
PLANS: dict[str, Placing] = {
    "all tables on rank 0": lambda k, t, ranks: table_wise(t.name, t.dim, 0),
    "three quarters on rank 0": lambda k, t, ranks: table_wise(
        t.name, t.dim, k // 4 % ranks if k % 4 == 3 else 0
    ),
    "tables in turns": lambda k, t, ranks: table_wise(t.name, t.dim, k % ranks),
    "rows split": lambda k, t, ranks: row_wise(t.name, t.dim, ranks),
    "columns split": lambda k, t, ranks: column_wise(t.name, t.dim, range(ranks)),
    "replicated": lambda k, t, ranks: data_parallel(t.name, t.dim, ranks),
}


@dataclass(frozen=True, slots=True)
class Load:
    """What a step looks up: tables of rows x dim, ids of an example, examples of a rank; and how
    often it is timed."""

    tables: int
    rows: int
    dim: int
    ids: int
    batch: int
    turns: int
    steps: int


LOADS = {
    "cpu": Load(tables=8, rows=50_000, dim=64, ids=4, batch=2048, turns=5, steps=15),
    # Enough for bytes to matter next to launches.
    "cuda": Load(tables=8, rows=1_000_000, dim=128, ids=8, batch=65_536, turns=3, steps=15),
    "quick": Load(tables=8, rows=2_000, dim=64, ids=4, batch=256, turns=1, steps=4),
}


def five_plans(*, device: str, quick: bool, **sizes: int | None) -> dict[str, Any]:
    """Measured and predicted seconds of a step by plan, and the speeds that were measured.

    sizes: instead of those of `LOADS`.
    """
    mesh = init(device=device)
    load = LOADS["quick" if quick else mesh.device.type]
    load = replace(load, **{name: value for name, value in sizes.items() if value is not None})
    topology = calibrate.measure(mesh, scale=calibrate.QUICK if quick else None)
    topology = fitted(mesh, topology, quick=quick)
    loads = [
        TableLoad(name=f"t{k}", rows=load.rows, dim=load.dim, ids_per_sample=load.ids, exponent=0.8)
        for k in range(load.tables)
    ]
    placements: dict[str, Placement] = {}
    for name, placing in PLANS.items():
        hosted = tuple(h for k, t in enumerate(loads) for h in placing(k, t, mesh.world_size))
        made = Placement(mesh.world_size, hosted)
        if made not in placements.values():  # one rank has all of everything
            placements[name] = made
    found: dict[str, list[float]] = {name: [] for name in placements}
    for seed in range(load.turns):
        for name, placement in placements.items():
            found[name].append(
                timed_steps(mesh, loads, placement, load.batch, steps=load.steps, seed=seed)
            )
    result = {
        "rank": mesh.rank,
        "ranks": mesh.world_size,
        "device": _device_name(mesh.device),
        "measured": {name: min(seconds) for name, seconds in found.items()},
        "noise_s": median([sorted(some)[:2][-1] - min(some) for some in found.values()]),
        "predicted": {
            name: predicted(topology, loads, placement, load.batch)
            for name, placement in placements.items()
        },
        "rates": calibrate.lines_of(topology.rates),
    }
    shutdown()
    return result


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU"
