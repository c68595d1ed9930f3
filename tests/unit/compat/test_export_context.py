"""Monolith's export modes: which parts a model has, and where lookups of its tables go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from shoal import Segment, TableSpec
from shoal.compat.monolith.native_training.distributed_ps import DistributedMultiTypeHashTable
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
from shoal.compat.monolith.native_training.multi_type_hash_table import table_specs
from shoal.errors import ConfigError
from shoal.ps.server import TableServer
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import SGD
from shoal.serve.model import LookupModel
from shoal.table.facade import Table
from shoal.table.factory import make_shard
from shoal.table.hosting import move_in, plan_placement
from support.served_models import OneSource, serving_sources

SEGMENT = Segment(dim=1, initializer=Zeros(), optimizer=SGD(lr=1.0))
SLOTS = {
    "1": TableSpec(name="x", segments=(SEGMENT,)),
    "2": TableSpec(name="y", segments=(SEGMENT,)),
}
IDS = {"1": torch.tensor([1, 2]), "2": torch.tensor([3, 1, 3])}


@pytest.fixture
def parts() -> Iterator[list[str]]:
    """Addresses of two served parts; rows of slot "1" are ids, of slot "2" their tenfold."""
    specs = table_specs(SLOTS)
    placement = plan_placement(specs, 2)
    whole = make_shard(specs)
    for spec, factor in zip(specs, (1, 10), strict=True):
        ids = torch.arange(100)
        Table(spec, shard=whole).assign(ids, factor * ids[:, None].float())
    with ExitStack() as stack:
        addresses = []
        for index in range(2):
            shard = make_shard(specs)
            move_in(whole, shard, placement, index)
            name = f"model:ps_{index}"
            source = OneSource(LookupModel(name, 1, shard), name)
            server, _ = stack.enter_context(serving_sources([source]))
            addresses.append(server.grpc_address)
        yield addresses


def test_a_distributed_export_looks_up_remotely(parts: list[str]) -> None:
    context = ExportContext()
    with enter_export_mode(ExportMode.DISTRIBUTED, context) as entered:
        assert entered is context is get_current_export_ctx() and is_exporting_distributed()
        tables = DistributedMultiTypeHashTable(
            2, SLOTS, lambda index, _: parts[index], max_rpc_deadline_millis=30_000
        )
        found = tables.lookup(IDS)
    assert context.sub_graph_num == 2 and sorted(context.sub_graphs) == ["ps_0", "ps_1"]
    signature = {
        "lookup": (
            {"1": ("int64", (-1,)), "2": ("int64", (-1,))},
            {"1": ("float32", (-1, 1)), "2": ("float32", (-1, 1))},
        )
    }
    assert context.signatures(context.sub_graph("ps_1")) == signature
    assert found["1"].shape == (2, 1)
    assert found["1"].tolist() == [[1.0], [2.0]]
    assert found["2"].tolist() == [[30.0], [10.0], [30.0]]
    with pytest.raises(ConfigError, match="change of an exported table"):
        tables.assign({"1": (torch.tensor([1]), torch.ones(1, 1))})


def test_a_standalone_export_has_no_parts() -> None:
    with enter_export_mode(ExportMode.STANDALONE) as context:
        assert is_exporting_standalone() and is_exporting()
        tables = DistributedMultiTypeHashTable(2, SLOTS)
        tables.assign_add({"1": (torch.tensor([1, 2]), torch.tensor([[1.0], [2.0]]))})
        assert tables.lookup(IDS)["1"].tolist() == [[1.0], [2.0]]
    assert context.sub_graph_num == 0


def test_normal_training_is_on_the_servers() -> None:
    servers = [
        TableServer(table_specs(SLOTS), index=i, of=2).serve("tcp://127.0.0.1:0") for i in range(2)
    ]
    with enter_export_mode(ExportMode.NONE) as context:
        assert not is_exporting()
        tables = DistributedMultiTypeHashTable(2, SLOTS, lambda index, _: servers[index].address)
    try:
        assert tables.lookup(IDS)["1"].shape == (2, 1)
        assert context.sub_graph_num == 0
    finally:
        tables.close()
        for server in servers:
            server.stop()


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
