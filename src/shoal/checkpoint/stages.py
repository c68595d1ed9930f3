"""Stages of a save: each rank's part of a stage, then a vote whether all ranks did theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.checkpoint.sharded_rows import OtherRankFailed
from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, CollectiveFailed, describe

__all__ = ["Stages"]

T = TypeVar("T")


class Stages:
    """Votes of a save.

    Args:
        where: what is written, for messages.
        collectives: nobody else's meanwhile.
    """

    def __init__(self, where: str, collectives: Collectives) -> None:
        self._where, self._collectives = where, collectives
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let the stage under way fail, on all ranks; from any thread."""
        self._given_up.set()

    def check(self) -> None:
        """Raise if it was given up: in a loop that tells other ranks when it ends early."""
        if self._given_up.is_set():
            remedy = "Save again."
            what = "a save under way"
            raise CheckpointError(describe(what, got="abort()", allowed="to go on", remedy=remedy))

    def run(self, what: str, work: Callable[[], T], *, last: bool = False) -> list[T]:
        """Do a stage; what it gave on every rank.

        Args:
            what: names it.
            work: this rank's part. Where it makes collective calls, they are the same on every
                rank whatever fails.
            last: what it does cannot be taken back, so that it is not given up any more.

        Raises:
            CheckpointError: a rank failed, or gave up; on every rank.
            CollectiveFailed: a rank is gone.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = work()
            if not last:
                self.check()  # not before: other ranks may be in a collective call of the work
        except CollectiveFailed:
            raise
        except Exception as error:  # noqa: BLE001 - every rank hears of it, whatever it is
            failure = error
        told = None if failure is None else _told(failure)
        said: list[tuple[str | None, Any]] = self._collectives.gather_objects(
            (told, value), what=f"vote on the {what} of a checkpoint"
        )
        wrong = [(rank, text) for rank, (text, _) in enumerate(said) if text is not None]
        if wrong:
            got = "; ".join(f"on rank {rank}: {text}" for rank, text in wrong if text)
            raise CheckpointError(
                describe(
                    f"writing the {what} of {self._where}",
                    got=got,
                    allowed="success on every rank",
                    remedy="Mend what is named; the next save removes what this one left.",
                )
            ) from failure
        return [one for _, one in said]


def _told(failure: Exception) -> str:
    """For the vote; nothing of one that only follows from another rank's."""
    if isinstance(failure, OtherRankFailed):
        return ""
    name = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
    return " ".join(f"{name}{failure}".split())
