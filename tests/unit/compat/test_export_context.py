"""Monolith's export modes: which parts a model has, and where lookups of its tables go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from shoal.compat.monolith.native_training.distributed_ps import (
    DistributedHashTable,
    PartitionedHashTable,
)
from shoal.compat.monolith.native_training.distributed_ps_factory import (
    create_multi_type_hash_table,
    create_native_multi_hash_table,
    create_partitioned_hash_table,
)
from shoal.compat.monolith.native_training.model_export.export_context import (
    ExportContext,
    ExportMode,
    enter_export_mode,
    get_current_export_ctx,
    get_current_export_mode,
    is_exporting,
    is_exporting_distributed,
    is_exporting_standalone,
)
from shoal.compat.monolith.native_training.parsers import ParserCtx
from shoal.embedding.combiners import ReduceSum
from shoal.errors import ConfigError
from shoal.ops import OutConfig, SliceConfig
from shoal.serve.model import LookupModel
from shoal.table.factory import make_shard
from shoal.table.hosting import move_in, plan_placement
from shoal.table.shard import RowsById
from support.monolith import spec
from support.monolith_cluster import Clusters
from support.served_models import OneSource, serving_sources

SLOTS = {"1": spec("x", 1), "2": spec("y", 2)}
IDS = {"1": torch.tensor([1, 2]), "2": torch.tensor([3, 1, 3])}
EVERY = torch.arange(100)
ROWS = {
    "1": (EVERY, EVERY[:, None].float()),
    "2": (EVERY, 10 * EVERY[:, None].float().repeat(1, 2)),
}
WANTED = {"1": [[1.0], [2.0]], "2": [[30.0] * 2, [10.0] * 2, [30.0] * 2]}


class Parts:
    """Served parts of what a trained table has, started as factories ask for them."""

    def __init__(self, num_ps: int, trained: RowsById, stack: ExitStack) -> None:
        self._num_ps, self._trained, self._stack = num_ps, trained, stack

    def factory(self, idx: int, _: object) -> str:
        specs = self._trained.specs
        whole, shard = make_shard(specs), make_shard(specs)
        for table in range(len(specs)):
            whole.load(table, self._trained.export(table))
        move_in(whole, shard, plan_placement(specs, self._num_ps), idx)
        name = f"model:ps_{idx}"
        source = OneSource(LookupModel(name, 1, shard), name)
        server, _ = self._stack.enter_context(serving_sources([source]))
        return str(server.grpc_address)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def signature(dims: Mapping[str, int]) -> dict[str, Any]:
    inputs = {name: ("int64", (-1,)) for name in dims}
    return {"lookup": (inputs, {name: ("float32", (-1, dim)) for name, dim in dims.items()})}


@pytest.mark.parametrize("num_ps", [1, 2, 3])
@pytest.mark.parametrize("native", [True, False])
def test_an_export_of_several_tables(
    native: bool, num_ps: int, clusters: Clusters, stack: ExitStack
) -> None:
    """3.2: parts of a distributed export, none of a standalone one; training continues."""
    make: Any = create_native_multi_hash_table if native else create_multi_type_hash_table
    cluster = clusters(num_ps)
    trained = cluster.closing(make(num_ps, SLOTS, table_factory=cluster.factory))
    assert trained.assign(ROWS).lookup(IDS)["1"].shape == (2, 1)
    parts = Parts(num_ps, trained.rows, stack)
    with enter_export_mode(ExportMode.DISTRIBUTED) as context:
        exported = make(num_ps, SLOTS, table_factory=parts.factory, max_rpc_deadline_millis=30_000)
        found = exported.lookup(IDS)
        assert trained.lookup(IDS)["1"].shape == (2, 1)
    assert found["1"].shape == (2, 1)
    assert {slot: rows.tolist() for slot, rows in found.items()} == WANTED
    assert context.sub_graph_num == num_ps
    dims = {spec.name: spec.dim for spec in trained.rows.specs}
    for idx in range(num_ps):
        assert context.signatures(context.sub_graphs[f"ps_{idx}"]) == signature(dims)
    with pytest.raises(ConfigError, match="change of an exported table"):
        exported.assign(ROWS)
    with enter_export_mode(ExportMode.STANDALONE) as context:
        alone = make(num_ps, SLOTS)
    assert alone.assign(ROWS).lookup(IDS)["2"].tolist() == WANTED["2"]
    assert context.sub_graph_num == 0
    trained.apply_gradients({"1": (torch.tensor([1]), torch.ones(1, 1))}, 0)
    assert trained.lookup(IDS)["1"].tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_an_export_of_one_table(num_ps: int, clusters: Clusters, stack: ExitStack) -> None:
    trained = clusters(num_ps).one(SLOTS["1"])
    trained.assign(*ROWS["1"])
    parts = Parts(num_ps, trained.table.shard, stack)
    with enter_export_mode(ExportMode.DISTRIBUTED) as context:
        exported = DistributedHashTable(
            num_ps, SLOTS["1"], parts.factory, max_rpc_deadline_millis=30_000
        )
        assert exported.lookup(IDS["1"]).tolist() == WANTED["1"]
    assert context.sub_graph_num == num_ps
    assert context.signatures(context.sub_graphs["ps_0"]) == signature({"x": 1})
    with enter_export_mode(ExportMode.STANDALONE) as context:
        alone = DistributedHashTable(num_ps, SLOTS["1"]).assign(*ROWS["1"])
    assert alone.lookup(IDS["1"]).tolist() == WANTED["1"]
    assert context.sub_graph_num == 0
    trained.apply_gradients(torch.tensor([1]), torch.ones(1, 1), 0)
    assert trained.lookup(IDS["1"]).tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("num_ps", [1, 2, 3])
@pytest.mark.parametrize("native", [True, False])
def test_an_export_of_a_partitioned_table(
    native: bool, num_ps: int, clusters: Clusters, stack: ExitStack
) -> None:
    params = PartitionedHashTable.gen_feature_configs(
        num_ps=num_ps,
        feature_name_to_config=SLOTS,
        layout_configs={"all": OutConfig((SliceConfig("1", 0, 1), SliceConfig("2", 0, 2)))},
        feature_to_combiner=dict.fromkeys(SLOTS, ReduceSum()),
        feature_to_unmerged_slice_dims={"1": (1,), "2": (2,)},
        use_native_multi_hash_table=native,
    )
    ctx, tables = ParserCtx(True, params), params.sub_table_name_to_config
    first = dict.fromkeys(tables, torch.tensor([1, 2]))
    rows = {table: torch.full((2, spec.dim), 4.0) for table, spec in tables.items()}

    def made(factory: Any) -> PartitionedHashTable:
        return create_partitioned_hash_table(
            num_ps, native, 30_000, parser_ctx=ctx, table_factory=factory
        )

    cluster = clusters(num_ps)
    trained = cluster.closing(made(cluster.factory))
    trained.assign({0: {table: (ids, rows[table]) for table, ids in first.items()}})
    parts = Parts(num_ps, trained._tables.rows, stack)
    with enter_export_mode(ExportMode.DISTRIBUTED) as context:
        found = made(parts.factory)._lookup_raw({0: first})[0]
    assert context.sub_graph_num == num_ps
    assert all(torch.equal(found[table], rows[table]) for table in tables)
    with enter_export_mode(ExportMode.STANDALONE) as context:
        made(None)
    assert context.sub_graph_num == 0


def test_a_mode_of_no_export_trains(clusters: Clusters) -> None:
    with enter_export_mode(ExportMode.NONE) as context:
        assert not is_exporting()
        tables = clusters(2).several(SLOTS)
    assert tables.assign(ROWS).lookup(IDS)["1"].tolist() == WANTED["1"]
    assert context.sub_graph_num == 0


def test_which_mode_it_is() -> None:
    context = ExportContext()
    with enter_export_mode(ExportMode.DISTRIBUTED, context) as entered:
        assert entered is context is get_current_export_ctx() and is_exporting_distributed()
    with enter_export_mode(ExportMode.STANDALONE):
        assert is_exporting_standalone() and is_exporting()


def test_modes_do_not_nest() -> None:
    assert get_current_export_mode() is ExportMode.NONE and get_current_export_ctx() is None
    with enter_export_mode(ExportMode.STANDALONE):
        with pytest.raises(ConfigError, match="export mode"), enter_export_mode(ExportMode.NONE):
            pass
        assert get_current_export_mode() is ExportMode.STANDALONE
    assert get_current_export_mode() is ExportMode.NONE


def test_signatures_of_parts() -> None:
    context = ExportContext(with_remote_gpu=True)
    graph = context.sub_graph("ps_0")
    assert context.sub_graph("ps_0") is graph and context.with_remote_gpu
    context.add_signature(graph, "lookup", {"a": 1}, {"a": 2})
    with pytest.raises(ConfigError, match="signature 'lookup'"):
        context.add_signature(graph, "lookup", {}, {})
    context.merge_signature(graph, "lookup", {"b": 3}, {})
    assert context.signatures(graph) == {"lookup": ({"a": 1, "b": 3}, {"a": 2})}
    context.dense_sub_graph("dense_0")
    assert (context.sub_graph_num, context.dense_sub_graph_num) == (1, 1)
