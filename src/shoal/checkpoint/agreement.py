"""Work that all ranks do or none: what went wrong on one is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, CollectiveFailed, ShoalError, describe

__all__ = ["together"]

T = TypeVar("T")


def together(collectives: Collectives, what: str, work: Callable[[], T]) -> list[T]:
    """Do a rank's part of some work; what it returned on every rank, by rank.

    Args:
        collectives: the ranks; all of them call this.
        what: the work, for messages.
        work: this rank's part, without collectives. Its result is picklable.

    Raises:
        CheckpointError: another rank's part failed; it says which and why. Here its own error is
            raised, whatever it is.
        CollectiveFailed: a rank is gone.
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except CollectiveFailed:
        raise
    except Exception as error:  # noqa: BLE001 - every rank hears of it, whatever it is
        failure = error
    told = None if failure is None else " ".join(f"{_name(failure)}{failure}".split())
    said = collectives.gather_objects((told, value), what=what)
    if isinstance(failure, ShoalError | MemoryError):
        raise failure
    wrong = [(rank, text) for rank, (text, _) in enumerate(said) if text is not None]
    if wrong:
        raise CheckpointError(
            describe(
                what,
                got="; ".join(f"on rank {rank}: {text}" for rank, text in wrong),
                allowed="success on every rank",
                remedy="Mend what is named, and try again.",
            )
        ) from failure
    return [one for _, one in said]


def _name(error: Exception) -> str:
    return "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
