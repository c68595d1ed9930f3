"""Gradients summed per row and optimizer steps on device rows, against each rule's own `step`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from shoal.ids import mix64
from shoal.kernels.gradients import (
    COLD_RUN,
    PooledGroup,
    bags_of,
    per_position,
    pooled,
    runs_of,
    sources_of,
)
from shoal.kernels.step import apply
from shoal.kernels.step_sums import sum_runs
from shoal.kernels.step_tiles import Stamp
from shoal.lookup import Output, Pool, PoolPlan, Slice
from shoal.rules.compressors import OneBit
from shoal.rules.optimizers import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Amsgrad,
    BatchSoftmax,
    DelayCompensated,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Momentum,
    MovingAverage,
    Optimizer,
    RMSprop,
    RowWiseAdagrad,
    SignSGD,
)
from shoal.table.shard import GradRecord
from support.pooling import position_gradients
from support.rounding import stochastic_round
from support.stepped_rows import StepWorld, drawn, eighths, form_of, on, step

HAS_GPU = torch.cuda.is_available()
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if HAS_GPU else pytest.param("cpu")]
pytestmark = pytest.mark.parametrize("device", DEVICES)

FUSED = [
    SGD(weight_decay=0.01),
    Momentum(weight_decay=0.01),
    Momentum(nesterov=True),
    Adagrad(weight_decay=0.01, eps=1e-3),
    RowWiseAdagrad(weight_decay=0.01, eps=1e-3),
    Adadelta(weight_decay=0.01),
    Adam(weight_decay=0.01),
    Adam(nesterov=True),
    AdamW(eps=1e-3),
    Amsgrad(weight_decay=0.01),
    Amsgrad(nesterov=True),
    FTRL(beta=0.5, l1=0.25, l2=0.1),
    RMSprop(weight_decay=0.01),
    RMSprop(accumulate="sum"),
    SignSGD(weight_decay=0.01),
    MovingAverage(),
    LAMB(),
    GroupFTRL(l1=0.25, l2=0.1),
    GroupAdagrad(beta=0.5, l2=0.1, weight_decay=0.01),
    DynamicWdAdagrad(weight_decay=0.1),
    DynamicWdAdagrad(weight_decay=0.1, decouple=False, flip=False, temperature=0.5),
    DynamicWdAdagrad(weight_decay=0.1, dynamic=False),
]
DELAYED = [DelayCompensated(inner=Adagrad(), strength=0.5), DelayCompensated(inner=SGD())]


def named(value: object) -> str:
    return value.kind if isinstance(value, Optimizer) else str(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", FUSED, ids=named)
def test_rules_in_registers(rule: Optimizer, dtype: torch.dtype, device: str) -> None:
    world = StepWorld([form_of((5, rule), dtype=dtype)], [0, 0], 20, device)
    mine = world.handles[0][:7] + world.handles[1][:7]
    for number in range(3 if HAS_GPU else 2):
        lengths = [1, 2, 3, COLD_RUN, COLD_RUN + 1, 0, 1] * 2
        handles = drawn(mine, lengths, seed=number)
        stamp = Stamp(version=number + 2, event_time_s=7 * number, global_step=number)
        step(world, handles, eighths(len(handles), 5, number, dtype), stamp)
    world.check(1e-6 if dtype is torch.float32 else 1e-12)


def test_frequency_estimate(device: str) -> None:
    world = StepWorld([form_of((1, BatchSoftmax()))], [0], 10, device)
    for global_step in (3, (1 << 20) + 9, (1 << 20) + 11):
        handles = drawn(world.handles[0], [1, 4, 12])
        step(world, handles, eighths(len(handles), 1), Stamp(2, 9, global_step))
    # Gaps near 2^20 lose float32 digits that the reference keeps.
    world.check(2e-6)


@pytest.mark.parametrize("rule", [FTRL(), GroupFTRL(), GroupAdagrad()], ids=named)
def test_rate_zero_leaves_rows(rule: Optimizer, device: str) -> None:
    world = StepWorld([form_of((4, rule))], [0], 10, device)
    world.rates_KR.zero_()
    step(world, world.handles[0], eighths(10, 4), Stamp(2, 9, 0))
    world.check(0)


@pytest.mark.parametrize("rule", DELAYED, ids=named)
def test_stale_gradients(rule: Optimizer, device: str) -> None:
    world = StepWorld([form_of((6, rule))], [0, 0], 12, device)
    mine = world.handles[0][:6] + world.handles[1][:6]
    for number in range(3):
        handles = drawn(mine, [1, 2, 9, 0, 30, 1] * 2, seed=number)
        seen = torch.randn(len(handles), 6, generator=torch.Generator().manual_seed(number))
        grads = eighths(len(handles), 6, number)
        step(world, handles, grads, Stamp(number + 2, 9, number), seen=seen)
    world.check()


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 3, 8, 33, 128, 300, 1100])
def test_widths(dim: int, device: str) -> None:
    world = StepWorld([form_of((dim, Adam()))], [0], 12, device)
    for number in range(2):
        handles = drawn(world.handles[0], [1, 2, 3, 9, 0, 1], seed=number)
        step(world, handles, eighths(len(handles), dim, number), Stamp(2, 9, number))
    world.check()


def test_run_lengths(device: str) -> None:
    world = StepWorld([form_of((2, SGD()))], [0], 300, device)
    lengths = [1, 2, COLD_RUN, COLD_RUN + 1, 63, 64, 65, 1025]
    handles = drawn(world.handles[0][250:], lengths)
    step(world, handles, eighths(len(handles), 2), Stamp(2, 9, 0))
    world.check()


def test_nothing_to_do(device: str) -> None:
    world = StepWorld([form_of((4, SGD()))], [0], 10, device)
    for handles in ([], [-1, -1, -1]):
        step(world, handles, eighths(len(handles), 4), Stamp(2, 9, 0))
    world.check(0)


def test_several_segments_and_forms(device: str) -> None:
    forms = [
        form_of((1, FTRL()), (6, Adagrad())),
        form_of((8, SGD())),
        form_of((3, LAMB()), (2, DelayCompensated(inner=Adam())), (4, SGD())),
    ]
    world = StepWorld(forms, [0, 1, 2, 1], 12, device)
    for number in range(2):
        parts = [drawn(world.handles[t], [1, 9, 2, 0, 20], seed=number) for t in range(4)]
        grads = [
            eighths(len(part), forms[f].dim, number)
            for part, f in zip(parts, world.tables, strict=True)
        ]
        if number:
            grads[0][0, 6] = torch.inf  # one segment's gradient holds back the other too
        handles = [handle for part in parts for handle in part]
        rooms = [
            sum(len(p) for p, t in zip(parts, world.tables, strict=True) if t == f)
            for f in range(3)
        ]
        runs = runs_of(on(world, handles), world.memory.layout, rooms)
        groups = per_position([g.to(device) for g in grads], forms=world.tables)
        stamp = Stamp(number + 2, 9, number, nan_policy="skip")
        sources = sources_of(runs, [groups])
        apply(world.memory.layout, forms, runs, sources, world.rates_KR, stamp)
        world.expect(handles, [row for part in grads for row in part], stamp)
    world.check()


def test_sharpening_reads(device: str) -> None:
    form = form_of((4, SGD()), compressor=OneBit(init_scale=0.5))
    world = StepWorld([form], [0], 10, device)
    handles = drawn(world.handles[0], [1, 2, 9])
    step(world, handles, eighths(len(handles), 4), Stamp(2, 9, 400))
    world.check()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # interpreted sums
@pytest.mark.parametrize("policy", ["raise", "skip", "clip"])
@pytest.mark.parametrize("rule", [Adam(), DelayCompensated(inner=Adam())], ids=named)
def test_not_finite(rule: Optimizer, policy: str, device: str) -> None:
    world = StepWorld([form_of((5, rule))], [0, 0], 10, device)
    mine = world.handles[0][:4] + world.handles[1][:4]
    handles = [h for h, many in zip(mine, [1, 2, 20, 1] * 2, strict=True) for _ in range(many)]
    grads = eighths(len(handles), 5)
    grads[0, 4], grads[4, 0] = torch.nan, torch.inf
    grads[25, 1], grads[26, 1] = -torch.inf, torch.inf
    grads[30, 2], grads[31, 2] = 3e38, 3e38  # only their sum is infinite
    stamp = Stamp(2, 9, 0, nan_policy=policy, nan_clip=0.5)
    step(world, handles, grads, stamp)
    assert sum(world.nonfinite) == (0 if policy == "clip" else 4)
    world.check()


def test_stamps(device: str) -> None:
    world = StepWorld([form_of((2, SGD()))], [0], 10, device)
    first, second, third = world.handles[0][:3]
    chunk, place = world.memory.chunk_of(second)
    chunk.counts[place], chunk.seen[place] = -3, -2  # 2^32 - 3 and 2^32 - 2
    world.rows[second].count, world.rows[second].seen = 2**32 - 3, 2**32 - 2
    handles = [first] * 3 + [second] * 2 + [third] * 20
    counts = [0, 5, 2, 1, 7] + [3] * 20
    step(world, handles, eighths(25, 2), Stamp(2**32 - 1, 2**31 + 5, 0), counts=counts)
    assert [world.rows[h].count for h in (first, second, third)] == [7, 2**32 - 1, 60]
    world.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [3, 12])
@pytest.mark.parametrize("fused", [True, False])
def test_narrow_rows(fused: bool, dim: int, dtype: torch.dtype, device: str) -> None:
    rule: Optimizer = SGD() if fused else DelayCompensated(inner=SGD())
    world = StepWorld([form_of((dim, rule), dtype=dtype)], [0], 20, device)
    world.rates_KR.fill_(0.5)
    handles = world.handles[0]
    before = torch.stack([world.memory.weights_of(h) for h in handles]).float().cpu()
    grads = eighths(20, dim) + 2.0**-11
    step(world, handles, grads, Stamp(2, 9, 41))
    want = stochastic_round(
        before - 0.5 * grads,
        dtype,
        key=mix64(77 ^ 5),
        ids_U=torch.tensor([world.memory.id_of(h) for h in handles]),
        column_start=0,
        global_step=41,
    )
    got = torch.stack([world.memory.weights_of(h) for h in handles]).cpu()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_same_bits_every_time(device: str) -> None:
    world = StepWorld([form_of((33, Adagrad()))], [0], 40, device)
    handles = drawn(world.handles[0], [1, 3, 8, 9, 40, 70, 2] * 2)
    grads = torch.randn(len(handles), 33, generator=torch.Generator().manual_seed(1))
    other = copy.deepcopy(world)
    # Other handles for the same rows: sums must not depend on where rows lie.
    other.memory = type(world.memory)(world.memory.sizes, device)
    moved = [world.handles[0][len(world.rows) - 1 - i] for i in range(len(world.rows))]
    place = dict(zip(world.handles[0], moved, strict=True))
    for old, new in place.items():
        other.memory.weights_of(new).copy_(world.memory.weights_of(old))
        other.memory.state_of(new).copy_(world.memory.state_of(old))
    step(world, handles, grads, Stamp(2, 9, 0))
    step(other, [place.get(h, -1) for h in handles], grads, Stamp(2, 9, 0))
    for old, new in place.items():
        assert torch.equal(world.memory.weights_of(old), other.memory.weights_of(new))


PLAN = PoolPlan(
    pools=(
        Pool("sum", (Slice(0, 5, 0, 1),)),
        Pool("mean", (Slice(0, 5, 1, 0),)),
        Pool("first_n", (Slice(0, 5, 2, 0),), length=2),
        Pool("sum", (Slice(1, 3, 0, 0), Slice(0, 2, 1, 3), Slice(4, 5, 2, 9))),
        Pool("first_n", (Slice(3, 5, 2, 2), Slice(0, 1, 0, 0)), length=3),
    ),
    outputs=(Output(7), Output(5), Output(12)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_gradients(weighted: bool, dtype: torch.dtype, device: str) -> None:
    world = StepWorld([form_of((5, SGD()), dtype=dtype)], [0], 20, device)
    batch, made = 4, torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 5, (5 * batch,), generator=made)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n, counts = int(offsets[-1]), lengths.view(5, batch).sum(1).tolist()
    handles = [world.handles[0][i] for i in torch.randint(0, 20, (n,), generator=made).tolist()]
    grads = tuple(
        torch.randn(batch, out.width, generator=made, dtype=dtype) for out in PLAN.outputs
    )
    weights = torch.rand(n, generator=made) if weighted else None
    record = GradRecord(None, grads, PLAN, offsets, weights)  # type: ignore[arg-type]
    alone = eighths(6, 5, dtype=dtype)
    groups = tuple(PooledGroup(pool, dim=5) for pool in PLAN.pools)
    # Two records in one call: the second has a gradient for each position.
    runs = runs_of(on(world, handles + handles[:6]))
    first = pooled(
        groups,
        [grad.to(device) for grad in grads],
        offsets.to(device),
        counts,
        weights_N=None if weights is None else weights.to(device),
        scale=0.5,
    )
    second = per_position([alone.to(device)], scale=2.0)
    sources = sources_of(runs, [first, second])
    apply(world.memory.layout, world.forms, runs, sources, world.rates_KR, Stamp(2, 9, 0))
    rows = [0.5 * g for g in position_gradients(record, [5] * n)] + [2 * g for g in alone]
    world.expect(handles + handles[:6], rows, Stamp(2, 9, 0))
    world.check(1e-6 if dtype is torch.float32 else 1e-14)


def test_bags(device: str) -> None:
    offsets = torch.tensor([0, 0, 2, 2, 3, 3, 3, 7, 7], device=device)
    assert bags_of(offsets, 4, 7).tolist() == [1, 1, 3, 2, 2, 2, 2]
    assert bags_of(torch.zeros(3, dtype=torch.int64, device=device), 2, 0).tolist() == []


@pytest.mark.parametrize("dim", [3, 1500])
def test_sums_in_order_of_first_appearance(dim: int, device: str) -> None:
    world = StepWorld([form_of((dim, SGD()))], [0, 0], 10, device)
    handles = drawn(world.handles[1] + world.handles[0], [2, 1, 12, 0, 9, 1] * 3)
    grads = eighths(len(handles), dim)
    want: dict[int, Tensor] = {}
    for handle, grad in zip(handles, grads, strict=True):
        if handle >= 0:
            want[handle] = want.get(handle, 0) + grad
    runs = runs_of(on(world, handles))
    sources = sources_of(runs, [per_position([grads.to(device)])])
    found = sum_runs(world.memory.layout, 0, world.forms[0], runs, sources)
    assert sorted(table for table, *_ in found) == [0, 1]
    for table, ids, sums, counts in found:
        own = [h for h in want if world.rows[h].table == table]
        assert ids.tolist() == [world.memory.id_of(h) for h in own]
        assert counts.tolist() == [handles.count(h) for h in own]
        assert torch.equal(sums.cpu(), torch.stack([want[h] for h in own]))


@pytest.mark.skipif(not HAS_GPU, reason="too many ids for the interpreter")
@pytest.mark.gpu
@pytest.mark.parametrize("rule", [SGD(), Adam(), FTRL(l1=0.25), LAMB(), DELAYED[0]], ids=named)
def test_many_ids(rule: Optimizer, device: str) -> None:
    world = StepWorld([form_of((32, rule))], [0, 0, 0], 3000, device)
    pool = torch.tensor([h for part in world.handles for h in part])
    made = torch.Generator().manual_seed(9)
    for number in range(2):
        rank = (len(pool) ** torch.rand(200_000, generator=made)).long() - 1
        handles = pool[rank.clamp(0, len(pool) - 1)].tolist()
        step(world, handles, eighths(200_000, 32, number), Stamp(2, 9, number))
    world.check()
