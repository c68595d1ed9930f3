"""The compiled core against the rules' reference arithmetic: every rule, width and row dtype."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.rules.compressors import FixedR8, OneBit
from shoal.rules.initializers import (
    Constant,
    Normal,
    TruncatedNormal,
    Uniform,
    initial_values,
    stream_key,
)
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
    RuleContext,
    SignSGD,
)
from shoal.table.cpu.shard import CpuShard
from shoal.table.shard import GradRecord, IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from support.rounding import stochastic_round

RULES: list[Optimizer] = [
    SGD(lr=0.1),
    Momentum(lr=0.1, weight_decay=0.01),
    Momentum(lr=0.1, nesterov=True),
    Adagrad(lr=0.1, weight_decay=0.1),
    RowWiseAdagrad(lr=0.1, weight_decay=0.1),
    Adadelta(lr=0.5, weight_decay=0.01),
    Adam(lr=0.01, weight_decay=0.01),
    Adam(lr=0.01, nesterov=True),
    AdamW(lr=0.01, weight_decay=0.1),
    Amsgrad(lr=0.01),
    FTRL(lr=0.1, l1=0.05, l2=0.1, beta=1.0),
    GroupFTRL(lr=0.1, l1=0.05, l2=0.1),
    GroupAdagrad(lr=0.1, l2=0.05, beta=1.0, weight_decay=0.01),
    DynamicWdAdagrad(lr=0.1, weight_decay=0.1),
    DynamicWdAdagrad(lr=0.1, weight_decay=0.1, decouple=False, flip=False),
    RMSprop(lr=0.1, weight_decay=0.01),
    RMSprop(lr=0.1, accumulate="sum"),
    MovingAverage(),
    SignSGD(lr=0.1, weight_decay=0.1),
    LAMB(lr=0.01),
]
WIDTHS = [*range(1, 68), 128]
NAMES = [f"{rule.kind}-{i}" for i, rule in enumerate(RULES)]


def one_group(ids: torch.Tensor) -> IdGroups:
    return IdGroups(ids, torch.tensor([0, ids.numel()]), torch.zeros(1, dtype=torch.int32))


def gradients(rows: int, dim: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Away from zero, so that rules with jumps agree."""
    generator = torch.Generator().manual_seed(dim * 100 + step)
    grad = torch.randn(rows, dim, generator=generator, dtype=dtype)
    return grad + 0.05 * torch.sign(grad)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_width_follows_the_reference(rule: Optimizer, dtype: str) -> None:
    real = torch.float32 if dtype == "float32" else torch.float64
    ids = torch.tensor([3, -9, 2**62, -(2**63), 7])
    specs = [
        TableSpec(name=f"w{dim}", segments=(Segment(dim=dim, optimizer=rule),), dtype=dtype)
        for dim in WIDTHS
    ]
    shard = CpuShard(specs, seed=5)
    for table, dim in enumerate(WIDTHS):
        groups = IdGroups(ids, torch.tensor([0, 5]), torch.tensor([table], dtype=torch.int32))
        w = initial_values(Uniform(), ids, seed=5, table=f"w{dim}", column_start=0, dim=dim)
        w = w.to(real)
        state = rule.init_state(dim, real).repeat(5, 1)
        for step in range(3):
            grad = gradients(5, dim, step, real)
            ctx = StepContext(global_step=step)
            shard.apply_ids(groups, [grad], ctx=ctx)
            w, state = rule.step(w, state, grad, rule.rate(step), RuleContext(global_step=step))
        got = shard.find(groups).weights[0]
        tolerance = 1e-6 if real == torch.float32 else 1e-12
        error = (got - w).abs() / w.abs().clamp(min=1)
        assert error.max() <= tolerance, f"width {dim}"
        for row, id in enumerate(ids.tolist()):
            entry = shard.entry(table, id)
            assert entry is not None
            assert torch.allclose(entry.state, state[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", [SGD(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.01)])
def test_narrow_rows_round_as_the_reference(rule: Optimizer, dtype: str) -> None:
    narrow = torch.float16 if dtype == "float16" else torch.bfloat16
    ids = torch.arange(-50, 50)
    for dim in (1, 3, 8, 17, 67, 128):
        segment = Segment(dim=dim, optimizer=rule)
        shard = CpuShard([TableSpec(name="n", segments=(segment,), dtype=dtype)], seed=2)
        w = initial_values(Uniform(), ids, seed=2, table="n", column_start=0, dim=dim).to(narrow)
        state = rule.init_state(dim).repeat(len(ids), 1)
        differing = total = 0
        for step in range(3):
            grad = gradients(len(ids), dim, step, torch.float32)
            shard.apply_ids(one_group(ids), [grad], ctx=StepContext(global_step=step))
            exact, state = rule.step(
                w.float(), state, grad, rule.rate(step), RuleContext(global_step=step)
            )
            w = stochastic_round(
                exact,
                narrow,
                key=stream_key(2, "n"),
                ids_U=ids,
                column_start=0,
                global_step=step,
            )
            got = shard.find(one_group(ids)).weights[0]
            differing += int((got != w.float()).sum())
            total += got.numel()
            w = got.to(narrow)
        # One ulp of float32 before rounding may tip a draw; nothing else may differ.
        assert differing <= total * 0.002 + 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_narrow_rows_of_every_width_round_as_the_reference(rule: Optimizer, dtype: str) -> None:
    narrow = torch.float16 if dtype == "float16" else torch.bfloat16
    ids = torch.tensor([3, -9, 2**62])
    specs = [
        TableSpec(name=f"h{dim}", segments=(Segment(dim=dim, optimizer=rule),), dtype=dtype)
        for dim in WIDTHS
    ]
    shard = CpuShard(specs, seed=4)
    differing = total = 0
    for table, dim in enumerate(WIDTHS):
        groups = IdGroups(ids, torch.tensor([0, 3]), torch.tensor([table], dtype=torch.int32))
        w = initial_values(Uniform(), ids, seed=4, table=f"h{dim}", column_start=0, dim=dim)
        w, state = w.to(narrow), rule.init_state(dim).repeat(3, 1)
        for step in range(2):
            grad = gradients(3, dim, step, torch.float32)
            shard.apply_ids(groups, [grad], ctx=StepContext(global_step=step))
            ctx = RuleContext(global_step=step)
            exact, state = rule.step(w.float(), state, grad, rule.rate(step), ctx)
            key = stream_key(4, f"h{dim}")
            w = stochastic_round(
                exact, narrow, key=key, ids_U=ids, column_start=0, global_step=step
            )
            got = shard.find(groups).weights[0]
            # A tipped draw moves a value by one step of the row dtype, never further.
            step_size = torch.finfo(narrow).eps * exact.abs().clamp(min=1e-2)
            assert ((got - w.float()).abs() <= step_size).all(), f"width {dim}"
            differing += int((got != w.float()).sum())
            total += got.numel()
            w = got.to(narrow)
        kept = torch.stack([shard.entry(table, id).state for id in ids.tolist()])  # type: ignore[union-attr]
        torch.testing.assert_close(kept, state, rtol=1e-5, atol=1e-6)
    assert differing <= total * 0.002 + 1


@pytest.mark.parametrize(
    "initializer",
    [Uniform(-0.3, 0.7), Normal(1.0, 0.2), TruncatedNormal(0.0, 0.1), Constant(0.25)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_initial_values_are_the_reference_bits(initializer: object, threads: int) -> None:
    segments = (
        Segment(name="a", dim=3, initializer=initializer),  # type: ignore[arg-type]
        Segment(name="b", dim=14, initializer=initializer),  # type: ignore[arg-type]
    )
    shard = CpuShard([TableSpec(name="init", segments=segments)], seed=11, threads=threads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-(2**62), 2**62, (5000,), generator=generator)
    order = torch.randperm(len(ids), generator=generator)
    for part in order.split(700):
        shard.find_or_init(one_group(ids[part]), ctx=StepContext()).end()
    got = shard.find(one_group(ids)).weights[0]
    for start, dim in ((0, 3), (3, 14)):
        want = initial_values(
            initializer,  # type: ignore[arg-type]
            ids,
            seed=11,
            table="init",
            column_start=start,
            dim=dim,
        )
        assert torch.equal(got[:, start : start + dim].view(torch.int32), want.view(torch.int32))


def test_batch_softmax_counts_steps_between_occurrences() -> None:
    rule = BatchSoftmax(lr=0.1)
    shard = CpuShard(
        [TableSpec(name="b", segments=(Segment(dim=1, optimizer=rule, initializer=Constant(1.0)),))]
    )
    ids = torch.tensor([4])
    for step in range(5, 3_000_000, 500_000):
        shard.apply_ids(one_group(ids), [torch.ones(1, 1)], ctx=StepContext(global_step=step))
    w = torch.ones(1, 1)
    state = rule.init_state(1).repeat(1, 1)
    for step in range(5, 3_000_000, 500_000):
        w, state = rule.step(w, state, torch.ones(1, 1), 0.1, RuleContext(global_step=step))
    assert math.isclose(shard.find(one_group(ids)).weights[0].item(), w.item(), rel_tol=1e-6)


def test_delay_compensation_reads_the_seen_weights() -> None:
    rule = DelayCompensated(inner=Adadelta(), strength=0.1)
    shard = CpuShard(
        [
            TableSpec(
                name="dc", segments=(Segment(dim=1, optimizer=rule, initializer=Constant(0.0)),)
            )
        ]
    )
    ids = torch.tensor([1])
    for latest, expected in ((0.1, -0.0031603), (0.0, -0.0065548)):
        shard.apply_ids(
            one_group(ids),
            [torch.full((1, 1), 10.0)],
            ctx=StepContext(),
            seen_weights=[torch.full((1, 1), latest)],
        )
        got = shard.find(one_group(ids)).weights[0].item()
        assert math.isclose(got, expected, abs_tol=6e-8)


@pytest.mark.parametrize("compressor", [FixedR8(r=1.0), OneBit(amplitude=0.1, init_scale=2.0)])
def test_quantising_compressors_act_in_training(compressor: FixedR8 | OneBit) -> None:
    segment = Segment(dim=9, optimizer=SGD(lr=0.5), compressor=compressor)
    shard = CpuShard([TableSpec(name="q", segments=(segment,))], seed=3)
    ids = torch.arange(20)
    raw = initial_values(Uniform(), ids, seed=3, table="q", column_start=0, dim=9)
    ctx = StepContext(global_step=450)
    ticket = shard.find_or_init(one_group(ids), ctx=ctx)
    seen = shard.gather(ticket, ctx=ctx)[0]
    assert torch.allclose(seen, compressor.retrieve(raw, 450), atol=1e-7)
    grad = gradients(20, 9, 0, torch.float32)
    shard.apply([GradRecord(ticket, (grad,))], ctx=ctx)
    want = raw - 0.5 * compressor.retrieve_backward(raw, grad, 450)
    stored = torch.stack([shard.entry(0, i).weights for i in range(20)])  # type: ignore[union-attr]
    assert torch.allclose(stored, want, atol=1e-6)
