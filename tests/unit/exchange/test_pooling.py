"""Rows received in flat buffers pool, and spread their gradients, as a local shard's rows do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.embedding.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature, Layout, LayoutKind, LayoutSlice, default_layouts
from shoal.errors import ConfigError, DTypeError, InputError
from shoal.exchange.pooling import HostedColumns, ReceivedRows
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.ops.dispatch import bounds_checks
from shoal.table.spec import TableSpec
from support.backends import BACKENDS, Implementation, forced
from support.poison import poisoned
from support.received import Received, batch_of, make_received, table

COMBINERS: list[Combiner] = [ReduceSum(), ReduceMean(), FirstN(2)]


def assert_pools(impl: Implementation, case: Received) -> None:
    """Pooled outputs equal the local shard's, bit for bit."""
    want = case.expected()
    with forced(impl.name), poisoned():
        got = case.compiled().pool(*case.on(impl.device))
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)


def assert_spreads(impl: Implementation, case: Received, seed: int = 5) -> None:
    """Gradients of ids equal the local shard's sums; floats nobody reads are zeros."""
    draw = torch.Generator().manual_seed(seed)
    grads = [
        torch.randint(-8, 9, out.shape, generator=draw).to(out.dtype) / 4 for out in case.expected()
    ]
    rows, offsets_N, batch = case.on(impl.device)
    sizes = [part.numel() for part in rows]
    moved = [grad.to(impl.device) for grad in grads]
    with forced(impl.name), poisoned():
        spread = case.compiled().spread(moved, sizes, offsets_N, batch)
    assert [part.numel() for part in spread] == sizes
    assert [part.dtype for part in spread] == list(case.reals)
    got, want = case.grads_of([part.cpu() for part in spread]), case.expected_grads(grads)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for id_, row in theirs.items():
            torch.testing.assert_close(mine[id_], row, rtol=1e-6, atol=1e-6)
    left = [part.cpu().clone() for part in spread]
    for columns, places in zip(case.hosted, case.places, strict=True):
        for place in places.values():
            left[columns.buffer][place : place + columns.width] = 0
    assert all(not part.any() for part in left)


TABLES = (table("a", 1, 4), table("b", 3, 2, dtype="float64"), table("c", 1, 4))
FEATURES = (
    Feature("f0", "a"),
    Feature("f1", "b", ReduceMean()),
    Feature("f2", "a", FirstN(2)),
    Feature("f3", "c", FirstN(2)),
    Feature("f4", "c", ReduceMean()),
)
LAYOUTS = (
    Layout("bias", "addn", tuple(LayoutSlice(f, "s0") for f in ("f4", "f0"))),
    Layout("joined", "concat", (LayoutSlice("f0"), LayoutSlice("f4", "s1"))),
    Layout("steps", "concat", (LayoutSlice("f2"), LayoutSlice("f3", "s1"))),
    Layout("piled", "stack", (LayoutSlice("f2", "s1"), LayoutSlice("f3", "s1"))),
    Layout("lone", "none", (LayoutSlice("f1"), LayoutSlice("f1", "s1"))),
)
LENGTHS = ((2, 0, 1), (3, 1, 0), (3, 0, 1), (0, 2, 1), (1, 2, 4))
WHOLE, CUT = ((), (), ()), ((2, 4), (4,), (1,))


def fixed(
    cuts: Sequence[Sequence[int]] = CUT,
    *,
    weights: bool = False,
    banks: Sequence[int] | None = None,
    lengths: Sequence[Sequence[int]] = LENGTHS,
) -> Received:
    batch = batch_of([f.name for f in FEATURES], lengths, weights=weights)
    return make_received(TABLES, FEATURES, LAYOUTS, batch, cuts, banks=banks)


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize("cuts", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weighted"])
class TestEveryImplementation:
    @pytest.mark.slow
    def test_pools(
        self, impl: Implementation, cuts: Sequence[Sequence[int]], weights: bool
    ) -> None:
        assert_pools(impl, fixed(cuts, weights=weights))

    @pytest.mark.slow
    def test_spreads(
        self, impl: Implementation, cuts: Sequence[Sequence[int]], weights: bool
    ) -> None:
        assert_spreads(impl, fixed(cuts, weights=weights))


@pytest.mark.parametrize("impl", BACKENDS)
class TestShapes:
    @pytest.mark.slow
    def test_several_banks_of_one_dtype(self, impl: Implementation) -> None:
        case = fixed(CUT, banks=(2, 1, 3))
        assert len(case.reals) == 4
        assert_pools(impl, case)
        assert_spreads(impl, case)

    @pytest.mark.parametrize("size", [0, 2])
    def test_no_ids(self, impl: Implementation, size: int) -> None:
        case = fixed(CUT, lengths=[[0] * size for _ in FEATURES])
        assert_pools(impl, case)
        assert_spreads(impl, case)

    def test_columns_that_no_slice_covers_are_zeros(self, impl: Implementation) -> None:
        case = fixed(CUT)
        pools = tuple(replace(pool, slices=()) for pool in case.plan.pools)
        pools = (
            replace(pools[0], slices=(Slice(1, 3, 1, 2), Slice(0, 1, 1, 6))),
            *pools[1:],
        )
        gappy = replace(case, plan=PoolPlan(pools, (Output(3), Output(8))))
        with forced(impl.name), poisoned():
            rows = gappy.compiled()
            empty, some = rows.pool(*gappy.on(impl.device))
        assert empty.dtype == torch.float32
        assert not empty.any()
        assert not some[:, [0, 1, 4, 5, 7]].any()
        whole = fixed(CUT)
        joined = whole.expected()[1]
        assert torch.equal(some.cpu()[:, [6, 2, 3]], joined[:, [0, 1, 2]])


@pytest.mark.parametrize("impl", BACKENDS[:2])
class TestAddedSequences:
    def test_first_n_slices_that_add(self, impl: Implementation) -> None:
        case = fixed(CUT)
        pools = [replace(pool, slices=()) for pool in case.plan.pools]
        pools[0] = replace(pools[0], slices=(Slice(1, 5, 0, 0),))
        pools[2] = replace(pools[2], slices=(Slice(1, 3, 0, 0, add=True),))
        added = replace(case, plan=PoolPlan(tuple(pools), (Output(4),)))
        assert_pools(impl, added)
        assert_spreads(impl, added)


@st.composite
def cases(draw: st.DrawFn) -> Received:
    count = draw(st.integers(1, 3))
    tables = [
        table(
            f"t{i}",
            *draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
            dtype=draw(st.sampled_from(["float32", "float64"])),
        )
        for i in range(count)
    ]
    names = [f"f{i}" for i in range(draw(st.integers(1, 4)))]
    features = [
        Feature(name, f"t{draw(st.integers(0, count - 1))}", draw(st.sampled_from(COMBINERS)))
        for name in names
    ]
    size = draw(st.integers(0, 3))
    # Exact: no sum rounds, so weights and features that are added to themselves are the same too.
    exact = draw(st.booleans())
    counts = st.sampled_from([0, 1, 2, 4]) if exact else st.integers(0, 4)
    lengths = [draw(st.lists(counts, min_size=size, max_size=size)) for _ in names]
    batch = batch_of(names, lengths, weights=exact and draw(st.booleans()))
    cuts = [draw(st.lists(st.integers(1, 6), max_size=3)) for _ in tables]
    layouts = [*default_layouts(features), *draw(joined(tables, features, exact))]
    banks = [draw(st.integers(1, 2)) for _ in tables]
    return make_received(tables, features, layouts, batch, cuts, banks=banks, exact=exact)


@st.composite
def joined(
    draw: st.DrawFn, tables: Sequence[TableSpec], features: Sequence[Feature], twice: bool
) -> list[Layout]:
    """Layouts of slices that can be joined: of one dtype, length and, if added, width."""
    specs = {spec.name: spec for spec in tables}
    kinds: dict[tuple[str, int], list[tuple[LayoutSlice, int]]] = {}
    for feature in features:
        spec = specs[feature.table]
        length = feature.combiner.max_seq_length
        for segment in spec.segments:
            piece = LayoutSlice(feature.name, segment.name), segment.dim
            kinds.setdefault((spec.dtype, length), []).append(piece)
    made = []
    for (_, length), pieces in kinds.items():
        chosen = draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=4))
        slices = tuple(piece for piece, _ in chosen)
        made.append(Layout(f"concat{len(made)}", "concat", slices))
        same = tuple(piece for piece, width in chosen if width == chosen[0][1])
        if not twice:
            same = tuple({piece.feature: piece for piece in same}.values())
        kind: LayoutKind = draw(st.sampled_from(["stack"] if length else ["stack", "addn"]))
        made.append(Layout(f"{kind}{len(made)}", kind, same))
    return made


CORE = BACKENDS[1].values[0]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_any_plan_equals_a_local_shard(case: Received) -> None:
    assert isinstance(CORE, Implementation)
    assert_pools(CORE, case)
    assert_spreads(CORE, case)


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("impl", BACKENDS[:2])
def test_sums_that_round_are_taken_in_order(impl: Implementation, weights: bool) -> None:
    batch = batch_of([f.name for f in FEATURES], [[5, 3, 7]] * 5, weights=weights, ids=40)
    # The reference adds pooled features; the core adds row by row, as a shard on the CPU.
    layouts = default_layouts(FEATURES) if impl.name == "reference" else LAYOUTS
    case = make_received(TABLES, FEATURES, layouts, batch, CUT, exact=False)
    assert_pools(impl, case)


class TestRefusals:
    def test_rows_that_leave_their_bank(self) -> None:
        case = fixed()
        rows, offsets_N, batch = case.on("cpu")
        offsets_N[-1] = 10_000
        with pytest.raises(InputError, match="rows_N"):
            case.compiled().pool(rows, offsets_N, batch)

    def test_slices_over_each_other(self) -> None:
        pool = Pool("sum", (Slice(0, 3, 0, 0), Slice(0, 2, 0, 2)))
        plan = PoolPlan((pool,), (Output(4),))
        with pytest.raises(ConfigError, match="written twice"):
            ReceivedRows(plan, [0], [HostedColumns(0, 0, 4, 0)], [torch.float32])

    def test_an_output_of_two_dtypes(self) -> None:
        pools = tuple(Pool("sum", (Slice(0, 2, 0, 2 * i),)) for i in range(2))
        hosted = [HostedColumns(i, 0, 2, i) for i in range(2)]
        with pytest.raises(DTypeError, match="output 0"):
            plan = PoolPlan(pools, (Output(4),))
            ReceivedRows(plan, [0, 1], hosted, [torch.float32, torch.float64])


def test_bounds_checks_pass(impl: Implementation = CORE) -> None:  # type: ignore[assignment]
    with bounds_checks():
        assert_pools(impl, fixed())
