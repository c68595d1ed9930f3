"""What ranks do in the distributed bench: exchanges of rows, and training of a DLRM-DCNv2."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import median
from shoal import EmbeddingCollection, Feature, Layout, LayoutSlice, SparseOptimizer
from shoal.comm import Mesh, Part, init, shutdown
from shoal.compiling import Compile
from shoal.data import Batch
from shoal.distributed import DistributedModelParallel
from shoal.embedding.layouts import compile_layouts
from shoal.exchange.all_to_all import AllToAllExchange
from shoal.exchange.local import Request
from shoal.models import DLRM
from shoal.optim import JointOptimizer
from shoal.pipeline import create_train_pipeline
from shoal.ragged import KeyedRagged
from shoal.rules.optimizers import SGD, Adagrad
from shoal.table.cuda.mapped import mapped_bytes
from shoal.table.factory import make_shard
from shoal.table.hosting import hosted_specs, plan_placement
from shoal.table.shard import StepContext
from shoal.table.spec import Segment, TableSpec

__all__ = ["exchange_rows", "train_dlrm"]

# MLPerf's DLRM-DCNv2: lookups a sample in each of 26 tables, 214 in all.
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# Distinct ids of each table in Criteo's 40 M version; the bench draws from at most `most_ids`.
SIZES = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956)
SIZES += (405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000)
SIZES += (590_152, 12_973, 108, 36)
DENSE = 13


def exchange_rows(*, mib: int, dim: int, repeats: int, device: str) -> dict[str, float]:
    """Milliseconds of one row exchange of `mib` MiB a rank, and of its parts.

    raw: `all_to_all_single` of the same bytes and splits. exchange: rows are read into the send
    buffer and exchanged, as `fetch` and the wait for it do. gather: the reading alone.
    """
    mesh = init(device=device)
    rows = (mib << 20) // (4 * dim)
    spec = TableSpec(name="t", segments=(Segment(dim=dim, optimizer=SGD(lr=0.1)),))
    placement = plan_placement((spec,), mesh.world_size)
    shard = make_shard(hosted_specs((spec,), placement, mesh.rank), device=str(mesh.device))
    exchange = AllToAllExchange(shard, placement, (spec,), mesh.collectives("rows"))
    ids = torch.arange(rows) * 0x9E3779B97F4A7C1 + mesh.rank
    batch = KeyedRagged(("f",), ids, torch.arange(rows + 1)).to(mesh.device)
    plan = compile_layouts({"t": spec}, (Feature("f", "t"),), _whole("f")).plan
    ctx = StepContext()
    request = Request(batch, batch, torch.zeros(1, dtype=torch.int32), plan)
    route = exchange.probe(exchange.send(request, insert=True, ctx=ctx))
    assert route.transfer is not None
    (layout,) = route.transfer.plan.buffers
    sent, received = route.transfer.sizes_of(layout)
    send = (received.sum(1) * dim).tolist()
    back = (sent.sum(1) * dim).tolist()
    source = torch.randn(sum(send), device=mesh.device)
    target = torch.empty(sum(back), device=mesh.device)
    group = mesh.new_group("raw")

    def raw() -> None:
        dist.all_to_all_single(target, source, back, send, group=group)

    def fetched() -> None:
        exchange.fetch(route, ctx=ctx)
        exchange._fetched.pop(route).pending.wait()

    def gather() -> None:
        shard.gather(route.ticket, ctx=ctx)

    packed = exchange.collectives

    def sent_only() -> None:
        packed.all_to_all([Part(source, tuple(send), tuple(back))], what="rows").wait()

    runs = {"raw": raw, "exchange": fetched, "gather": gather, "sent": sent_only}
    found = _interleaved(runs, repeats, mesh)
    found["bytes"] = 4.0 * sum(back)
    found["away"] = 4.0 * (sum(back) - back[mesh.rank])
    shutdown()
    return found


def _interleaved(runs: dict[str, Callable[[], None]], repeats: int, mesh: Mesh) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 3):
        for name, run in runs.items():
            mesh.control.barrier(what="turn of a bench")
            ms = _timed(run, mesh.device)
            if turn >= 3:
                took[name].append(ms)
    return {name: median(values) for name, values in took.items()}


def _timed(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The host is ahead by then, so that launches are not measured.
    torch.cuda._sleep(2_000_000)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


class Dlrm(nn.Module):
    """DLRM-DCNv2 as MLPerf has it: 26 tables of width `dim`, 3 crosses of rank 512."""

    def __init__(self, tables: EmbeddingCollection, dim: int) -> None:
        super().__init__()
        self.tables = tables
        self.dense = DLRM(
            (DENSE, len(MULTI_HOT), dim),
            bottom=(512, 256),
            top=(1024, 1024, 512, 256),
            cross_layers=3,
            low_rank=512,
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = self.tables(batch.ids, event_time_s=batch.event_time_s)["all"]
        device = batch.labels.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits_B = self.dense(batch.dense, rows)
        logits_B = logits_B.float()
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, logits_B.detach()


def train_dlrm(
    *, batch_size: int, dim: int, most_ids: int, steps: int, warmup: int, device: str,
    staleness: int = 0, pipelined: bool | None = True, seed: int = 0, compile: Compile = True,
    profile: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Seconds a step of `batch_size` samples a rank, and what memory it took.

    pipelined: None: without and with, the faster counts.
    profile: a file, to which rank 0 writes the kernels of a step.
    """
    mesh = init(device=device, seed=seed)
    names = tuple(f"c{k}" for k in range(len(MULTI_HOT)))
    specs = tuple(
        TableSpec(name=name, segments=(Segment(dim=dim, optimizer=Adagrad(lr=0.01)),))
        for name in names
    )
    features = tuple(Feature(name, name) for name in names)
    layout = Layout("all", "stack", tuple(LayoutSlice(name) for name in names))
    tables = EmbeddingCollection(specs, features, (layout,), device=str(mesh.device))
    torch.manual_seed(seed)
    model = DistributedModelParallel(
        Dlrm(tables, dim).to(mesh.device), mesh=mesh, compile=compile
    ).train()
    dense = torch.optim.Adagrad(list(model.dense_parameters()), lr=0.01)
    optimizer = JointOptimizer([SparseOptimizer(model), dense])
    # In pinned memory, as a loader returns them.
    made = [_batch(names, batch_size, most_ids, mesh, turn).to("cpu") for turn in range(6)]
    made = [batch.pin_memory() for batch in made] if device == "cuda" else made
    batches: Iterator[Batch] = itertools.cycle(made)
    ways = {"plain_s": _plain, "piped_s": _piped}
    skipped = {None: "", True: "plain_s", False: "piped_s"}[pipelined]
    found: dict[str, Any] = {
        name: way(
            model, optimizer, itertools.islice(batches, steps + warmup), staleness, warmup, mesh
        )
        for name, way in ways.items()
        if name != skipped
    }
    found |= {"step_s": min(found.values()), "rank": mesh.rank, "memory": 0}
    if device == "cuda":
        # Rows only grow: at the end they have the most.
        peak = torch.cuda.max_memory_allocated(mesh.device)
        found["memory"] = peak + mapped_bytes(mesh.device)
        found |= _apart(model, optimizer, made, mesh)
    if profile:
        _profile(model, optimizer, made, mesh, profile)
    found["rows"] = sum(tables.shard.size(k) for k in range(len(tables.shard.specs)))
    ids = made[0].ids
    cuts = ids.host_splits.tolist()
    found["distinct"] = sum(
        ids.values_N[a:b].unique().numel() for a, b in itertools.pairwise(cuts)
    )  # fmt: skip
    shutdown()
    return found


def _step(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    loss, _ = model(batch)
    # In this thread: a GPU's backward thread costs the host more than what it launches.
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _apart(
    model: nn.Module, optimizer: Any, batches: Sequence[Batch], mesh: Mesh
) -> dict[str, float]:
    """Milliseconds of a step on the device, launches not counted, and on the host alone.

    Without the former if the device was never kept busy until all was launched.
    """
    here = [batch.to(mesh.device) for batch in batches]
    device_ms, host_ms, steps = [], [], 3  # the host waits where a fourth lookup is open
    for turn in range(8):
        _settle(mesh)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(150_000_000)  # the host is ahead until its launches are done
        first.record()
        begun = time.perf_counter()
        for k in range(steps):
            _step(model, optimizer, here[(turn * steps + k) % len(here)])
        host_ms.append(1e3 * (time.perf_counter() - begun) / steps)
        waited = first.query()  # for launches: the device came to the steps before their end
        last.record()
        last.synchronize()
        if not waited:
            device_ms.append(first.elapsed_time(last) / steps)
    # Ranks wait for sizes in the midst of a step, and so for the device.
    found = {"host_ms": median(host_ms)} if mesh.world_size == 1 else {}
    return found | ({"device_ms": median(device_ms)} if device_ms else {})


def _profile(
    model: nn.Module, optimizer: Any, batches: Sequence[Batch], mesh: Mesh, file: str
) -> None:
    """Write the 40 kernels and calls that take most of a step, by device and by host time."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    here, steps = [batch.to(mesh.device) for batch in batches], 10
    with torch.profiler.profile(activities=kinds) as profiler:
        for k in range(steps):
            _step(model, optimizer, here[k % len(here)])
        _settle(mesh)
    if mesh.rank == 0:
        found = profiler.key_averages()
        orders = ("self_device_time_total", "self_cpu_time_total")
        tables = [
            found.table(sort_by=order, row_limit=40, max_name_column_width=90) for order in orders
        ]
        Path(file).write_text(f"{steps} steps\n" + "\n".join(tables))


def _piped(
    model: nn.Module, optimizer: Any, batches: Iterator[Batch], staleness: int, warmup: int,
    mesh: Mesh,
) -> float:  # fmt: skip
    pipeline = create_train_pipeline(model, optimizer, staleness=staleness)
    done, begun = 0, 0.0
    while True:
        if done == warmup:
            _settle(mesh)
            begun = time.perf_counter()
        try:
            pipeline.progress(batches)
        except StopIteration:
            break
        done += 1
    _settle(mesh)
    return (time.perf_counter() - begun) / (done - warmup)


def _plain(
    model: nn.Module, optimizer: Any, batches: Iterator[Batch], staleness: int, warmup: int,
    mesh: Mesh,
) -> float:  # fmt: skip
    done, begun = 0, 0.0
    for batch in batches:
        if done == warmup:
            _settle(mesh)
            begun = time.perf_counter()
        _step(model, optimizer, batch.to(mesh.device, non_blocking=True))
        done += 1
    _settle(mesh)
    return (time.perf_counter() - begun) / (done - warmup)


def _settle(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mesh.control.barrier(what="bench")


def _batch(names: tuple[str, ...], size: int, most_ids: int, mesh: Mesh, turn: int) -> Batch:
    """Ids by a power law of exponent 1.05 over each table's ids, scattered over 64 bits."""
    generator = torch.Generator(mesh.device).manual_seed(1_000 * turn + mesh.rank)
    ids, lengths = [], []
    for k, (hot, known) in enumerate(zip(MULTI_HOT, SIZES, strict=True)):
        ids.append(
            _zipf(min(known, most_ids), size * hot, generator, mesh.device) * 0x9E3779B97F4A7C1 + k
        )
        lengths.append(torch.full((size,), hot, device=mesh.device))
    dense = torch.rand(size, DENSE, generator=generator, device=mesh.device)
    labels = torch.randint(0, 2, (size,), generator=generator, device=mesh.device).float()
    keyed = KeyedRagged.from_lengths(names, torch.cat(ids), torch.stack(lengths))
    return Batch(ids=keyed, labels=labels, dense=dense, event_time_s=turn + 1)


def _zipf(known: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Ranks 0..known-1 by p ~ (rank + 1)^-1.05, by the inverse of the continuous law."""
    u = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    last = float(known + 1) ** -0.05
    return ((1.0 - u * (1.0 - last)) ** -20.0 - 1.0).long().clamp(0, known - 1)


def _whole(feature: str) -> tuple[Layout, ...]:
    return (Layout("all", "concat", (LayoutSlice(feature),)),)
