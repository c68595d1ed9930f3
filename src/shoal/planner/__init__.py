"""Which rank holds what: plans of tables on machines that are declared or measured."""

from __future__ import annotations

from shoal.planner.cost import CostModel, Workload, dense_work
from shoal.planner.make_plan import make_plan
from shoal.planner.options import Constraint, TableInput, table_input
from shoal.planner.plan import Plan, TablePlan, read_plan
from shoal.planner.planner import Planner, create_planner, host_tier
from shoal.planner.proposer import DynamicProgrammingProposer
from shoal.planner.statistics import TableStatistics, profile_data, read_statistics, zipf
from shoal.planner.topology import (
    Rates,
    Topology,
    from_environment,
    on_this_host,
    read_topology,
)

__all__ = [
    "Constraint",
    "CostModel",
    "DynamicProgrammingProposer",
    "Plan",
    "Planner",
    "Rates",
    "TableInput",
    "TablePlan",
    "TableStatistics",
    "Topology",
    "Workload",
    "create_planner",
    "dense_work",
    "from_environment",
    "host_tier",
    "make_plan",
    "on_this_host",
    "profile_data",
    "read_plan",
    "read_statistics",
    "read_topology",
    "table_input",
    "zipf",
]
