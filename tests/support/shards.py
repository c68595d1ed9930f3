"""The shards that tests run against: the reference, and each real one of this machine.

A kind is one entry of `SHARDS`. A test that takes a shard of every kind runs on "cuda" where there
is a GPU. Interpreted kernels are slow, so that elsewhere only tests marked `interpreted_too` do:
those whose way through the GPU shard no other such test of their file takes.

Shards that do not wait for their device are in `RAISES_LATE`: there what a kernel finds in the
data is raised by `check`, and other rows have stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from shoal.table.shard import Shard
from shoal.table.spec import TableSpec

from .placed_shard import PlacedCuda, PlacedTiered
from .reference_shard import ReferenceShard

__all__ = [
    "COMPILED",
    "CUDA",
    "RAISES_LATE",
    "SHARDS",
    "SHARD_KINDS",
    "TIERED",
    "TIERED_COMPILED",
    "WITH_INTERPRETED",
    "ShardFactory",
    "interpreted_once",
    "interpreted_too",
    "make_reference",
    "shard_factory",
]

ShardFactory = Callable[[Sequence[TableSpec]], Shard]


def make_reference(specs: Sequence[TableSpec]) -> Shard:
    return ReferenceShard(specs)


def make_cpu(specs: Sequence[TableSpec]) -> Shard:
    from shoal.table.cpu.shard import CpuShard

    return CpuShard(specs)


SHARDS: Mapping[str, ShardFactory] = {
    "reference": make_reference,
    "cpu": make_cpu,
    "cuda": PlacedCuda,
    "tiered": PlacedTiered,
}
RAISES_LATE: frozenset[str] = frozenset({"cuda", "tiered"})

COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
TIERED_COMPILED = pytest.param("tiered", marks=pytest.mark.gpu)
"""On a GPU."""
CUDA = COMPILED if torch.cuda.is_available() else pytest.param("cuda")
"""On a GPU, elsewhere interpreted."""
SHARD_KINDS: tuple[Any, ...] = ("reference", "cpu", COMPILED)
TIERED = TIERED_COMPILED if torch.cuda.is_available() else pytest.param("tiered")
"""On a GPU, elsewhere interpreted."""
WITH_INTERPRETED: tuple[Any, ...] = ("reference", "cpu", CUDA)
interpreted_too = pytest.mark.parametrize("make_shard", WITH_INTERPRETED, indirect=True)


def interpreted_once(name: str, values: Sequence[object], chosen: object) -> Any:
    """Each value of an argument with each kind, of which interpreted kernels take one value."""
    assert chosen in values
    cases = [
        pytest.param(kind, value, id=f"{kind}-{value!r}")
        for kind in ("reference", "cpu")
        for value in values
    ]
    for value in values:
        mark = CUDA.marks if value == chosen else COMPILED.marks
        cases.append(pytest.param("cuda", value, id=f"cuda-{value!r}", marks=mark))
    return pytest.mark.parametrize(("make_shard", name), cases, indirect=["make_shard"])


def shard_factory(kind: str) -> ShardFactory:
    return SHARDS[kind]
