"""Specs and plans in the plain form the compiled core takes."""

from __future__ import annotations

from typing import Any

from shoal.hashing import salt
from shoal.rules.optimizers import DelayCompensated, Optimizer
from shoal.table.shard import PoolPlan
from shoal.table.spec import TableSpec

__all__ = ["pool_dicts", "rate_row", "table_dict"]

_FID_SHIFT = {"v1": 54, "v2": 48}
_FID_MASK = {"v1": 0x3FF, "v2": 0x7FFF}
_NEVER = -1


def table_dict(spec: TableSpec, seed: int) -> dict[str, Any]:
    """A table spec as the core reads it; initial values are keyed by (seed, table name)."""
    return {
        "name": spec.name,
        "dim": spec.dim,
        "state_width": spec.state_width,
        "dtype": spec.dtype,
        "segments": _segment_dicts(spec),
        "salt": salt(spec.name),
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


def rate_row(spec: TableSpec, step: int, rates: tuple[float, ...] | None) -> list[float]:
    """Learning rates of a table's segments at a step: the given ones, else the rules' own."""
    if rates is not None:
        return list(rates)
    return [segment.optimizer.rate(step) for segment in spec.segments]
