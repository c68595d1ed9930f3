"""Planners of modules: `create_planner`, `collective_plan`, under the names of TorchEasyRec."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import as_first_rank
from shoal.comm.launch import init
from shoal.comm.launch_environment import choice
from shoal.errors import ConfigError, unknown_name
from shoal.planner.cost import dense_work
from shoal.planner.make_plan import make_plan
from shoal.planner.options import (
    FEATURE,
    GLOBAL,
    Constraint,
    TableInput,
    constraint_of,
    table_input,
)
from shoal.planner.plan import Plan, read_plan, tier_of
from shoal.planner.statistics import TableStatistics, check_known
from shoal.planner.topology import Topology, from_environment
from shoal.table.spec import HostRows, TableSpec


class Tables(Protocol):
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
        ckpt_plan_path: a plan, or a folder with one, whose tables keep types, tiers and ranks if
            FORCE_LOAD_SHARDING_PLAN is 1; read where the plan is made.
        horizon_samples: examples that tables are to grow for.
        time_limit_s: of the search.
        environ: variables.
    """

    topology: Topology
    batch_size: int
    device: str = "cuda"
    constraints: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, TableStatistics] = field(default_factory=dict)
    ckpt_plan_path: str | Path | None = None
    horizon_samples: float = 0.0
    time_limit_s: float = 60.0
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

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
                **_tier_of(made, self.topology.world_size),
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
        found = declared_constraints(model, names, features)
        for key, one in self.constraints.items():
            own = constraint_of(one)
            found[key] = own.under(found[key]) if key in found else own
        if self.ckpt_plan_path is not None and forced(self.environ):
            previous = read_plan(self.ckpt_plan_path)
            found |= kept(previous, names, self.topology.world_size)
        return found


def forced(environ: Mapping[str, str]) -> bool:
    """Whether FORCE_LOAD_SHARDING_PLAN asks for the tables of an earlier plan as they were.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    return bool(choice(environ, "FORCE_LOAD_SHARDING_PLAN", 0))


def kept(previous: Plan, tables: Collection[str], world_size: int) -> dict[str, Constraint]:
    """Constraints that keep types, tiers and ranks of an earlier plan's tables.

    Raises:
        ConfigError: it is of another world size or of several groups, or has tables that there are
            not.
    """
    remedy = "Set FORCE_LOAD_SHARDING_PLAN=0 to plan from scratch."
    if (previous.world_size, previous.replicas) != (world_size, 1):
        groups = f" in each of {previous.replicas} groups" if previous.replicas > 1 else ""
        raise ConfigError(
            "world size of the plan to keep (FORCE_LOAD_SHARDING_PLAN)",
            got=f"{previous.world_size}{groups}",
            allowed=f"{world_size}, the ranks of this job, in one group",
            remedy=remedy,
        )
    found = previous.constraints()
    if unknown := sorted(found.keys() - set(tables)):
        raise ConfigError(
            "tables of the plan to keep (FORCE_LOAD_SHARDING_PLAN)",
            got=", ".join(unknown),
            allowed=f"tables of this model: {', '.join(sorted(tables))}",
            remedy=remedy,
        )
    return found


def declared_constraints(
    model: nn.Module, tables: Collection[str], features: Mapping[str, str]
) -> dict[str, Any]:
    """What modules declare as `parameter_constraints`, by table or "feature:NAME".

    Raises:
        UnknownName: a table or feature that the model does not have.
        ConfigError: two modules that contradict each other.
    """
    found: dict[str, Constraint] = {}
    owners: dict[str, str] = {}
    for path, module in model.named_modules():
        declared = getattr(module, "parameter_constraints", None)
        declared = declared() if callable(declared) else declared
        owner = f"{path or 'the model'} ({type(module).__name__})"
        for key, one in (declared or {}).items():
            name = str(key)
            known = features if name.startswith(FEATURE) else tables
            if name.removeprefix(FEATURE) not in known:
                kind = "feature" if known is features else "table"
                raise unknown_name(f"{kind} of parameter_constraints", name, known)
            own = constraint_of(one)
            if name in found:
                if differing := own.clashes(found[name]):
                    raise ConfigError(
                        f"parameter_constraints of {name!r}",
                        got=f"{', '.join(differing)} differ: {owners[name]} has "
                        f"{found[name].summary()}; {owner} has {own.summary()}",
                        allowed="modules that agree on each setting of a table",
                        remedy="Declare the table in one of them.",
                    )
                own, owner = own.under(found[name]), f"{owners[name]}, {owner}"
            found[name], owners[name] = own, owner
    return dict(found)


def collections_of(model: nn.Module) -> list[Tables]:
    """The embedding collections in a module.

    Raises:
        ConfigError: there is none.
    """
    # By what the class has: asking an instance for properties would make its exchange.
    found = [
        cast(Tables, one)
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


def _tier_of(made: Tables, ranks: int) -> dict[str, Any]:
    """Where a collection's rows live, which was settled when it was built."""
    host: HostRows | None = getattr(made.shard, "settings", {}).get("host_rows")
    return host_tier(host, made.tables.values(), ranks)


def host_tier(host: HostRows | None, specs: Any, ranks: int) -> dict[str, Any]:
    """Tier and cached part of tables whose shards keep rows as `host` says, on every rank."""
    tier = tier_of(host)
    if host is None or tier != "cache":
        return {"tiers": (tier,)}
    rows = sum(4.0 * (s.expected_rows or 10**6) * (s.dim + s.state_width) for s in specs)
    cached = ranks * host.cache_bytes / max(rows, 1.0)
    return {"tiers": (tier,), "cache": min(0.99, max(1e-3, cached))}


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
        topology: the machines; the launcher's when left out, with speeds measured before.
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
    if model is not None:
        collections_of(model)
    return Planner(
        topology=topology or from_environment(str(device), environ=environ, cached=True),
        batch_size=batch_size,
        device=kind,
        constraints=given,
        statistics=statistics or {},
        ckpt_plan_path=ckpt_plan_path,
        horizon_samples=horizon_samples,
        environ=environ,
    )
