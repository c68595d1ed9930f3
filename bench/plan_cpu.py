"""The cases of the CPU table bench and the processes that measure them. Runs nothing.

Every row of the speed table is declared here; the workers name their results with the same
functions, so the names always agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import Case, Job

__all__ = ["BATCH_IDS", "DIMS", "DISTRIBUTIONS", "THREADS", "Scale", "case_name", "jobs"]

BATCH_IDS = 65_536
DIMS = (16, 64)
DISTRIBUTIONS = ("uniform", "zipf")
THREADS = (1, 2)
FULL_ROWS = 10_000_000
QUICK_ROWS = 200_000

FLOOR = "the requested floor"
CEILING = "the requested ceiling"
# torch then asks for huge pages for its outputs, as the tables do for their rows.
HUGE_PAGES: Mapping[str, str] = {"THP_MEM_ALLOC_ENABLE": "1"}
PeerEnv = Mapping[tuple[str, int], Mapping[str, str]]

STEP_PEERS: Mapping[str, tuple[str, str, Mapping[int, tuple[float, float]]]] = {
    "fbgemm": ("Adagrad step", "FBGEMM CPU TBE, EXACT_ADAGRAD", {1: (2.5, 3.8), 2: (4.0, 8.0)}),
    "torch_adagrad": (
        "Adagrad step",
        "nn.EmbeddingBag(sparse=True) + torch.optim.Adagrad",
        {1: (4.0, 6.0), 2: (4.0, 6.0)},
    ),
    "torch_adam": (
        "Adam step",
        "nn.EmbeddingBag(sparse=True) + torch.optim.SparseAdam",
        {1: (5.0, 8.0), 2: (5.0, 8.0)},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large and how long: rows preloaded, distinct batches, passes over them."""

    rows: int
    batches: int = 21
    passes: int = 2
    quick: bool = False

    @classmethod
    def of(cls, rows: int | None, quick: bool) -> Scale:
        """The scale of `--rows N` and `--quick`."""
        if quick:
            return cls(rows=rows or QUICK_ROWS, batches=5, passes=1, quick=True)
        return cls(rows=rows or FULL_ROWS)

    def params(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of a worker function as JSON values, the scale among them."""
        return {"scale": asdict(self), **more}


def case_name(
    what: str, dim: int | None = None, distribution: str | None = None, threads: int | None = None
) -> str:
    """`what D=16 zipf 2t`, leaving out what does not apply."""
    parts = [what]
    if dim is not None:
        parts.append(f"D={dim}")
    if distribution is not None:
        parts.append(distribution)
    if threads is not None:
        parts.append(f"{threads}t")
    return " ".join(parts)


def jobs(scale: Scale, peer_env: PeerEnv) -> list[Job]:
    """All jobs, in the order of the speed table; `peer_env` is the best per (baseline, D)."""
    return [
        *_find_jobs(scale, peer_env),
        *_step_jobs(scale, peer_env),
        *_insert_jobs(scale),
        *_scaling_jobs(scale),
        _overhead_job(scale),
        *_growth_jobs(scale),
        _resident_job(scale),
        *_many_tables_jobs(scale),
        *_beside_jobs(scale),
    ]


def _table_bytes(rows: int, dim: int, state: int) -> int:
    return rows * (4 * (dim + state) + 64)


def _find_jobs(scale: Scale, peer_env: PeerEnv) -> list[Job]:
    found = []
    for dim in DIMS:
        bar, stretch = {64: (0.9, 1.1), 16: (0.65, 0.8)}[dim]
        cases = tuple(
            Case(
                name=case_name("find", dim, distribution, threads),
                unit="Mids/s",
                peer="torch.index_select(out=)",
                bar=bar,
                stretch=stretch,
            )
            for threads in THREADS
            for distribution in DISTRIBUTIONS
        )
        found.append(
            Job(
                task="find",
                params=scale.params(dim=dim),
                cases=cases,
                need_bytes=2 * _table_bytes(scale.rows, dim, 0),
                env={**HUGE_PAGES, **peer_env.get(("index_select", dim), {})},
            )
        )
    return found


def _step_jobs(scale: Scale, peer_env: PeerEnv) -> list[Job]:
    found = []
    for peer, (what, title, bars) in STEP_PEERS.items():
        for dim in DIMS:
            cases = tuple(
                Case(
                    name=case_name(f"{what} vs {peer}", dim, distribution, threads),
                    unit="Mids/s",
                    peer=title,
                    bar=bars[threads][0],
                    stretch=bars[threads][1],
                )
                for threads in THREADS
                for distribution in DISTRIBUTIONS
            )
            state = (2 if peer == "torch_adam" else 1) * dim
            found.append(
                Job(
                    task="step",
                    params=scale.params(dim=dim, peer=peer),
                    cases=cases,
                    need_bytes=2 * _table_bytes(scale.rows, dim, state),
                    env={**HUGE_PAGES, **peer_env.get((peer, dim), {})},
                )
            )
    return found


def _insert_jobs(scale: Scale) -> list[Job]:
    found = []
    for dim in DIMS:
        cases = tuple(
            Case(
                name=case_name(f"insert new ids, {when}", dim, None, threads),
                unit="Mids/s a thread",
                peer=FLOOR,
                peer_value=5.0,
                bar=1.0 if when == "memory touched" else None,
                stretch=2.0 if when == "memory touched" else None,
            )
            for threads in THREADS
            for when in ("memory touched", "first touch")
        )
        found.append(
            Job(
                task="insert",
                params=scale.params(dim=dim),
                cases=cases,
                need_bytes=_table_bytes(scale.rows, dim, dim),
                env=HUGE_PAGES,
            )
        )
    return found


def _scaling_jobs(scale: Scale) -> list[Job]:
    found = []
    for dim in DIMS:
        cases = tuple(
            Case(
                name=case_name(f"2 threads over 1, {what}", dim, distribution),
                unit="Mids/s",
                peer="Shoal on 1 thread",
                bar=1.7,
                stretch=1.9,
            )
            for what in ("find", "Adagrad step")
            for distribution in DISTRIBUTIONS
        )
        found.append(
            Job(
                task="scaling",
                params=scale.params(dim=dim),
                cases=cases,
                need_bytes=_table_bytes(scale.rows, dim, dim),
                env=HUGE_PAGES,
            )
        )
    return found


def _overhead_job(scale: Scale) -> Job:
    cases = (
        Case(
            name="one lookup call of 64 ids",
            unit="us",
            peer=CEILING,
            peer_value=15.0,
            better="lower",
            bar=1.0,
            stretch=15.0 / 8.0,
        ),
        Case(
            name="one lookup call of 64 ids vs FBGEMM",
            unit="us",
            peer="FBGEMM CPU TBE forward",
            better="lower",
        ),
        Case(
            name="one lookup call of 64 ids vs EmbeddingBag",
            unit="us",
            peer="nn.EmbeddingBag forward",
            better="lower",
        ),
    )
    params = {"rows": min(scale.rows, 200_000), "calls": 500 if scale.quick else 5_000}
    return Job(task="overhead", params=params, cases=cases, env=HUGE_PAGES)


def _growth_jobs(scale: Scale) -> list[Job]:
    return [
        Job(
            task="growth",
            params={"start": scale.rows // 10, "stop": 2 * scale.rows, "threads": threads},
            cases=(
                Case(
                    name=case_name("p99/p50 of a step while growing", 16, None, threads),
                    unit="x",
                    peer=CEILING,
                    peer_value=4.0,
                    better="lower",
                    bar=1.0,
                    stretch=2.0,
                ),
            ),
            need_bytes=2 * _table_bytes(2 * scale.rows, 16, 16),
            env=HUGE_PAGES,
        )
        for threads in THREADS
    ]


def _resident_job(scale: Scale) -> Job:
    cases = (
        Case(
            name="resident bytes over payload D=16 Adagrad",
            unit="x",
            peer=CEILING,
            peer_value=1.35,
            better="lower",
            bar=1.0,
            stretch=1.35 / 1.2,
        ),
        Case(
            name="peak resident bytes over payload D=16 Adagrad",
            unit="x",
            peer=CEILING,
            peer_value=1.35,
            better="lower",
        ),
    )
    return Job(
        task="resident",
        params={"rows": scale.rows},
        cases=cases,
        need_bytes=2 * _table_bytes(scale.rows, 16, 16),
        env=HUGE_PAGES,
    )


def _many_tables_jobs(scale: Scale) -> list[Job]:
    found = []
    for threads in THREADS:
        step, lookup = (
            Case(
                name=case_name(f"1,000 tables over one, {what}", 16, None, threads),
                unit="ms",
                peer="Shoal, one table of 1 M rows",
                better="lower",
                bar=1 / 1.5 if what == "step" else None,
                stretch=1 / 1.2 if what == "step" else None,
            )
            for what in ("step", "lookup")
        )
        found.append(
            Job(
                task="many_tables",
                params={
                    "rows_a_table": 100 if scale.quick else 1_000,
                    "batches": scale.batches,
                    "passes": 1 if scale.quick else 5,
                    "threads": threads,
                },
                cases=(step, lookup),
                env=HUGE_PAGES,
            )
        )
    return found


def _beside_jobs(scale: Scale) -> list[Job]:
    rows = max(scale.rows // 10, BATCH_IDS)
    tail = {"unit": "x", "peer": CEILING, "peer_value": 4.0, "better": "lower"}
    declared: Sequence[tuple[str, Case]] = (
        ("evicting", Case(name="p99/p50 of a step while evicting D=16", **tail)),
        ("saving", Case(name="p99/p50 of a step while saving D=16", **tail)),
        (
            "given_back",
            Case(
                name="resident bytes given back after mass expiry D=16",
                unit="of those grown",
                peer="all of them",
                peer_value=1.0,
            ),
        ),
        (
            "half_missing",
            Case(
                name="find with half the ids missing D=16",
                unit="Mids/s",
                peer="Shoal, all ids present",
            ),
        ),
        (
            "churned",
            Case(
                name="find after long churn D=16",
                unit="Mids/s",
                peer="Shoal, fresh table of the same rows",
            ),
        ),
    )
    return [
        Job(
            task=task,
            params={"rows": rows, "steps": 20 if scale.quick else 200},
            cases=(case,),
            env=HUGE_PAGES,
        )
        for task, case in declared
    ]
