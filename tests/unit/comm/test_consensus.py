"""How ranks agree: each function on one rank, with another that is played."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm.collectives import LocalCollectives
from shoal.comm.consensus import as_first_rank, flagged, rank_rows, reduced, require_same, together
from shoal.errors import CheckpointError, CollectiveFailed, ConfigError, InputError

REMEDY = "Start again."


class WithAnother(LocalCollectives):
    """Rank `rank` of two; the other one gathers `other`."""

    def __init__(self, other: Any, rank: int = 0) -> None:
        super().__init__()
        self.other, self.rank, self.world_size = other, rank, 2

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        return [value, self.other] if self.rank == 0 else [self.other, value]


def test_the_same_value_passes_and_another_is_named() -> None:
    require_same(WithAnother((1, 2)), "settings", (1, 2), remedy=REMEDY)
    with pytest.raises(ConfigError) as caught:
        require_same(WithAnother((1, 3)), "settings", (1, 2), remedy=REMEDY)
    for part in ("settings", "(1, 3) on rank 1", "(1, 2) on rank 0", REMEDY):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="got 3 on rank 1, 2 on rank 0"):
        require_same(
            WithAnother((1, 3)), "x", (1, 2), remedy=REMEDY, shown=lambda a, b: (a[1], b[1])
        )


def test_work_that_another_rank_could_not_do() -> None:
    assert together(WithAnother((None, 5)), "a save", lambda: 4) == [4, 5]
    other = WithAnother(("OSError: the disk is full", None))
    with pytest.raises(CheckpointError, match=r"a save: got on rank 1: OSError: the disk is full"):
        together(other, "a save", lambda: 4)
    with pytest.raises(CollectiveFailed, match=REMEDY):
        together(other, "assign", lambda: 4, failed=CollectiveFailed, remedy=REMEDY)


def test_a_rank_raises_its_own_error() -> None:
    def fail() -> None:
        raise InputError("mine")

    def break_down() -> None:
        raise ValueError("a bug")

    both_fail = WithAnother(("InputError: theirs", None))
    with pytest.raises(InputError, match="mine"):
        together(both_fail, "assign", fail)
    with pytest.raises(CheckpointError, match="ValueError: a bug") as caught:
        together(WithAnother((None, 1)), "assign", break_down)
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_rank_0_finds() -> None:
    assert as_first_rank(WithAnother(("found",), rank=1), lambda: "never called", what="x") == (
        "found"
    )
    with pytest.raises(InputError, match="theirs"):
        as_first_rank(WithAnother(InputError("theirs"), rank=1), lambda: 0, what="x")
    with pytest.raises(ConfigError, match="nothing from rank 0"):
        as_first_rank(WithAnother(None, rank=1), lambda: 0, what="x")
    with pytest.raises(ZeroDivisionError):
        as_first_rank(WithAnother(None), lambda: 1 // 0, what="x")


def test_numbers() -> None:
    alone = LocalCollectives()
    assert reduced(alone, torch.tensor([3, 4]), "max", what="x").tolist() == [3, 4]
    assert flagged(alone, torch.tensor(True), what="x").tolist() == [1]
    assert rank_rows(alone, [1.0, 2.5], what="x").wait()[0].tolist() == [[1.0, 2.5]]
