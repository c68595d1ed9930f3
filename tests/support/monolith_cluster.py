"""Monolith's tables over parameter servers that run on loopback, or in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import torch

from shoal.comm.transport import Server
from shoal.compat.monolith.native_training.distributed_ps import (
    DistributedHashTable,
    DistributedMultiTypeHashTable,
)
from shoal.compat.monolith.native_training.multi_type_hash_table import table_specs
from shoal.ps.server import TableServer
from shoal.table.shard import RowsById
from shoal.table.spec import TableSpec

__all__ = ["Cluster", "Clusters", "same_rows"]


class Closing(Protocol):
    def close(self) -> None: ...


Closable = TypeVar("Closable", bound=Closing)


class Cluster:
    """`num_ps` servers, started as factories ask for them; of 0, tables are in this process."""

    def __init__(self, num_ps: int, stack: ExitStack) -> None:
        self.num_ps, self._stack = num_ps, stack
        self._servers: list[Server] = []
        stack.callback(self._stop)

    def _stop(self) -> None:
        """All at once: a server that stops waits a little."""
        if self._servers:
            with ThreadPoolExecutor() as pool:
                list(pool.map(Server.stop, self._servers))

    def factory(self, idx: int, config: TableSpec | Mapping[str, TableSpec]) -> str:
        specs = (config,) if isinstance(config, TableSpec) else table_specs(config)
        server = TableServer(specs, index=idx, of=self.num_ps).serve("tcp://127.0.0.1:0")
        self._servers.append(server)
        return server.address

    def closing(self, table: Closable) -> Closable:
        self._stack.callback(table.close)
        return table

    def one(self, config: TableSpec) -> DistributedHashTable:
        return self.closing(DistributedHashTable(self.num_ps, config, self.factory))

    def several(self, configs: Mapping[str, TableSpec], **more: Any) -> Any:
        return self.closing(
            DistributedMultiTypeHashTable(self.num_ps, configs, self.factory, **more)
        )


Clusters = Callable[[int], Cluster]


def same_rows(one: RowsById, other: RowsById) -> None:
    """All rows of all tables are equal: weights, state, times and counts."""
    for number, spec in enumerate(one.specs):
        mine, theirs = one.export(number), other.export(number)
        assert mine.ids.numel()
        for column in ("ids", "weights", "state", "last_seen_s", "counts"):
            assert torch.equal(getattr(mine, column), getattr(theirs, column)), spec.name
