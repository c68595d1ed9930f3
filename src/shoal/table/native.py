"""Specs and plans in the plain form the compiled core takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.hashing import salt
from shoal.rules.optimizers import DelayCompensated, Optimizer
from shoal.rules.schedules import Schedule
from shoal.table.shard import PoolPlan
from shoal.table.spec import TableSpec

__all__ = ["RateList", "pool_dicts", "table_dict"]

_FID_SHIFT = {"v1": 54, "v2": 48}
_FID_MASK = {"v1": 0x3FF, "v2": 0x7FFF}
_NEVER = -1


def table_dict(spec: TableSpec, seed: int) -> dict[str, Any]:
    """A table spec as the core reads it; initial values are keyed by (seed, hash name)."""
    return {
        "name": spec.name,
        "dim": spec.dim,
        "state_width": spec.state_width,
        "dtype": spec.dtype,
        "segments": _segment_dicts(spec),
        "salt": salt(spec.hash_name),
        "first_column": spec.first_column,
        "seed": seed & ((1 << 64) - 1),
        "capacity_rows": spec.capacity_rows or 0,
        "on_full": spec.on_full,
        "expected_rows": spec.expected_rows,
        "admission": _admission_dict(spec),
        "ttl_s": _ttl_dict(spec),
    }


def _segment_dicts(spec: TableSpec) -> list[dict[str, Any]]:
    segments = []
    column = state_column = 0
    for segment in spec.segments:
        first, second = segment.initializer.core_params()
        segments.append(
            {
                "column": column,
                "dim": segment.dim,
                "state_column": state_column,
                "state_width": segment.state_width,
                "rule": _rule_dict(segment.optimizer),
                "init": segment.initializer.kind,
                "init_a": first,
                "init_b": second,
                "retriever": segment.compressor.kind,
                "retriever_params": segment.compressor.core_params(),
            }
        )
        column += segment.dim
        state_column += segment.state_width
    return segments


def _rule_dict(rule: Optimizer) -> dict[str, Any]:
    if isinstance(rule, DelayCompensated):
        inner = _rule_dict(rule.inner)
        params = {**inner["params"], "delay_compensated": 1.0, "strength": float(rule.strength)}
        return {"kind": inner["kind"], "params": params}
    return {"kind": rule.kind, "params": rule.core_params()}


def _admission_dict(spec: TableSpec) -> dict[str, Any] | None:
    admission = spec.admission
    if admission is None:
        return None
    return {
        "sketch": admission.counter == "sketch",
        "width": admission.sketch_width,
        "depth": admission.sketch_depth,
        "required": {
            "otherwise": admission.required(-1),
            "shift": _FID_SHIFT[admission.fid_layout],
            "mask": _FID_MASK[admission.fid_layout],
            "values": [(slot, admission.required(slot)) for slot, _ in admission.per_slot],
        },
    }


def _ttl_dict(spec: TableSpec) -> dict[str, Any] | None:
    expiry = spec.expiry
    if expiry is None:
        return None
    return {
        "otherwise": _NEVER if expiry.ttl_s is None else expiry.ttl_s,
        "shift": _FID_SHIFT[expiry.fid_layout],
        "mask": _FID_MASK[expiry.fid_layout],
        "values": list(expiry.per_slot),
    }


def pool_dicts(plan: PoolPlan) -> list[dict[str, Any]]:
    """A pooled lookup's groups as the core reads them."""
    return [
        {
            "pooling": pool.pooling,
            "length": pool.length,
            "slices": [(s.start, s.stop, s.output, s.column, s.add) for s in pool.slices],
        }
        for pool in plan.pools
    ]


class RateList:
    """Learning rates of all segments of all tables of a shard, in order, at any step."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._fixed: list[float] = []
        self._scheduled: list[tuple[int, Optimizer]] = []
        self._slices: dict[str, slice] = {}
        for spec in specs:
            start = len(self._fixed)
            for segment in spec.segments:
                if isinstance(getattr(segment.optimizer, "lr", None), Schedule):
                    self._scheduled.append((len(self._fixed), segment.optimizer))
                self._fixed.append(segment.optimizer.rate(0))
            self._slices[spec.name] = slice(start, len(self._fixed))

    def at(self, step: int, given: Mapping[str, tuple[float, ...]]) -> list[float]:
        """The given rates of the tables named, the rules' own for the others."""
        rates = self._fixed.copy()
        for place, optimizer in self._scheduled:
            rates[place] = optimizer.rate(step)
        for name, row in given.items():
            rates[self._slices[name]] = row
        return rates
