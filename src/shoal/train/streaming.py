"""Training on a stream: where it continues, how ranks agree on it, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from shoal.comm.consensus import rank_rows
from shoal.data import Loader, StreamLoader
from shoal.train.ranks import Ranks
from shoal.train.run_state import RunState


def streaming(
    loader: Loader | StreamLoader,
    run_state: RunState,
    ranks: Ranks,
    waits: Callable[[], None] | None,
) -> AbstractContextManager[None]:
    """Within it a stream continues where the run is, and SIGTERM ends it; of files nothing.

    A collective call over several ranks. `waits` is called about once a second while no batch
    comes.
    """
    if not isinstance(loader, StreamLoader):
        return nullcontext()
    loader.places, loader.waits = dict(run_state.places or {}), waits
    control = ranks.background("stream")
    if control is not None:

        def vote(mine: list[float]) -> list[list[float]]:
            (every_WX,) = rank_rows(control, mine, what="vote on a batch of a stream").wait()
            found: list[list[float]] = every_WX.tolist()
            return found

        loader.agree = vote
    return loader.until_sigterm()
