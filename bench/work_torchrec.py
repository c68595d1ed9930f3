"""Torchrec's planner on our problems: its plans and ours, priced by both cost models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from plan_cases import tables_of, topology_of
from shoal.planner import CostModel, Plan, TableInput, Topology, Workload, make_plan
from shoal.planner.options import Option

__all__ = ["compare"]

TYPES = ("table_wise", "row_wise", "table_row_wise", "data_parallel")
BATCH = 2048
Where = dict[str, tuple[str, tuple[int, ...]]]  # table -> type, ranks of its shards


def compare(seed: int) -> tuple[float, float]:
    """(their plan over ours under our model, the same under theirs); above 1 ours is better."""
    rng = np.random.default_rng(20_000 + seed)
    topology = topology_of(int(rng.choice([8, 16])))
    tables = [
        replace(one, slices=(), state_width=float(one.dim))
        for one in tables_of(rng, int(rng.integers(10, 40)))
    ]
    plan = make_plan(tables, topology, _work(), constraints={"*": {"sharding": TYPES}})
    peer = _Peer(tables, topology)
    theirs, ours = peer.plan(), _where(plan)
    return (
        _our_price(tables, topology, theirs) / _our_price(tables, topology, ours),
        peer.price(theirs) / peer.price(ours),
    )


def _work() -> Workload:
    return Workload(batch_size=BATCH, dense_s=0.0)


def _where(plan: Plan) -> Where:
    return {one.name: (one.sharding, tuple(one.ranks())) for one in plan.tables}


def _our_price(tables: list[TableInput], topology: Topology, where: Where) -> float:
    """Seconds of the slowest rank under our model."""
    model = CostModel(topology, _work())
    ranks = np.full(topology.world_size, sum(model.shared_phases(one) for one in tables))
    for one in tables:
        kind, held = where[one.name]
        option: Any = Option(kind, 1, "device", 1.0, "float32")  # type: ignore[arg-type]
        ranks[list(held)] += model.price(one, option).seconds
    return float(ranks.max() + model.fixed_s())


class _Peer:
    """Torchrec's planner and cost model for the same tables and machines."""

    def __init__(self, tables: list[TableInput], topology: Topology) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import ParameterConstraints
        from torchrec.distributed.planner import Topology as TheirTopology
        from torchrec.distributed.types import ModuleSharder
        from torchrec.modules.embedding_configs import PoolingType

        self._topology = TheirTopology(
            world_size=topology.world_size,
            local_world_size=topology.local_size,
            compute_device="cuda",
            hbm_cap=topology.device_bytes,
            ddr_cap=topology.host_bytes,
            intra_host_bw=topology.rates.intra / 1000,
            inter_host_bw=topology.rates.cross / 1000,
        )
        self._module = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=one.name,
                    embedding_dim=one.dim,
                    num_embeddings=max(1, int(one.rows)),
                    feature_names=[one.name],
                    pooling=PoolingType.SUM,
                )
                for one in tables
            ],
        )
        self._sharders: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder()]
        self._constraints = {
            one.name: ParameterConstraints(
                sharding_types=list(TYPES),
                compute_kernels=["fused", "dense"],
                pooling_factors=[one.statistics.ids_per_sample],
            )
            for one in tables
        }

    def plan(self) -> Where:
        """Where its own planner puts the tables."""
        from torchrec.distributed.planner import EmbeddingShardingPlanner

        planner = EmbeddingShardingPlanner(
            topology=self._topology, batch_size=BATCH, constraints=self._constraints
        )
        made = planner.plan(self._module, self._sharders)
        return {
            name: (one.sharding_type, tuple(one.ranks))
            for module in made.plan.values()
            for name, one in module.items()
        }

    def price(self, where: Where) -> float:
        """Milliseconds of the slowest rank under its cost model."""
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

        enumerator = EmbeddingEnumerator(self._topology, BATCH, self._constraints)
        seconds = np.zeros(self._topology.world_size)
        left = set(where)
        for option in enumerator.enumerate(self._module, self._sharders):
            kind, ranks = where[option.name]
            if option.name in left and option.sharding_type == kind:
                left.discard(option.name)
                for rank, shard in zip(ranks, option.shards, strict=True):
                    seconds[rank] += shard.perf.total
        assert not left, left
        return float(seconds.max())
