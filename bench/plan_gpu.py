"""The cases of the GPU table bench and the processes that measure them. Runs nothing.

Baselines that cannot run on the same machine are published figures, each with its source. Floors
and ceilings are the requested values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from harness import Case, Job

__all__ = ["DIMS", "RULES", "THREADS", "Scale", "jobs"]

DIMS = (8, 32, 64, 128)
RULES = ("SGD", "Adam")
# Whether autograd runs backward in a thread of its own, as it does unless told otherwise.
THREADS = {True: "", False: ", backward in one thread"}

FLOOR = "the requested floor"
CEILING = "the requested ceiling"
SCRATCH_COPY_GB_S = 2991.0

# dynamicemb/benchmark_results.json, 2026-05-26, one H100 80GB HBM3: milliseconds of a step.
FBGEMM_STATIC = {"SGD": 0.96, "Adam": 1.35}
DYNAMICEMB = {"SGD": 1.92, "Adam": 2.19}
FBGEMM_UVM = {"no cache": 13.6, "cache 0.8x": 4.77}
# HierarchicalKV on the GPU that set the targets, row width 8, load 0.75: 1e9 keys a second.
HKV = "HierarchicalKV, H100 80GB HBM3, D=8"
HKV_FIND, HKV_INSERT = 3.6, 1.74

FIND_BARS = {8: (5.5, 7.5), 32: (4.5, 5.5), 64: (3.3, 3.75), 128: (2.1, 2.4)}
INSERT_DIMS = (8, 64)
INSERT_BAR = (2.0, 3.0)
STEP_BARS = {"SGD": (0.90, 0.72), "Adam": (1.15, 0.95)}
MODULE_BARS = {"SGD": (1.05, 0.96), "Adam": (1.35, 1.35)}  # stretch: what FBGEMM_STATIC takes
HOST_BAR = 0.6
TIER_BARS = {"no cache": (13.6, 10.0), "cache 0.8x": (4.8, 3.5)}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large and how long.

    Args:
        device: "cuda", or "cpu" for the interpreter.
        call_ids: ids of a lookup, an insert and a churning step.
        slots: slots of an index that is loaded to 0.75.
        repeats: calls that are timed together; a third as many again are timed alone.
        step_tables, step_ids, step_rows: tables, ids and rows a table of the big step.
        bag_tables, bag_batch, bag_rows: tables, examples and rows a table of the pooled step.
        churn_steps, churn_ids: steps before a find, new ids in each.
        grow_from, grow_to, grow_ids: rows of the growing table, new ids a step.
        copy_bytes: size of the copy that measures bandwidth.
        patience_s: a loop of many steps stops after this time and reports its progress.
    """

    device: Literal["cuda", "cpu"]
    call_ids: int = 1 << 20
    slots: int = 1 << 24
    repeats: int = 45
    step_tables: int = 10
    step_ids: int = 104_857
    step_rows: int = 1_000_000
    bag_tables: int = 26
    bag_batch: int = 65_536
    bag_rows: int = 500_000
    churn_steps: int = 10_000
    churn_ids: int = 4096
    grow_from: int = 1_000_000
    grow_to: int = 100_000_000
    grow_ids: int = 100_000
    copy_bytes: int = 1 << 30
    patience_s: float = 40.0

    @classmethod
    def of(cls, device: Literal["cuda", "cpu"], quick: bool) -> Scale:
        """The scale of `--device` and `--quick`; the interpreter takes the smallest."""
        if device == "cpu":
            return cls(
                device="cpu",
                call_ids=64,
                slots=256,
                repeats=2,
                step_tables=2,
                step_ids=24,
                step_rows=64,
                bag_tables=2,
                bag_batch=8,
                bag_rows=32,
                churn_steps=2,
                churn_ids=16,
                grow_from=64,
                grow_to=192,
                grow_ids=64,
                copy_bytes=1 << 20,
            )
        if quick:
            return cls(
                device="cuda",
                call_ids=1 << 16,
                slots=1 << 18,
                repeats=6,
                step_ids=10_000,
                step_rows=50_000,
                bag_batch=4096,
                bag_rows=50_000,
                churn_steps=100,
                grow_from=100_000,
                grow_to=1_000_000,
                copy_bytes=1 << 28,
            )
        return cls(device="cuda")

    @property
    def loaded_rows(self) -> int:
        """Rows that load the index to 0.75; short of it by a hair, so that it does not grow."""
        return self.slots * 3 // 4 - self.slots // 4096


def jobs(scale: Scale) -> list[Job]:
    """All jobs, in the order of the speed table."""
    return [
        _job(scale, "copy", [Case(name="copy bandwidth", unit="GB/s", **_scratch())]),
        _job(scale, "find", _find_cases()),
        _job(scale, "insert", _insert_cases()),
        *(_job(scale, "step", _step_cases(rule), rule=rule) for rule in RULES),
        *(_job(scale, "tier", [_tier_case(cache)], cache=cache) for cache in TIER_BARS),
        _job(scale, "pooled", _pooled_cases()),
        _job(scale, "budget", [_ceiling("5 % new ids at a full budget over none new", 1.5, 1.2)]),
        _job(scale, "churned", _churned_cases()),
        _job(scale, "growth", [_ceiling("p99/p50 of a step while growing", 3.0, 2.0)]),
    ]


def _job(scale: Scale, task: str, cases: list[Case], **more: Any) -> Job:
    params = {"scale": asdict(scale), **more}
    return Job(task=task, params=params, cases=tuple(cases), timeout_s=150.0)


def _scratch() -> Mapping[str, Any]:
    return {"peer": "the GPU that set the targets", "peer_value": SCRATCH_COPY_GB_S}


def _find_cases() -> list[Case]:
    cases = []
    for dim, (floor, hoped) in FIND_BARS.items():
        name = f"find and copy out, load 0.75, D={dim}"
        cases.append(_floor(name, "G rows/s", floor, hoped))
    hkv = {"unit": "G rows/s", "peer": f"{HKV}: find", "peer_value": HKV_FIND}
    cases.append(Case(name="find and copy out, load 0.75, D=8, against HKV", **hkv))
    cases.append(
        Case(
            name="find and copy out, load 0.75, D=8, eight times as many ids a call",
            unit="G rows/s",
            peer="Shoal, 1 M ids a call",
        )
    )
    cases.append(_ceiling("index and metadata bytes a row at load 0.75", 37.0, 33.0, "bytes"))
    return cases


def _insert_cases() -> list[Case]:
    cases = [_floor(f"insert new ids D={dim}", "G ids/s", *INSERT_BAR) for dim in INSERT_DIMS]
    hkv = {"unit": "G ids/s", "peer": f"{HKV}: insert_or_assign", "peer_value": HKV_INSERT}
    return [*cases, Case(name="insert new ids D=8, against HKV", **hkv)]


def _step_cases(rule: str) -> list[Case]:
    published = {
        "FBGEMM": ("FBGEMM static TBE, published", FBGEMM_STATIC[rule]),
        "dynamicemb": ("dynamicemb, all in HBM, published", DYNAMICEMB[rule]),
    }
    cases = [_ceiling(f"{rule} step, 10 tables, 1.05 M ids, D=128", *STEP_BARS[rule], "ms")]
    for how in THREADS.values():
        name = f"{rule} step, 10 tables, through modules{how}"
        cases.append(_ceiling(name, *MODULE_BARS[rule], "ms"))
        cases.append(_ceiling(f"{name}, host", HOST_BAR, HOST_BAR, "ms"))
    for who, (peer, ms) in published.items():
        name = f"{rule} step, 10 tables, against {who}"
        cases.append(Case(name=name, unit="ms", better="lower", peer=peer, peer_value=ms))
    return cases


def _tier_case(cache: str) -> Case:
    ceiling, hoped = TIER_BARS[cache]
    case = _ceiling(f"SGD step, rows in host memory, {cache}", ceiling, hoped, "ms")
    peer = f"{CEILING} (FBGEMM UVM, published: {FBGEMM_UVM[cache]} ms)"
    return Case(**{**asdict(case), "peer": peer})


def _pooled_cases() -> list[Case]:
    return [
        Case(
            name="Adam step, 26 tables, batch 65,536, pooled, D=64",
            unit="ms",
            peer="nn.EmbeddingBag(sparse=True) + SparseAdam",
            better="lower",
            bar=5.0,
            stretch=10.0,
        )
    ]


def _churned_cases() -> list[Case]:
    return [
        _ceiling("find after 10,000 steps of churn over fresh", 1.2, 1.1),
        _ceiling("find with half the ids missing over all there", 1.3, 1.2),
    ]


def _floor(name: str, unit: str, floor: float, hoped: float) -> Case:
    return Case(name=name, unit=unit, peer=FLOOR, peer_value=floor, bar=1.0, stretch=hoped / floor)


def _ceiling(name: str, ceiling: float, hoped: float, unit: str = "x") -> Case:
    return Case(
        name=name,
        unit=unit,
        peer=CEILING,
        peer_value=ceiling,
        better="lower",
        bar=1.0,
        stretch=ceiling / hoped,
    )
