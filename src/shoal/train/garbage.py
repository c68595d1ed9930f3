"""Python's garbage collector while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["old_objects_set_aside"]


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """Leave what exists now out of collections.

    Libraries bring hundreds of thousands of objects that stay for good: to look through them takes
    a tenth of a second, now and then, in the midst of a step. Does nothing where that was done
    before.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
