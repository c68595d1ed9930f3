"""Monolith's tables over parameter servers: the rows of `shoal.ps`, or of a shard of this process.

A factory of Monolith makes the tables of parameter server `idx` on that server. Here they exist
there already (`shoal ps`, or `TableServer(table_specs(slot_to_config), ...)`): a factory returns
the server's address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from shoal.compat.monolith.native_training.model_export.export_context import (
    get_current_export_ctx,
    is_exporting,
    is_exporting_standalone,
)
from shoal.compat.monolith.native_training.multi_type_hash_table import (
    BaseMultiTypeHashTable,
    MultiTypeHashTable,
    Pair,
    disconnect,
    event_seconds,
    merged_slots,
    table_specs,
)
from shoal.compat.monolith.native_training.parsers import (
    PREFIX,
    ParserCtx,
    ShardingSparseFidsOpParams,
    offsets_of,
)
from shoal.compat.monolith.native_training.sync_clients import (
    BoundClients,
    BoundTable,
    SyncClient,
)
from shoal.embedding.combiners import COMBINERS, Combiner
from shoal.errors import ConfigError, InputError
from shoal.exchange.wire import Wire
from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    MonolithOffsets,
    OutConfig,
    fused_embedding_to_layout,
    fused_embedding_to_layout_grad,
)
from shoal.ps.client import connect
from shoal.table.facade import Table
from shoal.table.factory import make_shard
from shoal.table.shard import RowsById
from shoal.table.spec import TableSpec

TableFactory = Callable[[int, Mapping[str, TableSpec]], str]
"""(index of a server, its slots) -> its address."""
Config = TypeVar("Config")
Layouts = dict[str, Tensor | list[Tensor]]
Time = Tensor | int | None


def _rows_of(
    num_ps: int,
    specs: tuple[TableSpec, ...],
    factory: Callable[[int, Config], str] | None,
    config: Config,
    transfer_float16: bool,
    deadline_ms: int,
    options: Mapping[str, Any],
) -> RowsById:
    """Rows of a shard of this process where there are no servers."""
    context = get_current_export_ctx()
    if num_ps == 0 or is_exporting_standalone():
        return make_shard(specs)
    addresses = _addresses(num_ps, factory, config)
    if context is not None and is_exporting():
        from shoal.compat.monolith.native_training.model_export.served_rows import ServedRows

        return cast(RowsById, ServedRows(context, specs, addresses, deadline_ms))
    half: Literal["float16"] | None = "float16" if transfer_float16 else None
    rows: RowsById = connect(addresses, specs, wire=Wire(half, half), **options).shard
    return rows


def _addresses(
    num_ps: int, factory: Callable[[int, Config], str] | None, config: Config
) -> list[str]:
    if factory is None:
        raise ConfigError(
            f"factory of tables on {num_ps} servers",
            got="None",
            allowed="(index of a server, config) -> its address",
            remedy="Pass lambda idx, _: addresses[idx].",
        )
    return [factory(idx, config) for idx in range(num_ps)]


class DistributedHashTable:
    """One table over parameter servers; ids int64 [n], rows [n, D].

    Args:
        ps_num: servers; 0 keeps the rows in this process.
        config: the table.
        hash_table_factory: (index of a server, config) -> its address; None for 0 servers.
        sync_client: gets ids that gradients change; or one for each server of serving.
        max_rpc_deadline_millis: of lookups of exported models.
        options: of `shoal.ps.connections.Servers`.

    In `enter_export_mode` there are no parameter servers: STANDALONE keeps rows in this process,
    DISTRIBUTED reads them from served parts, whose gRPC addresses the factory returns.
    """

    def __init__(
        self,
        ps_num: int,
        config: TableSpec,
        hash_table_factory: Callable[[int, TableSpec], str] | None = None,
        sync_client: SyncClient | Sequence[SyncClient | None] | None = None,
        max_rpc_deadline_millis: int = 30,
        **options: Any,
    ) -> None:
        rows = _rows_of(
            ps_num,
            (config,),
            hash_table_factory,
            config,
            False,
            max_rpc_deadline_millis,
            options,
        )
        self.table = Table(config, shard=rows)
        bound = BoundTable(config.dim, self.table.find)
        self._synced = BoundClients(sync_client, {config.name: bound})

    @property
    def dim_size(self) -> int:
        """D."""
        return self.table.spec.dim

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows; zeros where there is none. Never inserts."""
        return self.table.lookup(ids)

    def assign(self, ids: Tensor, values: Tensor, req_time: Time = None) -> DistributedHashTable:
        """Upsert weights; of duplicates the last wins."""
        self.table.assign(ids, values, event_time_s=event_seconds(req_time))
        return self

    def assign_add(
        self, ids: Tensor, values: Tensor, req_time: Time = None
    ) -> DistributedHashTable:
        """Add to rows; a missing id is initialised first. Duplicates add up."""
        self.table.assign_add(ids, values, event_time_s=event_seconds(req_time))
        return self

    def apply_gradients(
        self, ids: Tensor, grads: Tensor, global_step: Tensor | int, req_time: Time = None
    ) -> DistributedHashTable:
        """One optimizer step per id with the sum of its gradients, at the rates of `global_step`.

        The ids need not be those of a lookup.
        """
        seconds = event_seconds(req_time)
        self.table.apply(ids, grads, global_step=int(global_step), event_time_s=seconds)
        self._synced.touch(self.table.spec.name, ids)
        return self

    def close(self) -> None:
        """Disconnect from the servers. May be called twice."""
        disconnect(self.table.shard)


class DistributedMultiTypeHashTable(BaseMultiTypeHashTable):
    """A table for each slot over parameter servers. A call asks each server once.

    Args:
        num_ps: servers; 0 keeps the rows in this process.
        slot_to_config: what a slot's rows are; a config's own name is not read.
        table_factory: (index of a server, slot_to_config) -> its address; None for 0 servers.
            The server has the tables `table_specs(slot_to_config)`.
        transfer_float16: rows and gradients travel as float16; tables keep their own precision.
        max_rpc_deadline_millis: of lookups of exported models. How long other calls wait for
            servers is `patience` of the options.
        options: of `shoal.ps.connections.Servers`.

    In an export mode as `DistributedHashTable`.
    """

    def __init__(
        self,
        num_ps: int,
        slot_to_config: Mapping[str, TableSpec],
        table_factory: TableFactory | None = None,
        transfer_float16: bool = False,
        max_rpc_deadline_millis: int = 30,
        **options: Any,
    ) -> None:
        rows = _rows_of(
            num_ps,
            table_specs(slot_to_config),
            table_factory,
            slot_to_config,
            transfer_float16,
            max_rpc_deadline_millis,
            options,
        )
        super().__init__(rows, {slot: slot for slot in slot_to_config})


class PartitionedHashTable:
    """Tables whose lookups give layouts, of ids that were split where batches are prepared.

    Args:
        num_ps: servers; 0 keeps the rows in this process.
        table_factory: as of `DistributedMultiTypeHashTable`, for the tables of
            `sub_table_name_to_config`.
        use_native_multi_hash_table: not read: what `gen_feature_configs` was given counts.
        max_rpc_deadline_millis: as of `DistributedMultiTypeHashTable`.
        parser_ctx: with the parameters that `gen_feature_configs` made.
        options: of `shoal.ps.connections.Servers`.

    Raises:
        ConfigError: rows on a GPU with servers, whose rows are in host memory.
    """

    native_table = "native_multi_hash_table_fake_table"

    def __init__(
        self,
        num_ps: int,
        table_factory: TableFactory | None = None,
        use_native_multi_hash_table: bool = False,
        max_rpc_deadline_millis: int = 30,
        *,
        parser_ctx: ParserCtx,
        **options: Any,
    ) -> None:
        self._params = params = parser_ctx.params()
        self._configs = params.feature_configs
        slots = params.sub_table_name_to_config
        if num_ps and params.enable_gpu_emb:
            raise ConfigError(
                "enable_gpu_emb of a PartitionedHashTable",
                got=f"True with {num_ps} servers",
                allowed="0 servers",
                remedy="Use DistributedModelParallel for rows on several GPUs.",
            )
        if num_ps:
            self._tables: BaseMultiTypeHashTable = DistributedMultiTypeHashTable(
                num_ps,
                slots,
                table_factory,
                params.transfer_float16,
                max_rpc_deadline_millis,
                **options,
            )
        else:
            device = "cuda" if params.enable_gpu_emb else "cpu"
            self._tables = MultiTypeHashTable(slots, partial(make_shard, device=device))
        self._device = torch.device("cuda") if params.use_gpu else self._tables.rows.device
        self._keys = [
            f"{table}:{part}" for table in self._configs.tables for part in range(params.num_ps)
        ]

    @classmethod
    def gen_feature_configs(
        cls,
        num_ps: int,
        feature_name_to_config: Mapping[str, TableSpec],
        layout_configs: Mapping[str, OutConfig],
        feature_to_unmerged_slice_dims: Mapping[str, Sequence[int]],
        feature_to_combiner: Mapping[str, Combiner],
        use_native_multi_hash_table: bool,
        transfer_float16: bool = False,
        unique: Callable[[], bool] = lambda: True,
        enable_gpu_emb: bool = False,
        use_gpu: bool = False,
    ) -> ShardingSparseFidsOpParams:
        """Tables of features, and what makes layouts of their rows.

        Features have a table each with `use_native_multi_hash_table`; else, and with
        `transfer_float16`, those of one config share a table.
        """
        native = use_native_multi_hash_table and not transfer_float16
        if native:
            tables = dict(feature_name_to_config)
            table_of = dict.fromkeys(tables, cls.native_table)
        else:
            tables, table_of = merged_slots(feature_name_to_config)
        features = {}
        for name, combiner in feature_to_combiner.items():
            if not isinstance(combiner, COMBINERS) or type(combiner) not in COMBINERS:
                raise ConfigError(
                    f"combiner of feature {name!r}",
                    got=combiner,
                    allowed="ReduceSum(), ReduceMean() or FirstN(length)",
                    remedy="Pool rows of FirstN in the model, or use an EmbeddingCollection.",
                )
            features[name] = FeatureConfig(
                table_of[name],
                tuple(feature_to_unmerged_slice_dims[name]),
                "firstn" if combiner.pooling == "first_n" else combiner.pooling,
                combiner.max_seq_length,
            )
        configs = FeatureConfigs(features, layout_configs)
        parts = max(num_ps, 1)
        return ShardingSparseFidsOpParams(
            parts, native, unique, transfer_float16, tables, configs, enable_gpu_emb, use_gpu
        )

    def assign(self, data: Mapping[int, Mapping[str, Pair]]) -> PartitionedHashTable:
        """Upsert weights by part and table. A part only names ids: servers know where rows are."""
        self._tables.update("assign", _listed(data))
        return self

    def assign_add(self, data: Mapping[int, Mapping[str, Pair]]) -> PartitionedHashTable:
        """Add to rows by part and table."""
        self._tables.update("assign_add", _listed(data))
        return self

    def lookup(
        self,
        features: MutableMapping[str, Tensor],
        auxiliary_bundle: MutableMapping[str, Tensor] | None = None,
    ) -> Layouts:
        """Layouts of a batch by name; a list of tensors of a layout "none".

        Args:
            features: what `sharding_sparse_fids_with_context` added to is taken out.
            auxiliary_bundle: gets what `apply_gradients` needs.

        Raises:
            InputError: the features hold no ids that were split.
        """
        taken = {key: features.pop(key) for key in list(features) if key.startswith(PREFIX)}
        if not taken:
            raise InputError(
                "features of a lookup",
                got=f"no key that begins with {PREFIX}",
                allowed="ids that were split by table and part",
                remedy="Call sharding_sparse_fids_with_context first.",
            )
        parts = [self._parts(key, taken) for key in self._keys]
        rows = iter(self._tables.read([one for own in parts for one in own]))
        embs = [torch.cat([next(rows).reshape(-1) for _ in own]).to(self._device) for own in parts]
        outputs = fused_embedding_to_layout(embs, self._offsets(taken), self._configs)
        if auxiliary_bundle is not None:
            kept = {f"{PREFIX}{key}:embs": emb for key, emb in zip(self._keys, embs, strict=True)}
            auxiliary_bundle.update(taken | kept)
        laid, made = Layouts(), iter(outputs)
        for name, out in sorted(self._configs.out_configs.items()):
            several = out.out_type == "none"
            laid[name] = [next(made) for _ in out.slice_configs] if several else next(made)
        return laid

    def apply_gradients(
        self,
        layout_grads_and_vars: Sequence[tuple[Tensor | Sequence[Tensor], Any]],
        global_step: Tensor | int,
        req_time: Time = None,
        auxiliary_bundle: Mapping[str, Tensor] | None = None,
        *,
        grad_scale: float | Tensor | None = None,
    ) -> PartitionedHashTable:
        """One optimizer step per id of a lookup, with gradients of its layouts.

        Args:
            layout_grads_and_vars: (gradient, layout) of each layout, in sorted order of their
                names; a list of gradients of a layout "none". Layouts are not read.
            global_step: of the rates.
            req_time: the latest is the rows' time.
            auxiliary_bundle: what `lookup` filled.
            grad_scale: factor on every gradient.
        """
        if auxiliary_bundle is None:
            raise ConfigError(
                "auxiliary_bundle of apply_gradients",
                got="None",
                allowed="the dict that lookup filled",
                remedy="Pass one dict to lookup and to apply_gradients.",
            )
        grads = [
            grad
            for given, _ in layout_grads_and_vars
            for grad in ([given] if isinstance(given, Tensor) else given)
        ]
        flats = fused_embedding_to_layout_grad(
            grads,
            [auxiliary_bundle[f"{PREFIX}{key}:embs"] for key in self._keys],
            self._offsets(auxiliary_bundle),
            self._configs,
            layout_tensors_grad_scale=grad_scale,
        )
        widths = {spec.name: spec.dim for spec in self._tables.rows.specs}
        updates = []
        for key, flat in zip(self._keys, flats, strict=True):
            parts = self._parts(key, auxiliary_bundle)
            sizes = [ids.numel() * widths[table] for table, ids in parts]
            updates += [
                (table, ids, grad.view(-1, widths[table]))
                for (table, ids), grad in zip(parts, torch.split(flat, sizes), strict=True)
            ]
        self._tables.update("apply_ids", updates, global_step=global_step, req_time=req_time)
        return self

    def bind_sync(
        self,
        sync_clients: SyncClient | Sequence[SyncClient | None] | None,
        shared_name: str | None = None,
    ) -> None:
        """As of `BaseMultiTypeHashTable`."""
        self._tables.bind_sync(sync_clients, shared_name)

    def close(self) -> None:
        """Disconnect from the servers. May be called twice."""
        self._tables.close()

    def _lookup_raw(self, data: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
        """Rows by part and table."""
        asked = [one for tables in data.values() for one in tables.items()]
        rows = iter(self._tables.read(asked))
        return {part: {table: next(rows) for table in tables} for part, tables in data.items()}

    def _parts(self, key: str, taken: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Tables and ids of a list: its own, or of a native one those of each feature."""
        table, ids = key.rpartition(":")[0], taken[f"{PREFIX}shards/{key}"]
        if not self._params.use_native_multi_hash_table:
            return [(table, ids)]
        splits = taken[f"{PREFIX}shards_row_split/{key}"].tolist()
        names = self._configs.features_of(table)
        return [(f, ids[a:b]) for f, (a, b) in zip(names, pairwise(splits), strict=True)]

    def _offsets(self, taken: Mapping[str, Tensor]) -> MonolithOffsets:
        return offsets_of(taken, self._params.num_ps, self._device)


def _listed(data: Mapping[int, Mapping[str, Pair]]) -> list[tuple[str, Tensor, Tensor]]:
    return [(table, ids, rows) for tables in data.values() for table, (ids, rows) in tables.items()]
