"""A warm start: the models of a new run filled from an imported checkpoint or another run's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from shoal.checkpoint import LoadOptions, Manifest, load
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import locate
from shoal.config.tree import WarmStartSettings
from shoal.errors import CheckpointError, describe
from shoal.train import folder as folders
from shoal.train.contents import contents_of
from shoal.train.folder import RunFolder
from shoal.train.learner import Learner
from shoal.train.ranks import Ranks

__all__ = ["LOGISTIC", "fill", "find_warm"]

_log = logging.getLogger("shoal.train")

LOGISTIC = "logistic"
"""Name of the baseline that learns."""


def find_warm(settings: WarmStartSettings) -> str:
    """The checkpoint to start from: its folder or URL.

    Raises:
        CheckpointError: there is none at the path.
    """
    path = settings.path
    if "://" not in path and RunFolder(Path(path)).config.is_file():
        newest = folders.checkpoint_of(RunFolder(Path(path)))
        if newest is None:
            raise CheckpointError(
                describe(
                    "checkpoint.warm_start",
                    got=f"{path}, a run without checkpoints",
                    allowed="a run that saved one, the folder of checkpoints, or one of those",
                    remedy="Train it with output.save_model=true, or name another.",
                )
            )
        return newest
    store, name = locate(Storage(path).url)
    return store.folder(name).url


def fill(
    url: str, settings: WarmStartSettings, learners: Sequence[Learner], ranks: Ranks
) -> Manifest:
    """Fill the run's model, and its baselines as far as they were saved, from a checkpoint.

    Steps, position, random numbers and metrics start from zero, optimizers keep the settings of
    this run.

    Raises:
        CheckpointError: it is damaged, or of another model and not waived; nothing is half-loaded.
    """
    store, name = locate(url)
    manifest = store.manifest(name)
    saved = {table.collection for table in manifest.tables} | set(manifest.modules)
    model, *baselines = learners
    filled = [model, *(one for one in baselines if one.name in saved)]
    contents = contents_of(filled)
    with _own_settings(contents.optimizers):
        loaded = load(
            url,
            contents,
            options=_options(settings, manifest, {one.name for one in learners}),
            collectives=ranks.votes if ranks.many else None,
        )
    for hosting in contents.tables.values():
        hosting.shard.last_step = 0
        if hosting.resume is not None:
            hosting.resume(0)
    if ranks.leads:
        rows = ", ".join(f"{key}: {count}" for key, count in loaded.rows.items())
        _log.info("starting warm from %s, step %d; rows of %s", url, manifest.step, rows)
        for one in baselines:
            if one not in filled:
                _log.info("%s has no model %r: that starts anew", url, one.name)
    return manifest


def _options(settings: WarmStartSettings, manifest: Manifest, models: set[str]) -> LoadOptions:
    others = {LOGISTIC} - models  # a baseline that was trained beside the model is no part of it
    unknown = {
        *(table.key for table in manifest.tables if table.collection in others),
        *(f"module:{name}" for name in manifest.modules if name in others),
        *(f"optimizer:{name}" for name in manifest.optimizers if name in others),
    }
    return LoadOptions(
        tables=settings.tables,
        renames=settings.renames,
        allow_missing=frozenset(settings.allow_missing),
        allow_unknown=frozenset(settings.allow_unknown) | unknown,
        dense=settings.dense,
        state=settings.state,
    )


@contextmanager
def _own_settings(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Keep the settings of dense optimizers: a load brings those of the run that saved."""
    kept: list[tuple[Optimizer, list[dict[str, Any]]]] = [
        (one, [{k: v for k, v in group.items() if k != "params"} for group in one.param_groups])
        for one in optimizers.values()
    ]
    yield
    for optimizer, groups in kept:
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)
