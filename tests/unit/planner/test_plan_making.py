"""Plans as values, the reasons where there is none, and planners of modules."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.layouts import Feature
from shoal.errors import ConfigError, UnknownName
from shoal.planner import (
    Plan,
    Topology,
    Workload,
    create_planner,
    host_tier,
    make_plan,
    read_plan,
    zipf,
)
from shoal.rules.optimizers import Adagrad
from shoal.table.spec import HostRows, Segment, TableSpec
from support.planning import table

GPUS = Topology(nodes=2, local_size=4)
WORK = Workload(batch_size=4096, dense_s=1e-3)


def specs(*names: str) -> list[TableSpec]:
    segments = (Segment(dim=16, optimizer=Adagrad(lr=0.1)),)
    return [TableSpec(name=name, segments=segments, expected_rows=1000) for name in names]


class Model(nn.Module):
    """Two tables; with a constraint of its own, if given."""

    def __init__(self, declared: Any = None) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(
            specs("user", "item"), [Feature("who", "user"), Feature("what", "item")]
        )
        self.head = nn.Linear(4, 1)
        if declared is not None:
            self.parameter_constraints = declared


def test_a_plan_is_a_placement_and_comes_back() -> None:
    tables = [table(f"t{k}", 10.0 ** (k + 2)) for k in range(5)]
    plan = make_plan(tables, GPUS, WORK, constraints={"t0": {"sharding": "data_parallel"}})
    placement = plan.placement()
    assert placement.tables() == ("t0", "t1", "t2", "t3", "t4") and placement.world_size == 8
    assert placement.of("t0")[0].replicated
    again = Plan.from_json(plan.to_json())
    assert again.placement() == placement and again.diff(plan) == []
    assert again.to_json() == plan.to_json()
    assert plan.step_s == max(plan.rank_seconds) and len(plan.rank_device_bytes) == 8
    one = plan.rank_phases(0)
    hidden = one["ids"] + one["probe"]
    rest = sum(one.values()) - hidden + plan.base_phases["pooling"] + plan.base_phases["fixed"]
    assert plan.rank_seconds[0] == pytest.approx(max(hidden, WORK.dense_s) + rest)


def test_differences_are_named() -> None:
    tables = [table("a"), table("b")]
    first = make_plan(tables, GPUS, WORK, constraints={"a": {"sharding": "row_wise"}})
    second = make_plan(tables, GPUS, WORK, constraints={"a": {"sharding": "data_parallel"}})
    lines = first.diff(second)
    assert any(line.startswith("a: row_wise, float32 on 0-7 -> data_parallel") for line in lines)
    assert not any(line.startswith("b: added") for line in lines)
    fewer = make_plan(tables[:1], GPUS, WORK)
    assert "b: removed" in first.diff(fewer) and "b: added" in fewer.diff(first)


@pytest.mark.parametrize("change", [
    {"format": "other"}, {"tables": [{}]}, {"extra": 1}, {"world_size": 1}, {"world_size": 1 << 40},
    {"world_size": True}, {"world_size": "8"}, {"local_size": 0}, {"replicas": 0},
    {"replicas": 1.0}, {"replicas": "1111111111"}, {"step_s": "x"}, {"step_s": math.nan},
    {"lower_bound_s": None}, {"notes": 5}, {"notes": [5]}, {"topology": 5}, {"limits": [1.0]},
    {"rank_seconds": ["x"] * 8}, {"rank_host_bytes": 5.0}, {"base_phases": {"dense": "x"}},
    {"base_phases": [1.0]}, {"step_s": 10**400},
])  # fmt: skip
def test_other_text_is_no_plan(change: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan([table()], GPUS, WORK, constraints={"t": {"sharding": "row_wise"}})
    plain = json.loads(plan.to_json())
    with pytest.raises(ConfigError):
        Plan.from_json(json.dumps({**plain, **change}))
    first = plain["tables"][0]
    for bad in ({"rows": "x"}, {"dim": 16.0}, {"device_bytes": None}, {"phases": ["x"] * 9}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Plan.from_json(json.dumps({**plain, "tables": [{**first, **bad}]}))
    for text in ("", "[]", "{"):
        with pytest.raises(ConfigError, match="shoal plan"):
            Plan.from_json(text)
    with pytest.raises(ConfigError, match="shoal plan CONFIG"):
        read_plan(tmp_path / "none.json")


@pytest.mark.parametrize(
    "ranks", ["0-999999999999999", "0-8", "7-0", "-1", "0-7,0", ",".join(["0-7"] * 99), "", "a-b"]
)
def test_ranks_of_a_file_are_bounded_before_they_are_listed(ranks: str) -> None:
    plan = make_plan([table()], GPUS, WORK, constraints={"t": {"sharding": "row_wise"}})
    text = plan.to_json()
    assert '"ranks": "0-7"' in text
    with pytest.raises(ConfigError, match="shoal plan"):
        Plan.from_json(text.replace('"ranks": "0-7"', f'"ranks": "{ranks}"'))


@pytest.mark.slow
def test_lists_of_ranks_are_bounded_all_together() -> None:
    plan = json.loads(make_plan([table()], GPUS, WORK).to_json())
    plan["world_size"] = 1 << 16
    every = [{"start": k, "stop": k + 1, "ranks": f"{k}-65535"} for k in range(200)]
    plan["tables"][0]["hosted"] = every
    with pytest.raises(ConfigError, match="ranks of a job"):
        Plan.from_json(json.dumps(plan))


@pytest.mark.parametrize(
    ("tiers", "host_rows", "match"),
    [
        ("cache", None, "host_rows.cache_bytes=[1-9]"),
        ("host", None, "host_rows.cache_bytes=0"),
        ("device", HostRows(cache_bytes=1 << 20), "Leave host_rows out"),
        ("host", HostRows(cache_bytes=1 << 20), "cache_bytes=0"),
    ],
)
def test_rows_live_where_the_plan_has_them_or_it_is_refused(
    tiers: str, host_rows: HostRows | None, match: str
) -> None:
    plan = make_plan([table("user")], GPUS, WORK, constraints={"user": {"tiers": tiers}})
    with pytest.raises(ConfigError, match=match) as failure:
        plan.check_tiers(specs("user"), host_rows)
    assert f"user: {tiers}" in str(failure.value)
    plan.check_tiers(specs("other"), host_rows)
    real = {"device": None, "cache": HostRows(cache_bytes=8), "host": HostRows()}
    plan.check_tiers(specs("user"), real[tiers])


def test_the_cache_of_a_plan_in_bytes() -> None:
    given = {"*": {"tiers": "cache", "cache_ratios": [0.5], "sharding": "row_wise"}}
    plan = make_plan([table("a", 8000.0), table("b", 8000.0)], GPUS, WORK, constraints=given)
    values = sum(one.host_bytes for one in plan.tables)  # all rows of a rank
    assert plan.cache_bytes(0, ["a", "b"]) == math.ceil(values / 2)
    assert plan.cache_bytes(0, ["b"]) == math.ceil(values / 4)


def test_every_rank_caches_its_share() -> None:
    # 2 x 1000 rows of 16 weights and 16 numbers of state: 256,000 bytes on all ranks.
    some = HostRows(cache_bytes=32_000)
    given = [host_tier(some, specs("a", "b"), ranks) for ranks in (1, 4)]
    assert given == [{"tiers": ("cache",), "cache": 0.125}, {"tiers": ("cache",), "cache": 0.5}]
    assert host_tier(None, specs("a"), 4) == {"tiers": ("device",)}
    assert host_tier(HostRows(), specs("a"), 4) == {"tiers": ("host",)}


def test_pinned_ranks_are_those_of_every_group() -> None:
    many = Topology(nodes=16, local_size=8)
    # Little is left to exchange in a group, so that several of them pay.
    tables = [table(f"t{k}", 1e5) for k in range(6)]
    plan = make_plan(tables, many, WORK, groups=True, constraints={"t0": {"ranks": [9]}})
    assert plan.replicas > 1 and plan.tables[0].ranks() == [9]
    high = make_plan(tables, many, WORK, groups=True, constraints={"t0": {"ranks": [100]}})
    assert high.replicas == 1 and "2, 4, 8 groups were not tried" in high.notes[-1]


def test_pinned_ranks_and_nodes() -> None:
    given = {
        "a": {"ranks": [5]},
        "b": {"ranks": [0, 1, 2], "sharding": "row_wise"},
        "c": {"ranks": [4, 5, 6, 7], "sharding": "table_row_wise"},
        "d": {"sharding": "grid"},
    }
    plan = make_plan([table(name) for name in "abcd"], GPUS, WORK, constraints=given)
    where = {one.name: [hosted.ranks for hosted in one.hosted] for one in plan.tables}
    assert where["a"] == [(5,)] and where["b"] == [(0, 1, 2)] and where["c"] == [(4, 5, 6, 7)]
    assert sorted(where["d"]) == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.slow
def test_groups_are_simulated_from_64_devices() -> None:
    many = Topology(nodes=16, local_size=8)
    tables = [table(f"t{k}", 1e5) for k in range(6)]
    one, several = (make_plan(tables, many, WORK, groups=groups) for groups in (False, True))
    assert one.replicas == 1 and several.step_s <= one.step_s
    forced = replace(several, replicas=2)
    with pytest.raises(ConfigError, match="simulations"):
        forced.placement()


# ---- no plan ----


@pytest.mark.parametrize(
    ("tables", "given", "device_bytes", "match"),
    [
        ([table("a", 1e8)], {}, 6 * 10**9, r"bytes too many on a device.*'a'.*no constraint.*host"),
        ([table("a", 1e8)], {}, 1000, r"bytes too many on a device.*tables with a piece.*'a'"),
        ([table("a", 1e7)], {"a": {"sharding": "table_wise"}}, 4 * 10**9,
         r"constraints: 'a': sharding=\('table_wise',\).*Drop the constraints of a"),
        ([table("a", 1e6)], {"a": {"sharding": "column_wise", "slices": 3}}, 10**9,
         r"options of table 'a' on 8 ranks: got none.*slices=\(3,\).*table_wise"),
        ([table("a", 1e6), table("a", 1e6)], {}, 10**9, "a name of its own"),
        ([], {}, 10**9, "one or more"),
    ],
)  # fmt: skip
def test_a_failed_plan_says_why(
    tables: list[Any], given: dict[str, Any], device_bytes: int, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make_plan(tables, replace(GPUS, device_bytes=device_bytes), WORK, constraints=given)


def test_the_missing_bytes_are_enough() -> None:
    tables = [table(f"t{k}", 1e7, slices=()) for k in range(3)]
    only = {"*": {"sharding": "table_wise"}}
    small = Topology(nodes=1, local_size=2, device_bytes=8 * 10**9, reserve=0.0)
    with pytest.raises(ConfigError) as failure:
        make_plan(tables, small, WORK, constraints=only)
    missing = int(str(failure.value).partition(" bytes too many")[0].rpartition(" ")[2]
                  .replace(",", ""))  # fmt: skip
    enough = replace(small, device_bytes=small.device_bytes + missing + 10**6)
    assert make_plan(tables, enough, WORK, constraints=only).tables
    with pytest.raises(ConfigError):
        less = replace(small, device_bytes=small.device_bytes + int(missing * 0.98))
        make_plan(tables, less, WORK, constraints=only)


# ---- modules ----


def test_a_planner_of_a_module() -> None:
    planner = create_planner("cpu", 512, None, {"sharding_types": ["row_wise"]}, topology=GPUS)
    plan = planner.collective_plan(Model({"user": {"sharding": ["table_wise"]}}))
    kinds = {one.name: one.sharding for one in plan.tables}
    assert kinds == {"user": "table_wise", "item": "row_wise"}
    plan.check(specs("user", "item"), 8)


def test_the_plan_of_a_checkpoint_is_kept_when_asked(tmp_path: Path) -> None:
    first = create_planner("cpu", 512, topology=GPUS,
                           constraints={"item": {"ranks": [6]}}).plan(Model())  # fmt: skip
    (tmp_path / "plan.json").write_text(first.to_json())
    forced = {"FORCE_LOAD_SHARDING_PLAN": "1"}
    kept = create_planner("cpu", 512, tmp_path, topology=GPUS, environ=forced).plan(Model())
    assert kept.placement() == first.placement()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "plan.json").write_text("{}")
    create_planner("cpu", 512, tmp_path / "broken", topology=GPUS, environ={}).plan(Model())
    # Also under limits of all tables, which would move them.
    limits = {"ranks": [0, 1]}
    kept = create_planner(
        "cpu", 512, tmp_path, limits, topology=GPUS, environ=forced
    ).plan(Model())  # fmt: skip
    assert kept.placement() == first.placement()
    other = create_planner("cpu", 512, tmp_path, topology=GPUS.with_devices(4), environ=forced)
    with pytest.raises(ConfigError, match="FORCE_LOAD_SHARDING_PLAN"):
        other.plan(Model())


def test_a_plan_of_several_groups_is_not_kept(tmp_path: Path) -> None:
    plan = create_planner("cpu", 512, topology=GPUS.with_devices(4)).plan(Model())
    (tmp_path / "plan.json").write_text(replace(plan, replicas=2).to_json())
    forced = {"FORCE_LOAD_SHARDING_PLAN": "1"}
    with pytest.raises(ConfigError, match="4 in each of 2 groups"):
        create_planner("cpu", 512, tmp_path, topology=GPUS, environ=forced).plan(Model())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"constraints": {"usr": {}}}, "user"),
        ({"statistics": {"usr": zipf(10)}}, "user"),
        ({"global_constraints_cfg": {"sharding": ["rw"]}}, "rw"),
    ],
)
def test_wrong_names_plan_nothing(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(UnknownName, match=match):
        create_planner("cpu", 512, topology=GPUS, **settings).plan(Model())


def test_other_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        create_planner("cpu", 0, topology=GPUS)
    with pytest.raises(ConfigError, match="EmbeddingCollection"):
        create_planner("cpu", 1, None, None, nn.Linear(1, 1), topology=GPUS)
    for key, match in (
        ("usr", "table of par.*user"),
        ("feature:whoo", "feature of par.*: what, who"),
    ):
        with pytest.raises(UnknownName, match=match):
            create_planner("cpu", 1, topology=GPUS).plan(Model({key: {}}))
    with pytest.raises(ConfigError, match="FORCE_LOAD"):
        # Where the plan is made, which is rank 0.
        environ = {"FORCE_LOAD_SHARDING_PLAN": "2"}
        create_planner("cpu", 1, "x", topology=GPUS, environ=environ).plan(Model())


class Both(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.model = Model(first)
        self.head = nn.Linear(1, 1)
        self.head.parameter_constraints = second


def test_modules_that_contradict_each_other_are_both_named() -> None:
    planner = create_planner("cpu", 8, topology=GPUS)
    with pytest.raises(ConfigError) as failure:
        planner.plan(Both({"user": {"max_ranks": 1}}, {"user": {"max_ranks": 2}}))
    assert all(name in str(failure.value) for name in ("model (Model)", "head (Linear)"))
    joined = planner.plan(Both({"user": {"ranks": [3]}}, {"user": {"sharding": "table_wise"}}))
    (user,) = (one for one in joined.tables if one.name == "user")
    assert (user.sharding, user.ranks()) == ("table_wise", [3])


def test_a_plan_of_another_model_or_job() -> None:
    plan = create_planner("cpu", 512, topology=GPUS).plan(Model())
    with pytest.raises(ConfigError, match="world size"):
        plan.check(specs("user", "item"), 4)
    with pytest.raises(UnknownName, match="item"):
        plan.check(specs("user"), 8)
    with pytest.raises(ConfigError, match="none for other"):
        plan.check(specs("user", "item", "other"), 8)
    wider = [replace(one, dtype="bfloat16") for one in specs("user", "item")]
    with pytest.raises(ConfigError, match="bfloat16"):
        plan.check(wider, 8)
