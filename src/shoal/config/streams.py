"""Streams of a run, from their settings."""

from __future__ import annotations

import math

from shoal.config.tree import KafkaSource, RunConfig, TableSource
from shoal.data import Feed, RankShare, Replay, Source, StreamLoader
from shoal.errors import ConfigError
from shoal.table.factory import resolve_device


def stream_loader(
    config: RunConfig, feed: Feed, share: RankShare | None, partitions: RankShare | None, least: int
) -> StreamLoader:
    """Batches of a stream; `share` and `partitions` as of `StreamLoader`.

    Raises:
        ConfigError: epochs or shuffling.
    """
    settings = config.data
    for key, plain in (("epochs", 1), ("shuffle", "never"), ("shuffle_window", None)):
        if (got := getattr(settings, key)) != plain:
            allowed, remedy = f"{plain}: a stream comes once", "Leave it out."
            raise ConfigError(f"data.{key} of a stream", got, allowed, remedy)
    stream = settings.source.stream if isinstance(settings.source, KafkaSource) else None
    return StreamLoader(
        feed,
        settings.batch_size,
        share=share,
        partitions=partitions,
        wait_s=math.inf if stream is None else stream.wait_s,
        idle_s=None if stream is None else stream.idle_s,
        max_examples=settings.max_examples,
        least=least,
        prefetch=settings.prefetch,
        pin_memory=resolve_device(config.device).startswith("cuda"),
    )


def replayed(config: RunConfig, training: Source | Feed, since_s: float | None) -> Source | Feed:
    """What a run trains on, as a stream if it is to be replayed.

    Raises:
        ConfigError: a replay of a stream, or of files without times by their times.
    """
    settings, source = config.data.replay, config.data.source
    if settings is None:
        return training
    untimed = isinstance(source, TableSource) and source.time is None and settings.rate is None
    if not isinstance(training, Source) or untimed:
        raise ConfigError(
            "data.replay",
            got="data.source.time: null" if untimed else "a stream",
            allowed="files, with event times unless it has a rate",
            remedy="Set data.source.time to the column of event times, or leave data.replay out.",
        )
    pace = settings.model_dump(include={"speed", "rate", "clock_s"})
    return Replay(training, since_s=since_s, **pace)
