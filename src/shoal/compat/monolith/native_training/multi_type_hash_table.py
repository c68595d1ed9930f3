"""Monolith's tables of several slots, over any owner of rows: a shard, servers or ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from shoal.compat.monolith.native_training.sync_clients import (
    BoundClients,
    BoundTable,
    SyncClient,
)
from shoal.errors import known_name
from shoal.ps.client import RowsOverServers
from shoal.table import checks
from shoal.table.factory import make_shard
from shoal.table.shard import IdGroups, RowsById, StepContext
from shoal.table.spec import TableSpec

Update = Literal["assign", "assign_add", "apply_ids"]
Pair = tuple[Tensor, Tensor]
"""Ids int64 [n] and rows [n, D]."""


def table_specs(slot_to_config: Mapping[str, TableSpec]) -> tuple[TableSpec, ...]:
    """Tables of slots, in sorted order and named as their slots: what their servers are given."""
    return tuple(replace(slot_to_config[slot], name=slot) for slot in sorted(slot_to_config))


def merged_slots(
    slot_to_config: Mapping[str, TableSpec],
) -> tuple[dict[str, TableSpec], dict[str, str]]:
    """Slots that differ in name only share a table: configs of the tables, each slot's table.

    A table's name is the MD5 of its slots' sorted names, joined with commas.
    """
    alike: dict[str, list[str]] = {}
    for slot in sorted(slot_to_config):
        alike.setdefault(repr(replace(slot_to_config[slot], name="any")), []).append(slot)
    configs, table_of = {}, dict[str, str]()
    for slots in alike.values():
        name = hashlib.md5(",".join(slots).encode(), usedforsecurity=False).hexdigest()
        configs[name] = slot_to_config[slots[0]]
        table_of |= dict.fromkeys(slots, name)
    return configs, table_of


def event_seconds(req_time: Tensor | int | None) -> int:
    """The latest of Monolith's request times; 0 of none."""
    times = torch.as_tensor([] if req_time is None else req_time, device="cpu")
    return int(times.max()) if times.numel() else 0


def disconnect(rows: RowsById) -> None:
    """Close the connections of rows over servers; others have none."""
    if isinstance(rows, RowsOverServers):
        rows.servers.close()


class BaseMultiTypeHashTable:
    """Rows of several slots. Every method is one call to the owner of all rows.

    Methods that change rows return the table, where Monolith's return a new handle.

    Args:
        rows: the owner.
        table_of: the table of each slot; slots may share one, and then its ids.
    """

    def __init__(self, rows: RowsById, table_of: Mapping[str, str]) -> None:
        names = [spec.name for spec in rows.specs]
        self.rows = rows
        self._numbers = {slot: names.index(table) for slot, table in table_of.items()}
        self._tables = dict(table_of)
        self._synced = BoundClients(None, {})

    def bind_sync(
        self,
        sync_clients: SyncClient | Sequence[SyncClient | None] | None,
        shared_name: str | None = None,
    ) -> None:
        """Report ids that gradients or `reinitialize` change to parameter sync clients.

        Args:
            sync_clients: one, or one for each server of serving.
            shared_name: push all tables together, under this name.
        """
        slots = {table: slot for slot, table in sorted(self._tables.items())}
        tables = {
            spec.name: BoundTable(spec.dim, partial(self._found, slots[spec.name]))
            for spec in self.rows.specs
            if spec.name in slots
        }
        self._synced = BoundClients(sync_clients, tables, shared_name)

    def _found(self, slot: str, ids: Tensor) -> Pair:
        found = self.rows.find(self._groups([(slot, ids)]))
        return found.weights[0], found.found_N

    def lookup(self, slot_to_id: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows [n, D] of ids int64 [n], by slot; zeros where there is no row. Never inserts.

        Raises:
            UnknownName: no such slot.
        """
        return dict(zip(slot_to_id, self.read(list(slot_to_id.items())), strict=True))

    def assign(
        self, slot_to_id_and_value: Mapping[str, Pair], req_time: Tensor | int | None = None
    ) -> BaseMultiTypeHashTable:
        """Upsert weights; of duplicates the last wins."""
        return self.update("assign", _listed(slot_to_id_and_value), req_time=req_time)

    def assign_add(
        self, slot_to_id_and_value: Mapping[str, Pair], req_time: Tensor | int | None = None
    ) -> BaseMultiTypeHashTable:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        return self.update("assign_add", _listed(slot_to_id_and_value), req_time=req_time)

    def apply_gradients(
        self,
        slot_to_id_and_grad: Mapping[str, Pair],
        global_step: Tensor | int,
        req_time: Tensor | int | None = None,
    ) -> BaseMultiTypeHashTable:
        """One optimizer step per id with the sum of its gradients, at the rates of `global_step`.

        The ids need not be those of a lookup.
        """
        parts = _listed(slot_to_id_and_grad)
        return self.update("apply_ids", parts, global_step=global_step, req_time=req_time)

    def reinitialize(
        self, slot: str, ids: Tensor, req_time: Tensor | int | None = None
    ) -> tuple[BaseMultiTypeHashTable, Tensor]:
        """Initial rows and state again: the table and int32 [n] in the order of the ids.

        1: the id had a row, 0: it was inserted, -1: there is no such slot.
        """
        if slot not in self._numbers:
            return self, torch.full_like(ids, -1, dtype=torch.int32)
        ctx = StepContext(event_time_s=event_seconds(req_time))
        status = self.rows.reinitialize(self._groups([(slot, ids)]), ctx=ctx)
        self._synced.touch(self._tables[slot], ids)
        return self, status

    def get_table_dim_sizes(self) -> list[int]:
        """Row width of each table, in sorted order of their names."""
        return [spec.dim for spec in self.rows.specs]

    def close(self) -> None:
        """Disconnect from servers. May be called twice."""
        disconnect(self.rows)

    def read(self, parts: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, ...]:
        """`lookup` of (slot, ids) in any order, a slot any number of times."""
        return self.rows.find(self._groups(parts)).weights

    def update(
        self,
        method: Update,
        parts: Sequence[tuple[str, Tensor, Tensor]],
        *,
        global_step: Tensor | int = 0,
        req_time: Tensor | int | None = None,
    ) -> BaseMultiTypeHashTable:
        """A method of `RowsById` with (slot, ids, rows), a slot any number of times."""
        groups = self._groups([(slot, ids) for slot, ids, _ in parts])
        values = [rows.to(self.rows.device) for *_, rows in parts]
        ctx = StepContext(global_step=int(global_step), event_time_s=event_seconds(req_time))
        getattr(self.rows, method)(groups, values, ctx=ctx)
        if method == "apply_ids":
            for slot, ids, _ in parts:
                self._synced.touch(self._tables[slot], ids)
        return self

    def _groups(self, parts: Sequence[tuple[str, Tensor]]) -> IdGroups:
        device, sizes, numbers, ids = self.rows.device, [0], [], []
        for slot, ids_n in parts:
            known_name("slot", slot, self._numbers)
            ids_n = ids_n.to(device).contiguous()
            checks.flat(f"ids of slot {slot!r}", ids_n, device)
            numbers.append(self._numbers[slot])
            sizes.append(ids_n.numel())
            ids.append(ids_n)
        return IdGroups(
            torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device=device),
            torch.tensor(sizes, device="cpu").cumsum(0),
            torch.tensor(numbers, dtype=torch.int32, device="cpu"),
        )


def _listed(slot_to_pair: Mapping[str, Pair]) -> list[tuple[str, Tensor, Tensor]]:
    return [(slot, ids, rows) for slot, (ids, rows) in slot_to_pair.items()]


class MultiTypeHashTable(BaseMultiTypeHashTable):
    """A table for each slot, all of one owner.

    Args:
        slot_to_config: what a slot's rows are; a config's own name is not read.
        hash_table_factory: makes the owner of `table_specs(slot_to_config)`; by default a shard of
            this process.
    """

    def __init__(
        self,
        slot_to_config: Mapping[str, TableSpec],
        hash_table_factory: Callable[[tuple[TableSpec, ...]], RowsById] = make_shard,
    ) -> None:
        owner = hash_table_factory(table_specs(slot_to_config))
        super().__init__(owner, {slot: slot for slot in slot_to_config})


class MergedMultiTypeHashTable(BaseMultiTypeHashTable):
    """Slots of one config share a table and its ids: equal ids of two such slots are one row.

    Args:
        slot_to_config: what a slot's rows are; a config's own name is not read.
        factory: makes the tables of the merged configs.
    """

    def __init__(
        self,
        slot_to_config: Mapping[str, TableSpec],
        factory: Callable[[Mapping[str, TableSpec]], BaseMultiTypeHashTable] = MultiTypeHashTable,
    ) -> None:
        configs, self.slot_mapping = merged_slots(slot_to_config)
        super().__init__(factory(configs).rows, self.slot_mapping)
