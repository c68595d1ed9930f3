"""Where the tables of a run go: by named types, by a plan's file, or planned now."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

from shoal import planner
from shoal.comm.consensus import as_first_rank
from shoal.comm.mesh import Mesh
from shoal.config import RunConfig
from shoal.config.build import ModelParts, RunData, build_host_rows, open_data
from shoal.data import RankShare
from shoal.placement import Placement
from shoal.planner import Plan, TableInput, TableStatistics, Topology, Workload
from shoal.planner.options import constraint_of
from shoal.planner.planner import kept
from shoal.planner.statistics import check_known
from shoal.planner.topology import NOT_HERE, overridden
from shoal.table.hosting import plan_placement
from shoal.table.spec import TableSpec
from shoal.train.ranks import Ranks

_log = logging.getLogger("shoal.train")

_PROFILED = 32  # batches that a plan without a file of statistics reads
_WIRE_BYTES = {"bfloat16": 2, "float16": 2, "int8": 1}


def settled_placement(config: RunConfig, specs: tuple[TableSpec, ...], mesh: Mesh) -> Placement:
    """The placement of the types that a config names; row-wise where it wants a plan."""
    settings = config.distributed.placement
    return plan_placement(
        specs,
        mesh.world_size,
        default="row_wise" if settings.default == "auto" else settings.default,
        kinds=settings.tables,
        local_world_size=mesh.launch.local_world_size,
    )


def planned(
    config: RunConfig,
    parts: ModelParts,
    ranks: Ranks,
    previous: Callable[[], Plan | None] = lambda: None,
) -> Plan | None:
    """The plan of a model, read or made on rank 0; None where the config names types.

    A baseline, whose tables are others than those of the run's model, is never planned.

    Args:
        config: of the run.
        parts: of the model.
        ranks: of the run; all of them call this.
        previous: called on rank 0: a plan whose tables keep types, tiers and ranks.

    Raises:
        ShoalError: what rank 0 raised, on every rank.
    """
    settings = config.distributed
    own = parts.name == config.model.kind
    if not own or (settings.plan is None and settings.placement.default != "auto"):
        return None

    def find() -> Plan:
        if settings.plan is not None:
            plan = planner.read_plan(settings.plan)
        else:
            plan = plan_run(config, parts, topology_of(config, ranks), previous=previous())
        plan.check(parts.tables, ranks.world_size)
        plan.check_tiers(parts.tables, build_host_rows(config))
        return plan

    return as_first_rank(ranks.control, find, what="sharding plan")


def topology_of(config: RunConfig, ranks: Ranks) -> Topology:
    """The machines of a run: of the file that its config names, or those that there are.

    Raises:
        ConfigError: the file is of other numbers of ranks.
    """
    if config.distributed.topology is None:
        found = planner.from_environment(config.device, cached=True)
    else:
        found = planner.read_topology(config.distributed.topology)
        mesh = ranks.mesh
        found.check_job(ranks.world_size, 1 if mesh is None else mesh.launch.local_world_size)
        found = overridden(found, os.environ)
    for note in found.notes:
        if NOT_HERE in note:
            _log.warning("speeds of the plan: %s", note)
    return found


def statistics_of(
    config: RunConfig, parts: ModelParts, batches: int = _PROFILED, *, ranks: int = 1
) -> dict[str, TableStatistics]:
    """Statistics of the file that a config names, or of the first batches of its data.

    With data.sampler batches are those of one of `ranks`: each draws its own items.

    Raises:
        UnknownName: of a table that the model does not have.
        ConfigError: not such a file.
    """
    if config.distributed.statistics is not None:
        found = planner.read_statistics(config.distributed.statistics)
        check_known(found, [spec.name for spec in parts.tables])
        return found
    features = {one.name: one.table for one in parts.features}
    share = RankShare() if config.data.sampler is None else RankShare(0, ranks)
    loader = data_of(config, share, samples=True).train
    return planner.profile_data(loader.batches(), features, most=batches)


def data_of(config: RunConfig, share: RankShare | None = None, *, samples: bool = False) -> RunData:
    """The data of a run as it is read on the host, by one rank; samples: as of `open_data`."""
    here = config.model_copy(update={"device": "cpu"})
    return open_data(here, share or RankShare(), samples=samples)


def inputs_of(config: RunConfig, parts: ModelParts, ranks: int) -> list[TableInput]:
    """What is to be planned for each table of a model, as it will be when all data was seen."""
    statistics = statistics_of(config, parts, ranks=ranks)
    examples = data_of(config).train.size or 1 << 30  # of a stream nobody knows
    host = build_host_rows(config)
    return [
        planner.table_input(
            spec,
            statistics.get(spec.name),
            horizon_samples=float(examples),
            **planner.host_tier(host, parts.tables, ranks),
        )
        for spec in parts.tables
    ]


def work_of(config: RunConfig, parts: ModelParts, topology: Topology) -> Workload:
    """What else a rank does in a step of a run."""
    wire = config.distributed.wire
    return planner.dense_work(
        topology,
        -(-config.data.batch_size // topology.world_size),
        sum(one.numel() for one in parts.module.parameters()),
        row_bytes=None if wire.rows is None else _WIRE_BYTES[wire.rows],
        grad_bytes=None if wire.grads is None else _WIRE_BYTES[wire.grads],
    )


def plan_run(
    config: RunConfig,
    parts: ModelParts,
    topology: Topology,
    *,
    inputs: list[TableInput] | None = None,
    previous: Plan | None = None,
    groups: bool = False,
    time_limit_s: float = 60.0,
) -> Plan:
    """A plan of a run's model on some machines.

    Args:
        config: of the run.
        parts: of the model.
        topology: the machines.
        inputs: what is to be planned, if that is known.
        previous: a plan whose tables keep types, tiers and ranks.
        groups, time_limit_s: as of `make_plan`.

    Raises:
        UnknownName: constraints or statistics of tables that the model does not have.
        ConfigError: no plan that fits.
    """
    placement = config.distributed.placement
    constraints = {key: constraint_of(one) for key, one in placement.constraints.items()}
    for table, kind in placement.tables.items():
        own = constraints.get(table, constraint_of({}))
        constraints[table] = replace(own, sharding=(kind,))
    if inputs is None:
        inputs = inputs_of(config, parts, topology.world_size)
    if previous is not None:
        constraints |= kept(previous, [one.name for one in inputs], topology.world_size)
    return planner.make_plan(
        inputs,
        topology,
        work_of(config, parts, topology),
        constraints=constraints,
        features={one.name: one.table for one in parts.features},
        groups=groups,
        time_limit_s=time_limit_s,
    )
