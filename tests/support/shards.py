"""The shards that tests run against: the reference, and each real one of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.table.shard import Shard
from shoal.table.spec import TableSpec

from .reference_shard import ReferenceShard

__all__ = ["SHARD_KINDS", "ShardFactory", "make_reference", "shard_factory"]

ShardFactory = Callable[[Sequence[TableSpec]], Shard]

SHARD_KINDS = ("reference", "cpu")


def make_reference(specs: Sequence[TableSpec]) -> Shard:
    return ReferenceShard(specs)


def make_cpu(specs: Sequence[TableSpec]) -> Shard:
    from shoal.table.cpu import CpuShard

    return CpuShard(specs)


def shard_factory(kind: str) -> ShardFactory:
    return {"reference": make_reference, "cpu": make_cpu}[kind]
