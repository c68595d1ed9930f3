"""From settings to the specs of tables and features, the dense model, and the batches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from shoal import data
from shoal.comm.collectives import Collectives
from shoal.config import tree
from shoal.config.streams import replayed, stream_loader
from shoal.config.tree import (
    FeatureSettings,
    FlightsSource,
    KafkaSource,
    RunConfig,
    SyntheticSource,
    TableSettings,
    TableSource,
)
from shoal.data import Feed, Loader, Quarantine, RankShare, Recipe, Source, StreamLoader
from shoal.data.catalog import SECTION as RETRIEVAL
from shoal.data.catalog import Catalog
from shoal.data.columns import check_present
from shoal.data.item_tree import ItemTree
from shoal.data.sampler_service import shared_sampler
from shoal.data.samplers import Sampling, read_items
from shoal.embedding.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.embedding.layouts import Feature, Layout, LayoutSlice
from shoal.errors import ConfigError, known_name, unknown_name
from shoal.models import BIAS, VEC, Inputs, ModelSpec, Task
from shoal.models.tasks import EMBEDDINGS, FIRST_ORDER, SEQUENCES, InBatchSoftmax, tasks_of
from shoal.table.factory import resolve_device
from shoal.table.spec import HostRows, Segment, TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What a model is assembled from.

    Layouts give the inputs of `module` that are rows, by their names in `shoal.models.tasks`.

    Args:
        spec: of `module`.
        tasks: what it predicts, in the order of its outputs.
        inputs: widths and names of its inputs.
        lists: features whose examples may have any number of ids.
    """

    name: str
    tables: tuple[TableSpec, ...]
    features: tuple[Feature, ...]
    layouts: tuple[Layout, ...]
    module: nn.Module
    spec: ModelSpec
    tasks: tuple[Task, ...]
    inputs: Inputs
    lists: frozenset[str]


def build_parts(
    config: RunConfig,
    model: ModelSpec | None = None,
    *,
    source: SourceInputs | None = None,
    examples: int | None = None,
) -> ModelParts:
    """Assemble a model's parts, without a look at the data.

    Args:
        config: settings of tables and features.
        model: a baseline's settings; None: `config.model`.
        source: what the data gives; None: what its settings say.
        examples: of the data, to check that a training step fits this machine's memory.

    Raises:
        UnknownName: a feature that the data does not have, or a table that no feature uses.
        ConfigError: widths that do not fit together, or not into memory.
    """
    model = model or config.model
    source = source or source_inputs(config.data.source)
    settings = feature_settings(config, source.features)
    features = tuple(
        Feature(name, own.table or name, _combiner(name, own, model), own.max_length)
        for name, own in settings.items()
    )
    tables = _tables(config, settings, model.segments)
    tasks = tasks_of(source.labels, config.tasks, many=model.multi_task)
    if model is config.model:
        _check_model(config, tasks)
    sampler = config.data.sampler
    model.check_negatives(None if sampler is None else (sampler.id, *sampler.attributes))
    lengths = {one.name: one.combiner.max_seq_length for one in features}
    inputs = Inputs.of(source.num_dense, tables[0].segments[-1].dim, lengths, tasks)
    if examples is not None:
        _check_memory(config, model, tables, inputs, examples)
    return ModelParts(
        name=model.kind,
        tables=tables,
        features=features,
        layouts=_layouts(inputs, model.segments),
        module=model.build(inputs),
        spec=model,
        tasks=tasks,
        inputs=inputs,
        lists=source.lists,
    )


def _check_model(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Refuse settings that the model would ignore, or reads wrongly.

    Raises:
        ConfigError: settings of a label that it does not predict, or of one whose loss is a
            softmax; a list in place of an item's one id; a softmax over nodes of a tree.
    """
    model, source = config.model, config.data.source
    softmax = isinstance(model.objective(tuple(tasks)), InBatchSoftmax)
    used = set() if softmax else {task.label for task in tasks}
    ignored = sorted(config.tasks.keys() - used)
    if ignored:
        allowed = f"labels that it predicts, with a loss each: {sorted(used)}"
        remedy = "Leave them out, or choose a model of several labels."
        raise ConfigError(f"tasks of model {model.kind}", ignored, allowed, remedy)
    if softmax and getattr(source, "sample_rate", None) is not None:
        allowed, remedy = "none: its negatives are other items of a batch", "Leave it out."
        raise ConfigError(f"sample_rate of model {model.kind}", "one", allowed, remedy)
    if softmax and config.data.tree is not None:
        allowed, remedy = "a model with a loss for each example", "Leave data.tree out."
        raise ConfigError("model that data.tree gives nodes to", model.kind, allowed, remedy)
    own = source.ids.get(model.id_feature or "") if isinstance(source, TableSource) else None
    if own is not None and own.is_list:
        got, remedy = f"the list {model.id_feature!r}", "Set model.item_id, or another target."
        raise ConfigError(f"items of model {model.kind}", got, "one id an example", remedy)


def build_tables(config: RunConfig) -> tuple[TableSpec, ...]:
    """The tables of a run's model, without a look at its data.

    Raises:
        UnknownName: a feature that the data does not have, or a table that no feature uses.
    """
    settings = feature_settings(config, source_inputs(config.data.source).features)
    return _tables(config, settings, config.model.segments)


def _tables(
    config: RunConfig, settings: Mapping[str, FeatureSettings], segments: tuple[str, ...]
) -> tuple[TableSpec, ...]:
    used = tuple(dict.fromkeys(own.table or name for name, own in settings.items()))
    for name in config.tables:
        fits = name in used or any(fnmatchcase(table, name) for table in used)
        if name != RunConfig.DEFAULT_TABLE and not fits:
            raise unknown_name("table", name, used, remedy="Tables are named by features.*.table.")
    return tuple(_table(config, name, segments) for name in used)


def build_host_rows(config: RunConfig) -> HostRows | None:
    """Where a run's rows are, if not on its GPU."""
    settings = config.host_rows
    return None if settings is None else HostRows(**settings.model_dump())


def table_spec(config: RunConfig, table: str) -> TableSpec:
    """The table of that name as the model of a run has it.

    Raises:
        UnknownName: the config names its features, and none of them uses such a table.
    """
    used = {settings.table or name for name, settings in config.features.items()}
    if used and table not in used:
        raise unknown_name("table", table, used, remedy="Tables are named by features.*.table.")
    return _table(config, table, config.model.segments)


def feature_settings(config: RunConfig, offered: Sequence[str]) -> Mapping[str, FeatureSettings]:
    """The features to train on: those the config names, or all that the data offers.

    Raises:
        UnknownName: a feature that the data does not have.
    """
    for name in config.features:
        what = f"feature of data.source {config.data.source.kind!r}"
        known_name(what, name, offered, remedy="Name an id column of the data.")
    return config.features or {name: FeatureSettings() for name in offered}


def _combiner(name: str, settings: FeatureSettings, model: ModelSpec) -> Combiner:
    if settings.combiner == "first_n" and model.takes_sequences:
        if settings.max_length is None:
            remedy = f"Set features.{name}.max_length."
            raise ConfigError(f"sequence {name!r}", "no max_length", "its longest", remedy)
        return FirstN(settings.max_length)
    # Of a model that takes no sequences, lists are pooled.
    pooled = {"sum": ReduceSum, "mean": ReduceMean, "first_n": ReduceMean}
    return pooled[settings.combiner]()


def _table(config: RunConfig, name: str, segments: tuple[str, ...]) -> TableSpec:
    """By the settings of its name, else of the first pattern that fits it, else of all tables."""
    fitting = (own for pattern, own in config.tables.items() if fnmatchcase(name, pattern))
    default = config.tables.get(RunConfig.DEFAULT_TABLE, TableSettings())
    settings = config.tables.get(name) or next(fitting, default)
    every = {
        BIAS: Segment(
            dim=1,
            name=BIAS,
            initializer=settings.bias.initializer,
            optimizer=settings.bias.optimizer or settings.optimizer,
        ),
        VEC: Segment(
            dim=settings.dim,
            name=VEC,
            initializer=settings.initializer,
            optimizer=settings.optimizer,
            compressor=settings.compressor,
        ),
    }
    return TableSpec(
        name=name,
        segments=tuple(every[segment] for segment in segments),
        dtype=settings.dtype,
        capacity_rows=settings.capacity_rows,
        on_full=settings.on_full,
        expected_rows=settings.expected_rows,
        admission=settings.admission,
        expiry=settings.expiry,
    )


def _layouts(inputs: Inputs, segments: tuple[str, ...]) -> tuple[Layout, ...]:
    def slices(names: Sequence[str], segment: str) -> tuple[LayoutSlice, ...]:
        return tuple(LayoutSlice(name, segment) for name in names)

    made = [Layout(EMBEDDINGS, "stack", slices(inputs.names, segments[-1]))]
    if len(segments) > 1:
        made.insert(0, Layout(FIRST_ORDER, "concat", slices(inputs.names, BIAS)))
    if inputs.sequences:
        made.append(Layout(SEQUENCES, "stack", slices(inputs.sequences, segments[-1])))
    return tuple(made)


def _check_memory(
    config: RunConfig, model: ModelSpec, tables: Sequence[TableSpec], inputs: Inputs, examples: int
) -> None:
    """Refuse settings that cannot work here, by what they take at least, before they take it.

    Raises:
        ConfigError: more than the machine has; names the largest part.
    """
    with torch.device("meta"):
        weights = sum(one.numel() for one in model.build(inputs).parameters())
    widths = inputs.width + sum(getattr(model, "hidden", ()))
    order = config.data.shuffle_window or examples if config.data.shuffle != "never" else 0
    parts = {
        "model.hidden": 16 * weights,  # with gradients and the optimizer's two numbers
        "data.batch_size": 8 * min(config.data.batch_size, examples) * widths,
        "data.shuffle_window": 8 * min(order, examples),
        "expected_rows of tables": sum(
            4 * one.expected_rows * (one.dim + one.state_width) for one in tables
        ),
        "admission.sketch_width of tables": sum(
            4 * one.admission.sketch_width * one.admission.sketch_depth
            for one in tables
            if one.admission is not None and one.admission.counter == "sketch"
        ),
    }
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(parts.values()) > here:
        name = max(parts, key=parts.__getitem__)
        raise ConfigError(
            f"memory for model {model.kind}",
            got=f"{sum(parts.values()):,} bytes and more, most for {name}",
            allowed=f"{here:,} bytes, as this machine has",
            remedy=f"Lower {name}.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The data of a run.

    Args:
        train, evaluation: batches; may be iterated more than once.
        quarantine: where rows and files go that cannot be used; None: they are errors.
        catalog: items that those of evaluation examples are ranked among; None: they are not.
    """

    train: Loader | StreamLoader
    evaluation: Loader
    quarantine: Quarantine | None = None
    catalog: Catalog | None = None


@dataclass(frozen=True, slots=True)
class SourceInputs:
    """What a source gives a model.

    Args:
        features: names of the id features, in batch order.
        lists: those whose examples may have any number of ids.
        num_dense: dense columns.
        labels: their names.
    """

    features: tuple[str, ...]
    lists: frozenset[str]
    num_dense: int
    labels: tuple[str, ...]


def source_inputs(source: tree.SourceSettings) -> SourceInputs:
    """The inputs of a source by its settings alone; nothing is read."""
    if isinstance(source, SyntheticSource):
        made = _synthetic(source, 0)[0]
        return SourceInputs(made.features, frozenset(), made.num_dense, ("label",))
    recipe = data.flights.RECIPE if isinstance(source, FlightsSource) else _recipe(source)
    lists = {one.name for one in recipe.ids if one.is_list} | set(recipe.computed.names)
    return SourceInputs(recipe.features, frozenset(lists), recipe.num_dense, recipe.labels)


def open_data(
    config: RunConfig,
    share: RankShare | None = None,
    collectives: Collectives | None = None,
    *,
    samples: bool = True,
    keys: Sequence[str] | None = None,
) -> RunData:
    """Open a run's source and divide it into training and evaluation.

    Args:
        config: settings of the run; batch sizes count the examples of all ranks.
        share: this rank's part of each batch; None: all of it, but of training batches this
            worker's part if it is one of several.
        collectives: of all ranks, which then share servers if data.sampler says so.
        samples: training batches have the items of data.sampler, or nodes of data.tree; else
            nothing of a sampler is opened, and of a tree what eval.retrieval needs.
        keys: to predict: evaluation examples need no labels and have these columns as
            `Batch.keys`; files of their own alone are opened. None: to evaluate.

    Raises:
        ConfigError: nothing says what to evaluate on, or two settings do; batches of one example
            with batch normalisation; a replay without event times; epochs or shuffling of a
            stream.
        DataError: a file that is missing, empty or malformed, or no examples on one side.
        DataError: a key that is no column.
    """
    settings = config.data
    quarantine = None
    if settings.quarantine is not None:
        rank = share.rank if share else config.distributed.worker
        quarantine = Quarantine(**settings.quarantine.model_dump(), rank=rank)
    training, evaluation = _sides(config, quarantine, keys)
    since = None if settings.replay is None else settings.replay.since
    if keys is None:
        training = replayed(config, training, None if since is None else _seconds(since))
    pins = resolve_device(config.device).startswith("cuda")
    # Of one value there is no variance.
    normalises = keys is None and getattr(config.model, "batch_norm", False)
    workers = config.distributed.workers
    training_share = RankShare(config.distributed.worker, workers) if workers > 1 else share
    if normalises and settings.batch_size == 1:
        raise ConfigError(
            "data.batch_size with model.batch_norm",
            got=1,
            allowed="2 or more examples, over all ranks",
            remedy="Use larger batches, or no batch normalisation.",
        )
    # Workers without a process group normalise over their own examples.
    least = 2 * workers if normalises else workers
    for name, own in (("sampler", settings.sampler), ("tree", settings.tree)):
        if own is not None and not isinstance(training, Source):
            remedy = f"Leave data.{name} out."
            raise ConfigError(f"data.{name}", "a stream", "examples of files", remedy)
    tree = _item_tree(config) if samples or config.eval.retrieval is not None else None
    if not isinstance(training, Source):
        train: Loader | StreamLoader = stream_loader(config, training, share, training_share, least)
    else:
        train = Loader(
            data.first_of(training, settings.max_examples),
            settings.batch_size,
            order=data.Order(
                passes=settings.epochs,
                shuffle=settings.shuffle,
                window=settings.shuffle_window,
                seed=config.seed,
            ),
            share=training_share,
            prefetch=settings.prefetch,
            pin_memory=pins,
            least=least,
            short=settings.last_batch,
            sampler=_sampler(config, collectives) if samples else None,
            tree=tree if samples else None,
            what="training examples",
        )
    return RunData(
        train=train,
        evaluation=Loader(
            data.first_of(evaluation, config.eval.max_examples),
            config.eval.batch_size,
            share=share,
            prefetch=settings.prefetch,
            pin_memory=pins,
            what="evaluation examples",
        ),
        quarantine=quarantine,
        catalog=_catalog(config, tree),
    )


def _sides(
    config: RunConfig, quarantine: Quarantine | None, keys: Sequence[str] | None
) -> tuple[Source | Feed, Source]:
    source, at = config.data.source, config.data.split
    at_s = None if at is None else int(_seconds(at))
    if isinstance(source, SyntheticSource):
        check_present(keys or (), (), "made-up examples", "--key")
        return _synthetic(source, config.seed)
    if isinstance(source, FlightsSource):
        from_s = data.flights.SPLIT_S if at_s is None else at_s
        loaded = data.flights.load(fit_before_s=from_s)
        examples = loaded.examples
        if keys:
            check_present(keys, loaded.table.column_names, "the flights", "--key")
            examples = examples.with_keys(loaded.table.select(keys))
        return data.split_by_time(examples, from_s)
    streams = isinstance(source, KafkaSource)
    if (at_s is None) == (not source.eval_paths) or (streams and at_s is not None):
        raise ConfigError(
            "what to evaluate on",
            got="data.split and data.source.eval_paths" if source.eval_paths else at_s or "neither",
            allowed="one of data.split (a time, not of a stream) and data.source.eval_paths",
            remedy="Set data.split=null." if source.eval_paths else "Set one of them.",
        )
    recipe = _recipe(source)
    if keys is not None:
        recipe = replace(recipe, weight=None, group=None, sample_rate=None)
        recipe = replace(recipe, keys=tuple(keys), unlabelled=True)
        if at_s is None:
            found = _files(source, source.eval_paths, recipe, quarantine)
            return found, found
    if isinstance(source, KafkaSource):
        feed = data.KafkaFeed(source.stream, recipe, quarantine, config.name)
        return feed, _files(source, source.eval_paths, recipe, quarantine)
    training = _files(source, source.paths, recipe, quarantine)
    if at_s is None:
        return training, _files(source, source.eval_paths, recipe, quarantine)
    return data.split_by_time(training, at_s)


def _seconds(at: datetime) -> float:
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def _sampler(config: RunConfig, collectives: Collectives | None) -> Sampling | None:
    settings, source = config.data.sampler, config.data.source
    if settings is None:
        return None
    opener = partial(data.Sampler.open, settings, _items_recipe(source), seed=config.seed)
    if settings.shared and collectives is not None:
        return shared_sampler(opener, settings, collectives)
    return opener()


def _items_recipe(source: tree.SourceSettings) -> Recipe:
    """What makes features of items as those of examples are made."""
    if not isinstance(source, TableSource):
        remedy = "Leave data.sampler, data.tree and eval.retrieval out."
        raise ConfigError("data.source of items", source.kind, "files, kafka", remedy)
    return _recipe(source)


def _item_tree(config: RunConfig) -> ItemTree | None:
    settings = config.data.tree
    if settings is None:
        return None
    if config.data.sampler is not None:
        remedy = "Leave one of them out."
        raise ConfigError("data.tree", "data.sampler, too", "one of them", remedy)
    if "base_rate" in config.baselines:
        # The mean label of nodes says nothing of examples.
        allowed, remedy = "logistic, or none", "Leave base_rate out of baselines."
        raise ConfigError("baselines with data.tree", "base_rate", allowed, remedy)
    return ItemTree.open(settings, _items_recipe(config.data.source), seed=config.seed)


def _catalog(config: RunConfig, item_tree: ItemTree | None) -> Catalog | None:
    """The items that eval.retrieval ranks.

    Raises:
        ConfigError: no file of them, a model without a vector of each, or settings without use.
    """
    settings, names = config.eval.retrieval, config.model.item_features
    if settings is None:
        return None
    unused = "width" if item_tree is None else "items"
    if getattr(settings, unused) is not None:
        one = "without" if item_tree is None else "with"
        remedy = "Leave it out."
        got = getattr(settings, unused)
        raise ConfigError(f"eval.retrieval.{unused} {one} data.tree", got, "none", remedy)
    if item_tree is not None:
        return Catalog(settings, item_tree, item_tree.id)
    sampler = config.data.sampler
    path = settings.items or (sampler.items if sampler else None)
    if path is None or not names:
        got = f"model {config.model.kind}" if path else "no file of items"
        allowed = "data.tree, or a file of items and two_tower, or hstu with head: next_item"
        raise ConfigError(
            "eval.retrieval", got, allowed, "Set eval.retrieval.items, or leave it out."
        )
    items, _, _ = read_items(path, _items_recipe(config.data.source), names, None, RETRIEVAL)
    return Catalog(settings, items, names[0])


def _recipe(settings: TableSource) -> Recipe:
    shared = {"label", "dense", "dense_fill", "time", "weight", "group", "sample_rate"}
    return Recipe(
        ids=tuple(
            data.IdFeature(name=name, **own.model_dump()) for name, own in settings.ids.items()
        ),
        computed=settings.features,
        **settings.model_dump(include=shared),
    )


def _files(
    settings: TableSource, paths: tuple[str, ...], recipe: Recipe, quarantine: Quarantine | None
) -> Source:
    if isinstance(settings, tree.CsvFiles):
        return data.CsvSource(paths, recipe, quarantine)
    return data.ParquetSource(paths, recipe, quarantine=quarantine)


def _synthetic(settings: SyntheticSource, seed: int) -> tuple[Source, Source]:
    shared = settings.model_dump(exclude={"kind", "examples", "eval_examples"})
    training = data.SyntheticClicks(examples=settings.examples, seed=seed, **shared)
    evaluation = data.SyntheticClicks(
        examples=settings.eval_examples, first=settings.examples, seed=seed, **shared
    )
    return training, evaluation
