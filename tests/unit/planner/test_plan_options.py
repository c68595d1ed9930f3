"""What may be done with a table, and what constraints leave of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError, UnknownName
from shoal.planner.options import (
    Constraint,
    constraint_of,
    constraints_by_table,
    options_of,
    table_input,
)
from shoal.planner.statistics import zipf
from shoal.planner.topology import Topology
from shoal.rules.optimizers import Adagrad, RowWiseAdagrad
from shoal.table.spec import Segment, TableSpec
from support.planning import table

TOPOLOGY = Topology(nodes=2, local_size=4)


def kinds(
    constraint: Constraint, topology: Topology = TOPOLOGY, **own: Any
) -> set[tuple[str, int]]:
    found = options_of(table(**own), constraint, topology)
    return {(one.sharding, one.slices) for one in found}


def test_every_sharding_type_is_an_option() -> None:
    assert {kind for kind, _ in kinds(Constraint())} == {
        "row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel",
    }  # fmt: skip
    on_one_node = {kind for kind, _ in kinds(Constraint(), Topology(nodes=1, local_size=4))}
    assert on_one_node == {"row_wise", "table_wise", "column_wise", "data_parallel"}


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(sharding=("row_wise",)), {("row_wise", 1)}),
        (Constraint(sharding=("column_wise",), slices=(4,)), {("column_wise", 4)}),
        (Constraint(max_ranks=1), {("table_wise", 1)}),
        (Constraint(min_ranks=8, sharding=("row_wise", "grid")), {("row_wise", 1), ("grid", 2)}),
        (Constraint(ranks=(3,)), {("table_wise", 1)}),
        (Constraint(ranks=(4, 5, 6, 7), sharding=("table_row_wise", "grid")),
         {("table_row_wise", 1)}),
        (Constraint(max_ranks=1, sharding=("row_wise",)), set()),
    ],
)  # fmt: skip
def test_constraints_leave_what_they_allow(constraint: Constraint, expected: set[Any]) -> None:
    assert kinds(constraint) == expected


def test_rows_may_live_elsewhere_and_be_smaller() -> None:
    some = Constraint(
        sharding=("table_wise",), tiers=("device", "cache", "host"), cache_ratios=(0.1, 0.3),
        dtypes=("float32", "bfloat16"),
    )  # fmt: skip
    found = options_of(table(), some, TOPOLOGY)
    assert {(one.tier, one.cache) for one in found} == {
        ("device", 1.0), ("cache", 0.1), ("cache", 0.3), ("host", 0.0),
    }  # fmt: skip
    assert len(found) == 8
    on_cpu = Topology(nodes=1, local_size=2, device="cpu")
    assert {one.tier for one in options_of(table(), some, on_cpu)} == {"device"}


def test_rules_that_couple_columns_forbid_slices() -> None:
    def spec(rule: Any) -> TableSpec:
        return TableSpec(name="t", segments=(Segment(dim=64, optimizer=rule),), expected_rows=10)

    assert table_input(spec(Adagrad(lr=0.1))).slices == (2, 4, 8, 16)
    assert table_input(spec(RowWiseAdagrad(lr=0.1))).slices == ()


def test_inputs_of_a_spec() -> None:
    spec = TableSpec(
        name="t", segments=(Segment(dim=8, optimizer=Adagrad(lr=0.1)),), capacity_rows=1500,
        expected_rows=1000, dtype="bfloat16",
    )  # fmt: skip
    statistics = zipf(100, new_per_sample=0.5)
    one = table_input(spec, statistics, horizon_samples=800)
    assert (one.rows, one.rows_later, one.dtype, one.state_width) == (1000, 1400, "bfloat16", 8)
    assert table_input(spec, statistics, horizon_samples=9999).row_count == 1500  # its capacity


def test_constraints_of_all_then_patterns_then_tables() -> None:
    found = constraints_by_table(
        {
            "user": {"max_ranks": 2},
            "*": {"sharding": "row_wise", "dtypes": ["bfloat16"]},
            "u*": {"sharding": ["table_wise"], "max_ranks": 1},
        },
        ["user", "item"],
    )
    assert found["user"] == Constraint(sharding=("table_wise",), dtypes=("bfloat16",), max_ranks=2)
    assert found["item"] == Constraint(sharding=("row_wise",), dtypes=("bfloat16",))


def test_constraints_of_features_reach_their_table() -> None:
    features = {"clicked": "item", "bought": "item", "who": "user"}
    given = {
        "feature:clicked": {"sharding": ["row_wise", "grid"], "min_ranks": 2},
        "feature:bought": {"sharding": ["row_wise"], "min_ranks": 4},
    }
    found = constraints_by_table(given, ["item", "user"], features)
    assert found["item"] == Constraint(sharding=("row_wise",), min_ranks=4)
    assert found["user"] == Constraint()
    given["feature:bought"]["sharding"] = ["table_wise"]
    with pytest.raises(ConfigError, match="features of table 'item'"):
        constraints_by_table(given, ["item", "user"], features)


def test_the_seed_systems_names() -> None:
    old = SimpleNamespace(sharding_types=["row_wise"], compute_kernels=["fused_uvm_caching"])
    assert constraint_of(old) == Constraint(sharding=("row_wise",), tiers=("cache",))
    assert constraint_of({"compute_kernels": "fused"}) == Constraint(tiers=("device",))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"usr": {}}, "user"),
        ({"z*": {}}, "z\\*"),
        ({"feature:clicks": {}}, "feature"),
        ({"user": {"shardings": ["row_wise"]}}, "sharding"),
        ({"user": {"sharding": ["rowwise"]}}, "row_wise"),
        ({"user": {"tiers": ["disk"]}}, "tier"),
        ({"user": {"dtypes": ["int8"]}}, "float16"),
        ({"user": {"sharding": []}}, "not empty"),
        ({"user": {"min_ranks": 3, "max_ranks": 2}}, "min_ranks"),
        ({"user": {"max_ranks": 0.5}}, "max_ranks"),
        ({"user": {"ranks": [-1]}}, "ranks from 0"),
        ({"user": {"cache_ratios": [1.5]}}, "cache ratios"),
    ],
)  # fmt: skip
def test_constraints_without_sense(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        constraints_by_table(given, ["user", "item"], {"who": "user"})


def test_ranks_that_the_job_lacks() -> None:
    with pytest.raises(ConfigError, match=r"0\.\.7"):
        options_of(table(), Constraint(ranks=(8,)), TOPOLOGY)
    with pytest.raises(UnknownName):
        Constraint(sharding=("twrw",))


@pytest.mark.parametrize("value", ["row_wise", 3, object()])
def test_a_constraint_that_is_no_mapping_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="settings by name"):
        constraint_of(value)


@pytest.mark.parametrize(
    "settings",
    [{"max_ranks": 0}, {"min_ranks": 0}, {"cache_ratios": ["a"]}, {"cache_ratios": [1.0]}],
)
def test_limits_without_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="constraint"):
        constraint_of(settings)


def test_names_of_the_seed_system_are_known() -> None:
    one = constraint_of({"sharding_types": ["grid_shard"], "compute_kernels": ["dense"]})
    assert (one.sharding, one.tiers) == (("grid",), ("device",))


@pytest.mark.parametrize("changes", [{"dtype": "fp8"}, {"tiers": ("hbm",)}, {"rows": float("inf")}])
def test_tables_without_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(table("t"), **changes)
