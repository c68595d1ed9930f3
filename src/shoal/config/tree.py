"""The settings of a run: one frozen tree, every key of it, with defaults."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, core_schema

from shoal.compiling import Compile
from shoal.config.short_forms import ShortFor
from shoal.config.type_words import DEVICE, NAME, is_bool_for_number, of_type, with_patterns
from shoal.data import feature_set
from shoal.data.catalog import RetrievalSettings
from shoal.data.feature_set import ID_RULES, ElementWise, FeatureSet, FeatureSpec
from shoal.data.item_tree import TreeSettings
from shoal.data.kafka import Kafka
from shoal.data.kinds import KINDS
from shoal.data.samplers import SamplerSettings
from shoal.errors import ConfigError, UnknownName, did_you_mean, known_name, unknown_name
from shoal.exchange.all_to_all import GradReduce
from shoal.exchange.wire import WireKind
from shoal.models import MODELS, DeepFMSettings, ModelSpec, TaskSettings
from shoal.placement import Sharding
from shoal.planner.options import constraint_of
from shoal.rules import compressors, initializers, optimizers, schedules
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.table.shard import NanPolicy
from shoal.table.spec import MAX_DIM, MAX_THREADS, CachePolicy, OnFull, RowDType

Registry = Mapping[str, type]


def _by_kind_of(module: types.ModuleType) -> Registry:
    """The public rules of a module by their kind."""
    public = (getattr(module, name) for name in module.__all__)
    return {cls.kind: cls for cls in public if hasattr(cls, "kind")}


OPTIMIZERS = _by_kind_of(optimizers)
INITIALIZERS = _by_kind_of(initializers)
COMPRESSORS = _by_kind_of(compressors)
SCHEDULES = _by_kind_of(schedules)
_FAMILIES: dict[str, Registry] = {
    "optimizer": OPTIMIZERS,
    "initializer": INITIALIZERS,
    "compressor": COMPRESSORS,
    "schedule": SCHEDULES,
    "feature": KINDS,
    "ids": ID_RULES,
    "model": MODELS,
}


def build(value: Any, registry: Registry) -> Any:
    """Build the rule that `{kind: NAME, ...}` (or just `NAME`) means; a built rule passes.

    Raises:
        UnknownName: no such kind or setting.
        ConfigError: no kind, or a setting of the wrong type or value.
    """
    if is_dataclass(value):
        return value
    what = next(name for name, known in _FAMILIES.items() if known is registry)
    settings = {"kind": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping) or "kind" not in settings:
        remedy, of_table = f"Say which {what} with kind.", TableSettings.model_fields.get(what)
        if of_table and isinstance(settings, Mapping):
            own = ", ".join(f"{key}: {setting}" for key, setting in settings.items())
            remedy += (
                f" A table's {what} replaces that of tables.default as a whole: write"
                f" {{kind: {of_table.default.kind}, {own}}}, say."
            )
        allowed = f"a name, or {{kind: name, ...}}, of {', '.join(sorted(registry))}"
        raise ConfigError(what, repr(value), allowed, remedy)
    kind = str(settings["kind"])
    known_name(f"{what} kind", kind, registry)
    rest = {key: setting for key, setting in settings.items() if key != "kind"}
    return build_record(rest, registry[kind], f"{what} {kind}")


def build_record(settings: Any, cls: type, what: str) -> Any:
    """Build a frozen dataclass from settings named as its fields; a built one passes.

    Raises:
        UnknownName: a setting that `cls` does not have.
        ConfigError: a setting missing, of the wrong type, or refused by `cls`.
    """
    if isinstance(settings, cls):
        return settings
    known = {field.name: field for field in fields(cls) if field.init}
    if not isinstance(settings, Mapping):
        allowed = f"settings of {', '.join(known)}"
        raise ConfigError(what, repr(settings), allowed, "Write key: value pairs.")
    for key in settings:
        if key not in known:
            names = [*known, *(["kind"] if hasattr(cls, "kind") else [])]
            unknown = unknown_name(f"setting of {what}", str(key), names)
            if not did_you_mean(str(key), names):  # it may be another kind's: `compose` asks
                unknown.args = (*unknown.args, str(key))
            raise unknown
    required = [
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING and name not in settings
    ]
    if required:
        allowed, missing = f"settings of {', '.join(known)}", ", ".join(required)
        raise ConfigError(what, f"no {missing}", allowed, f"Give {missing}.")
    hints = typing.get_type_hints(cls)
    return cls(**{key: _convert(v, hints[key], f"{key} of {what}") for key, v in settings.items()})


def dump(value: Any) -> Any:
    """The settings of a rule as plain YAML values; `build` of them gives an equal rule."""
    if not is_dataclass(value):
        if isinstance(value, tuple):
            return [dump(item) for item in value]
        return value
    plain = {field.name: dump(getattr(value, field.name)) for field in fields(value) if field.init}
    return {"kind": value.kind, **plain} if hasattr(value, "kind") else plain


# Types of settings that are of a family, wherever they stand.
_INSIDE: dict[Any, Registry] = {
    schedules.Schedule: SCHEDULES,
    optimizers.Optimizer: OPTIMIZERS,
    feature_set.IdRule: ID_RULES,
}


def _convert(value: Any, hint: Any, what: str) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    given = typing.get_args(hint) if union else (hint,)
    options = tuple(option for option in given if option is not types.NoneType)
    alone = len(options) == 1 and value is not None
    is_name = isinstance(value, str) and value[:1].isalpha()  # no number, but perhaps a wrong kind
    for option in options:
        registry, mapped = _INSIDE.get(option, {}), isinstance(value, Mapping)
        if registry and (mapped or is_name or (alone and not is_dataclass(value))):
            return build(value, registry)
        if isinstance(option, type) and is_dataclass(option) and (mapped or alone):
            return build_record(value, option, what)
    value = tuple(sorted(value.items())) if isinstance(value, Mapping) else value
    return of_type(value, hint, what)


class Section(BaseModel):
    """A part of the tree: frozen, and it knows its keys.

    An unknown key raises `UnknownName` with the key and the known ones as further `args`, so
    that `compose` can say where in the tree it was.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys_of_their_types(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for key, setting in value.items():
                if key not in cls.model_fields:
                    known = tuple(cls.model_fields)
                    unknown = UnknownName(f"unknown config key {key}")
                    unknown.args = (*unknown.args, str(key), known)
                    raise unknown
                hint = cls.model_fields[key].annotation
                if is_bool_for_number(setting, hint):
                    kind = "float_type" if "float" in str(hint) else "int_type"
                    wrong = InitErrorDetails(type=kind, loc=(key,), input=setting)
                    raise ValidationError.from_exception_data(cls.__name__, [wrong])
        return value


@dataclass(frozen=True, slots=True)
class _Built:
    """Makes a field hold what `build` returns, and dump it as plain settings again."""

    build: Callable[[Any], Any]

    dump: Callable[[Any], Any] = dump

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.build, serialization=core_schema.plain_serializer_function_ser_schema(self.dump)
        )


def _rate(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return build(value, SCHEDULES)
    if not 0 <= value < math.inf:
        allowed = "a finite number, 0 or more, or a schedule"
        raise ConfigError("learning rate", value, allowed, "Set it to one.")
    return float(value)


def _record(cls: type, what: str) -> _Built:
    """Builds a record of settings, or none."""
    return _Built(lambda value: None if value is None else build_record(value, cls, what))


_GROUP = ("delimiter", "length", "features")


def _features(value: Any) -> FeatureSet:
    """Features by name: settings of a kind and of `FeatureSpec`, or a group of sequences."""
    if isinstance(value, FeatureSet):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError("features", repr(value), "name: {kind: ...}", "Name each feature.")
    made: list[FeatureSpec] = []
    for name, settings in value.items():
        if isinstance(settings, Mapping) and settings.get("kind") == "group":
            rest = {key: own for key, own in settings.items() if key != "kind"}
            for key in rest:
                known_name(f"setting of group {name!r}", key, _GROUP)
            inner = [_feature(str(key), own) for key, own in rest.pop("features", {}).items()]
            shared = build_record(rest, ElementWise, f"group {name!r}")
            made += feature_set.sequence_group(
                str(name), inner, delimiter=shared.delimiter, length=shared.length
            )
        else:
            made.append(_feature(str(name), settings))
    return FeatureSet(tuple(made))


def _feature(name: str, value: Any) -> FeatureSpec:
    settings = {"kind": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        allowed = "a kind, or {kind: ..., ...}"
        raise ConfigError(f"feature {name!r}", repr(value), allowed, "Say which kind it is.")
    common = {field.name for field in fields(FeatureSpec)} - {"name", "kind"}
    own = {key: setting for key, setting in settings.items() if key not in common}
    shared = {key: setting for key, setting in settings.items() if key in common}
    kind = own.get("kind")
    if isinstance(kind, str) and kind in KINDS:
        known = [*(field.name for field in fields(KINDS[kind])), *common, "kind"]
        for key in own:
            known_name(f"setting of feature {name!r} ({kind})", key, known)
    elif isinstance(kind, str):
        raise unknown_name(f"kind of feature {name!r}", kind, [*KINDS, "group"])
    if shared.get("sequence") is True:
        shared["sequence"] = {}
    made = {"name": name, "kind": build(own, KINDS), **shared}
    spec: FeatureSpec = build_record(made, FeatureSpec, f"feature {name!r}")
    return spec


def _dump_features(value: FeatureSet) -> dict[str, Any]:
    plain = {}
    for spec in value.features:
        settings = {key: own for key, own in dump(spec).items() if key not in ("name", "kind")}
        plain[spec.name] = {**dump(spec.kind), **settings}
    return plain


def _of(registry: Registry) -> _Built:
    return _Built(lambda value: build(value, registry))


_RULES = ShortFor(
    "kind", inside={"lr": SCHEDULES, "target": SCHEDULES, "rate": SCHEDULES, "inner": OPTIMIZERS}
)
OptimizerRule = Annotated[optimizers.Optimizer, _of(OPTIMIZERS), _RULES]
InitializerRule = Annotated[initializers.Initializer, _of(INITIALIZERS), ShortFor("kind")]
CompressorRule = Annotated[compressors.Compressor, _of(COMPRESSORS), ShortFor("kind")]
ModelRule = Annotated[ModelSpec, _of(MODELS), ShortFor("kind")]
LearningRate = Annotated[float | schedules.Schedule, _Built(_rate), _RULES]
AdmissionRule = Annotated[Admission | None, _record(Admission, "admission")]
ExpiryRule = Annotated[Expiry | None, _record(Expiry, "expiry")]
SamplerRule = Annotated[SamplerSettings | None, _record(SamplerSettings, "data.sampler")]
TreeRule = Annotated[TreeSettings | None, _record(TreeSettings, "data.tree")]
Retrieval = Annotated[RetrievalSettings | None, _record(RetrievalSettings, "eval.retrieval")]
TaskRule = Annotated[TaskSettings, _Built(lambda value: build_record(value, TaskSettings, "task"))]
Features = Annotated[FeatureSet, _Built(_features, _dump_features), ShortFor("kind", each=True)]


# Larger numbers are mistakes, and sums of them would not fit 64 bits.
Count = Annotated[int, Field(gt=0, le=(1 << 31) - 1)]
Examples = Annotated[int, Field(gt=0, le=1 << 47)]
Few = Annotated[int, Field(ge=0, le=1024)]
LogOdds = Annotated[float, Field(ge=-1e6, le=1e6)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]


class FlightsSource(Section):
    """The flights that ship with the package; without `data.split` November begins it."""

    kind: Literal["flights"] = "flights"


class IdSettings(Section):
    """Where an id feature's ids are: the column of its name, other ones crossed, or a list."""

    columns: tuple[str, ...] = ()
    is_list: bool = False
    max_length: Count | None = None


class TableSource(Section):
    """What files and streams share: which columns are what.

    `eval_paths` are files to evaluate on, Parquet for a stream.
    `features` are computed of columns (`shoal.data.feature_set`); one of `ids` and `features` is
    needed. Of several labels the first is that of models with one output. `sample_rate` is the
    chance with which negatives were kept: a number, or a column of it.
    """

    eval_paths: tuple[str, ...] = ()
    ids: dict[str, IdSettings] = Field(default_factory=dict)
    features: Features = Field(default_factory=lambda: FeatureSet(()))
    label: str | tuple[str, ...]
    dense: tuple[str, ...] = ()
    dense_fill: Annotated[float, Field(allow_inf_nan=False)] | None = None
    time: str | None = None
    weight: str | None = None
    group: str | None = None
    sample_rate: str | float | None = None


class FileSource(TableSource):
    """Files; without `eval_paths` `data.split` divides `paths` by time."""

    paths: tuple[str, ...]


class ParquetFiles(FileSource):
    """Parquet files, read a row group at a time."""

    kind: Literal["parquet"] = "parquet"


class CsvFiles(FileSource):
    """CSV files with a header line; a list of ids is text with blanks between them."""

    kind: Literal["csv"] = "csv"


class KafkaSource(TableSource):
    """Records of a Kafka topic; `stream` has the settings of `shoal.data.Kafka`."""

    kind: Literal["kafka"] = "kafka"
    stream: Annotated[Kafka, _Built(lambda value: build_record(value, Kafka, "stream"))]


class SyntheticSource(Section):
    """Clicks made up on the fly: Zipf ids, new ids arriving, a planted signal."""

    kind: Literal["synthetic"] = "synthetic"
    examples: Examples = 1_000_000
    eval_examples: Examples = 100_000
    num_features: Annotated[int, Field(gt=0, le=1024)] = 8
    vocabulary: Examples = 1_000_000
    vocabularies: Annotated[tuple[Examples, ...], Field(max_length=1024)] = ()
    exponent: Annotated[float, Field(gt=0, le=64)] = 1.05
    fresh_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    fresh_per_example: Annotated[float, Field(ge=0, le=1024)] = 0.05
    num_dense: Annotated[int, Field(ge=0, le=1 << 16)] = 4
    signal: LogOdds = 1.0
    bias: LogOdds = -1.5


SourceSettings = Annotated[
    FlightsSource | ParquetFiles | CsvFiles | KafkaSource | SyntheticSource,
    Field(discriminator="kind"),
]


class ReplaySettings(Section):
    """Train recorded events as a stream, each once it is due: by its time, `speed` times as fast as
    it came, or `rate` of them a second; with neither, all at once.

    The event time `since` (UTC unless it says otherwise; None: that of the first example) is due at
    `clock_s`, seconds since 1970 (None: when training begins).
    """

    speed: Annotated[float | None, Field(gt=0, le=1e9)] = None
    rate: Annotated[float | None, Field(gt=0, le=1e9)] = None
    since: datetime | None = None
    clock_s: Annotated[float, Field(ge=0, le=1e11)] | None = None


class QuarantineSettings(Section):
    """Where rows and files that cannot be used are named, and how many may be, on each rank.

    `same_columns`: a file whose columns differ from the first file's in name or type is one.
    """

    path: str
    most_rows: Annotated[int, Field(ge=0, lt=1 << 31)] = 1_000
    most_files: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    same_columns: bool = False


class DataSettings(Section):
    """Where examples come from and in which order.

    `split` is an event time (UTC unless it says otherwise): examples before it train, those from
    it on evaluate. `shuffle` "replays" keeps the order of the first epoch and shuffles later ones.
    `last_batch` is what becomes of a last batch of an epoch that is one example, which batch
    normalisation cannot take. `sampler` draws items that examples are compared with; with `tree`
    examples become those of its nodes.
    """

    source: Annotated[SourceSettings, ShortFor("kind")]
    split: datetime | None = None
    batch_size: Count = 512
    epochs: Count = 1
    shuffle: Literal["never", "replays", "always"] = "never"
    shuffle_window: Examples | None = None
    prefetch: Few = 2
    last_batch: Literal["merge", "drop"] = "merge"
    max_examples: Examples | None = None
    sampler: SamplerRule = None
    tree: TreeRule = None
    replay: ReplaySettings | None = None
    quarantine: Annotated[QuarantineSettings | None, ShortFor("path")] = None


class BiasSettings(Section):
    """The one weight per id of the first-order part. `optimizer` defaults to the table's."""

    optimizer: OptimizerRule | None = None
    initializer: InitializerRule = Field(default_factory=initializers.Zeros)


class TableSettings(Section):
    """A table; what `tables.default` says holds where the table itself says nothing."""

    dim: Annotated[int, Field(gt=0, le=MAX_DIM)] = 16
    dtype: RowDType = "float32"
    optimizer: OptimizerRule = optimizers.Adagrad(lr=0.05)
    initializer: InitializerRule = initializers.Uniform(minval=-0.01, maxval=0.01)
    compressor: CompressorRule = compressors.Float32()
    bias: BiasSettings = Field(default_factory=BiasSettings)
    capacity_rows: Examples | None = None
    on_full: OnFull = "raise"
    expected_rows: Annotated[int, Field(ge=0, le=(1 << 31) - 2)] = 0
    admission: AdmissionRule = None
    expiry: ExpiryRule = None


class FeatureSettings(Section):
    """A feature: the table it looks up (its own name when left out) and how ids are pooled.

    "first_n" keeps the rows of `max_length` ids as a sequence, for models that take them.
    """

    table: str | None = None
    combiner: Literal["sum", "mean", "first_n"] = "sum"
    max_length: Count | None = None


DenseKind = Literal[
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "radam",
    "rmsprop", "rprop", "sgd",
]  # fmt: skip


class DenseRuleSettings(Section):
    """torch's optimizer of that name; `options` are further arguments of it, momentum say."""

    kind: DenseKind = "adam"
    lr: LearningRate = 0.001
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    options: dict[str, Any] = Field(default_factory=dict)


class DenseOptimizerSettings(DenseRuleSettings):
    """Optimizer of the model's dense weights, but for those whose names fit a pattern of
    `parameters`, of which the first counts; what a pattern leaves out is as for all. `ema` is the
    decay of a moving average of the weights, which evaluations, exports and replicas take in
    place of the last ones."""

    parameters: dict[str, Annotated[DenseRuleSettings, ShortFor("kind")]] = Field(
        default_factory=dict
    )
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _patterns_take_over(cls, value: Any) -> Any:
        return with_patterns(value, cls.model_fields["kind"].default)


MetricName = Literal["auc", "gauc", "log_loss", "ne"]


class EarlyStopSettings(Section):
    """Stop after `patience` evaluations in a row that improve on the best by `least` at most."""

    metric: MetricName
    patience: Count = 3
    least: Annotated[float, Field(ge=0, le=1)] = 0.0


class EvalSettings(Section):
    """How the evaluation runs: after training, and at every `every_steps` steps of it.

    `retrieval` ranks examples' items among all known ones.
    """

    batch_size: Count = 4096
    max_examples: Examples | None = None
    every_steps: Count | None = None
    early_stop: Annotated[EarlyStopSettings | None, ShortFor("metric")] = None
    retrieval: Retrieval = None


class LoggingSettings(Section):
    """What a run writes while it trains. `points` is about how many points curves get."""

    points: Count = 200
    plain_interval_s: Seconds = 5.0
    jsonl: bool = True
    tensorboard: bool | Literal["auto"] = "auto"


class WarmStartSettings(Section):
    """What a new run's models are filled from, and which differences are fine.

    `path` is a checkpoint, a folder of them or a run. `tables`, `renames`, `allow_missing`,
    `allow_unknown`, `dense` and `state` are those of `shoal.checkpoint.LoadOptions`.
    """

    path: str
    tables: tuple[str, ...] | None = None
    renames: dict[str, str] = Field(default_factory=dict)
    allow_missing: tuple[str, ...] = ()
    allow_unknown: tuple[str, ...] = ()
    dense: bool = True
    state: bool = True


class CheckpointSettings(Section):
    """When a run saves what it needs to resume, where, and whether it resumes from there.

    `dir` None is `checkpoints/` in the run folder. Each `full_every`-th save is full, the others
    hold what changed since. `keep_full` full ones stay, with what builds on them. `warm_start`
    counts only where there is nothing to resume. More than `failures_allowed` saves in a row
    that fail, and the last one of a run, end it. The checkpoint of the evaluation with the best
    `keep_best` stays.
    """

    dir: str | None = None
    every_steps: Count | None = None
    every_s: Seconds | None = None
    full_every: Count = 10
    keep_full: Count = 2
    keep_best: MetricName | None = None
    failures_allowed: Few = 3
    background: bool = True
    resume: Literal["auto", "never", "must"] = "auto"
    warm_start: Annotated[WarmStartSettings | None, ShortFor("path")] = None


class OutputSettings(Section):
    """Where the run folder goes and whether the trained model is kept."""

    dir: str = "runs"
    save_model: bool = True


def _constraints(value: Any) -> Any:
    for key, one in value.items() if isinstance(value, Mapping) else ():
        constraint_of(one, f"constraint of {key}")
    return value


class PlacementSettings(Section):
    """How tables are spread over ranks: the sharding type of all, and of those that differ.

    "auto" plans them: see `shoal.planner`. `constraints` are of plans, by table, pattern, "*" for
    all, or "feature:NAME".
    """

    default: Sharding | Literal["auto"] = "row_wise"
    tables: dict[str, Sharding] = Field(default_factory=dict)
    constraints: Annotated[dict[str, dict[str, Any]], BeforeValidator(_constraints)] = Field(
        default_factory=dict
    )


class WireSettings(Section):
    """Precision of rows and of their gradients between ranks; None: as they are."""

    rows: WireKind | None = None
    grads: WireKind | None = None


class ServersSettings(Section):
    """Parameter servers that hold the model's rows, under `distributed.path=ps`.

    `addresses` in order of the servers' indices, or the `discovery` where `count` of them
    register, for whom workers wait `start_s`, and which forgets a server that it did not hear for
    `session_s`; `token_file` holds what the servers were given. A request without a reply within
    `reply_s` is sent again, `repeats` times. `stale_updates` of a worker may be on their way while
    it trains on; 0: each step waits until servers have applied it. No frame of a request or reply
    has more than `most_mib` MiB.
    """

    addresses: tuple[str, ...] = ()
    discovery: str | None = None
    count: Annotated[int, Field(ge=1, le=4096)] | None = None
    session_s: Annotated[float, Field(ge=1, le=600)] = 10.0
    start_s: Seconds = 600.0
    token_file: str | None = None
    reply_s: Seconds = 30.0
    repeats: Few = 5
    stale_updates: Few = 0
    most_mib: Annotated[int, Field(ge=1, le=2047)] = 256


Scaling = Literal["none", "sqrt", "linear"]


class DistributedSettings(Section):
    """What matters when a run has several ranks; one rank alone reads `staleness` and what
    concerns parameter servers.

    `grad_reduce` is of rows: "mean" trains as one process does, "sum" is Monolith's. All learning
    rates and `data.batch_size` are multiplied by the number of ranks, or its root, as `lr_scaling`
    and `batch_scaling` say. `plan` is a
    file of `shoal plan`; `topology` and `statistics` are what placement "auto" plans with. Under
    `dense: average` this process is `worker` of about `workers` that have no process group: it
    reads its part of every batch, and every `average_every` steps moves towards the average of
    their dense weights on server 0.
    """

    placement: Annotated[PlacementSettings, ShortFor("default")] = PlacementSettings()
    grad_reduce: GradReduce = "mean"
    lr_scaling: Scaling = "none"
    batch_scaling: Scaling = "none"
    plan: str | None = None
    topology: str | None = None
    statistics: str | None = None
    per_sender_steps: bool = False
    staleness: Few = 0
    wire: WireSettings = Field(default_factory=WireSettings)
    path: Literal["auto", "torch", "shared_memory", "mpi", "ps"] = "auto"
    servers: ServersSettings = Field(default_factory=ServersSettings)
    dense: Literal["ddp", "fsdp2", "average"] = "ddp"
    average_every: Annotated[int, Field(ge=1, le=1 << 20)] = 8
    worker: Annotated[int, Field(ge=0, lt=4096)] = 0
    workers: Annotated[int, Field(ge=1, le=4096)] = 1
    timeout_s: Seconds | None = None
    pin_cores: bool = True
    enable_alltoall_metrics: bool = False
    enable_alltoall_metrics_for_slot: bool = False

    @model_validator(mode="after")
    def _workers_have_servers(self) -> DistributedSettings:
        alone = self.dense == "average"
        if alone > (self.path == "ps") or self.worker >= self.workers or (self.workers > 1) > alone:
            raise ConfigError(
                "dense, path, worker and workers",
                got=f"{self.dense}, {self.path}, {self.worker} and {self.workers}",
                allowed="dense=average with path=ps and worker of 0..workers-1, or another dense "
                "and one worker",
                remedy="Set dense=average and path=ps for workers without a process group.",
            )
        return self


class PublishSettings(Section):
    """Where replicas get what a run changes, while it trains.

    `address` is tcp://HOST:PORT; rank r listens on PORT + r, or on a free one for port 0. Changed
    rows can be had every `every_s`, dense weights every `dense_every_s`. `keep_bytes` of changes
    are kept for replicas that are behind. A run waits at its end, up to `linger_s`, until
    replicas have all. `token_file` holds what replicas must know.
    """

    address: str = "tcp://127.0.0.1:0"
    every_s: Seconds = 0.4
    dense_every_s: Seconds = 10.0
    keep_bytes: Annotated[int, Field(ge=1, lt=1 << 63)] = 1 << 30
    linger_s: Seconds = 30.0
    token_file: str | None = None


class HostRowsSettings(Section):
    """Rows in host memory, those in use in a cache of so many bytes on the GPU; 0: in none."""

    cache_bytes: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    policy: CachePolicy = "lru"


class RunConfig(Section):
    """The whole tree: every setting of a run, as docs/guide/config.md describes each.

    Raises:
        UnknownName: a key that no section has.
        ConfigError: settings that exclude or need each other.
    """

    DEFAULT_TABLE: ClassVar[str] = "default"

    name: Annotated[str, Field(pattern=NAME)]
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    device: Annotated[str, Field(pattern=DEVICE)] = "cpu"
    host_rows: HostRowsSettings | None = None
    threads: Annotated[int, Field(gt=0, le=MAX_THREADS)] | None = None
    data: DataSettings
    tables: dict[str, TableSettings] = Field(default_factory=dict)
    features: dict[str, FeatureSettings] = Field(default_factory=dict)
    model: ModelRule = Field(default_factory=DeepFMSettings)
    tasks: dict[str, TaskRule] = Field(default_factory=dict)
    dense_optimizer: Annotated[DenseOptimizerSettings, ShortFor("kind")] = Field(
        default_factory=DenseOptimizerSettings
    )
    loss: Literal["log_loss"] = "log_loss"
    clip_norm: PositiveFloat | None = None
    accumulation: Count = 1
    amp: Literal["none", "bfloat16", "float16"] = "none"
    compile: Compile = False
    nan_policy: NanPolicy = "raise"
    nan_clip: Annotated[float, Field(gt=0, le=3e38)] = 1.0
    evict_every_s: Count = 86_400
    profile: str | None = None
    deterministic: bool = False
    tf32: bool | None = None
    distributed: DistributedSettings = Field(default_factory=DistributedSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    baselines: tuple[Literal["base_rate", "logistic"], ...] = ("base_rate", "logistic")
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    output: OutputSettings = Field(default_factory=OutputSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    publish: PublishSettings | None = None

    @model_validator(mode="after")
    def _expiry_has_times(self) -> RunConfig:
        source = self.data.source
        if isinstance(source, FileSource) and source.time is None:
            for name, table in self.tables.items():
                if table.expiry is not None and table.expiry != Expiry():
                    allowed = "a column of event times, by which rows expire"
                    remedy = "Set data.source.time, or leave the expiry out."
                    raise ConfigError(
                        f"data.source.time with tables.{name}.expiry", None, allowed, remedy
                    )
        return self

    @model_validator(mode="after")
    def _evaluates_on_the_way(self) -> RunConfig:
        early, best = self.eval.early_stop, self.checkpoint.keep_best
        wanted = {best, early and early.metric} - {None}
        if wanted and self.eval.every_steps is None:
            allowed, remedy = "steps between evaluations", "Set eval.every_steps."
            what = "eval.every_steps with eval.early_stop or checkpoint.keep_best"
            raise ConfigError(what, got=None, allowed=allowed, remedy=remedy)
        if best is not None and self.distributed.path == "ps":
            allowed, remedy = "none: rows are on servers, which save them", "Leave one of them out."
            raise ConfigError(
                "checkpoint.keep_best with distributed.path=ps", best, allowed, remedy
            )
        if "gauc" in wanted and getattr(self.data.source, "group", None) is None:
            allowed, remedy = "a column of groups", "Set data.source.group, or use auc."
            raise ConfigError("data.source.group with the metric gauc", None, allowed, remedy)
        return self
