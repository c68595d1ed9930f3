"""From Arrow columns to ids, dense features and labels.

Features computed otherwise are a recipe's `computed` (`shoal.data.feature_set`). Of the others, an
id is the column's integer itself, or what its text stands for (`shoal.ids.ids_of_text`): an
integer if it spells one, else its 64-bit hash. Several columns crossed are one id that mixes theirs
in order. A list column is a jagged feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.data import columns
from shoal.data.batch import LEAST_RATE, TensorSource
from shoal.data.columns import Rows
from shoal.data.feature_set import Evaluated, FeatureSet, ModelInputs
from shoal.data.kinds import cross
from shoal.errors import ConfigError
from shoal.ragged import Ragged

if TYPE_CHECKING:
    import pyarrow as pa


_FILL = "Set dense_fill to what stands for a missing value, drop these rows, or correct the file."


@dataclass(frozen=True, slots=True, kw_only=True)
class IdFeature:
    """An id feature of a table.

    Args:
        name: of the feature.
        columns: where its ids come from; () is the column of its name. Several columns are
            crossed, in this order; none of them may hold lists.
        is_list: the column holds lists of ids.
        max_length: longest list that is allowed; None allows any.

    Raises:
        ConfigError: a crossed list, a limit without a list, or a limit below 1.
    """

    name: str
    columns: tuple[str, ...] = ()
    is_list: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", (self.name,))
        if self.is_list and len(self.columns) > 1:
            self._refuse("columns", self.columns, "one column for a list feature")
        if self.max_length is not None and (not self.is_list or self.max_length < 1):
            self._refuse("max_length", self.max_length, "None, or at least 1 for a list feature")

    def _refuse(self, what: str, got: object, allowed: str) -> None:
        remedy = "Set is_list=True for a column of lists; cross columns of single values only."
        raise ConfigError(
            f"{what} of feature {self.name!r}", got=got, allowed=allowed, remedy=remedy
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which columns of a table are what.

    Args:
        ids: features whose ids are columns' values, in batch order.
        label: a column of 0..1 or booleans, or several; they are nothing else.
        dense: columns of finite numbers, in batch order.
        dense_fill: what a missing dense value (null or NaN) becomes; None refuses it.
        time: a timestamp column, or one of whole seconds since 1970.
        weight: a column of finite numbers of at least 0.
        group: a column of ids, for metrics by group; it may be a feature, too.
        computed: features computed of columns, after `ids` and `dense`.
        sample_rate: the chance with which a negative like this example was kept, above 0 and up to
            1: a number, or a column of it, which positives have, too.
        keys: columns that come along as they are, of any type.
        unlabelled: columns of labels may be missing, and single labels: they are NaN.

    Raises:
        ConfigError: no feature with ids, a name twice, a column in roles that exclude each other,
            or a `dense_fill` that is not finite.
    """

    ids: tuple[IdFeature, ...]
    label: str | tuple[str, ...]
    dense: tuple[str, ...] = ()
    dense_fill: float | None = None
    time: str | None = None
    weight: str | None = None
    group: str | None = None
    computed: FeatureSet = field(default_factory=lambda: FeatureSet(()))
    sample_rate: str | float | None = None
    keys: tuple[str, ...] = ()
    unlabelled: bool = False

    def __post_init__(self) -> None:
        if not self.labels:
            raise ConfigError("label", got="none", allowed="a column", remedy="Name one or more.")
        names = self.features
        if not names or len(set(names)) != len(names):
            remedy = "Name each id feature once."
            raise ConfigError(
                "id features", got=list(names), allowed="1 or more names", remedy=remedy
            )
        if self.dense_fill is not None and not math.isfinite(self.dense_fill):
            raise ConfigError(
                "dense_fill", got=self.dense_fill, allowed="a finite number", remedy="Set one."
            )
        rate = self.sample_rate
        if isinstance(rate, float | int) and not LEAST_RATE <= rate <= 1:
            allowed, remedy = "above 0, up to 1, or a column", "Set it to one."
            raise ConfigError("sample_rate", got=rate, allowed=allowed, remedy=remedy)
        self._check_roles()

    def _check_roles(self) -> None:
        lists = {name for feature in self.ids if feature.is_list for name in feature.columns}
        single = [name for feature in self.ids if not feature.is_list for name in feature.columns]
        others = [*lists, *dict.fromkeys(single), *self.dense, self.time, self.weight, self.group]
        others += [*self.computed.columns, self._rate_column]
        numbers = [*self.dense, *self.labels, self.time, self.weight, self.group]
        numbers.append(self._rate_column)
        for name, got, is_wrong in [
            *((name, "the label and something else", name in others) for name in self.labels),
            *((name, "a label twice", self.labels.count(name) > 1) for name in self.labels),
            *((name, "dense twice", self.dense.count(name) > 1) for name in self.dense),
            *((name, "lists and single values", name in [*single, *numbers]) for name in lists),
        ]:
            if is_wrong:
                raise ConfigError(
                    f"roles of column {name!r}",
                    got=got,
                    allowed="label alone; dense once; lists or single values",
                    remedy="Name the column in one of them.",
                )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the id features, in batch order."""
        return (*(feature.name for feature in self.ids), *self.computed.names)

    @property
    def labels(self) -> tuple[str, ...]:
        """Columns of labels, one or more."""
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def num_dense(self) -> int:
        """Dense columns of a batch."""
        return len(self.dense) + self.computed.num_dense

    @property
    def columns(self) -> list[str]:
        """Every column that is read, each once."""
        others = (*self.labels, self.time, self.weight, self.group, self._rate_column, *self.keys)
        return list(dict.fromkeys([*self.input_columns, *(n for n in others if n is not None)]))

    def columns_of(self, present: Iterable[str]) -> list[str]:
        """Of `columns` those to read where `present` are: without labels that may be missing."""
        absent = set(self.labels).difference(present) if self.unlabelled else ()
        return [name for name in self.columns if name not in absent]

    @property
    def _rate_column(self) -> str | None:
        return self.sample_rate if isinstance(self.sample_rate, str) else None

    @property
    def input_columns(self) -> list[str]:
        """Columns that features are made of, each once."""
        named = [column for feature in self.ids for column in feature.columns]
        return list(dict.fromkeys([*named, *self.dense, *self.computed.columns]))

    def check_columns(self, present: Iterable[str], where: str) -> None:
        """Check that all columns are there, each once.

        Raises:
            DataError: one is missing, and the nearest that are there; or there twice, and where.
        """
        have = list(present)
        columns.check_present(self.keys, have, where, "--key")
        columns.check_present(self.columns_of(have), have, where)


def encode(
    table: pa.Table, recipe: Recipe, where: str, *, first_row: int = 0, spelled: bool = False
) -> TensorSource:
    """Examples of an Arrow table (or record batch) in memory.

    Args:
        table: one row per example.
        recipe: which columns are what.
        where: names the table in messages.
        first_row: number of the table's first row there.
        spelled: numbers and lists may be text, and empty text is missing, as in CSV.

    Raises:
        DataError: a column is missing, there twice, or of a type that does not fit; an id, label,
            weight or time is missing, or a dense value without `dense_fill`; a list holds a null
            or is longer than declared; a label is outside 0..1, a weight negative, or a number
            not finite.
    """
    recipe.check_columns(table.schema.names, where)
    rows = Rows(where, first_row, spelled)
    found = _evaluated(table, recipe, rows)
    rate = recipe.sample_rate
    rate_column = rate if isinstance(rate, str) else None
    others = (*recipe.labels, recipe.time, recipe.weight, recipe.group, rate_column)
    there = {
        name: columns.decoded(table.column(name))
        for name in recipe.columns_of(table.schema.names)
        if name in others
    }
    weights = None
    if recipe.weight is not None:
        weights = columns.numbers(there[recipe.weight], recipe.weight, rows, low=0.0)
    rates = None
    if isinstance(rate, str):
        rates = columns.numbers(there[rate], rate, rows, low=LEAST_RATE, high=1.0)
    elif rate is not None:
        rates = torch.full((table.num_rows,), float(rate), device="cpu")
    gap = math.nan if recipe.unlabelled else None
    first, *more = (
        columns.numbers(there[name], name, rows, low=0.0, high=1.0, fill=gap)
        if name in there
        else torch.full((table.num_rows,), math.nan, device="cpu")
        for name in recipe.labels
    )
    return TensorSource(
        found.ids,
        first,
        more_labels=torch.stack(more, dim=1) if more else None,
        dense=found.joined_dense(),
        times_s=None
        if recipe.time is None
        else columns.times(there[recipe.time], recipe.time, rows),
        groups=None
        if recipe.group is None
        else columns.ids(there[recipe.group], recipe.group, rows),
        weights=weights,
        id_weights=found.weights,
        rates=rates,
        keys=table.select(recipe.keys) if recipe.keys else None,
        unlabelled=recipe.unlabelled,
    )


def model_inputs(
    table: pa.Table, recipe: Recipe, where: str, *, spelled: bool = False, threads: int = 1
) -> ModelInputs:
    """What a model takes of an Arrow table, without labels: as `encode` makes it for training.

    Args:
        table: one row per example.
        recipe: which columns are what; labels, weights and times are not read.
        where: names the table in messages.
        spelled: numbers and lists may be text, as in CSV.
        threads: features computed at a time.

    Raises:
        DataError: as `encode`, but for labels, weights and times.
    """
    read = recipe.input_columns
    columns.check_present(read, table.schema.names, where)
    return _evaluated(table, recipe, Rows(where, 0, spelled), threads).inputs()


def _evaluated(table: pa.Table, recipe: Recipe, rows: Rows, threads: int = 1) -> Evaluated:
    there = {name: columns.decoded(table.column(name)) for name in recipe.input_columns}
    ids: dict[str, Tensor | Ragged] = {}
    for feature in recipe.ids:
        if feature.is_list:
            (name,) = feature.columns
            limit = feature.max_length
            ids[feature.name] = columns.lists(there[name], name, rows, max_length=limit)
        else:
            ids[feature.name] = cross([columns.ids(there[n], n, rows) for n in feature.columns])
    dense = [
        columns.numbers(there[name], name, rows, fill=recipe.dense_fill, remedy=_FILL)
        for name in recipe.dense
    ]
    more = recipe.computed.evaluate(there, table.num_rows, rows, threads=threads)
    return Evaluated({**ids, **more.ids}, more.weights, [*dense, *more.dense])


def encode_times(table: pa.Table, recipe: Recipe, where: str, *, first_row: int = 0) -> Tensor:
    """Event times, int64 [N], whole seconds; 0 for a recipe without a time column.

    Raises:
        DataError: not a time, missing, or outside 0..2^32-1 seconds.
    """
    if recipe.time is None:
        return torch.zeros(table.num_rows, dtype=torch.int64, device="cpu")
    column = columns.decoded(table.column(recipe.time))
    return columns.times(column, recipe.time, Rows(where, first_row))
