"""Tables and expectations for the numbers of Monolith's tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.rules.schedules import Polynomial, Schedule
from shoal.table.facade import Table
from shoal.table.spec import Segment, TableSpec

from .shards import ShardFactory

__all__ = ["GROWING", "near", "rows", "slots", "spec", "table"]

GROWING = Polynomial(1.0, 10, end=2.0)


def spec(name: str, dim: int, lr: float | Schedule = 1.0, **more: object) -> TableSpec:
    segment = Segment(dim=dim, optimizer=SGD(lr=lr), initializer=Zeros())
    return TableSpec(name=name, segments=(segment,), **more)  # type: ignore[arg-type]


def table(
    make_shard: ShardFactory, dim: int = 1, lr: float | Schedule = 1.0, **more: object
) -> Table:
    one = spec("t", dim, lr, **more)
    return Table(one, shard=make_shard([one]))


def slots(make_shard: ShardFactory, *specs: TableSpec) -> dict[str, Table]:
    shard = make_shard(specs)
    return {one.name: Table(one, shard=shard) for one in specs}


def near(actual: Tensor, expected: Sequence[object] | Tensor, atol: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected).double()
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=atol)


def rows(*values: float, dim: int = 1) -> list[list[float]]:
    return [[value] * dim for value in values]
