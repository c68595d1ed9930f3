"""Sub-tables of some columns hold the bits of those columns of the whole table.

Initial values on the reference, the compiled core and the GPU shard; then trained 16-bit rows.
The GPU shard runs a few steps, interpreted, where there is no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shoal.placement import Hosted
from shoal.rules.admission import Admission
from shoal.rules.compressors import FixedR8, Float32
from shoal.rules.initializers import (
    Constant,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    initial_values,
    stream_key,
)
from shoal.rules.optimizers import SGD, Adagrad, Adam, DelayCompensated, Optimizer, RowWiseAdagrad
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda.shard import CudaShard
from shoal.table.hosting import hosted_spec
from shoal.table.shard import IdGroups, Shard, StepContext
from shoal.table.spec import RowDType, Segment, TableSpec
from support.placed_shard import PlacedShard
from support.rounding import stochastic_round

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SEED = 2**63 + 11

pytestmark = [pytest.mark.gpu] if ON_GPU else []

DTYPES: tuple[RowDType, ...] = ("float32", "float16", "bfloat16", "float64")
LAWS: tuple[Initializer, ...] = (Uniform(-0.3, 0.7), Normal(1.0, 0.2), TruncatedNormal())
CUTS = ((4, 8), (8,), (1, 2, 5), (3, 10, 11), (7,))


def core(specs: Sequence[TableSpec]) -> Shard:
    return CpuShard(specs, seed=SEED)


def device(specs: Sequence[TableSpec]) -> Shard:
    return PlacedShard(CudaShard(specs, seed=SEED, device=DEVICE))


SHARDS = [pytest.param(core, id="core"), pytest.param(device, id="device")]
Make = Callable[[Sequence[TableSpec]], Shard]


def slices_of(spec: TableSpec, cuts: Sequence[int]) -> tuple[TableSpec, ...]:
    edges = pairwise((0, *cuts, spec.dim))
    return tuple(hosted_spec(spec, Hosted(spec.name, a, b, (0,))) for a, b in edges)


def groups(ids_N: Tensor, table: int) -> IdGroups:
    splits = torch.tensor([0, len(ids_N)])
    return IdGroups(ids_N, splits, torch.tensor([table], dtype=torch.int32))


def each(ids_N: Tensor, tables: int) -> IdGroups:
    """The ids in each of the first tables."""
    splits = torch.arange(tables + 1) * len(ids_N)
    return IdGroups(ids_N.repeat(tables), splits, torch.arange(tables, dtype=torch.int32))


def stored(shard: Shard) -> tuple[Tensor, list[Tensor]]:
    """Weights of table 0, and those of the others side by side."""
    whole, *parts = (shard.export(k) for k in range(len(shard.specs)))
    for part in parts:
        # One salt: the same order.
        assert torch.equal(part.ids, whole.ids)
    return whole.weights, [part.weights for part in parts]


def mixed(dtype: RowDType) -> TableSpec:
    segments = (
        Segment(name="bias", dim=1, initializer=Normal(), optimizer=SGD(lr=0.1)),
        Segment(name="a", dim=6, initializer=LAWS[0], optimizer=Adagrad(lr=0.1)),
        Segment(name="b", dim=5, initializer=LAWS[2], optimizer=Adam(lr=0.01)),
    )
    return TableSpec(name="t", segments=segments, dtype=dtype)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
@pytest.mark.parametrize("start", [0, 1, 4, 6, 63])
def test_the_reference_counts_columns_of_the_whole_row(law: Initializer, start: int) -> None:
    ids = torch.tensor([0, -1, 7, 2**62, -(2**63)])
    whole = initial_values(law, ids, seed=SEED, table="t", column_start=0, dim=67)
    for dim in (1, 2, 4):
        part = initial_values(law, ids, seed=SEED, table="t", column_start=start, dim=dim)
        assert torch.equal(part, whole[:, start : start + dim])


@pytest.mark.slow
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", SHARDS)
def test_initial_values_are_those_of_the_whole(
    make: Make, dtype: RowDType, cuts: tuple[int, ...]
) -> None:
    spec = mixed(dtype)
    parts = slices_of(spec, cuts)
    shard = make([spec, *parts])
    # More than the rows that a core draws together, and a few over.
    ids = torch.arange(-9, 10) * 0x9E3779B97F4A7C1
    seen = each(ids, len(parts) + 1)
    ticket = shard.find_or_init(seen, ctx=StepContext(event_time_s=5))
    read = shard.gather(ticket, ctx=StepContext())
    ticket.end()
    assert torch.equal(read[0], torch.cat(read[1:], dim=1))
    whole, held = stored(shard)
    assert torch.equal(whole, torch.cat(held, dim=1))
    reference = [
        initial_values(
            s.initializer,
            ids,
            seed=SEED,
            table="t",
            column_start=spec.columns(s.name)[0],
            dim=s.dim,
        )
        for s in spec.segments
    ]
    assert torch.equal(read[0], torch.cat(reference, dim=1).to(whole.dtype).to(read[0].dtype))


@pytest.mark.slow
@pytest.mark.parametrize("make", SHARDS)
def test_rows_written_anew_get_the_same_values(make: Make) -> None:
    spec = mixed("bfloat16")
    parts = slices_of(spec, (3, 8))
    shard = make([spec, *parts])
    ids = torch.arange(21) - 4
    every = each(ids, len(parts) + 1)
    first = shard.find_or_init(every, ctx=StepContext())
    first.end()
    kept, _ = stored(shard)
    ones = [torch.ones(len(ids), s.dim) for s in shard.specs]
    shard.assign(every, ones, ctx=StepContext())
    assert bool((stored(shard)[0] == 1).all())
    assert bool(shard.reinitialize(every, ctx=StepContext()).all())
    whole, held = stored(shard)
    assert torch.equal(whole, kept)
    assert torch.equal(torch.cat(held, dim=1), kept)


def trained(make: Make, spec: TableSpec, cuts: Sequence[int], steps: int, batch: int) -> None:
    parts = slices_of(spec, cuts)
    shard = make([spec, *parts])
    edges = [0, *cuts, spec.dim]
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        ids = torch.randint(-20, 20, (batch,), generator=generator)
        grad = torch.randn(batch, spec.dim, generator=generator)
        # Where a device adds an id's gradients depends on how wide its rows are.
        grad = (64 * grad).round() / 64 if ON_GPU else grad
        columns = [grad[:, a:b].contiguous() for a, b in pairwise(edges)]
        ctx = StepContext(global_step=step, event_time_s=step)
        shard.apply_ids(each(ids, len(parts) + 1), [grad, *columns], ctx=ctx)
    whole, held = stored(shard)
    assert torch.equal(whole, torch.cat(held, dim=1))
    assert whole.dtype == getattr(torch, spec.dtype)


RULES: tuple[Optimizer, ...] = (
    SGD(lr=0.05),
    Adagrad(lr=0.1, weight_decay=0.01),
    Adam(lr=0.01),
    DelayCompensated(inner=Adagrad(lr=0.1)),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_hundred_steps_on_the_core(rule: Optimizer, dtype: RowDType) -> None:
    for dim, cuts in ((12, (4, 8)), (67, (1, 2, 30, 64)), (128, (64,))):
        segment = Segment(dim=dim, optimizer=rule)
        spec = TableSpec(name="t", segments=(segment,), dtype=dtype)
        trained(core, spec, cuts, steps=100, batch=50)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_rows_of_several_segments_on_the_core(cuts: tuple[int, ...]) -> None:
    trained(core, mixed("bfloat16"), cuts, steps=30, batch=30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("cuts", [(4,), (3, 9)], ids=str)
@pytest.mark.gpu if ON_GPU else pytest.mark.filterwarnings("default")
def test_steps_on_the_device(rule: Optimizer, dtype: RowDType, cuts: tuple[int, ...]) -> None:
    segment = Segment(dim=12, optimizer=rule)
    spec = TableSpec(name="t", segments=(segment,), dtype=dtype)
    trained(device, spec, cuts, *((100, 400) if ON_GPU else (3, 12)))


@pytest.mark.slow
def test_rows_of_several_segments_on_the_device() -> None:
    trained(device, mixed("bfloat16"), (5, 8), *((100, 400) if ON_GPU else (2, 12)))


def test_slices_between_coupled_and_compressed_segments() -> None:
    segments = (
        Segment(name="a", dim=5, optimizer=RowWiseAdagrad(lr=0.1)),
        Segment(name="b", dim=7, optimizer=Adam(lr=0.01), compressor=FixedR8(r=1.0)),
        Segment(name="c", dim=2, optimizer=SGD(lr=0.1), compressor=Float32()),
    )
    spec = TableSpec(name="t", segments=segments, dtype="bfloat16")
    trained(core, spec, (5, 9), steps=100, batch=40)


def test_the_rounding_of_a_slice_is_the_reference_s() -> None:
    spec = TableSpec(
        name="t", segments=(Segment(dim=11, optimizer=SGD(lr=0.5), initializer=Constant(0.3)),),
        dtype="bfloat16",
    )  # fmt: skip
    part = hosted_spec(spec, Hosted("t", 5, 11, (0,)))
    ids = torch.arange(-30, 30)
    grad = torch.randn(len(ids), 6, generator=torch.Generator().manual_seed(0))
    for make in (core, device):
        shard = make([part])
        shard.apply_ids(groups(ids, 0), [grad], ctx=StepContext(global_step=8))
        start = torch.full((len(ids), 6), 0.3).bfloat16().float()
        want = stochastic_round(
            start - 0.5 * grad, torch.bfloat16,
            key=stream_key(SEED, "t"), ids_U=ids, column_start=5, global_step=8,
        )  # fmt: skip
        chunk = shard.export(0)
        assert torch.equal(chunk.weights[chunk.ids.argsort()], want)


@pytest.mark.slow
@pytest.mark.parametrize("make", SHARDS)
def test_admission_of_slices_decides_as_that_of_the_whole(make: Make) -> None:
    rule = Admission(threshold=2, counter="sketch", sketch_width=16, sketch_depth=2)
    spec = replace(mixed("float32"), admission=rule)
    parts = slices_of(spec, (7,))
    shard = make([spec, *parts])
    for step in range(3):
        ids = torch.arange(step, 30, 2)
        ticket = shard.find_or_init(each(ids, 3), ctx=StepContext(global_step=step))
        # Ids without a row read as what they would start as.
        read = shard.gather(ticket, ctx=StepContext(global_step=step))
        assert torch.equal(read[0], torch.cat(read[1:], dim=1))
        assert bool((read[0] != 0).all())
        assert step > 0 or not bool(ticket.admitted_N.all())
        ticket.end()
    whole, held = stored(shard)
    assert torch.equal(whole, torch.cat(held, dim=1))
    assert 0 < len(whole) <= 30
