"""Where a run begins: from scratch, from a checkpoint, or from another run's models."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import yaml  # type: ignore[import-untyped]
from torch.optim import Optimizer

from shoal.checkpoint import CheckpointStore, LoadOptions, Manifest, load
from shoal.checkpoint.job_state import read as read_job
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import locate
from shoal.comm.launch_environment import Attempt
from shoal.config import RunConfig, from_mapping, to_yaml
from shoal.config.tree import WarmStartSettings
from shoal.errors import CheckpointError, ConfigError
from shoal.planner import Plan
from shoal.planner.planner import forced
from shoal.telemetry import replace_text
from shoal.train import folder as folders
from shoal.train.folder import RunFolder
from shoal.train.learner import contents_of
from shoal.train.run_state import RunState
from shoal.train.saving import SavedChain

_log = logging.getLogger("shoal.train")

LOGISTIC = "logistic"
"""Name of the baseline that learns."""


def _fill(url: str, settings: WarmStartSettings, run_state: RunState) -> None:
    """Fill the run's model, and its baselines as far as they were saved, from a checkpoint.

    Steps, position, random numbers and metrics start from zero, optimizers keep the settings of
    this run.

    Raises:
        CheckpointError: it is damaged, or of another model and not waived; nothing is half-loaded.
    """
    store, name = locate(url)
    manifest = store.manifest(name)
    saved = {table.collection for table in manifest.tables} | set(manifest.modules)
    model, *baselines = run_state.learners
    filled = [model, *(one for one in baselines if one.name in saved)]
    contents = contents_of(filled)
    with _own_settings(contents.optimizers):
        loaded = load(
            url,
            contents,
            options=_options(settings, manifest, {one.name for one in run_state.learners}),
            collectives=run_state.ranks.control,
        )
    for one in filled:
        one.loaded()
    for hosting in contents.tables.values():
        hosting.shard.last_step = 0
        if hosting.resume is not None:
            hosting.resume(0)
    if run_state.ranks.leads:
        rows = ", ".join(f"{key}: {count}" for key, count in loaded.rows.items())
        _log.info("starting warm from %s, step %d; rows of %s", url, manifest.step, rows)
        for one in baselines:
            if one not in filled:
                _log.info("%s has no model %r: that starts from scratch", url, one.name)


def _options(settings: WarmStartSettings, manifest: Manifest, models: set[str]) -> LoadOptions:
    others = {LOGISTIC} - models  # a baseline that was trained next to the model is no part of it
    unknown = {
        *(table.key for table in manifest.tables if table.collection in others),
        *(f"module:{name}" for name in manifest.modules if name in others),
        *(f"optimizer:{name}" for name in manifest.optimizers if name.split("/")[0] in others),
    }
    return LoadOptions(
        **settings.model_dump(include={"tables", "renames", "dense", "state"}),
        allow_missing=frozenset(settings.allow_missing),
        allow_unknown=frozenset(settings.allow_unknown) | unknown,
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


LATEST = "latest"

# What may differ between a run and its resumption: who does the work, how fast, what is reported.
_FREE = (
    *("name", "device", "compile", "host_rows", "threads", "profile", "logging", "output"),
    *("checkpoint", "publish", "eval", "data.prefetch", "data.epochs", "data.quarantine"),
    *(f"data.replay.{key}" for key in ("speed", "rate", "since", "clock_s")),
    *(f"data.source.stream.{key}" for key in ("servers", "options", "wait_s", "idle_s")),
    "data.source.stream.most_ahead_s",
    *(f"distributed.{key}" for key in ("placement", "plan", "topology", "statistics", "path")),
    *(f"distributed.{key}" for key in ("servers", "dense", "average_every", "worker", "workers")),
    *(f"distributed.{key}" for key in ("timeout_s", "pin_cores", "enable_alltoall_metrics")),
    "distributed.enable_alltoall_metrics_for_slot",
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins.

    Args:
        folder: of the run; made, or found.
        url: folder of its checkpoints.
        checkpoint: name of the one to continue from; None: the run starts from scratch.
        warm: folder of the checkpoint that a new run's models are filled from.
    """

    folder: RunFolder
    url: str
    checkpoint: str | None = None
    warm: str | None = None


def find_beginning(
    config: RunConfig, resume: str | None, attempt: Attempt | None, examples: int | None = None
) -> Beginning:
    """Decide where a run begins; called on one rank. A new run gets its folder last.

    Args:
        config: of the run.
        resume: a run folder, or "latest": the newest unfinished run of this name; None: what
            `checkpoint` in the config says.
        attempt: which start of the launcher's job this is.
        examples: to train on in one pass; None: not known.

    Raises:
        CheckpointError: nothing to continue from where there must be, or checkpoints of another run
            where this one would put its own.
        ConfigError: settings that the run to continue had otherwise, or that contradict; or
            other data.
    """
    settings = config.checkpoint
    mine, url, newest = _newest(config, resume, attempt)
    if newest is not None and settings.resume == "never":
        got = f"{url}, which holds {newest}"
        remedy = "Choose another folder, or set checkpoint.resume=auto."
        raise CheckpointError(
            "checkpoint.dir under checkpoint.resume=never", got, "an empty one", remedy
        )
    if newest is None and mine is not None and (resume is not None or settings.dir is None):
        _log.warning("no checkpoint of %s: it starts over", mine.path)
    elif newest is None and resume is None and settings.resume != "never" and _again(attempt):
        _warn_lost(config, attempt, url)
    if url is None or newest is None:
        return _from_scratch(config, mine, attempt, url)
    job = _job_in(url, newest)
    _check_same(config, job, f"{url}/{newest}")
    _check_data(config, job, f"{url}/{newest}", examples)
    if mine is None:
        there = Path(job["folder"])
        mine = RunFolder(there) if there.is_dir() else folders.create(config, attempt)
    # Where the run says that its checkpoints are, also where this command leaves it out.
    update = {"dir": settings.dir or (None if url == str(mine.checkpoints) else url)}
    kept = config.model_copy(update={"checkpoint": settings.model_copy(update=update)})
    replace_text(mine.config, to_yaml(kept))
    return Beginning(mine, url, newest)


def _newest(
    config: RunConfig, resume: str | None, attempt: Attempt | None
) -> tuple[RunFolder | None, str | None, str | None]:
    """(the run's folder, if it has one, folder of its checkpoints, name of the newest)."""
    settings = config.checkpoint
    if resume is not None and settings.resume == "never":
        allowed = "checkpoint.resume=auto or must next to --resume"
        raise CheckpointError("checkpoint.resume", "never", allowed, "Leave one of them out.")
    mine = None
    if resume is not None:
        mine = folders.unfinished(config) if resume == LATEST else folders.existing(resume)
        if mine is None:
            got = f"no unfinished run {config.name}-* in {config.output.dir}"
            allowed = "one that was interrupted"
            raise CheckpointError("--resume latest", got, allowed, "Name its folder.")
    elif _again(attempt) and settings.resume != "never":
        mine = folders.made_by(config, attempt.job)
    url = settings.dir or (None if mine is None else folders.checkpoints_of(mine))
    entry = None if url is None else CheckpointStore(url).latest()
    if mine is not None and resume is not None and settings.dir is not None:
        own = Storage(mine.checkpoints)
        others = own.url != Storage(settings.dir).url and mine.checkpoints.is_dir()
        # Left behind, a run would start over, or its older model would be evaluated.
        if (others or entry is None) and folders.checkpoint_of(mine) is not None:
            what, allowed = "checkpoint.dir of a run to continue", folders.checkpoints_of(mine)
            remedy = "Leave checkpoint.dir out, or move them there first."
            raise CheckpointError(what, settings.dir, allowed, remedy)
    return mine, url, None if entry is None else entry.name


def plan_to_keep(config: RunConfig, resume: str | None, attempt: Attempt | None) -> Plan | None:
    """The plan of the checkpoint to continue from, if FORCE_LOAD_SHARDING_PLAN is 1; on one rank.

    Raises:
        CheckpointError, ConfigError: as `find_beginning`; or a plan that is damaged.
    """
    if not forced(os.environ):
        return None
    _, url, newest = _newest(config, resume, attempt)
    if url is None or newest is None:
        return None
    text = _job_in(url, newest).get("plan")
    if text is None:
        _log.warning("FORCE_LOAD_SHARDING_PLAN: %s/%s has no plan to keep", url, newest)
        return None
    return Plan.from_json(text)


def job_of(
    config: RunConfig, folder: RunFolder, examples: int | None = None, plan: Plan | None = None
) -> dict[str, Any]:
    """What checkpoints hold of the run that they belong to; `examples` as for `find_beginning`."""
    where = str(folder.path.absolute())
    job = {"config": to_yaml(config), "folder": where, "examples": examples}
    return job if plan is None else {**job, "plan": plan.to_json()}


def restore(config: RunConfig, beginning: Beginning, run_state: RunState) -> SavedChain:
    """Fill models and run_state from the checkpoint to continue from, or models by a warm start.

    Returns:
        what deltas build on; an empty one where the run starts from scratch.

    Raises:
        CheckpointError: it is damaged, or of another model; nothing is half-loaded.
    """
    name, settings, ranks = beginning.checkpoint, config.checkpoint.warm_start, run_state.ranks
    if name is None:
        if beginning.warm is not None and settings is not None:
            _fill(beginning.warm, settings, run_state)
        return SavedChain()
    store = CheckpointStore(beginning.url)
    contents = contents_of(run_state.learners)
    loaded = load(store.folder(name).url, contents, collectives=ranks.control)
    state, own = loaded.state["run_state"], loaded.rank_state or None
    run_state.load_state(state, own)
    if ranks.leads:
        at = f"step {run_state.steps}, {run_state.position} samples"
        _log.info("continuing from %s/%s: %s", beginning.url, name, at)
        if own is None:
            _log.warning(
                "%s was saved by %d ranks, these are %d: their random numbers begin from scratch",
                name,
                state["world_size"],
                ranks.world_size,
            )
    return SavedChain(loaded.manifest, loaded.cursors, len(store.chain(name)) - 1)


def _again(attempt: Attempt | None) -> TypeGuard[Attempt]:
    """Whether a launcher started the job before."""
    return attempt is not None and attempt.restarts > 0


def _warn_lost(config: RunConfig, attempt: Attempt, url: str | None) -> None:
    """Warn that a launcher's job starts over though it ran before, and what may be the cause."""
    key, found = "checkpoint.dir", f"no checkpoint in {url}"
    if url is None:
        key, found = "output.dir", f"no run folder of an earlier one in {config.output.dir}"
    _log.warning(
        "start %d of this job finds %s: it starts over. If an earlier start saved a checkpoint, "
        "rank 0 was on another host: put %s on storage that all hosts share",
        attempt.restarts + 1,
        found,
        key,
    )


def _from_scratch(
    config: RunConfig, mine: RunFolder | None, attempt: Attempt | None, url: str | None
) -> Beginning:
    if config.checkpoint.resume == "must":
        got = f"none in {url}" if url else "no checkpoint.dir, and no --resume"
        what = "checkpoint to continue from (checkpoint.resume=must)"
        remedy = "Set checkpoint.resume=auto to start a new run."
        raise CheckpointError(what, got, "a committed one", remedy)
    settings = config.checkpoint.warm_start
    warm = None if settings is None else _find_warm(settings)
    folder = folders.create(config, attempt) if mine is None else mine
    return Beginning(folder, url or str(folder.checkpoints), warm=warm)


def _find_warm(settings: WarmStartSettings) -> str:
    """The checkpoint to start from: its folder or URL.

    Raises:
        CheckpointError: there is none at the path.
    """
    path = settings.path
    if "://" not in path and RunFolder(Path(path)).config.is_file():
        newest = folders.checkpoint_of(RunFolder(Path(path)))
        if newest is None:
            got = f"{path}, a run without checkpoints"
            allowed = "a run that saved one, the folder of checkpoints, or one of those"
            remedy = "Train it with output.save_model=true, or name another."
            raise CheckpointError("checkpoint.warm_start", got, allowed, remedy)
        return newest
    store, name = locate(Storage(path).url)
    return store.folder(name).url


def _job_in(url: str, name: str) -> Mapping[str, Any]:
    store = CheckpointStore(url)
    job = read_job(store.folder(name), store.manifest(name)).state
    if not {"config", "folder", "run_state"} <= job.keys():
        got, allowed = "no state of a training run", "one that `shoal train` saved"
        remedy = "Name another folder in checkpoint.dir."
        raise CheckpointError(f"checkpoint {url}/{name}", got, allowed, remedy)
    return job


def _check_same(config: RunConfig, job: Mapping[str, Any], what: str) -> None:
    """Refuse a run that would train another model, or on other data, than it did so far."""
    # Settings that did not exist then are at their defaults.
    begun = from_mapping(yaml.safe_load(job["config"]))
    then, now = (dict(_leaves(one.model_dump(mode="json"))) for one in (begun, config))
    differ = [
        key
        for key in sorted(then.keys() | now.keys())
        if not _is_free(key) and then.get(key) != now.get(key)
    ]
    if (config.data.replay is None) != (begun.data.replay is None):
        differ.append("data.replay")  # its keys are free, but its position is another one
    if differ:
        got = ", ".join(f"{key}={now.get(key)!r}, not {then.get(key)!r}" for key in differ)
        allowed = "the settings that it was begun with"
        remedy = "Set them back, or start a new run: checkpoint.resume=never."
        raise ConfigError(f"settings of the run that {what} is of", got, allowed, remedy)


def _check_data(config: RunConfig, job: Mapping[str, Any], what: str, examples: int | None) -> None:
    """Refuse data of another length, on which the position means other examples.

    What was added behind the data is fine while the first pass goes through it in order. Passes
    that have begun are not taken back.
    """
    then: int | None = job.get("examples")
    if then is None or examples is None:
        return
    position = job["run_state"]["position"]
    # A pass that is over continues in what was added, if its last batch was a whole one.
    whole = position < then or (position == then and then % config.data.batch_size == 0)
    in_order = config.data.shuffle != "always" and whole and then < examples
    passes = -(-position // examples)
    if then != examples and not in_order:
        name, got, allowed = "examples to train on", examples, f"the {then} that it was begun with"
        remedy = "Bring the files back as they were, or start a new run: checkpoint.resume=never."
    elif passes > config.data.epochs:
        name, got, allowed = "data.epochs", config.data.epochs, f"{passes} or more: they have begun"
        remedy = "Set it so, or start a new run: checkpoint.resume=never."
    else:
        return
    raise ConfigError(f"{name}, of the run that {what} is of", got, allowed, remedy)


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in _FREE)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; an empty mapping counts as a value."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree
