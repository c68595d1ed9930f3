"""Checks of indices and offsets in device memory, on for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shoal.ops import dispatch


@contextlib.contextmanager
def bounds_checks(enabled: bool = True) -> Iterator[None]:
    """`set_bounds_checks` inside; what was set before, afterwards."""
    before = dispatch.checks_bounds()
    dispatch.set_bounds_checks(enabled)
    try:
        yield
    finally:
        dispatch.set_bounds_checks(before)
