"""Measures the machine that plans are for: memory, tables, links between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, Part
from shoal.comm.mesh import Mesh
from shoal.planner.topology import (
    ASSUMED,
    Curve,
    DeviceKind,
    Rates,
    Topology,
    fingerprint_of,
    from_environment,
    measured_text,
    show_bandwidth,
    show_seconds,
)
from shoal.rules.optimizers import Adagrad
from shoal.table.factory import make_shard
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

_WIDTHS = (4, 16, 64, 256)  # columns of float32
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: rows of a table, ids of a lookup, bytes of copies, repeats."""

    rows: int = 200_000
    ids: int = 16_384
    copied_bytes: int = 64 << 20
    sent_bytes: int = 8 << 20
    repeats: int = 9


QUICK = Scale(rows=5_000, ids=1_024, copied_bytes=1 << 20, sent_bytes=1 << 18, repeats=3)


def measure(mesh: Mesh, *, scale: Scale | None = None) -> Topology:
    """Measured speeds and sizes of this job's machines; a collective call.

    Cross-node speeds are measured where there are several nodes, and assumed otherwise. What whole
    steps cost besides is `shoal.train.stepping`'s to measure.

    Raises:
        CollectiveFailed: a rank is gone.
    """
    scale = Scale() if scale is None else scale
    device = mesh.device
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    known = ASSUMED[kind]
    copy = _copies(device, device, scale)
    id_s, gather, update = _tables(device, scale, copy)
    rates = replace(
        known,
        copy=copy,
        host_link=_copies(torch.device("cpu"), device, scale),
        gather=gather,
        update=update,
        id_s=id_s,
        flops=_flops(device, scale),
    )
    if mesh.world_size > 1:
        rates = _links(mesh, rates, scale)
    here = from_environment(str(device))
    return replace(here, rates=rates, notes=())


def best(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a call: the fastest of some, after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        _settle(device)
        begun = time.perf_counter()
        run()
        _settle(device)
        seconds.append(time.perf_counter() - begun)
    return max(min(seconds[1:]), _LEAST_S)


def cached(folder: Path, topology: Topology) -> Path:
    """Write measured speeds where the same machine finds them; the path says on which."""
    fingerprint = fingerprint_of(topology.device, topology.local_size)
    path = folder / f"topology-{topology.nodes}x{topology.local_size}-{topology.device}.json"
    path.write_text(measured_text(topology, fingerprint))
    return path


def lines_of(rates: Rates) -> list[str]:
    """Measured speeds for people."""
    links = {
        "copy": rates.copy, "host link": rates.host_link, "in a node": rates.intra,
        "all-reduce": rates.reduce,
    }  # fmt: skip
    steps = {
        "id": rates.id_s, "occurrence": rates.occurrence_s, "table": rates.table_s,
        "slice": rates.slice_s, "step": rates.step_s, "collective": rates.intra_latency_s,
    }  # fmt: skip
    curves = (("rows read", rates.gather), ("rows updated", rates.update))
    return [
        ", ".join(f"{name} {show_bandwidth(value)}" for name, value in links.items()),
        *(
            f"{name}: " + ", ".join(f"{w:.0f} B {show_bandwidth(v)}" for w, v in curve)
            for name, curve in curves
        ),
        "seconds of an " + ", ".join(f"{name} {show_seconds(s)}" for name, s in steps.items()),
    ]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copies(source: torch.device, target: torch.device, scale: Scale) -> float:
    """Bytes a second read and written by a copy; between host and device, bytes moved."""
    count = scale.copied_bytes // 4
    data = torch.ones(count, device=source)
    if source.type != target.type:
        data = data.pin_memory()
    out = torch.empty(count, device=target)
    seconds = best(lambda: out.copy_(data, non_blocking=True), target, scale.repeats)
    return (2 if source.type == target.type else 1) * 4.0 * count / seconds


def _flops(device: torch.device, scale: Scale) -> float:
    size = 512 if scale.rows > QUICK.rows else 128
    a, b = (torch.ones(size, size, device=device) for _ in range(2))
    return 2.0 * size**3 / best(lambda: a @ b, device, scale.repeats)


def _tables(device: torch.device, scale: Scale, most: float) -> tuple[float, Curve, Curve]:
    """(seconds of an id, bytes a second of rows read, of rows and state updated) of this shard."""
    found = [_table(device, dim, scale) for dim in (1, *_WIDTHS)]
    id_s = max(found[0][0] / scale.ids, _LEAST_S / 10)
    base_read, base_step = found[0]
    gather, update = [], []
    for dim, (read_s, step_s) in zip(_WIDTHS, found[1:], strict=True):
        size = 4.0 * dim * scale.ids
        # What wider rows add to the time of rows of one column.
        added_s = max(read_s - base_read, _LEAST_S), max(step_s - base_step, _LEAST_S)
        gather.append((4.0 * dim, min(size / added_s[0], most)))
        update.append((8.0 * dim, min(4 * size / added_s[1], most)))
    return id_s, tuple(gather), tuple(update)


def _table(device: torch.device, dim: int, scale: Scale) -> tuple[float, float]:
    """Seconds of a lookup, and of an optimizer step, of random rows of a table that wide."""
    spec = TableSpec(
        name="t",
        segments=(Segment(dim=dim, optimizer=Adagrad(lr=0.1)),),
        expected_rows=scale.rows,
    )
    shard = make_shard((spec,), device=str(device))
    ctx = StepContext(global_step=1)

    def groups(ids_N: Tensor) -> IdGroups:
        splits = torch.tensor([0, len(ids_N)], device="cpu")
        return IdGroups(ids_N.to(device), splits, torch.zeros(1, dtype=torch.int32, device="cpu"))

    every = torch.arange(scale.rows, device="cpu") * 0x9E3779B97F4A7C1
    shard.assign(groups(every), [torch.ones(scale.rows, dim, device=device)], ctx=ctx)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(scale.rows, generator=generator, device="cpu")[: scale.ids]
    picked = groups(every[order])
    count = len(order)
    grads = [torch.full((count, dim), 0.01, device=device)]

    def look_up() -> None:
        ticket = shard.find_or_init(picked, ctx=ctx)
        shard.gather(ticket, ctx=ctx)
        ticket.end()

    read_s = best(look_up, device, scale.repeats)
    step_s = best(lambda: shard.apply_ids(picked, grads, ctx=ctx), device, scale.repeats)
    return read_s * scale.ids / count, step_s * scale.ids / count


def _links(mesh: Mesh, rates: Rates, scale: Scale) -> Rates:
    """Speeds and latencies of collectives between ranks, of the slowest rank."""
    made = mesh.collectives("calibration")
    try:
        empty = _all_to_all(made, 0, scale)
        full = _all_to_all(made, scale.sent_bytes, scale)
        data = torch.ones(scale.sent_bytes // 4, device=made.device)
        summed = best(
            lambda: made.all_reduce(data, "sum", what="calibration").wait(),
            made.device,
            scale.repeats,
        )
        seconds = torch.tensor([empty, full, summed], dtype=torch.float64, device="cpu")
        (worst,) = mesh.control.all_reduce(seconds, "max", what="calibration").wait()
    finally:
        made.close()
    latency, moving = float(worst[0]), max(float(worst[1] - worst[0]), _LEAST_S)
    ranks, local = mesh.world_size, mesh.launch.local_world_size
    rates = replace(rates, reduce=scale.sent_bytes / float(worst[2]))
    near = scale.sent_bytes * (local - 1) / ranks / moving
    far = scale.sent_bytes * (ranks - local) / ranks / moving
    if local == ranks:
        return replace(rates, intra=near, intra_latency_s=latency)
    if local == 1:
        return replace(rates, cross=far, cross_latency_s=latency)
    # The slower links decide; those of a node are at least as fast as what passed.
    return replace(rates, cross=far, cross_latency_s=latency, intra=max(rates.intra, near))


def _all_to_all(made: Collectives, size: int, scale: Scale) -> float:
    """Seconds of an even all-to-all in which each rank sends this number of bytes."""
    each = size // 4 // made.world_size
    splits = (each,) * made.world_size
    data = torch.ones(each * made.world_size, 1, device=made.device)

    def once() -> None:
        made.all_to_all([Part(data, splits, splits)], what="calibration").wait()

    return best(once, made.device, scale.repeats)
