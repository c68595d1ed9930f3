"""The cases of the operations' bench, their targets and sizes. Imports no torch, runs nothing.

An `Op` is one operation at one size. It has a row per thread count against plain torch and, if
memory bandwidth limits it, one against a copy. The workers use the same functions for the names of
their results, so the names always agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness import Case, Job
from plan_cpu import THREADS, case_name

__all__ = [
    "DIMS",
    "FAMILIES",
    "THREADS",
    "DeviceName",
    "Op",
    "Scale",
    "cases_of",
    "ceiling_name",
    "copy_name",
    "jobs",
    "operations",
    "time_name",
]

DeviceName = Literal["cpu", "cuda"]

DIMS = (16, 64, 128)
FAMILIES = ("ids", "rows", "segments", "reduce", "layout")
MODES = ("sum", "mean", "sqrtn", "l2")
REDUCES = ("reduce_sum", "reduce_mean", "reduce_mean_sqrtn", "reduce_sqrtn")
COPY = "a copy of memory by as many threads"
DEVICE_COPY = "a copy of device memory"
CEILING = "the requested ceiling"
CEILING_MS = 0.2
# Against torch alone on the CPU: least ratio, and the one hoped for.
TWICE = (2.0, None)
# As a part of a copy: every such case on the CPU, from this width on CUDA.
OF_COPY = {"cpu": 0.7, "cuda": 0.8}
LEAST_DIM = {"cpu": 1, "cuda": 64}
# Limits of a process on the CPU: memory for several copies of a case's rows, and time.
NEED_BYTES = 4_000_000_000
TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where it runs and how large: the device, and sizes that shrink with `quick`."""

    device: DeviceName
    quick: bool = False

    @property
    def value_bytes(self) -> int:
        """Bytes of the rows of a case that must not fit a cache."""
        if self.quick:
            return 1 << 21
        return 1 << (30 if self.device == "cuda" else 28)

    @property
    def copy_bytes(self) -> int:
        """Bytes that one copy reads."""
        return 1 << 23 if self.quick else self.value_bytes

    def of(self, full: int, quick: int) -> int:
        """A size."""
        return quick if self.quick else full


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation at one size.

    Args:
        what, dim: its name, and the width of its rows if cases differ in it.
        family: cases measured in one process and traced in one file.
        build: "module:function" that makes its inputs and contenders.
        params: keyword arguments of `build` (JSON values), without the device.
        peer: the baseline in torch; the fastest of several counts.
        times: target and stretch ratio to the baseline; None: informational.
        copied: whether it is measured against a copy, and the target fraction.
        ceiling_ms: a time it must not exceed.
    """

    what: str
    family: str
    build: str
    params: Mapping[str, Any]
    peer: str
    dim: int | None = None
    times: tuple[float, float | None] | None = None
    copied: bool = False
    of_copy: float | None = None
    ceiling_ms: float | None = None

    @property
    def name(self) -> str:
        """Its name without threads."""
        return case_name(self.what, self.dim)


def time_name(op: Op, threads: int | None) -> str:
    """The row of its time against torch's."""
    return case_name(op.what, op.dim, None, threads)


def copy_name(op: Op, threads: int | None) -> str:
    """The row of the bytes it moves against those of a copy."""
    return f"{time_name(op, threads)} of a copy"


def ceiling_name(op: Op, threads: int | None) -> str:
    """The row of its time against a ceiling."""
    return f"{time_name(op, threads)} within {op.ceiling_ms} ms"


def cases_of(op: Op, threads: int | None) -> list[Case]:
    """The rows of an operation on this many threads (None: a device that has no such choice)."""
    bar, stretch = op.times or (None, None)
    lower: dict[str, Any] = {"unit": "ms", "better": "lower"}
    cases = [Case(name=time_name(op, threads), peer=op.peer, bar=bar, stretch=stretch, **lower)]
    if op.copied:
        name = copy_name(op, threads)
        peer = DEVICE_COPY if threads is None else COPY
        cases.append(Case(name=name, unit="GB/s", peer=peer, bar=op.of_copy))
    if op.ceiling_ms is not None:
        name = ceiling_name(op, threads)
        cases.append(Case(name=name, peer=CEILING, peer_value=op.ceiling_ms, bar=1.0, **lower))
    return cases


def operations(scale: Scale) -> list[Op]:
    """All operations, in the order of the issue's list."""
    return [
        *_id_ops(scale),
        *_row_ops(scale),
        *_segment_ops(scale),
        *_reduce_ops(scale),
        *_layout_ops(scale),
    ]


def jobs(
    scale: Scale,
    threads: Sequence[int],
    wanted: Sequence[Op],
    folder: Path | None,
    env: Mapping[str, str],
) -> list[Job]:
    """Processes on the CPU: one per family, or one in all where starting them takes longest.

    wanted: some of `operations`. folder: where traces go, if anywhere.
    """
    groups = [FAMILIES] if scale.quick else [(family,) for family in FAMILIES]
    found = []
    for group in groups:
        ops = [op for op in wanted if op.family in group]
        if not ops:
            continue
        found.append(
            Job(
                task=", ".join(group),
                params={
                    "quick": scale.quick,
                    "threads": list(threads),
                    "ops": [op.name for op in ops],
                    "profile": None if folder is None else str(folder.resolve()),
                },
                cases=tuple(case for op in ops for t in threads for case in cases_of(op, t)),
                need_bytes=0 if scale.quick else NEED_BYTES,
                env=env,
                timeout_s=TIMEOUT_S,
            )
        )
    return found


def _scattered(scale: Scale) -> dict[str, Any]:
    """Targets of an operation that sums rows from random positions."""
    return {"times": TWICE if scale.device == "cpu" else None, "copied": True}


def _bound(scale: Scale, dim: int) -> dict[str, Any]:
    """Targets of an operation that only moves rows."""
    asked = OF_COPY[scale.device] if dim >= LEAST_DIM[scale.device] else None
    return {**_scattered(scale), "of_copy": asked}


def _tables(scale: Scale) -> dict[str, int]:
    """Monolith's: so many tables, so many ids each."""
    return {"tables": scale.of(128, 8), "ids": scale.of(10_240, 1_024)}


def _id_ops(scale: Scale) -> list[Op]:
    ids = scale.of(1_000_000, 20_000)
    cpu = scale.device == "cpu"
    dedups: dict[str, tuple[dict[str, Any], tuple[float, float] | None, float | None]] = {
        "dedup 1 M ids": ({"distribution": "uniform"}, (3.0, 6.0), CEILING_MS),
        "dedup_into 1 M ids": ({"distribution": "uniform", "into": True}, None, CEILING_MS),
        "dedup 1 M Zipf ids": ({"distribution": "zipf"}, None, None),
    }
    return [
        *(
            Op(
                what=what,
                family="ids",
                build="ops_ids:dedup",
                params={"ids": ids, **params},
                peer="torch.unique(return_inverse=True)",
                times=times if cpu else None,
                ceiling_ms=None if cpu else ceiling,
            )
            for what, (params, times, ceiling) in dedups.items()
        ),
        Op(
            what="partition 1 M ids, 8 shards",
            family="ids",
            build="ops_ids:partition",
            params={"ids": ids, "shards": 8},
            peer="torch.sort(stable=True, out=), torch.bincount",
        ),
        *(
            Op(
                what="split_by_indices 1 M rows, 8 splits",
                dim=dim,
                family="ids",
                build="ops_ids:split_by_indices",
                params={"rows": ids, "dim": dim, "splits": 8},
                peer="a mask per split; or sort, index_select(out=), split",
            )
            for dim in (16, 64)
        ),
        Op(
            what="fused_reorder_by_indices 128 x 10,240 ids, 8 shards",
            dim=16,
            family="ids",
            build="ops_ids:fused_reorder",
            params={"shards": 8, "dim": 16, **_tables(scale)},
            peer="torch.unique per table, or one of packed ids; argsort, bincount",
        ),
    ]


def _row_ops(scale: Scale) -> list[Op]:
    looked_up = "sort, searchsorted, take(out=), index_select(out=)"
    million, lot = scale.of(1_000_000, 20_000), scale.of(100_000, 2_000)
    found = [
        Op(
            what="map_id_to_embedding 1 M ids, 10 shards",
            dim=16,
            family="rows",
            build="ops_rows:map_id",
            params={"ids": million, "shards": 10, "dim": 16},
            peer=f"cat, {looked_up}",
            times=TWICE if scale.device == "cpu" else None,
        )
    ]
    for dim, columns in ((32, 4), (256, 2)):
        # On CUDA the rows fit its cache, and finding them is most of the work.
        bars = _bound(scale, dim) if scale.device == "cpu" else {}
        found.append(
            Op(
                what=f"gather_embeddings_by_input 100 k ids, input x {columns}",
                dim=dim,
                family="rows",
                build="ops_rows:gather_by_input",
                params={"ids": lot, "columns": columns, "dim": dim},
                peer=looked_up,
                **bars,
            )
        )
    for dim in DIMS:
        params = {"dim": dim, "value_bytes": scale.value_bytes}
        found += [
            Op(
                what="gather_rows",
                dim=dim,
                family="rows",
                build="ops_rows:gather",
                params=params,
                peer="torch.index_select(out=)",
                **_bound(scale, dim),
            ),
            Op(
                what="gather_rows backward (scatter_rows)",
                dim=dim,
                family="rows",
                build="ops_rows:scatter",
                params=params,
                peer="zero_, index_add_; or aten.embedding_dense_backward",
                **_scattered(scale),
            ),
        ]
    return [*found, *_fused_gather_ops(scale)]


def _fused_gather_ops(scale: Scale) -> list[Op]:
    found = []
    for dim in (16, 64):
        params: dict[str, Any] = {"dim": dim, **_tables(scale)}
        if dim == 64:  # the width of Monolith's benchmark has its number of ids; this leaves caches
            params["ids"] = scale.value_bytes // (params["tables"] * dim * 4)
        found += [
            Op(
                what="fused_gather_embeddings_by_input 128 tables",
                dim=dim,
                family="rows",
                build="ops_rows:fused_gather",
                params=params,
                peer="index_select(out=) per table, or one of all",
                **_bound(scale, dim),
            ),
            Op(
                what="fused_gather_embeddings_by_input_gradient 128 tables",
                dim=dim,
                family="rows",
                build="ops_rows:fused_gather_gradient",
                params=params,
                peer="zero_, index_add_ per table; or cat(out=) and one of all",
                **_scattered(scale),
            ),
        ]
    return found


def _segment_ops(scale: Scale) -> list[Op]:
    """Each segment has 4 rows in the mean, some none; the rows are far larger than a cache."""
    forward = "index_add_; or embedding_bag of a range"
    if scale.device == "cuda":
        forward += "; or torch.segment_reduce"
    peers = {"forward": forward, "backward": "index_select(out=), scaled"}
    return [
        Op(
            what=f"segment_{mode} {way}",
            dim=dim,
            family="segments",
            build=f"ops_segments:{way}",
            params={"mode": mode, "dim": dim, "value_bytes": scale.value_bytes},
            peer=peer,
            **_bound(scale, dim),
        )
        for way, peer in peers.items()
        for mode in MODES
        for dim in DIMS
    ]


def _reduce_ops(scale: Scale) -> list[Op]:
    forward, backward = "index_add_; or searchsorted, embedding_bag", "index_select(out=), scaled"
    found = []
    for name in REDUCES:
        params = {"name": name, "dim": 64, "value_bytes": scale.value_bytes, "in_order": True}
        for way, peer in (("forward", forward), ("backward", backward)):
            found.append(
                Op(
                    what=f"{name} {way}, sorted index",
                    dim=64,
                    family="reduce",
                    build=f"ops_segments:reduce_{way}",
                    params=params,
                    peer=peer,
                    **_bound(scale, 64),
                )
            )
    params = {"name": "reduce_sum", "dim": 64, "value_bytes": scale.value_bytes, "in_order": False}
    found.append(
        Op(
            what="reduce_sum forward, index in any order",
            dim=64,
            family="reduce",
            build="ops_segments:reduce_forward",
            params=params,
            peer=f"index_add_; or sort, {forward.split('; or ')[1]}",
            **_scattered(scale),
        )
    )
    return found


def _layout_ops(scale: Scale) -> list[Op]:
    groups = (49, 50, 100) if not scale.quick else (5, 5, 9)
    params = {"batch": scale.of(256, 32), "groups": list(groups)}
    peer = "embedding_bag per feature, cat, stack, sum"
    return [
        Op(
            what=f"fused_embedding_to_layout {way} 256 x 199 features",
            family="layout",
            build=f"ops_layout:{way}",
            params=params,
            peer=peer if way == "forward" else f"the gradient of {peer}",
        )
        for way in ("forward", "backward")
    ]
