"""Collections on a GPU against the same collections on the CPU, the dense side and torch around.

Under `make test-gpu` on a device; elsewhere on the interpreter, with fewer steps.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.combiners import FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.errors import NonFiniteGradient, ShapeError
from shoal.optim import JointOptimizer, SparseOptimizer, clip_grad_norm_
from shoal.ragged import KeyedRagged
from shoal.rules.initializers import Uniform
from shoal.rules.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    Optimizer,
    RowWiseAdagrad,
    SignSGD,
)
from shoal.table.cpu.shard import CpuShard
from shoal.table.facade import Table
from shoal.table.shard import Shard
from shoal.table.spec import Segment, TableSpec

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STEPS, BATCH, VOCABULARY = (20, 256, 300) if ON_GPU else (3, 5, 12)

if not ON_GPU:
    pytest.importorskip("shoal.table.cuda.shard")

from shoal.table.cuda.shard import CudaShard  # noqa: E402

# Interpreted kernels add infinities up with numpy, which warns.
INTERPRETED = [pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]
pytestmark = [pytest.mark.gpu] if ON_GPU else INTERPRETED

RULES: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.5),
    "momentum": Momentum(lr=0.1),
    "adagrad": Adagrad(lr=0.1),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.1),
    "adam": Adam(lr=0.01),
    "adamw": AdamW(lr=0.01),
    "ftrl": FTRL(lr=0.1),
    "sign_sgd": SignSGD(lr=0.01),
}
FEATURES = (
    Feature("user", "users"),
    Feature("item", "items", ReduceMean()),
    Feature("history", "items", FirstN(3), max_length=4),
    Feature("liked", "items", ReduceSum()),
)
LAYOUTS = (
    Layout("bias", "addn", (LayoutSlice("item", "bias"), LayoutSlice("user", "bias"))),
    Layout("wide", "concat", (LayoutSlice("item", "vec"), LayoutSlice("user", "vec"))),
    Layout("pair", "stack", (LayoutSlice("liked", "vec"), LayoutSlice("item", "vec"))),
    Layout("lone", "none", (LayoutSlice("user"), LayoutSlice("history", "vec"))),
)


def specs(rule: Optimizer, dtype: str = "float32") -> tuple[TableSpec, ...]:
    def segments(width: int) -> tuple[Segment, ...]:
        return tuple(
            Segment(name=name, dim=dim, optimizer=rule, initializer=Uniform(-0.5, 0.5))
            for name, dim in (("bias", 1), ("vec", width))
        )

    return (
        TableSpec(name="users", segments=segments(8), dtype=dtype),  # type: ignore[arg-type]
        TableSpec(name="items", segments=segments(8), dtype=dtype),  # type: ignore[arg-type]
    )


def cuda_shard(tables: Sequence[TableSpec]) -> Shard:
    return CudaShard(tables, device=str(DEVICE))


def pair(
    rule: Optimizer, layouts: Sequence[Layout] | None = LAYOUTS
) -> tuple[EmbeddingCollection, EmbeddingCollection]:
    """The same collection on the CPU and on the device."""
    tables = specs(rule)
    made = [
        EmbeddingCollection(tables, FEATURES, layouts, shard=make(tables))
        for make in (CpuShard, cuda_shard)
    ]
    return made[0], made[1]


def batches(count: int, *, weighted: bool = False) -> Iterator[KeyedRagged]:
    """Lengths are powers of two or zero, so that means stay exact."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        choices = torch.tensor([0, 1, 2, 4])
        picks = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
        lengths = choices[picks]
        total = int(lengths.sum())
        # Squares crowd the low ids: many duplicates, as in real data.
        ids = (torch.rand(total, generator=generator).square() * VOCABULARY).long()
        weights = None
        if weighted:
            weights = torch.randint(1, 5, (total,), generator=generator) / 4
        keys = tuple(feature.name for feature in FEATURES)
        yield KeyedRagged.from_lengths(keys, ids, lengths, weights)


def exact(like: Tensor, generator: torch.Generator) -> Tensor:
    """Gradients whose sums are exact in any order, and away from zero."""
    sizes = torch.randint(1, 9, like.shape, generator=generator)
    signs = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
    return (sizes * signs / 16).to(like.dtype)


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.dtype)


Draw = Callable[[Tensor, torch.Generator], Tensor]


def send_back(outs: Sequence[dict[str, Tensor]], draw: Draw, generator: torch.Generator) -> None:
    """The same gradients to both sides' outputs."""
    for name in outs[0]:
        grad = draw(outs[0][name], generator)
        for out in outs:
            out[name].backward(grad.to(out[name].device), retain_graph=True)


def assert_same_inputs(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].device.type == DEVICE.type
        torch.testing.assert_close(
            ours[name].cpu(), value, atol=1e-6, rtol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_same_rows(ours: EmbeddingCollection, theirs: EmbeddingCollection) -> None:
    for name in theirs.tables:
        mine, want = ours.table(name).export(), theirs.table(name).export()
        assert mine.ids.tolist() == want.ids.tolist()
        torch.testing.assert_close(mine.weights, want.weights, atol=1e-6, rtol=1e-6)
        # State sums many roundings: FTRL's z differed by 1.4e-6 after 20 steps.
        torch.testing.assert_close(mine.state, want.state, atol=4e-6, rtol=4e-6)
        assert torch.equal(mine.counts, want.counts)
        assert torch.equal(mine.last_seen_s, want.last_seen_s)


def summed(out: dict[str, Tensor]) -> Tensor:
    return torch.stack([value.square().sum() for value in out.values()]).sum()


# Interpreted, rules are the matter of `test_cuda_rules`: one with state by column, one by row.
@pytest.mark.slow
@pytest.mark.parametrize("name", list(RULES) if ON_GPU else ["adagrad", "rowwise_adagrad"])
def test_a_run_equals_the_cpu(name: str) -> None:
    theirs, ours = pair(RULES[name])
    optimizers = [SparseOptimizer(side) for side in (theirs, ours)]
    generator = torch.Generator().manual_seed(7)
    for step, batch in enumerate(batches(STEPS)):
        outs = [side(batch, event_time_s=step) for side in (theirs, ours)]
        assert_same_inputs(outs[1], outs[0])
        send_back(outs, exact, generator)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_rows(ours, theirs)
    optimizers[1].check()


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_two_steps_of_random_gradients(weighted: bool) -> None:
    """Monolith's comparison of its GPU embedding: pooled layouts agree to 1e-6."""
    theirs, ours = pair(Adagrad(lr=0.05))
    optimizers = [SparseOptimizer(side) for side in (theirs, ours)]
    generator = torch.Generator().manual_seed(11)
    (batch,) = batches(1, weighted=weighted)
    for _ in range(2):
        outs = [side(batch) for side in (theirs, ours)]
        assert_same_inputs(outs[1], outs[0])
        send_back(outs, normal, generator)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_inputs(ours(batch), theirs(batch))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["moved", "built"])
def test_batches_on_the_device(where: str) -> None:
    theirs, ours = pair(SGD(lr=0.5))
    for batch in batches(2, weighted=True):
        there = batch.to(DEVICE)
        if where == "built":
            there = KeyedRagged(batch.keys, there.values_N, there.offsets_FB1, there.weights_N)
        assert_same_inputs(ours(there), theirs(batch))
        assert_same_inputs(ours(there.select(list(reversed(batch.keys)))), theirs(batch))
        lists = {key: [[1] * 5] for key in batch.keys}
        with pytest.raises(ShapeError, match="feature 'history': got 5"):
            ours(KeyedRagged.from_lists(lists).to(DEVICE))


def test_reading_and_later_rows() -> None:
    theirs, ours = pair(SGD(lr=0.5))
    first, second = batches(2)
    for side in (theirs, ours):
        side(first)
        side.eval()
    assert_same_inputs(ours(second), theirs(second))
    assert len(ours.table("users")) == len(theirs.table("users"))


def test_rows_that_come_with_gradients() -> None:
    tables = specs(SGD(lr=0.5))
    sides = [
        EmbeddingCollection(tables, FEATURES, shard=make(tables), init_on_lookup=False)
        for make in (CpuShard, cuda_shard)
    ]
    optimizers = [SparseOptimizer(side) for side in sides]
    generator = torch.Generator().manual_seed(3)
    for batch in batches(2, weighted=True):
        send_back([side(batch) for side in sides], exact, generator)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_rows(sides[1], sides[0])


@pytest.mark.slow
def test_accumulation_adds_up() -> None:
    theirs, ours = pair(Adam(lr=0.01))
    optimizers = [SparseOptimizer(side) for side in (theirs, ours)]
    generator = torch.Generator().manual_seed(2)
    for batch in batches(3):
        send_back([side(batch) for side in (theirs, ours)], exact, generator)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()
    assert_same_rows(ours, theirs)


@pytest.mark.parametrize("read", [False, True])
def test_dropped_gradients(read: bool) -> None:
    _, ours = pair(SGD(lr=1.0))
    optimizer = SparseOptimizer(ours)
    (batch,) = batches(1)
    summed(ours(batch)).backward()
    before = ours.table("items").export()
    if read:
        assert all(proxy.grad is not None for proxy in optimizer.proxies)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(ours.table("items").export().weights, before.weights)
    ours.table("items").clear()


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("dense_device", sorted({"cpu", str(DEVICE)}))
def test_clipping(max_norm: float, dense_device: str) -> None:
    theirs, ours = pair(SGD(lr=1.0))
    (batch,) = batches(1)
    norms = []
    for side, where in ((theirs, "cpu"), (ours, dense_device)):
        optimizer = SparseOptimizer(side)
        weight = nn.Parameter(torch.ones(3, device=where))
        summed(side(batch)).backward()
        weight.sum().backward()
        norms.append(clip_grad_norm_([weight], optimizer, max_norm).cpu())
        optimizer.step()
    torch.testing.assert_close(norms[0], norms[1], atol=1e-4, rtol=1e-5)
    for name in theirs.tables:
        mine, want = ours.table(name).export(), theirs.table(name).export()
        torch.testing.assert_close(mine.weights, want.weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", ["dense", "sparse", "nowhere"])
def test_a_scaler_skips_all_or_nothing(where: str) -> None:
    _, ours = pair(SGD(lr=1.0))
    (batch,) = batches(1)
    ours(batch)
    before = ours.table("items").export().weights
    weight = nn.Parameter(torch.ones(2, device=DEVICE))
    joint = JointOptimizer([SparseOptimizer(ours), torch.optim.SGD([weight], lr=1.0)])
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    factors = {key: float("inf") if key == where else 1.0 for key in ("dense", "sparse")}
    loss = factors["dense"] * weight.sum() + factors["sparse"] * summed(ours(batch))
    scaler.scale(loss).backward()
    scaler.step(joint)
    scaler.update()
    joint.zero_grad()
    moved = not torch.equal(ours.table("items").export().weights, before)
    assert moved == (where == "nowhere")
    assert weight.tolist() == ([0.0, 0.0] if moved else [1.0, 1.0])
    assert scaler.get_scale() == (8.0 if moved else 4.0)


def test_bad_gradients_are_told_late() -> None:
    _, ours = pair(SGD(lr=1.0))
    optimizer = SparseOptimizer(ours)
    ids = {"user": [[1], [2]], "item": [[], []], "history": [[], []], "liked": [[], []]}
    batch = KeyedRagged.from_lists(ids)
    out = ours(batch)["user"]
    before = ours.table("users").export()
    factors = torch.tensor([[1.0], [float("nan")]], device=out.device)
    (out * factors).sum().backward()
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
        optimizer.check()
    optimizer.zero_grad()
    optimizer.check()
    after = ours.table("users").export()
    moved = {
        id_: bool((a != b).any())
        for id_, a, b in zip(after.ids.tolist(), after.weights, before.weights, strict=True)
    }
    assert moved == {1: True, 2: False}


@pytest.mark.slow
def test_a_copy_has_the_same_rows() -> None:
    _, ours = pair(Adam(lr=0.01))
    optimizer = SparseOptimizer(ours)
    (batch,) = batches(1)
    summed(ours(batch)).backward()
    optimizer.step()
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.shard.device == ours.shard.device
    assert_same_rows(copy, ours)
    assert_same_inputs(copy(batch), {n: v.cpu() for n, v in ours(batch).items()})


def test_rows_go_from_device_to_device() -> None:
    theirs, ours = pair(Adagrad(lr=0.1))
    (batch,) = batches(1)
    optimizer = SparseOptimizer(ours)
    summed(ours(batch)).backward()
    optimizer.step()
    for name in ours.tables:
        theirs.table(name).load(ours.table(name).export())
    assert_same_rows(ours, theirs)
    _, again = pair(Adagrad(lr=0.1))
    for name in theirs.tables:
        again.table(name).load(theirs.table(name).export())
    assert_same_rows(again, theirs)


def test_a_table_takes_lists_and_cpu_tensors() -> None:
    (spec, _) = specs(SGD(lr=1.0))
    one = Table(spec, shard=cuda_shard([spec]))
    ids = [1, -1, -(1 << 63), -(1 << 63) + 1, (1 << 63) - 1]
    ticket = one.find_or_init(ids, counts=torch.ones(5).long())
    start = one.gather(ticket)
    ticket.end()
    assert start.device.type == DEVICE.type and len(one) == 5
    one.apply(torch.tensor(ids), torch.ones(5, spec.dim))
    weights, found_N = one.find(torch.tensor(ids, device=DEVICE))
    assert found_N.all() and found_N.device.type == DEVICE.type
    torch.testing.assert_close(weights, start - 1.0)
    one.assign([1], [[2.0] * spec.dim])
    one.assign_add([1], torch.ones(1, spec.dim))
    assert one.lookup([1, 5]).cpu().tolist() == [[3.0] * spec.dim, [0.0] * spec.dim]
    assert one.reinitialize([1, 7]).cpu().tolist() == [1, 0]
    assert not one.check()


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has nothing to wait for")
@pytest.mark.parametrize("where", ["cpu", "moved"])
def test_a_step_does_not_wait(where: str) -> None:
    _, ours = pair(Adam(lr=0.01))
    dense = nn.Linear(16, 1, device=DEVICE)
    members = [SparseOptimizer(ours), torch.optim.Adam(dense.parameters(), fused=True)]
    joint = JointOptimizer(members)
    every = list(batches(12))
    if where == "moved":
        every = [batch.to(DEVICE) for batch in every]

    def step(batch: KeyedRagged) -> None:
        out = ours(batch)
        (dense(out["wide"]).sum() + out["pair"].sum() + out["bias"].sum()).backward()
        joint.step()
        joint.zero_grad()

    for batch in every[:6]:
        step(batch)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in every[6:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lookups_of_one_size_that_are_replayed_equal_the_cpu() -> None:
    """From the fourth on, runs come from a graph; memory of the first is long used by others.
    Steps are still to come on the device when the next lookup begins."""
    theirs, ours = pair(SGD(lr=0.5))
    every = [batch for batch in batches(1) for _ in range(3)]
    optimizers = [SparseOptimizer(theirs), SparseOptimizer(ours)]
    noise = []
    for step in range(15 if ON_GPU else 2):
        for owner, optimizer in zip((theirs, ours), optimizers, strict=True):
            batch = every[step % len(every)]
            out = owner(batch)
            (out["wide"].sum() + out["pair"].sum() + out["bias"].sum()).backward()
            if ON_GPU:
                torch.cuda._sleep(1 << 24)
            optimizer.step()
            optimizer.zero_grad()
        noise.append(torch.full((1 << 14,), -7, dtype=torch.int32, device=DEVICE))
        if len(noise) > 3:
            noise.clear()
    assert_same_rows(ours, theirs)
