"""Pooled slices laid out as a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.errors import unknown_name
from shoal.ops.checks import refuse

Layout = Literal["none", "concat", "stack", "addn"]


def pooled_layout(layout: Layout, slices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Lay pooled slices out as a model reads them.

    Slices are [B, D] each or [B, L, D] each. "none": as they are, one output per slice;
    "concat": [B, sum D] or [B, L, sum D]; "stack": [B, n, D] or [B, n, L, D]; "addn": their sum
    [B, D].

    Raises:
        UnknownName: no such layout.
        ShapeError: no slices, shapes the layout cannot join, or "addn" of sequences.
    """
    if layout not in get_args(Layout):
        raise unknown_name("layout", layout, get_args(Layout))
    shapes = [tuple(part.shape) for part in slices]
    joined = {shape[:-1] for shape in shapes} if layout == "concat" else set(shapes)
    if not shapes or len(shapes[0]) not in (2, 3):
        raise refuse(f"slices of {layout}", shapes, "[B, D] or [B, L, D]", "Pool them first.")
    if layout == "none":
        return tuple(slices)
    if len(joined) > 1:
        allowed = "equal shapes" if layout != "concat" else "shapes equal but for D"
        raise refuse(f"slices of {layout}", shapes, allowed, "Use layout 'none'.")
    if layout == "concat":
        return (torch.cat(list(slices), dim=-1),)
    if layout == "stack":
        return (torch.stack(list(slices), dim=1),)
    if len(shapes[0]) == 3:
        raise refuse("slices of addn", shapes, "[B, D]", "Pool sequences before adding.")
    return (torch.stack(list(slices)).sum(dim=0),)
