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
    asks_pause: Callable[[], bool],
) -> AbstractContextManager[None]:
    """Within it a stream continues where the run is, and SIGTERM ends it; of files nothing.

    A collective call over several ranks. `waits` is called about once a second while no batch
    comes; without it, as under a pipeline, batches pause when `asks_pause`.
    """
    if not isinstance(loader, StreamLoader):
        return nullcontext()
    loader.places, loader.waits = dict(run_state.places or {}), waits
    loader.asks_pause = asks_pause if waits is None else None
    loader.feed.continues(run_state.left_out_before)
    run_state.left_out = loader.feed.left_out
    control = ranks.background("stream")
    if control is not None:

        def vote(mine: list[float]) -> list[list[float]]:
            (every_WX,) = rank_rows(control, mine, what="vote on a batch of a stream").wait()
            found: list[list[float]] = every_WX.tolist()
            return found

        loader.agree = vote
    return loader.until_sigterm()
