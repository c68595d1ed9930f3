"""A layout small enough to verify on paper: two tables, four features, every kind of output."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.ops import (
    FeatureConfig,
    FeatureConfigs,
    LayoutIndex,
    MonolithOffsets,
    OutConfig,
    SliceConfig,
)
from shoal.ragged import KeyedRagged
from support.backends import Implementation

__all__ = ["BATCH", "TWO", "on", "two_index", "two_rows"]

TWO = FeatureConfigs(
    {
        "a": FeatureConfig("t", (1, 2)),
        "b": FeatureConfig("t", (3,), "mean"),
        "c": FeatureConfig("s", (2, 2), "firstn", 2),
        "d": FeatureConfig("s", (4,)),
    },
    {
        "added": OutConfig((SliceConfig("b", 0, 1), SliceConfig("a", 2, 3)), "addn"),
        "joined": OutConfig((SliceConfig("b", 1, 3), SliceConfig("a", 0, 3)), "concat"),
        "piled": OutConfig((SliceConfig("c", 0, 2), SliceConfig("c", 2, 4)), "stack"),
        "single": OutConfig((SliceConfig("c", 1, 4), SliceConfig("d", 0, 4)), "none"),
    },
)
# Feature "d" is missing, "x" is not configured, keys are not sorted.
BATCH = {
    "c": [[1, 0, 1], [], [2]],
    "b": [[0, 0], [1], []],
    "x": [[7], [], []],
    "a": [[2], [], [2, 0]],
}


def two_rows(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    s = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    t = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
    return [torch.tensor(rows, dtype=dtype, device=device) for rows in (s, t)]


def two_index(shared: tuple[str, ...] = (), batch: dict = BATCH) -> LayoutIndex:
    keyed = KeyedRagged.from_lists(batch)
    return LayoutIndex.from_keyed(keyed, keyed.values_N, {"s": 4, "t": 3}, TWO, shared=shared)


def on(impl: Implementation, value):  # type: ignore[no-untyped-def]
    """A list of tensors, an index or packed offsets, on the implementation's device."""
    if impl.device == "cpu":
        return value
    if isinstance(value, list):
        return [tensor.to(impl.device) for tensor in value]
    if isinstance(value, LayoutIndex):
        return value.to(impl.device)
    fields = {name: getattr(value, name) for name in MonolithOffsets.__dataclass_fields__}
    moved = {k: v.to(impl.device) for k, v in fields.items() if isinstance(v, Tensor)}
    splits = value.fid_list_row_split
    moved["fid_list_row_split"] = splits and [split.to(impl.device) for split in splits]
    return MonolithOffsets(**{**fields, **moved})
