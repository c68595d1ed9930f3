"""Trainings that several ranks must do as one process does, and what "as" means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.exchange_runs import OPTIMIZERS, SHARDINGS, Case, Outcome, local_run, whole_rows

__all__ = ["CASES", "MATRIX", "same_as_local"]

MATRIX = [
    Case(sharding, optimizer=rule, sizes=sizes, steps=4, threshold=2, ttl_s=15)
    for sharding in SHARDINGS
    for rule in OPTIMIZERS
    for sizes in ((3,), (4, 2, 1, 3), (4, 0, 1, 0))
]
"""Even, uneven and empty ranks, with admission and expiry on."""

CASES = [
    *(Case(sharding, optimizer=rule) for sharding in SHARDINGS for rule in OPTIMIZERS),
    *(Case(sharding, sizes=(5, 0, 1, 2)) for sharding in SHARDINGS),
    *(Case(sharding, sizes=(3, 2), weights=True) for sharding in SHARDINGS),
    *(Case(sharding, threshold=3, sizes=(3, 4)) for sharding in SHARDINGS),
    *(Case(sharding, ttl_s=15, sizes=(2, 3)) for sharding in SHARDINGS),
    *(Case(sharding, insert=False, threshold=3) for sharding in SHARDINGS),
    Case("row_wise", early=True),
    Case("grid", local_world_size=1, sizes=(4, 1)),
    Case("table_row_wise", local_world_size=None, sizes=(4, 1)),
    Case("row_wise", {"items": "column_wise", "tags": "data_parallel"}, early=True),
    Case("table_wise", {"users": "data_parallel"}, tags_dtype="float32", optimizer="adam"),
    Case("row_wise", sizes=(0,)),
    *(Case(sharding, optimizer="adagrad", per_sender=True, sizes=(3, 2)) for sharding in SHARDINGS),
]


def same(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=what)


def same_as_local(case: Case, outcomes: Sequence[Outcome], tolerance: float = 0.0) -> None:
    """Outputs and rows of one process, bit for bit without a tolerance."""
    on_device = tolerance
    # Rows with weights are rounded once more or less on their way.
    tolerance = max(tolerance, 1e-6) if case.weights else tolerance
    whole = local_run(case, len(outcomes))
    sizes = [case.size(rank) for rank in range(len(outcomes))]
    starts = np.cumsum([0, *sizes])
    for rank, outcome in enumerate(outcomes):
        mine = slice(starts[rank], starts[rank + 1])
        for step, (got, want) in enumerate(zip(outcome.outputs, whole.outputs, strict=True)):
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert a.dtype == b.dtype
                same(a, b[mine], tolerance, f"{case}, {rank=}, {step=}, output {i}")
        for a, b in zip(outcome.read, whole.read, strict=True):
            same(a, b[mine], tolerance, f"{case}, {rank=}, read")
    for table in ("users", "items", "tags"):
        same_rows(
            whole_rows(outcomes, table), whole_rows([whole], table), f"{case}, {table}", on_device
        )


def same_rows(
    got: dict[int, tuple[Any, ...]],
    want: dict[int, tuple[Any, ...]],
    what: str,
    tolerance: float,
) -> None:
    """Equal rows; the tolerance is for optimizer state, which a device may round otherwise."""
    assert got.keys() == want.keys(), what
    for id_, (first, *rest) in want.items():
        assert got[id_][0] == first, f"{what}, {id_}"
        if rest:
            same(np.array(got[id_][1]), np.array(rest[0]), tolerance, f"{what}, {id_}")
            assert got[id_][2:] == tuple(rest[1:]), f"{what}, {id_}"
