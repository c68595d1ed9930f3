"""Monolith's numbers for `PartitionedHashTable` (spec/monolith-training.md 3.2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.compat.monolith.native_training.distributed_ps import PartitionedHashTable
from shoal.compat.monolith.native_training.distributed_ps_factory import (
    create_partitioned_hash_table,
)
from shoal.compat.monolith.native_training.parsers import (
    ParserCtx,
    sharding_sparse_fids_with_context,
)
from shoal.embedding.combiners import FirstN, ReduceMean, ReduceSum
from shoal.errors import ConfigError, InputError
from shoal.ops import OutConfig, SliceConfig
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Zeros
from shoal.rules.optimizers import FTRL, Adagrad
from shoal.table.spec import Segment, TableSpec
from support.monolith import near, spec
from support.monolith_cluster import Cluster, Clusters, same_rows

DIMS: Mapping[str, tuple[int, ...]] = {"uid": (1, 4), "gid": (1, 4, 8), "cid": (1, 4, 8)}
BATCH = KeyedRagged.from_lists(
    {name: [[3 * i + at] for i in range(6)] for at, name in enumerate(DIMS)}
)
PREFIX = "__sharding_sparse_fids__"
Parts = dict[int, dict[str, tuple[Tensor, Tensor]]]


def gen_table_config(dims: tuple[int, ...], learning_rate: float = 1.0) -> TableSpec:
    """Segment 0 by FTRL, others by Adagrad; rows start at zero."""
    rules = [FTRL(lr=learning_rate), *[Adagrad(lr=learning_rate)] * (len(dims) - 1)]
    segments = [
        Segment(name=f"s{i}", dim=dim, initializer=Zeros(), optimizer=rule)
        for i, (dim, rule) in enumerate(zip(dims, rules, strict=True))
    ]
    return TableSpec(name="any", segments=tuple(segments))


def gen_out_config(layout_names: tuple[str, ...]) -> dict[str, OutConfig]:
    """Layout i has slice i of every feature that has one."""
    layouts = {}
    for i, name in enumerate(layout_names):
        own = {feature: dims for feature, dims in DIMS.items() if i < len(dims)}
        slices = [SliceConfig(f, sum(d[:i]), sum(d[: i + 1])) for f, d in own.items()]
        layouts[name] = OutConfig(tuple(slices))
    return layouts


def get_parser_ctx(num_ps: int, native: bool, **more: Any) -> ParserCtx:
    given: dict[str, Any] = {
        "num_ps": num_ps,
        "feature_name_to_config": {name: gen_table_config(dims) for name, dims in DIMS.items()},
        "layout_configs": gen_out_config(("bias", "vec", "deep")),
        "feature_to_combiner": dict.fromkeys(DIMS, ReduceSum()),
        "feature_to_unmerged_slice_dims": DIMS,
        "use_native_multi_hash_table": native,
        "unique": lambda: True,
    }
    return ParserCtx(True, PartitionedHashTable.gen_feature_configs(**(given | more)))


def gen_data(ctx: ParserCtx, make: Callable[[int, int], Tensor]) -> Parts:
    """Ids p + P j of part p of P, j below the width of the table's rows, with rows."""
    params = ctx.params()
    return {
        part: {
            name: (
                part + params.num_ps * torch.arange(config.dim),
                make(config.dim, config.dim),
            )
            for name, config in params.sub_table_name_to_config.items()
        }
        for part in range(params.num_ps)
    }


def fids_of(data: Parts) -> dict[int, dict[str, Tensor]]:
    return {part: {name: fids for name, (fids, _) in own.items()} for part, own in data.items()}


def sharded(ctx: ParserCtx, batch: KeyedRagged = BATCH) -> dict[str, Tensor]:
    features: dict[str, Tensor] = {"label": torch.ones(6)}
    sharding_sparse_fids_with_context(batch, features, ctx)
    return features


def start(cluster: Cluster, ctx: ParserCtx) -> PartitionedHashTable:
    return cluster.closing(
        create_partitioned_hash_table(
            cluster.num_ps, True, parser_ctx=ctx, table_factory=cluster.factory
        )
    )


both = pytest.mark.parametrize("native", [True, False])


@both
def test_basic(cluster: Cluster, native: bool) -> None:
    ctx = get_parser_ctx(cluster.num_ps, native)
    generator = torch.Generator().manual_seed(0)
    a, c = (
        gen_data(ctx, lambda n, d: torch.rand(n, d, generator=generator) * 2 - 1) for _ in range(2)
    )
    table = start(cluster, ctx).assign(a).assign_add(c)
    found = table._lookup_raw(fids_of(a))
    assert {part: set(own) for part, own in found.items()} == {p: set(own) for p, own in a.items()}
    for part, own in a.items():
        for name, (_, embs) in own.items():
            near(found[part][name], embs + c[part][name][1])


@both
def test_lookup(cluster: Cluster, native: bool) -> None:
    ctx = get_parser_ctx(cluster.num_ps, native)
    filled = gen_data(get_parser_ctx(2, native), lambda *shape: torch.full(shape, 2.0))
    table = start(cluster, ctx).assign(filled)
    features = sharded(ctx)
    layouts = table.lookup(features, auxiliary_bundle={})
    assert list(features) == ["label"]
    near(layouts["bias"], [[2, 2, 2]] * 4 + [[0, 2, 2]] * 2)
    near(layouts["vec"], [[2] * 12] * 4 + [[0] * 4 + [2] * 8] * 2)
    near(layouts["deep"], [[2] * 16] * 6)


@both
def test_apply_gradients(cluster: Cluster, native: bool) -> None:
    ctx = get_parser_ctx(cluster.num_ps, native)
    data = gen_data(get_parser_ctx(2, native), lambda *shape: torch.full(shape, 3.0))
    table = start(cluster, ctx).assign(data)
    bundle: dict[str, Tensor] = {}
    layouts = table.lookup(sharded(ctx), bundle)
    pairs = [(torch.full_like(layouts[name], 2.0), layouts[name]) for name in sorted(layouts)]
    table.apply_gradients(pairs, torch.tensor(0), auxiliary_bundle=bundle)
    found, configs = table._lookup_raw(fids_of(data)), ctx.params().feature_configs.feature_configs
    stepped = 0
    for part, own in data.items():
        for name, (fids, _) in own.items():
            readers = [f for f in DIMS if (f if native else configs[f].table) == name]
            batch = {id_ for f in readers for id_ in BATCH[f].values.tolist()}
            for row, fid in zip(found[part][name], fids.tolist(), strict=True):
                rest = row.numel() - 1
                near(row, [1.5437492] + [2.0122704] * rest if fid in batch else [3.0] * (rest + 1))
                stepped += fid in batch
    assert stepped == 4 + 6 + 6  # of uid, 12 and 15 are beyond the ids of the data


@both
def test_shards(native: bool) -> None:
    features = sharded(get_parser_ctx(2, native))
    lists = {
        key.removeprefix(f"{PREFIX}shards/"): found.tolist()
        for key, found in features.items()
        if key.startswith(f"{PREFIX}shards/")
    }
    if not native:
        assert lists == {
            "9871d3a2c554b27151cacf1422eec048:0": [0, 6, 12],
            "9871d3a2c554b27151cacf1422eec048:1": [3, 9, 15],
            "c4a398dea30b21551ae4c09454001dba:0": [2, 8, 14, 4, 10, 16],
            "c4a398dea30b21551ae4c09454001dba:1": [5, 11, 17, 1, 7, 13],
        }
        return
    cells = {}
    for key, found in lists.items():
        splits = itertools.pairwise(features[f"{PREFIX}shards_row_split/{key}"].tolist())
        for feature, (first, last) in zip(sorted(DIMS), splits, strict=True):
            cells[feature + key[-2:]] = found[first:last]
    assert cells == {
        "uid:0": [0, 6, 12],
        "uid:1": [3, 9, 15],
        "cid:0": [2, 8, 14],
        "cid:1": [5, 11, 17],
        "gid:0": [4, 10, 16],
        "gid:1": [1, 7, 13],
    }


def trained(
    table: PartitionedHashTable, ctx: ParserCtx, batch: KeyedRagged = BATCH, steps: int = 2
) -> dict[str, Any]:
    """Layouts after steps with random gradients."""
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        bundle: dict[str, Tensor] = {}
        layouts = table.lookup(sharded(ctx, batch), bundle)
        pairs = [
            (torch.rand(layouts[name].shape, generator=generator).to(layouts[name]), layouts[name])
            for name in sorted(layouts)
        ]
        table.apply_gradients(pairs, step, req_time=torch.tensor([step]), auxiliary_bundle=bundle)
    return table.lookup(sharded(ctx, batch))


@both
@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_servers_have_the_bits_of_one_process(
    clusters: Clusters, num_ps: int, native: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 5, (3 * 16,), generator=generator)
    drawn = torch.randint(-9, 9, (int(lengths.sum()),), generator=generator)
    batch = KeyedRagged.from_lengths(tuple(DIMS), drawn, lengths)
    found, tables = [], []
    for count in (num_ps, 0):
        ctx = get_parser_ctx(count, native)
        tables.append(start(clusters(count), ctx))
        found.append(trained(tables[-1], ctx, batch, steps=3))
    for name, layout in found[0].items():
        assert torch.equal(layout, found[1][name]), name
    same_rows(*(table._tables.rows for table in tables))


@pytest.mark.gpu
@both
def test_rows_on_a_gpu(clusters: Clusters, native: bool) -> None:
    """3.2, `enable_gpu_emb`: batch 3, two steps."""
    batch = KeyedRagged.from_lists({name: [[3 * i] for i in range(3)] for name in DIMS})
    found = []
    for on_gpu in (False, True):
        ctx = get_parser_ctx(0, native, enable_gpu_emb=on_gpu, use_gpu=on_gpu)
        found.append(trained(start(clusters(0), ctx), ctx, batch))
    for name, layout in found[0].items():
        near(found[1][name].cpu(), layout)


@both
@pytest.mark.parametrize("unique", [True, False])
def test_any_pooling_and_layout(clusters: Clusters, native: bool, unique: bool) -> None:
    """Sums, means and first rows; layouts of one tensor a slice; a feature that is missing."""
    cluster = clusters(2)
    wide = spec("any", 2)
    ctx = get_parser_ctx(
        2,
        native,
        feature_name_to_config=dict.fromkeys("abcd", wide),
        feature_to_combiner={"a": ReduceSum(), "b": ReduceMean(), "c": FirstN(2), "d": ReduceSum()},
        feature_to_unmerged_slice_dims=dict.fromkeys("abcd", (1, 1)),
        layout_configs={
            "each": OutConfig((SliceConfig("a", 0, 2), SliceConfig("c", 1, 2)), "none"),
            "sum": OutConfig((SliceConfig("b", 0, 1), SliceConfig("d", 0, 1)), "addn"),
        },
        unique=lambda: unique,
    )
    batch = KeyedRagged.from_lists({"a": [[1, 1], []], "b": [[2, 3], [3]], "c": [[4, 5, 6], [4]]})
    table = start(cluster, ctx)
    tables = list("abc" if native else ctx.params().sub_table_name_to_config)
    fids = torch.arange(1, 7)
    values = torch.stack([fids, 10 * fids], dim=1).float()
    table.assign({0: {name: (fids, values) for name in tables}})
    bundle: dict[str, Tensor] = {}
    layouts = table.lookup(sharded(ctx, batch), bundle)
    assert isinstance(layouts["each"], list) and isinstance(layouts["sum"], Tensor)
    assert [part.tolist() for part in layouts["each"]] == [
        [[2, 20], [0, 0]],
        [[[40], [50]], [[40], [0]]],
    ]
    assert layouts["sum"].tolist() == [[2.5], [3]]
    ones = [torch.ones_like(part) for part in layouts["each"]]
    pairs = [(ones, layouts["each"]), (torch.ones_like(layouts["sum"]), layouts["sum"])]
    table.apply_gradients(pairs, 0, auxiliary_bundle=bundle, grad_scale=0.5)
    (raw,) = table._lookup_raw({0: {name: fids for name in tables}}).values()
    got = {f: raw[f if native else tables[0]] for f in "abc"}
    assert got["a"][0].tolist() == [1 - 1, 10 - 1]
    assert got["b"][1:3].tolist() == [[2 - 0.25, 20], [3 - 0.75, 30]]
    assert got["c"][3:].tolist() == [[4, 40 - 1], [5, 50 - 0.5], [6, 60]]


def test_float16_shares_tables(clusters: Clusters) -> None:
    ctx = get_parser_ctx(2, native=True, transfer_float16=True)
    assert len(ctx.params().sub_table_name_to_config) == 2
    table = start(clusters(2), ctx)
    table.assign(gen_data(ctx, lambda *shape: torch.full(shape, 1 + 2.0**-20)))
    assert table.lookup(sharded(ctx))["deep"].tolist() == [[1.0] * 16] * 6


def test_what_is_refused(clusters: Clusters) -> None:
    with pytest.raises(ConfigError, match="sharding_sparse_fids_op_params"):
        PartitionedHashTable(0, parser_ctx=ParserCtx())
    with pytest.raises(ConfigError, match="enable_gpu_emb"):
        start(clusters(2), get_parser_ctx(2, True, enable_gpu_emb=True))
    ctx = get_parser_ctx(0, True)
    with pytest.raises(InputError, match="features of a lookup"):
        start(clusters(0), ctx).lookup({"label": torch.ones(6)})
    with pytest.raises(ConfigError, match="auxiliary_bundle"):
        start(clusters(0), ctx).apply_gradients([], 0)
