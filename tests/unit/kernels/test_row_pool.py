"""Pooled reads on the device against a plain loop, and against the compiled core."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shoal.kernels.pool import COLUMN, WIDTH, gather_pooled, pool_lines
from shoal.kernels.rows import gather
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.admission import Admission
from shoal.rules.compressors import FixedR8, OneBit
from shoal.rules.initializers import Normal, Uniform
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.device_rows import DEVICES, DeviceRows, draw_ids, plain_table
from support.pooling import pool_rows

SEED = 11


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Pooled:
    """One pooled call: groups of random bags over the tables of a shard."""

    def __init__(self, shard: DeviceRows, tables: Sequence[int], bags: int, seed: int) -> None:
        draw = random.Random(seed)
        ids = draw_ids(40)
        groups: list[tuple[int, list[int]]] = []
        lengths: list[int] = []
        for table in tables:
            sizes = [draw.choice((0, 0, 1, 1, 2, 3, 7)) for _ in range(bags)]
            lengths += sizes
            groups.append((table, draw.choices(ids, k=sum(sizes))))
        shard.insert(*((t, ids[:25]) for t in dict.fromkeys(tables)))
        self.shard, self.tables, self.bags = shard, list(tables), bags
        self.call = shard.tables.groups(*groups)
        self.handles_N = shard.look_up(self.call)
        self.offsets_GB1 = torch.tensor([0, *lengths]).cumsum(0)
        generator = torch.Generator().manual_seed(seed)
        self.weights_N = torch.rand(self.handles_N.numel(), generator=generator) + 0.5

    def pool(self, plan: PoolPlan, weighted: bool, initial: bool) -> tuple[Tensor, ...]:
        forms_G = [self.shard.forms[table] for table in self.tables]
        lines = pool_lines(plan, forms_G, torch.device(self.shard.device))
        outputs = gather_pooled(
            self.shard.tables.layout,
            lines,
            self.call,
            self.handles_N,
            self.offsets_GB1.to(self.shard.device),
            self.weights_N.to(self.shard.device) if weighted else None,
            initial=initial,
            global_step=3,
        )
        return tuple(output.cpu() for output in outputs)

    def rows(self, initial: bool) -> list[Tensor]:
        """One [D] per position, as a plain read gives them."""
        rows: list[Tensor] = []
        splits = self.call.splits_G1.tolist()
        for table, start, stop in zip(self.tables, splits, splits[1:], strict=False):
            form = self.shard.forms[table]
            out = torch.empty(stop - start, form.dim, dtype=form.real, device=self.shard.device)
            gather(
                self.shard.tables.layout, form, self.call, out, handles_N=self.handles_N,
                start=start, stop=stop, initial=initial, global_step=3,
            )  # fmt: skip
            rows += list(out.cpu())
        return rows


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written shows."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


def segmented(name: str, dtype: str = "float32", **more: object) -> TableSpec:
    return TableSpec(
        name=name,
        dtype=dtype,  # type: ignore[arg-type]
        segments=(
            Segment(name="bias", dim=1, initializer=Normal(0.0, 1.0)),
            Segment(name="vec", dim=6, initializer=Uniform(-1.0, 1.0), compressor=FixedR8(1.0)),
            Segment(name="bits", dim=2, initializer=Uniform(-1.0, 1.0), compressor=OneBit()),
        ),
        **more,  # type: ignore[arg-type]
    )


def assert_near(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weighted", "initial"),
    [(False, False), (True, True), *[(False, True), (True, False)] * torch.cuda.is_available()],
)
def test_every_pooling_of_every_width(device: str, weighted: bool, initial: bool) -> None:
    specs = [plain_table("a", 8), plain_table("b", 5, "bfloat16"), plain_table("c", 160)]
    call = Pooled(DeviceRows.make(specs, device, SEED), [0, 1, 2, 0], 21, seed=1)
    plan = PoolPlan(
        (
            Pool("sum", (Slice(0, 8, 0, 4), Slice(2, 5, 1, 0))),
            Pool("mean", (Slice(0, 5, 0, 12), Slice(1, 3, 1, 7))),
            Pool("mean", (Slice(0, 160, 2, 0),)),
            Pool("first_n", (Slice(0, 8, 3, 8), Slice(3, 4, 1, 3)), length=3),
        ),
        (Output(20), Output(9), Output(160), Output(32), Output(4)),
    )
    got = call.pool(plan, weighted, initial)
    weights_N = call.weights_N if weighted else None
    wanted = pool_rows(call.rows(initial), plan, call.offsets_GB1, weights_N, torch.float32)
    assert_near(got, wanted)


def test_slices_add_to_earlier_ones(device: str) -> None:
    specs = [plain_table("a", 8), plain_table("b", 6), plain_table("d", 8, "float64")]
    call = Pooled(DeviceRows.make(specs, device, SEED), [0, 1, 0, 0, 2, 2], 9, seed=2)
    plan = PoolPlan(
        (
            Pool("sum", (Slice(0, 8, 0, 0),)),
            Pool("mean", (Slice(0, 6, 0, 1, True),)),
            Pool("first_n", (Slice(0, 4, 0, 4, True),), length=2),
            Pool("sum", (Slice(0, 8, 0, 2, True), Slice(0, 8, 1, 4, True))),
            Pool("sum", (Slice(0, 8, 2, 0),)),
            Pool("mean", (Slice(0, 8, 2, 0, True),)),
        ),
        (Output(14), Output(12), Output(8)),
    )
    got = call.pool(plan, False, False)
    rows = call.rows(False)
    wanted = pool_rows([row.double() for row in rows], plan, call.offsets_GB1, None, torch.float64)
    assert_near(got, (wanted[0].float(), wanted[1].float(), wanted[2]))


def test_lines_of_one_launch_share_no_columns(device: str) -> None:
    """Programs of a launch run at once and add without atomics."""
    rows = DeviceRows.make([plain_table("a", 4)], device, SEED)
    plan = PoolPlan(
        (
            Pool("sum", (Slice(0, 4, 0, 4),)),
            Pool("first_n", (Slice(0, 4, 0, 0, True),), length=2),
            Pool("sum", (Slice(0, 4, 0, 0, True),)),
        ),
        (Output(8),),
    )
    form = rows.forms[0]
    for one in pool_lines(plan, [form] * 3, torch.device(device)).launches:
        lines = one.lines_LW.tolist()
        spans = [(line[COLUMN], line[COLUMN] + line[WIDTH]) for line in lines]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans))), spans


def test_pooling_nothing(device: str) -> None:
    shard = DeviceRows.make([plain_table("a", 4)], device, SEED)
    plan = PoolPlan((Pool("sum", (Slice(0, 4, 0, 0),)),), (Output(4),))
    call = Pooled(shard, [0], 0, seed=3)
    assert call.pool(plan, False, False)[0].shape == (0, 4)
    call.bags, call.offsets_GB1 = 3, torch.zeros(4, dtype=torch.int64)
    call.call = shard.tables.groups((0, []))
    call.handles_N = shard.look_up(call.call)
    assert torch.equal(call.pool(plan, False, True)[0], torch.zeros(3, 4))


def random_plan(specs: Sequence[TableSpec], tables: Sequence[int], seed: int) -> PoolPlan:
    """Each group on columns of its own, or added to an output of the same width and dtype."""
    draw = random.Random(seed)
    pools, outputs = list[Pool](), list[tuple[int, bool]]()
    for table in tables:
        spec = specs[table]
        pooling = draw.choice(("sum", "mean", "first_n"))
        length = draw.choice((1, 2, 4)) if pooling == "first_n" else 1
        cut = draw.randrange(spec.dim)
        slices = []
        for start, stop in [(0, cut), (cut, spec.dim)] if cut else [(0, spec.dim)]:
            shape = length * (stop - start), spec.dtype == "float64"
            add = shape in outputs and draw.random() < 0.6
            if not add:
                outputs.append(shape)
            output = outputs.index(shape) if add else len(outputs) - 1
            slices.append(Slice(start, stop, output, 0, add))
        pools.append(Pool(pooling, tuple(slices), length))  # type: ignore[arg-type]
    return PoolPlan(tuple(pools), tuple(Output(width) for width, _ in outputs))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4) if torch.cuda.is_available() else [1])
def test_random_plans_equal_the_compiled_core(device: str, seed: int) -> None:
    refusing = Admission(threshold=1000)
    specs = [
        segmented("a"),
        segmented("b", "float16"),
        segmented("c", "float64"),
        plain_table("d", 16),
    ]
    tables = random.Random(seed).choices(range(4), k=6)
    call = Pooled(DeviceRows.make(specs, device, SEED), tables, 8, seed=seed)
    plan = random_plan(specs, tables, seed)
    groups = IdGroups(
        call.call.ids_N.cpu(), call.call.splits_G1.cpu(), torch.tensor(tables, dtype=torch.int32)
    )
    ids = draw_ids(40)[:25]
    ctx = StepContext(global_step=3)
    for initial in (False, True):
        own = [TableSpec(**{**vars_of(spec), "admission": refusing}) for spec in specs]
        shard = CpuShard(own, seed=SEED)
        for k, spec in enumerate(specs):
            other = CpuShard([spec], seed=SEED)
            one = torch.tensor(ids), torch.tensor([0, 25]), torch.tensor([0], dtype=torch.int32)
            other.find_or_init(IdGroups(*one), ctx=ctx).end()
            shard.load(k, other.export(0))
        shard.last_step = 3
        for weighted in (False, True):
            inputs = plan, call.offsets_GB1, call.weights_N if weighted else None
            if initial:
                ticket = shard.find_or_init(groups, ctx=ctx)
                wanted = shard.gather_pooled(ticket, *inputs, ctx=ctx)
            else:
                wanted = shard.find_pooled(groups, *inputs)
            assert_near(call.pool(plan, weighted, initial), wanted)


def vars_of(spec: TableSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in ("name", "dtype", "segments")}
