"""Monolith's makers of tables: of this process, over parameter servers, or over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shoal.comm.launch import init
from shoal.compat.monolith.native_training.distributed_ps import (
    DistributedMultiTypeHashTable,
    PartitionedHashTable,
    TableFactory,
)
from shoal.compat.monolith.native_training.multi_type_hash_table import (
    MergedMultiTypeHashTable,
    MultiTypeHashTable,
)
from shoal.compat.monolith.native_training.parsers import ParserCtx
from shoal.compat.monolith.native_training.sync_clients import SyncClient
from shoal.errors import ConfigError
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.rows_by_id import RowsOverRanks
from shoal.ps.server import spread_over
from shoal.table.factory import make_shard
from shoal.table.hosting import hosted_specs
from shoal.table.shard import RowsById
from shoal.table.spec import TableSpec

Nones = Sequence[None] | None
"""Monolith's filters, one a server: none."""
SyncClients = Sequence[SyncClient | None] | None
"""One a server of serving."""
MULTI_TABLE = "native_multi_hash_table"
"""Under which tables that are pushed together are known to servers."""


def create_multi_type_hash_table(
    num_ps: int,
    slot_to_config: Mapping[str, TableSpec],
    hash_filters: Nones = None,
    sync_clients: SyncClients = None,
    reduce_network_packets: bool = False,
    max_rpc_deadline_millis: int = 30,
    *,
    table_factory: TableFactory | None = None,
    **options: Any,
) -> MergedMultiTypeHashTable:
    """Tables of merged slots over `num_ps` servers, or in this process for 0.

    Args:
        num_ps, slot_to_config, max_rpc_deadline_millis, table_factory, options: as of
            `DistributedMultiTypeHashTable`.
        hash_filters: None, or a list of None.
        sync_clients: get ids that gradients change, by their remainder.
        reduce_network_packets: not read: a call asks each server once in any case.

    Raises:
        ConfigError: a filter, or servers without a `table_factory`.
    """
    tables = partial(
        create_native_multi_hash_table,
        num_ps,
        hash_filters=hash_filters,
        max_rpc_deadline_millis=max_rpc_deadline_millis,
        table_factory=table_factory,
        **options,
    )
    merged = MergedMultiTypeHashTable(slot_to_config, tables)
    merged.bind_sync(sync_clients)
    return merged


def create_native_multi_hash_table(
    num_ps: int,
    slot_to_config: Mapping[str, TableSpec],
    hash_filters: Nones = None,
    sync_clients: SyncClients = None,
    max_rpc_deadline_millis: int = 30,
    *,
    table_factory: TableFactory | None = None,
    **options: Any,
) -> DistributedMultiTypeHashTable:
    """`create_multi_type_hash_table` with a table for each slot, which clients push together."""
    _refuse("hash_filters", hash_filters, "Give the config an admission.")
    tables = DistributedMultiTypeHashTable(
        num_ps,
        slot_to_config,
        table_factory,
        max_rpc_deadline_millis=max_rpc_deadline_millis,
        **options,
    )
    tables.bind_sync(sync_clients, MULTI_TABLE)
    return tables


def create_in_worker_multi_type_hash_table(
    shard_num: int,
    slot_to_config: Mapping[str, TableSpec],
    hash_filter: None = None,
    sync_client: None = None,
    queue_configs: Mapping[str, int] | None = None,
) -> MergedMultiTypeHashTable:
    """Tables of merged slots over the ranks of a synchronous job, a shard on each.

    All ranks call each method together. Gradients are summed over ranks; an id takes one step.

    Args:
        shard_num: ranks; 0 or 1 keeps the rows in this process.
        slot_to_config: what a slot's rows are; a config's own name is not read.
        hash_filter, sync_client: None.
        queue_configs: not read: calls are not queued (`create_train_pipeline` overlaps steps).

    Raises:
        ConfigError: another number of ranks than the job has, a filter or a sync client.
    """
    tables = partial(
        create_in_worker_native_multi_hash_table,
        shard_num,
        hash_filter=hash_filter,
        sync_client=sync_client,
    )
    return MergedMultiTypeHashTable(slot_to_config, tables)


def create_in_worker_native_multi_hash_table(
    shard_num: int,
    slot_to_config: Mapping[str, TableSpec],
    hash_filter: None = None,
    sync_client: None = None,
    queue_configs: Mapping[str, int] | None = None,
) -> MultiTypeHashTable:
    """`create_in_worker_multi_type_hash_table` with a table for each slot."""
    _refuse("hash_filter", [hash_filter], "Give the config an admission.")
    _refuse("sync_client", [sync_client], "Leave it out.")
    return MultiTypeHashTable(slot_to_config, partial(_over_ranks, shard_num))


def create_partitioned_hash_table(
    num_ps: int,
    use_native_multi_hash_table: bool,
    max_rpc_deadline_millis: int = 30,
    hash_filters: Nones = None,
    sync_clients: SyncClients = None,
    *,
    parser_ctx: ParserCtx,
    table_factory: TableFactory | None = None,
    **options: Any,
) -> PartitionedHashTable:
    """A `PartitionedHashTable`; arguments as of it and of `create_multi_type_hash_table`."""
    _refuse("hash_filters", hash_filters, "Give the config an admission.")
    tables = PartitionedHashTable(
        num_ps,
        table_factory,
        use_native_multi_hash_table,
        max_rpc_deadline_millis,
        parser_ctx=parser_ctx,
        **options,
    )
    tables.bind_sync(sync_clients, MULTI_TABLE if use_native_multi_hash_table else None)
    return tables


def _over_ranks(shard_num: int, specs: tuple[TableSpec, ...]) -> RowsById:
    if shard_num <= 1:
        return make_shard(specs)
    mesh = init(device="cpu")
    if mesh.world_size != shard_num:
        raise ConfigError(
            "shard_num of a table in workers",
            got=shard_num,
            allowed=f"the number of ranks, {mesh.world_size}",
            remedy="Start as many ranks as there are shards.",
        )
    placement = spread_over(specs, shard_num)
    collectives = mesh.collectives("hash tables", device=torch.device("cpu"))
    shard = make_shard(hosted_specs(specs, placement, mesh.rank))
    return RowsOverRanks(AllToAllExchange(shard, placement, specs, collectives))


def _refuse(what: str, given: Sequence[object] | None, remedy: str) -> None:
    if any(one is not None for one in given or ()):
        raise ConfigError(what, got=given, allowed="None", remedy=remedy)
