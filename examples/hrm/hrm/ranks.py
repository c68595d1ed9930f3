"""Ranks of a run: how they meet, how all of them fail when one does, and how a program ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from shoal import comm
from shoal.errors import CheckpointError, ConfigError, DataError, LaunchError, ShoalError

__all__ = ["joined", "on_all_ranks", "program"]

T = TypeVar("T")


@contextmanager
def joined(device: str = "auto", threads: int | None = None) -> Iterator[comm.Mesh]:
    """The mesh of this process: the current one, or a new one that ends with the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    there = comm.current()
    try:
        yield comm.init(device=device) if there is None else there
    finally:
        torch.set_num_threads(before)
        if there is None:
            comm.shutdown()


def on_all_ranks(votes: comm.Collectives, act: Callable[[], T], *, what: str) -> T:
    """What this rank's `act` returns, if no rank's raises; a collective call.

    Raises:
        ShoalError: this rank's own error, else that of the first rank that has one.
    """
    done: list[T] = []
    own: Exception | None = None
    try:
        done.append(act())
    except Exception as error:  # noqa: BLE001 - raised again once the others know
        own = error
    said = votes.gather_objects(_told(own), what=what)
    if own is not None:
        raise own
    for rank, told in enumerate(said):
        if told is not None:
            kind, text = told
            raise kind(f"rank {rank}: {text}")
    return done[0]


def _told(error: Exception | None) -> tuple[type[ShoalError], str] | None:
    if error is None:
        return None
    if isinstance(error, ShoalError):
        return type(error), str(error)
    return ShoalError, f"{type(error).__name__}: {error}"


def program(act: Callable[[], None]) -> int:
    """The exit status of a program; prints errors of Shoal in one line.

    Wrong settings, data and checkpoints fail on every rank: rank 0 reports them for all.
    """
    try:
        act()
    except ShoalError as error:
        alike = isinstance(error, ConfigError | DataError | CheckpointError)
        if not alike or isinstance(error, LaunchError) or comm.detect().rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        comm.shutdown()
    return 0
