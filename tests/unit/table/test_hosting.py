"""The sub-tables that placements put on ranks: their specs, planned placements, what is refused."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from shoal.errors import ConfigError, UnknownName
from shoal.placement import (
    Hosted,
    Placement,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_row_wise,
    table_wise,
)
from shoal.rules.admission import Admission
from shoal.rules.compressors import FixedR8
from shoal.rules.expiry import Expiry
from shoal.rules.initializers import Constant, Normal
from shoal.rules.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    DelayCompensated,
    GroupFTRL,
    Optimizer,
    RowWiseAdagrad,
)
from shoal.table.hosting import check_placement, hosted_spec, hosted_specs, plan_placement
from shoal.table.spec import Segment, TableSpec

KINDS = ("row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel")

WIDE = TableSpec(
    name="t",
    segments=(
        Segment(name="bias", dim=1, initializer=Constant(0.5), optimizer=SGD(lr=0.1)),
        Segment(name="a", dim=6, initializer=Normal(), optimizer=Adam(lr=0.01)),
        Segment(name="b", dim=5, optimizer=RowWiseAdagrad(), compressor=FixedR8(r=1.0)),
    ),
    dtype="bfloat16",
    capacity_rows=1001,
    on_full="lru",
    expected_rows=10,
    admission=Admission(threshold=3),
    expiry=Expiry(ttl_s=9),
)


def table(rule: Optimizer, dim: int = 8, name: str = "t") -> TableSpec:
    return TableSpec(name=name, segments=(Segment(dim=dim, optimizer=rule),))


def test_whole_rows_keep_the_spec_but_for_shares_of_the_budget() -> None:
    assert hosted_spec(WIDE, table_wise("t", 12, 3)[0]) == WIDE
    assert hosted_spec(WIDE, data_parallel("t", 12, 4)[0]) == WIDE
    share = hosted_spec(WIDE, row_wise("t", 12, 4)[0])
    assert (share.name, share.capacity_rows, share.expected_rows) == ("t", 251, 3)
    assert share.segments == WIDE.segments
    assert (share.admission, share.expiry) == (WIDE.admission, WIDE.expiry)
    assert (share.hash_name, share.first_column) == ("t", 0)


def test_slices_cut_segments_and_keep_names() -> None:
    left = hosted_spec(WIDE, Hosted("t", 0, 3, (0,)))
    middle = hosted_spec(WIDE, Hosted("t", 3, 7, (0, 1)))
    right = hosted_spec(WIDE, Hosted("t", 7, 12, (1,)))
    assert [s.name for s in (left, middle, right)] == ["t[0:3]", "t[3:7]", "t[7:12]"]
    assert [(s.name, s.dim) for s in left.segments] == [("bias", 1), ("a", 2)]
    assert [(s.name, s.dim) for s in middle.segments] == [("a", 4)]
    assert right.segments == WIDE.segments[2:]
    assert middle.segments[0].optimizer == WIDE.segments[1].optimizer
    assert middle.segments[0].initializer == WIDE.segments[1].initializer
    assert [s.first_column for s in (left, middle, right)] == [0, 3, 7]
    assert {s.hashed_as for s in (left, middle, right)} == {"t"}
    assert (left.capacity_rows, middle.capacity_rows) == (1001, 501)
    assert left.on_full == "lru"
    assert left.dtype == "bfloat16"


def test_a_slice_of_a_slice_counts_columns_from_the_whole() -> None:
    slice_ = hosted_spec(table(SGD(lr=1.0), 16), Hosted("t", 8, 16, (0,)))
    inner = hosted_spec(slice_, Hosted("t[8:16]", 2, 8, (0,)))
    assert (inner.first_column, inner.hash_name, inner.name) == (10, "t", "t[8:16][2:8]")


def test_a_rank_s_tables_come_in_the_order_of_specs() -> None:
    specs = [table(SGD(lr=1.0), 8, name) for name in ("z", "a", "m")]
    slices = (
        *column_wise("z", 8, (1, 0)),
        *row_wise("a", 8, 2),
        *column_wise("m", 8, (0, 0)),
    )
    placement = Placement(2, slices)
    names = [[one.name for one in hosted_specs(specs, placement, rank)] for rank in (0, 1)]
    assert names == [["z[4:8]", "a", "m[0:4]", "m[4:8]"], ["z[0:4]", "a"]]


@pytest.mark.parametrize(
    "rule", [RowWiseAdagrad(), LAMB(), GroupFTRL(), DelayCompensated(inner=LAMB())]
)
def test_a_coupled_segment_is_not_cut(rule: Optimizer) -> None:
    inner = type(getattr(rule, "inner", rule)).__name__
    placement = Placement(2, column_wise("t", 8, (0, 1)))
    with pytest.raises(ConfigError, match=rf"'t'.*'vec'.*{inner}.*Split between segments"):
        check_placement([table(rule)], placement)
    with pytest.raises(ConfigError, match=inner):
        hosted_spec(table(rule), placement.hosted[0])
    for whole in (row_wise("t", 8, 2), table_wise("t", 8, 1), data_parallel("t", 8, 2)):
        check_placement([table(rule)], Placement(2, whole))


def test_cuts_between_coupled_segments_are_legal() -> None:
    segments = (
        Segment(name="a", dim=3, optimizer=RowWiseAdagrad()),
        Segment(name="b", dim=5, optimizer=LAMB()),
    )
    spec = TableSpec(name="t", segments=segments)
    slices = (Hosted("t", 0, 3, (0,)), Hosted("t", 3, 8, (1,)))
    check_placement([spec], Placement(2, slices))
    assert [hosted_spec(spec, one).segments for one in slices] == [segments[:1], segments[1:]]


def test_a_rule_coupled_over_the_row_admits_no_cut_at_all() -> None:
    class Coupled(SGD):
        coupling = "row"  # type: ignore[assignment]

    segments = (
        Segment(name="a", dim=4, optimizer=SGD(lr=1.0)),
        Segment(name="b", dim=4, optimizer=Coupled(lr=1.0)),
    )
    spec = TableSpec(name="t", segments=segments)
    check_placement([spec], Placement(2, row_wise("t", 8, 2)))
    with pytest.raises(ConfigError, match=r"'b'.*Coupled reads the whole row"):
        check_placement([spec], Placement(2, column_wise("t", 8, (0, 1))))


def test_placements_that_do_not_fit_are_refused() -> None:
    spec = table(SGD(lr=1.0))
    with pytest.raises(UnknownName, match="'u'"):
        check_placement([spec], Placement(2, (*row_wise("t", 8, 2), *row_wise("u", 8, 2))))
    for slices in ((), row_wise("t", 7, 2), row_wise("t", 9, 2)):
        with pytest.raises(ConfigError, match="columns of table 't'"):
            check_placement([spec], Placement(2, slices))
    with pytest.raises(ConfigError, match="rank of a placement"):
        hosted_specs([spec], Placement(2, row_wise("t", 8, 2)), 2)
    with pytest.raises(ConfigError, match="of table 'other'"):
        hosted_spec(spec, table_wise("other", 8, 0)[0])
    with pytest.raises(ConfigError, match="columns of table 't'"):
        hosted_spec(spec, table_wise("t", 9, 0)[0])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_every_type_fit_and_agree(kind: str, world: int) -> None:
    specs = [table(Adagrad(), dim, f"t{dim}") for dim in (1, 2, 8, 30, 64)]
    node = min(world, 2)
    placement = plan_placement(specs, world, default=kind, local_world_size=node)
    assert placement == plan_placement(list(specs), world, default=kind, local_world_size=node)
    check_placement(specs, placement)
    for rank in range(world):
        hosted_specs(specs, placement, rank)
    shares = sum(len(one.ranks) for one in placement.hosted)
    assert shares >= len(specs)


def test_what_a_plan_gives_each_table() -> None:
    kinds = {f"t{k}": kind for k, kind in enumerate(KINDS)}
    specs = [table(SGD(lr=1.0), 16, name) for name in kinds]
    placement = plan_placement(specs, 4, kinds=kinds, local_world_size=2)
    assert placement.of("t0") == row_wise("t0", 16, 4)
    assert placement.of("t1") == table_wise("t1", 16, 0)
    assert [one.stop for one in placement.of("t2")] == [4, 8, 12, 16]
    assert sorted(one.ranks for one in placement.of("t2")) == [(0,), (1,), (2,), (3,)]
    assert placement.of("t3") == table_row_wise("t3", 16, (2, 3))
    assert placement.of("t4") in [
        grid("t4", 16, nodes) for nodes in (((0, 1), (2, 3)), ((2, 3), (0, 1)))
    ]
    assert placement.of("t5") == data_parallel("t5", 16, 4)


def test_whole_tables_go_where_least_is() -> None:
    sizes = [100, 10, 10, 50, 30]
    specs = [
        TableSpec(name=f"t{k}", segments=(Segment(dim=4),), expected_rows=rows)
        for k, rows in enumerate(sizes)
    ]
    placement = plan_placement(specs, 2, default="table_wise")
    ranks = [placement.of(spec.name)[0].ranks for spec in specs]
    assert ranks == [(0,), (1,), (1,), (1,), (1,)]


def test_plans_are_refused() -> None:
    spec = table(LAMB())
    with pytest.raises(ConfigError, match="LAMB"):
        plan_placement([spec], 2, default="column_wise")
    with pytest.raises(ConfigError, match=r"sharding type of table 't'.*row_wise"):
        plan_placement([spec], 2, default="rows")
    with pytest.raises(UnknownName, match="'u'"):
        plan_placement([spec], 2, kinds={"u": "row_wise"})
    for world, node in ((0, None), (2, 0)):
        with pytest.raises(ConfigError, match="world_size"):
            plan_placement([spec], world, local_world_size=node)


@pytest.mark.parametrize(
    "changed", [{"hashed_as": ""}, {"hashed_as": 3}, {"first_column": -1}, {"first_column": True}]
)
def test_specs_with_a_wrong_origin_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        TableSpec(name="t", segments=(Segment(dim=4),), **changed)  # type: ignore[arg-type]


def test_every_cut_of_element_wise_columns_is_legal() -> None:
    spec = table(Adam(), 9)
    for cut in range(1, 9):
        placed = tuple(Hosted("t", a, b, (0,)) for a, b in pairwise((0, cut, 9)))
        check_placement([spec], Placement(1, placed))
        parts = [hosted_spec(spec, one) for one in placed]
        assert [p.first_column for p in parts] == [0, cut]
        assert list(accumulate(p.dim for p in parts)) == [cut, 9]
