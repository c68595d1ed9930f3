"""Python's garbage collector while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["old_objects_set_aside"]

_PYTHONS_OWN = 10_000  # Python 3.12 begins with some hundred objects set aside


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """Leave what exists now out of collections.

    Libraries bring hundreds of thousands of objects that stay for good: to look through them takes
    a tenth of a second, now and then, in the midst of a step. Does nothing where somebody did so
    before.
    """
    if gc.get_freeze_count() > _PYTHONS_OWN:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
