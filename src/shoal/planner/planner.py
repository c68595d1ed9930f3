"""Planners of modules: `create_planner`, `collective_plan`, under the names of TorchEasyRec."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import as_first_rank
from shoal.comm.launch import init
from shoal.comm.launchers import choice
from shoal.errors import ConfigError, unknown_name
from shoal.planner.cost import dense_work
from shoal.planner.making import make_plan
from shoal.planner.options import FEATURE, GLOBAL, TableInput, Tier, constraint_of, table_input
from shoal.planner.plan import Plan, read_plan
from shoal.planner.statistics import TableStatistics, check_known
from shoal.planner.topology import Topology, from_environment
from shoal.table.spec import HostRows, TableSpec


class FeatureLike(Protocol):
    """What a plan reads of a feature."""

    name: str
    table: str


class Collection(Protocol):
    """What a plan reads of an `EmbeddingCollection`."""

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Specs by name."""

    @property
    def features(self) -> Sequence[Any]:
        """With name and table."""

    @property
    def shard(self) -> Any:
        """Where its rows are."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans the tables of modules for some machines.

    Args:
        topology: the machines; ranks of the launcher when left out.
        batch_size: examples of a rank.
        device: where rows live, "cuda" or "cpu".
        constraints: see `constraints_by_table`.
        statistics: of ids by table; a Zipf law over the expected rows of tables without.
        previous: a plan whose types, tiers and ranks its tables keep.
        horizon_samples: examples that tables are to grow for.
        time_limit_s: of the search.
    """

    topology: Topology
    batch_size: int
    device: str = "cuda"
    constraints: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, TableStatistics] = field(default_factory=dict)
    previous: Plan | None = None
    horizon_samples: float = 0.0
    time_limit_s: float = 60.0

    def plan(self, model: nn.Module) -> Plan:
        """A plan of the tables of a module.

        Raises:
            UnknownName: constraints or statistics of tables that the module does not have.
            ConfigError: no collection, or no plan that fits.
        """
        collections = collections_of(model)
        specs = {name: spec for one in collections for name, spec in one.tables.items()}
        features = {one.name: one.table for made in collections for one in made.features}
        check_known(self.statistics, specs)
        tables = [
            table_input(
                spec,
                self.statistics.get(name),
                horizon_samples=self.horizon_samples,
                **_tier_of(made, spec),
            )
            for made in collections
            for name, spec in made.tables.items()
        ]
        unique = list({table.name: table for table in tables}.values())
        return make_plan(
            unique,
            self.topology,
            dense_work(
                self.topology, self.batch_size, sum(one.numel() for one in model.parameters())
            ),
            constraints=self._constraints(model, unique, features),
            features=features,
            time_limit_s=self.time_limit_s,
        )

    def collective_plan(self, model: nn.Module, collectives: Collectives | None = None) -> Plan:
        """The plan that rank 0 makes, on every rank; all ranks call this.

        Args:
            model: the same on every rank.
            collectives: between the hosts of all ranks; those of `shoal.comm.init` when left out.

        Raises:
            ShoalError: what rank 0 raised, on every rank.
            CollectiveFailed: a rank is gone.
        """
        if collectives is None:
            mesh = init(device=self.device)
            collectives = LocalCollectives() if mesh.world_size == 1 else mesh.control
        return as_first_rank(collectives, lambda: self.plan(model), what="sharding plan")

    def _constraints(
        self, model: nn.Module, tables: Sequence[TableInput], features: Mapping[str, str]
    ) -> dict[str, Any]:
        """Those of the modules, under the planner's own, under those of the previous plan."""
        names = {table.name for table in tables}
        found: dict[str, Any] = {}
        for module in model.modules():
            declared = getattr(module, "parameter_constraints", None)
            declared = declared() if callable(declared) else declared
            for key, one in (declared or {}).items():
                if key not in names and key.removeprefix(FEATURE) not in features:
                    raise unknown_name("table of parameter_constraints", str(key), names)
                found[key] = constraint_of(one)
        for key, one in self.constraints.items():
            own = constraint_of(one)
            found[key] = own.under(found[key]) if key in found else own
        if self.previous is not None:
            if self.previous.world_size != self.topology.world_size:
                raise ConfigError(
                    "world size of the plan to keep (FORCE_LOAD_SHARDING_PLAN)",
                    got=self.previous.world_size,
                    allowed=f"{self.topology.world_size}, the ranks of this job",
                    remedy="Set FORCE_LOAD_SHARDING_PLAN=0 to plan again.",
                )
            kept = self.previous.constraints()
            if unknown := sorted(kept.keys() - set(names)):
                raise ConfigError(
                    "tables of the plan to keep (FORCE_LOAD_SHARDING_PLAN)",
                    got=", ".join(unknown),
                    allowed=f"tables of this model: {', '.join(sorted(names))}",
                    remedy="Name a plan of this model, or set FORCE_LOAD_SHARDING_PLAN=0.",
                )
            found |= {name: one for name, one in kept.items() if name in names}
        return found


def collections_of(model: nn.Module) -> list[Collection]:
    """The embedding collections in a module.

    Raises:
        ConfigError: there is none.
    """
    # By what the class has: asking an instance for properties would make its exchange.
    found = [
        cast(Collection, one)
        for one in model.modules()
        if all(hasattr(type(one), name) for name in ("tables", "shard", "distribute"))
    ]
    if not found:
        raise ConfigError(
            "module to plan",
            got=f"{type(model).__name__} without an EmbeddingCollection",
            allowed="a module with one or more",
            remedy="Plan the module that holds the tables.",
        )
    return found


def _tier_of(made: Collection, spec: TableSpec) -> dict[str, Any]:
    """Where a collection's rows live, which was settled when it was built."""
    host: HostRows | None = getattr(made.shard, "settings", {}).get("host_rows")
    return host_tier(host, made.tables.values(), spec)


def host_tier(host: HostRows | None, specs: Any, spec: TableSpec) -> dict[str, Any]:
    """Tier and cached part of a table whose shard keeps rows as `host` says."""
    tiers: tuple[Tier, ...] = ("device",)
    if host is None:
        return {"tiers": tiers}
    if not host.cache_bytes:
        return {"tiers": ("host",)}
    rows = sum(4.0 * (s.expected_rows or 10**6) * (s.dim + s.state_width) for s in specs)
    return {"tiers": ("cache",), "cache": min(0.99, max(1e-3, host.cache_bytes / max(rows, 1.0)))}


def create_planner(
    device: str | torch.device,
    batch_size: int,
    ckpt_plan_path: str | Path | None = None,
    global_constraints_cfg: Any = None,
    model: nn.Module | None = None,
    *,
    topology: Topology | None = None,
    statistics: Mapping[str, TableStatistics] | None = None,
    constraints: Mapping[str, Any] | None = None,
    horizon_samples: float = 0.0,
    environ: Mapping[str, str] | None = None,
) -> Planner:
    """A planner for this job, under the seed system's name and arguments.

    There are no `sharders`: every collection takes every sharding type.

    Args:
        device: of the tables.
        batch_size: examples of a rank.
        ckpt_plan_path: a plan, or a folder with one; read if FORCE_LOAD_SHARDING_PLAN is 1: its
            tables keep their types, tiers and ranks.
        global_constraints_cfg: of all tables: a `Constraint`, its settings, or an object with
            `sharding_types` and `compute_kernels`.
        model: if given, must have a collection.
        topology: the machines; the launcher's when left out.
        statistics: of ids by table.
        constraints: by table, pattern, "*" or "feature:NAME".
        horizon_samples: examples that tables are to grow for.
        environ: variables; the process's own when left out.

    Raises:
        UnknownName, ConfigError: a constraint, variable or file without sense.
    """
    environ = os.environ if environ is None else environ
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            "batch_size of a planner", got=repr(batch_size), allowed="1 or more", remedy="Set it."
        )
    kind = torch.device(device).type
    given = dict(constraints or {})
    if global_constraints_cfg is not None:
        whole = constraint_of(global_constraints_cfg, "global constraint")
        given[GLOBAL] = constraint_of(given[GLOBAL]).under(whole) if GLOBAL in given else whole
    previous = None
    if choice(environ, "FORCE_LOAD_SHARDING_PLAN", 0) and ckpt_plan_path is not None:
        previous = read_plan(ckpt_plan_path)
    if model is not None:
        collections_of(model)
    return Planner(
        topology=topology or from_environment(str(device), environ=environ),
        batch_size=batch_size,
        device=kind,
        constraints=given,
        statistics=statistics or {},
        previous=previous,
        horizon_samples=horizon_samples,
    )
