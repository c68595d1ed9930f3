"""From the data settings of a run to its training and evaluation batches."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timezone

import torch

from shoal.config import tree
from shoal.config.tree import FileSource, FlightsSource, RunConfig, SyntheticSource
from shoal.data import (
    CsvSource,
    IdFeature,
    Loader,
    Order,
    ParquetSource,
    RankShare,
    Recipe,
    Source,
    Subset,
    SyntheticClicks,
    flights,
    split_by_time,
)
from shoal.errors import ConfigError, describe
from shoal.table.factory import resolve_device

__all__ = ["RunData", "open_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The data of a run.

    Args:
        features: names of the id features, in batch order.
        num_dense: dense columns.
        train, evaluation: batches; may be iterated more than once.
    """

    features: tuple[str, ...]
    num_dense: int
    train: Loader
    evaluation: Loader


def open_data(config: RunConfig, share: RankShare | None = None) -> RunData:
    """Open a run's source and divide it into training and evaluation.

    Args:
        config: settings of the run; batch sizes count the examples of all ranks.
        share: this rank's part of each batch; None: all of it.

    Raises:
        ConfigError: nothing says what to evaluate on, or two settings do; batches of one example
            with batch normalisation.
        DataError: a file that is missing, empty or malformed, or no examples on one side.
    """
    settings = config.data
    training, evaluation = _sides(config)
    pins = resolve_device(config.device).startswith("cuda")
    # Of one value there is no variance.
    normalises = getattr(config.model, "batch_norm", False)
    if normalises and settings.batch_size == 1:
        raise ConfigError(
            describe(
                "data.batch_size with model.batch_norm",
                got=1,
                allowed="2 or more examples, over all ranks",
                remedy="Use larger batches, or no batch normalisation.",
            )
        )
    order = Order(
        passes=settings.epochs,
        shuffle=settings.shuffle,
        window=settings.shuffle_window,
        seed=config.seed,
    )
    return RunData(
        features=training.features,
        num_dense=training.num_dense,
        train=Loader(
            _first(training, settings.max_examples),
            settings.batch_size,
            order=order,
            share=share,
            prefetch=settings.prefetch,
            pin_memory=pins,
            least=2 if normalises else 1,
            short=settings.last_batch,
        ),
        evaluation=Loader(
            _first(evaluation, config.eval.max_examples),
            config.eval.batch_size,
            share=share,
            prefetch=settings.prefetch,
            pin_memory=pins,
        ),
    )


def _sides(config: RunConfig) -> tuple[Source, Source]:
    source, at_s = config.data.source, _split_s(config)
    if isinstance(source, SyntheticSource):
        return _synthetic(source, config.seed)
    if isinstance(source, FlightsSource):
        from_s = flights.SPLIT_S if at_s is None else at_s
        return split_by_time(flights.load(fit_before_s=from_s).examples, from_s)
    if (at_s is None) == (not source.eval_paths):
        raise ConfigError(
            describe(
                "what to evaluate on",
                got="neither" if at_s is None else "data.split and data.source.eval_paths",
                allowed="one of data.split (a time) and data.source.eval_paths (files)",
                remedy="Set one of them.",
            )
        )
    training = _files(source, source.paths)
    if at_s is None:
        return training, _files(source, source.eval_paths)
    return split_by_time(training, at_s)


def _split_s(config: RunConfig) -> int | None:
    at = config.data.split
    if at is None:
        return None
    return int((at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp())


def _files(settings: FileSource, paths: tuple[str, ...]) -> Source:
    recipe = Recipe(
        ids=tuple(
            IdFeature(
                name=name, columns=own.columns, is_list=own.is_list, max_length=own.max_length
            )
            for name, own in settings.ids.items()
        ),
        label=settings.label,
        dense=settings.dense,
        dense_fill=settings.dense_fill,
        time=settings.time,
        weight=settings.weight,
    )
    if isinstance(settings, tree.CsvSource):
        return CsvSource(paths, recipe)
    return ParquetSource(paths, recipe)


def _synthetic(settings: SyntheticSource, seed: int) -> tuple[Source, Source]:
    shared = settings.model_dump(exclude={"kind", "examples", "eval_examples"})
    training = SyntheticClicks(examples=settings.examples, seed=seed, **shared)
    evaluation = SyntheticClicks(
        examples=settings.eval_examples, first=settings.examples, seed=seed, **shared
    )
    return training, evaluation


def _first(source: Source, max_examples: int | None) -> Source:
    if max_examples is None or max_examples >= len(source):
        return source
    return Subset(source, torch.arange(max_examples, device="cpu"))
