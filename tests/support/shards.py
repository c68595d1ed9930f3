"""The shards that tests run against: the reference, and each real one of this machine.

A kind is one entry of `SHARDS`. Shards that do not wait for their device are in `RAISES_LATE`:
there what a kernel finds in the data is raised by `check`, and other rows have stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shoal.table.shard import Shard
from shoal.table.spec import TableSpec

from .reference_shard import ReferenceShard

__all__ = [
    "RAISES_LATE",
    "SHARDS",
    "SHARD_KINDS",
    "ShardFactory",
    "make_reference",
    "shard_factory",
]

ShardFactory = Callable[[Sequence[TableSpec]], Shard]


def make_reference(specs: Sequence[TableSpec]) -> Shard:
    return ReferenceShard(specs)


def make_cpu(specs: Sequence[TableSpec]) -> Shard:
    from shoal.table.cpu import CpuShard

    return CpuShard(specs)


def make_cuda(specs: Sequence[TableSpec]) -> Shard:
    """Kernels interpreted, on CPU tensors."""
    from shoal.table.cuda import CudaShard

    return CudaShard(specs, device="cpu")


SHARDS: Mapping[str, ShardFactory] = {
    "reference": make_reference,
    "cpu": make_cpu,
    "cuda": make_cuda,
}
SHARD_KINDS = tuple(SHARDS)
RAISES_LATE: frozenset[str] = frozenset({"cuda"})


def shard_factory(kind: str) -> ShardFactory:
    return SHARDS[kind]
