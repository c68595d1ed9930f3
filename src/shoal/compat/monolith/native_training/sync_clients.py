"""Tables that report the ids they changed to parameter sync clients, by server as Monolith does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.placement import floormod

Find = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Ids int64 [n] -> rows float32 [n, D], and bool [n]: whether there is one."""


@dataclass(frozen=True, slots=True)
class BoundTable:
    """A table of a sync client: its width D, and how its rows are read."""

    dim: int
    find: Find


class SyncClient(Protocol):
    """What pushes rows that changed. Methods may be called by any thread."""

    def bind(self, tables: Mapping[str, BoundTable], shared_name: str | None) -> None:
        """Take tables by unique id; with a shared name they are one multi-table."""

    def touch(self, table: str, ids: Tensor) -> None:
        """Note ids whose rows changed."""


class BoundClients:
    """Tables bound to a client, or to one for each server of serving: id modulo their number.

    Args:
        clients: one or several; None of these, or no list, reports to nobody.
        tables: by unique id.
        shared_name: of a multi-table.
    """

    def __init__(
        self,
        clients: SyncClient | Sequence[SyncClient | None] | None,
        tables: Mapping[str, BoundTable],
        shared_name: str | None = None,
    ) -> None:
        given = clients if isinstance(clients, Sequence) else (clients,)
        self._clients = given if any(one is not None for one in given) else ()
        for client in self._clients:
            if client is not None:
                client.bind(tables, shared_name)

    def touch(self, table: str, ids: Tensor) -> None:
        """Note ids whose rows changed."""
        if not self._clients:
            return
        ids = ids.cpu()
        owners = floormod(ids, len(self._clients))
        for index, client in enumerate(self._clients):
            if client is not None:
                client.touch(table, ids[owners == index])
