"""Collections while a run trains: what was there before is left out, what comes is collected."""

from __future__ import annotations

import gc
import weakref

import pytest

from shoal.train.runs import old_objects_set_aside

FEW = 10_000  # Python's own, where it sets some aside


class Ring:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.own = self


def test_old_objects_are_set_aside_and_come_back():
    assert gc.get_freeze_count() < FEW
    with old_objects_set_aside():
        assert gc.get_freeze_count() > FEW
        made = weakref.ref(Ring())
        gc.collect()
        assert made() is None
    assert gc.get_freeze_count() < FEW


def test_they_come_back_after_a_failure():
    with pytest.raises(ValueError, match="a step"), old_objects_set_aside():
        raise ValueError("a step failed")
    assert gc.get_freeze_count() < FEW


def test_what_somebody_else_set_aside_stays_so():
    gc.freeze()
    try:
        with old_objects_set_aside():
            assert gc.get_freeze_count() > FEW
        assert gc.get_freeze_count() > FEW  # another thread may have ended some of them
    finally:
        gc.unfreeze()
