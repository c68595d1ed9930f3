"""Measures the machine that plans are for: memory, tables, links between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.comm.collectives import Collectives, Part
from shoal.comm.mesh import Mesh
from shoal.planner.topology import (
    ASSUMED,
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
from shoal.table.shard import GradRecord, IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

_WIDTHS = (4, 16, 32, 64, 128, 256)  # columns of float32
_FULL = 64  # columns from which a table of `Scale.rows` is larger than caches
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: rows of a table, ids of a lookup, bytes of copies, repeats."""

    rows: int = 1 << 18  # of 64 columns; of narrower ones more
    ids: int = 1 << 16
    copied_bytes: int = 64 << 20
    sent_bytes: int = 8 << 20
    repeats: int = 9


_BYTES_AN_ID = 8 << 10  # of rows, gradients and what a lookup returns, at the largest width
# A call takes the host a tenth of a millisecond, which has to be little next to what it does.
ON_GPU = Scale(rows=1 << 22, ids=1 << 21, copied_bytes=1 << 29, sent_bytes=1 << 26)
QUICK = Scale(rows=5_000, ids=1_024, copied_bytes=1 << 20, sent_bytes=1 << 18, repeats=3)


def measure(mesh: Mesh, *, scale: Scale | None = None) -> Topology:
    """Measured speeds and sizes of this job's machines; a collective call.

    Speeds in a node and between nodes are measured where there are ranks for it, and assumed
    otherwise. What whole steps cost besides is measured by `shoal.distributed.timed_steps`.

    scale: of the device when left out.

    Raises:
        CollectiveFailed: a rank is gone.
    """
    device = mesh.device
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    if scale is None:
        scale = _fitting(ON_GPU, device) if kind == "cuda" else Scale()
    known = ASSUMED[kind]
    rates = replace(
        known,
        copy=_copies(device, device, scale),
        host_link=_copies(torch.device("cpu"), device, scale),
        flops=_flops(device, scale),
        **_tables(device, scale),
    )
    if mesh.world_size > 1:
        rates = _links(mesh, rates, scale)
    here = from_environment(str(device))
    return replace(here, rates=rates, notes=())


def _fitting(scale: Scale, device: torch.device) -> Scale:
    """The scale, or a smaller one that fits the free memory of a GPU."""
    free = torch.cuda.mem_get_info(device)[0]
    while scale.ids > 1 << 16 and scale.ids * _BYTES_AN_ID > free:
        scale = replace(scale, rows=scale.rows // 2, ids=scale.ids // 2)
    return scale


def best(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a call: the fastest of some, after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        begun = _now(device)
        run()
        seconds.append(_now(device) - begun)
    return max(min(seconds[1:]), _LEAST_S)


def measured_file(folder: Path, topology: Topology) -> tuple[Path, str]:
    """The file, and its text, where the same machine finds measured speeds."""
    fingerprint = fingerprint_of(topology.device, topology.local_size)
    path = folder / f"topology-{topology.nodes}x{topology.local_size}-{topology.device}.json"
    return path, measured_text(topology, fingerprint)


def lines_of(rates: Rates) -> list[str]:
    """Measured speeds for people."""
    links = {
        "copy": rates.copy, "host link": rates.host_link, "in a node": rates.intra,
        "all-reduce": rates.reduce,
    }  # fmt: skip
    steps = {
        "id": rates.id_s, "occurrence": rates.occurrence_s,
        "table": rates.table_s, "slice": rates.slice_s, "step": rates.step_s,
        "replicated byte": rates.replica_s,
        "collective": rates.intra_latency_s,
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


def _now(device: torch.device) -> float:
    """Seconds of a clock, once the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
    size = 128 if scale == QUICK else 4096 if device.type == "cuda" else 512
    a, b = (torch.ones(size, size, device=device) for _ in range(2))
    return 2.0 * size**3 / best(lambda: a @ b, device, scale.repeats)


def _tables(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Rates of this shard: ids found, rows read and stepped by width, gradients that repeat."""
    every_W4 = np.array([_row_seconds(device, dim, scale) for dim in _WIDTHS])
    probes, reads, steps, repeats = every_W4.T
    sizes = 4.0 * np.array(_WIDTHS)  # of weights; those of state are as many
    return {
        "id_s": float(probes.min()),
        "gather": tuple(zip(sizes.tolist(), (sizes / reads).tolist(), strict=True)),
        "update": tuple(zip((2 * sizes).tolist(), (4 * sizes / steps).tolist(), strict=True)),
        "repeat": float(np.median(repeats / steps)),
    }


def _row_seconds(device: torch.device, dim: int, scale: Scale) -> list[float]:
    """Seconds of an id to be found, to be read and to be stepped, in a table that wide; and of
    another gradient of a row that is stepped."""
    rows = int(scale.rows * min(4.0, max(0.5, _FULL / dim)))
    spec = TableSpec(
        name="t",
        segments=(Segment(dim=dim, optimizer=Adagrad(lr=0.1)),),
        expected_rows=rows,
    )
    shard = make_shard((spec,), device=str(device))
    ctx = StepContext(global_step=1)

    def groups(ids_N: Tensor, copies: int = 1) -> IdGroups:
        splits = torch.arange(copies + 1, device="cpu") * len(ids_N)
        tables_G = torch.zeros(copies, dtype=torch.int32, device="cpu")
        # Each rank sends its ids in an order of its own.
        orders = [torch.randperm(len(ids_N), generator=generator, device="cpu")] * (copies - 1)
        both = torch.cat([ids_N, *(ids_N[order] for order in orders)])
        return IdGroups(both.to(device), splits, tables_G)

    generator = torch.Generator().manual_seed(1)
    every = torch.arange(rows, device="cpu") * 0x9E3779B97F4A7C1
    shard.assign(groups(every), [torch.ones(rows, dim, device=device)], ctx=ctx)
    order = torch.randperm(rows, generator=generator, device="cpu")
    whole = [every[some] for some in torch.split(order, scale.ids) if len(some) == scale.ids]
    # Made before the clock runs: other rates have what it takes to bring ids to their owner.
    batches = {copies: [groups(some, copies) for some in whole] for copies in (1, 2)}
    grads = (torch.full((scale.ids, dim), 0.01, device=device),)
    looked_up: list[Any] = []
    stepped: dict[int, list[float]] = {1: [], 2: []}
    # As in a step, rows have left the caches when they are stepped: all others were read since.
    for turn in range(2 + 2 * scale.repeats // len(whole)):
        copies, tickets = 1 + turn % 2, []
        for batch in batches[copies]:
            stamps = [_now(device)]
            tickets.append(shard.find_or_init(batch, ctx=ctx))
            stamps.append(_now(device))
            shard.gather(tickets[-1], ctx=ctx)
            looked_up.append(np.diff([*stamps, _now(device)]) / copies)
        for ticket in tickets:
            begun = _now(device)
            shard.apply([GradRecord(ticket, grads * copies)], ctx=ctx)
            stepped[copies].append(_now(device) - begun)
    # The fastest fifth, as of whole steps.
    once, twice = (float(np.quantile(stepped[copies], 0.2)) for copies in (1, 2))
    found = [*np.quantile(looked_up, 0.2, axis=0), once, twice - once]
    return [max(float(one), _LEAST_S) / scale.ids for one in found]


def _links(mesh: Mesh, rates: Rates, scale: Scale) -> Rates:
    """Speeds and latencies of collectives between ranks, of the slowest rank."""
    ranks, local = mesh.world_size, mesh.launch.local_world_size
    home = mesh.rank // local
    here = tuple(rank // local == home for rank in range(ranks))
    # Two patterns of the same all-to-all: to ranks of this node, and to those of others.
    patterns = {"intra": here, "cross": tuple(not one for one in here)}
    patterns = {name: to for name, to in patterns.items() if sum(to) > (name == "intra")}
    sizes = (0, scale.sent_bytes // 16, scale.sent_bytes // 4, scale.sent_bytes)
    made = mesh.collectives("calibration")
    try:
        data = torch.ones(scale.sent_bytes // 4, device=made.device)
        summed = best(
            lambda: made.all_reduce(data, "sum", what="calibration").wait(),
            made.device,
            scale.repeats,
        )
        found = [summed]
        for to in patterns.values():
            found += [_all_to_all(made, size, to, scale) for size in sizes]
        seconds = torch.tensor(found, dtype=torch.float64, device="cpu")
        (worst,) = mesh.control.all_reduce(seconds, "max", what="calibration").wait()
    finally:
        made.close()
    speeds: dict[str, Any] = {"reduce": scale.sent_bytes / float(worst[0])}
    by_pattern = worst[1:].reshape(-1, len(sizes)).tolist()
    for (name, to), measured in zip(patterns.items(), by_pattern, strict=True):
        part = (sum(to) - (name == "intra")) / sum(to)  # what stays on a rank is not sent
        latency_s, speed = fitted_line([size * part for size in sizes], measured)
        speeds |= {name: speed, f"{name}_latency_s": latency_s}
    return replace(rates, **speeds)


def fitted_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds of no bytes, bytes a second) of times by size: least squares of relative errors."""
    times = np.maximum(seconds, _LEAST_S)
    slope, empty = np.polyfit(sizes, times, 1, w=1 / times)
    return max(float(empty), _LEAST_S), 1 / max(float(slope), _LEAST_S / max(sizes))


def _all_to_all(made: Collectives, size: int, to: tuple[bool, ...], scale: Scale) -> float:
    """Seconds of an all-to-all in which each rank sends its bytes to some ranks, evenly."""
    each = size // 4 // sum(to)
    splits = tuple(each * one for one in to)
    data = torch.ones(sum(splits), 1, device=made.device)

    def once() -> None:
        made.all_to_all([Part(data, splits, splits)], what="calibration").wait()

    return best(once, made.device, scale.repeats)
