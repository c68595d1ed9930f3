"""The GPU shard against the compiled core: every rule, row dtype and path, fed the same batches.

Under `make test-gpu` over a hundred steps on a device; elsewhere a few steps, interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from shoal.rules.compressors import FixedR8, Float16, Float32, OneBit
from shoal.rules.initializers import (
    Constant,
    Initializer,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    Zeros,
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
    SignSGD,
)
from shoal.rules.schedules import Polynomial
from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import GradRecord, IdGroups, Shard, StepContext
from shoal.table.spec import Segment, TableSpec
from shoal.table.values import RowChunk
from support.placed_shard import PlacedShard

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS, BATCH = (100, 400) if ON_GPU else (2, 14)
DIM = 6

pytestmark = [pytest.mark.gpu] if ON_GPU else []

RULES: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.1),
    "sgd scheduled": SGD(lr=Polynomial(0.2, 6, end=0.01)),
    "momentum": Momentum(lr=0.05, weight_decay=0.01),
    "nesterov": Momentum(lr=0.05, nesterov=True),
    "adagrad": Adagrad(lr=0.1, weight_decay=0.1),
    "row-wise adagrad": RowWiseAdagrad(lr=0.1, weight_decay=0.1),
    "adadelta": Adadelta(lr=0.5, weight_decay=0.01),
    "adam": Adam(lr=0.01, weight_decay=0.01),
    "nadam": Adam(lr=0.01, nesterov=True),
    "adamw": AdamW(lr=0.01, weight_decay=0.1),
    "amsgrad": Amsgrad(lr=0.01),
    "ftrl": FTRL(lr=0.1, l1=0.05, l2=0.1, beta=1.0),
    "group ftrl": GroupFTRL(lr=0.1, l1=0.05, l2=0.1),
    "group adagrad": GroupAdagrad(lr=0.1, l2=0.05, beta=1.0, weight_decay=0.01),
    "dynamic decay": DynamicWdAdagrad(lr=0.1, weight_decay=0.1),
    "rmsprop": RMSprop(lr=0.01),
    "rmsprop summed": RMSprop(lr=0.01, accumulate="sum"),
    "moving average": MovingAverage(momentum=0.9),
    "batch softmax": BatchSoftmax(lr=0.1),
    "sign": SignSGD(lr=0.01, weight_decay=0.1),
    "lamb": LAMB(lr=0.02),
    "delayed": DelayCompensated(inner=Adagrad(lr=0.1), strength=0.1),
}
# The same kernels with another constant; interpreted, `test_step_kernels` has them.
VARIANTS = ("nesterov", "nadam", "rmsprop summed")


class Pair:
    """The same tables on the core and on the device, and the same random batches for both."""

    def __init__(self, specs: Sequence[TableSpec], seed: int = 7) -> None:
        self.specs = specs
        self.core: Shard = CpuShard(specs, seed=seed)
        self.device = PlacedShard(CudaShard(specs, seed=seed, device=DEVICE))
        self.generator = torch.Generator().manual_seed(seed)

    def groups(self, tables: Sequence[int], most: int = BATCH) -> IdGroups:
        """Many duplicates, within a group and across groups of one table."""
        sizes = [int(torch.randint(1, most, (), generator=self.generator)) for _ in tables]
        drawn = torch.rand(sum(sizes), generator=self.generator).square() * most
        return IdGroups(
            drawn.long() * 0x9E3779B97F4A7C1,
            torch.tensor(list(accumulate(sizes, initial=0))),
            torch.tensor(tables, dtype=torch.int32),
        )

    def rows(self, groups: IdGroups) -> list[Tensor]:
        """Sums are exact in any order, and away from zero: a column keeps its sign."""
        sizes = groups.splits_G1.diff().tolist()
        found = []
        for n, k in zip(sizes, groups.tables_G.tolist(), strict=True):
            shape = (n, self.specs[k].dim)
            value = torch.randint(1, 9, shape, generator=self.generator) / 16
            real = torch.float64 if self.specs[k].dtype == "float64" else torch.float32
            signs = 1 - 2 * (torch.arange(shape[1]) % 2)
            found.append(((value + 1 / 64) * signs).to(real))
        return found

    def train(self, groups: IdGroups, ctx: StepContext) -> None:
        grads = tuple(self.rows(groups))
        for shard in (self.core, self.device):
            ticket = shard.find_or_init(groups, ctx=ctx)
            shard.apply([GradRecord(ticket, grads)], ctx=ctx)

    def agree(self, tolerance: float, *, bits: bool = False) -> None:
        self.device.check()
        for k, spec in enumerate(self.specs):
            theirs, ours = self.core.export(k), self.device.export(k)
            same_metadata(ours, theirs)
            if bits:
                assert torch.equal(ours.weights, theirs.weights), spec.name
            near(ours.weights, theirs.weights, tolerance, f"weights of {spec.name}")
            near(ours.state, theirs.state, 10 * tolerance, f"state of {spec.name}")


def same_metadata(ours: RowChunk, theirs: RowChunk) -> None:
    for name in ("ids", "versions", "last_seen_s", "counts"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def near(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    if theirs.numel():
        error = (ours - theirs).abs() / theirs.abs().clamp(min=1)
        assert error.max() <= tolerance, f"{what}: {float(error.max()):.3g}"


def table(name: str, *rules: Optimizer, dtype: str = "float32", dim: int = DIM) -> TableSpec:
    segments = tuple(
        Segment(name=f"s{j}", dim=dim + j, optimizer=rule, initializer=Uniform(0.2, 0.9))
        for j, rule in enumerate(rules)
    )
    return TableSpec(name=name, segments=segments, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in RULES if ON_GPU or n not in VARIANTS])
def test_runs_of_a_rule_agree(name: str) -> None:
    """Alone in a row, beside another rule, and in float64."""
    rule = RULES[name]
    dim = 1 if name == "batch softmax" else DIM
    specs = [
        table("alone", rule, dim=dim),
        table("beside", rule, Adagrad(lr=0.1), dim=dim),
        table("wide", rule, dtype="float64", dim=dim),
    ]
    # Interpreted, a form is slow; most rules' rows of one segment are `test_step_kernels`' matter.
    specs = specs if ON_GPU or name in ("sgd", "delayed") else specs[1:2]
    pair = Pair(specs)
    for step in range(STEPS):
        if step % 10 == 1:
            pair.core.close_version()
            pair.device.close_version()
        groups = pair.groups((*range(len(specs)), 0))
        pair.train(groups, StepContext(global_step=step, event_time_s=step))
    pair.agree(1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_rows_agree_to_the_bit(dtype: str) -> None:
    """Where sums and steps are exact, rounding draws the same numbers: the same bits."""
    pair = Pair([table("n", SGD(lr=0.25), dtype=dtype), table("m", SGD(lr=0.5), dtype=dtype)])
    for step in range(STEPS):
        pair.train(pair.groups((0, 1, 0)), StepContext(global_step=step))
    pair.agree(0.0, bits=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rules_on_narrow_rows_differ_in_few_draws(dtype: str) -> None:
    rules = ("adam", "adagrad", "ftrl", "row-wise adagrad", "lamb")[: 5 if ON_GPU else 3]
    pair = Pair([table(name, RULES[name], dtype=dtype) for name in rules])
    differing = total = 0
    for step in range(min(STEPS, 20)):
        pair.train(pair.groups(range(len(rules)), BATCH // 2), StepContext(global_step=step))
    for k in range(len(rules)):
        theirs, ours = pair.core.export(k), pair.device.export(k)
        same_metadata(ours, theirs)
        differing += int((ours.weights != theirs.weights).sum())
        total += ours.weights.numel()
        near(ours.weights.float(), theirs.weights.float(), 0.05, rules[k])
    assert differing <= 0.01 * total + 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_initial_values_and_written_rows_are_the_same_bits(dtype: str) -> None:
    makes: tuple[Initializer, ...] = (
        *(Zeros(), Ones(), Constant(0.3), Uniform(-0.3, 0.7)),
        *(Normal(1.0, 0.2), TruncatedNormal(0.0, 0.1)),
    )
    segments = tuple(
        Segment(name=f"s{j}", dim=j + 1, initializer=make, optimizer=Adagrad(lr=0.1))
        for j, make in enumerate(makes)
    )
    pair = Pair([TableSpec(name="t", segments=segments, dtype=dtype)])  # type: ignore[arg-type]
    ctx = StepContext(global_step=3, event_time_s=9)
    groups, others = pair.groups((0, 0)), pair.groups((0,))
    added, assigned = pair.rows(groups), pair.rows(others)
    seen = []
    for shard in (pair.core, pair.device):
        ticket = shard.find_or_init(groups, ctx=ctx)
        seen.append(torch.cat(shard.gather(ticket, ctx=ctx)))
        ticket.end()
    assert torch.equal(*seen)
    pair.agree(0.0, bits=True)
    for shard in (pair.core, pair.device):
        shard.assign_add(groups, added, ctx=ctx)
        shard.assign(others, assigned, ctx=ctx)
    pair.agree(0.0, bits=True)
    for shard in (pair.core, pair.device):
        assert shard.reinitialize(groups, ctx=ctx).all()
    pair.agree(0.0, bits=True)


@pytest.mark.parametrize("compressor", [Float16(), FixedR8(r=1.0), OneBit(amplitude=0.1)])
def test_compressors_agree(compressor: Float16 | FixedR8 | OneBit) -> None:
    segments = (
        Segment(name="a", dim=5, optimizer=SGD(lr=0.5), compressor=compressor),
        Segment(name="b", dim=3, optimizer=Adagrad(lr=0.1), compressor=Float32()),
    )
    pair = Pair([TableSpec(name="q", segments=segments)])
    for step in range(450, 450 + STEPS):
        groups, ctx = pair.groups((0,)), StepContext(global_step=step)
        pair.train(groups, ctx)
        theirs, ours = pair.core.find(groups), pair.device.find(groups)
        near(ours.weights[0], theirs.weights[0], 1e-6, "find")
    pair.agree(1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seen", [False, True])
def test_delay_compensation_by_ids(seen: bool) -> None:
    rules = (DelayCompensated(inner=Adagrad(lr=0.1), strength=0.3), Adam(lr=0.01))
    pair = Pair([table("d", *rules), table("plain", SGD(lr=0.1)), table("e", rules[0])])
    for step in range(STEPS):
        groups = pair.groups((0, 1, 2, 0))
        grads, weights = pair.rows(groups), pair.rows(groups)
        counts_N = torch.randint(1, 4, groups.ids_N.shape, generator=pair.generator)
        for shard in (pair.core, pair.device):
            shard.apply_ids(
                groups,
                grads,
                counts_N,
                ctx=StepContext(global_step=step, event_time_s=step // 2),
                seen_weights=weights if seen else None,
            )
    pair.agree(1e-6)


def test_rates_of_a_call_reach_their_segments() -> None:
    pair = Pair([table("a", SGD(lr=0.1), Adam(lr=0.1)), table("b", SGD(lr=0.1), Adam(lr=0.1))])
    for step in range(STEPS):
        rates = {"a": (0.5 / (step + 1), 0.01), "b": (0.0, 0.02 * step)}
        pair.train(pair.groups((0, 1)), StepContext(global_step=step, learning_rates=rates))
    pair.train(pair.groups((0, 1)), StepContext(global_step=STEPS))
    pair.agree(1e-6)
