"""Features computed of columns, and the ids or dense numbers that they become.

The same evaluation serves training, evaluation and serving: a `FeatureSet` takes an Arrow table and
needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from shoal.address import empty_rows
from shoal.data import columns
from shoal.data.columns import Rows, as_numpy
from shoal.data.kinds import Id, Kind, columns_of, renamed
from shoal.data.values import (
    MOST_COMBINATIONS,
    Given,
    IntArray,
    Values,
    as_text,
    floats,
    lengths_of,
    starts_of,
    within,
)
from shoal.errors import ConfigError, DataError, known_name
from shoal.ids import TEXT_TYPES, ids_of_text, mix64
from shoal.ragged import KeyedRagged, Ragged

if TYPE_CHECKING:
    import pyarrow as pa

_FEATURE = "feature:"


@runtime_checkable
class IdRule(Protocol):
    """How values become ids, other than as they are. A frozen dataclass named in configs."""

    kind: ClassVar[str]

    def ids(self, array: pa.Array, name: str, rows: Rows) -> IntArray:
        """int64 [N] of values without nulls.

        Raises:
            DataError: a value that has no id.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HashBuckets:
    """Ids 0..size-1: the 64-bit id of a value, mixed, modulo size. Different values may share one.

    Raises:
        ConfigError: a size outside 1..2^31-1.
    """

    kind: ClassVar[str] = "hash"
    size: int

    def __post_init__(self) -> None:
        _check_size("size of hash ids", self.size)

    def ids(self, array: pa.Array, name: str, rows: Rows) -> IntArray:
        mixed = mix64(columns.words(array, name, rows)).numpy().view(np.uint64)
        return (mixed % np.uint64(self.size)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Integers of 0..size-1 as they are. `unknown` is the id of others; None refuses them.

    Raises:
        ConfigError: a size outside 1..2^31-1.
    """

    kind: ClassVar[str] = "range"
    size: int
    unknown: int | None = None

    def __post_init__(self) -> None:
        _check_size("size of range ids", self.size)

    def ids(self, array: pa.Array, name: str, rows: Rows) -> IntArray:
        ids: IntArray = columns.words(array, name, rows).numpy()
        outside = (ids < 0) | (ids >= self.size)
        if self.unknown is None and outside.any():
            place = int(np.flatnonzero(outside)[0])
            remedy = "Raise size, set unknown, or correct the data."
            allowed = f"0..{self.size - 1}"
            got = repr(array[place].as_py())
            raise rows.error(f"column {name!r}", place, got, allowed, remedy)
        return np.where(outside, self.unknown or 0, ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The place of a value among known ones, from 0; numbers are compared as text.

    Args:
        values: the known ones, in order; or
        file: one a line, in UTF-8.
        unknown: the id of others; None: as many as there are known values.

    Raises:
        ConfigError: neither or both, none, a value twice, or a file that cannot be read.
    """

    kind: ClassVar[str] = "vocabulary"
    values: tuple[str, ...] = ()
    file: str | None = None
    unknown: int | None = None
    _known: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        import pyarrow as pa

        what = "vocabulary" if self.file is None else f"vocabulary file {self.file}"
        if (self.file is None) == (not self.values):
            got = "neither" if self.file is None else "both"
            raise ConfigError(what, got, "values or file", "Set one of them.")
        values = [str(value) for value in self.values]
        if self.file is not None:
            try:
                # Other ends of lines of Unicode may be part of a value.
                lines = Path(self.file).read_bytes().decode("utf-8-sig").split("\n")
                values = [
                    line.removesuffix("\r") for line in lines if line or line is not lines[-1]
                ]
            except (OSError, UnicodeError) as error:
                remedy = "Check the path; write one value a line, in UTF-8."
                raise ConfigError(what, got=error, allowed="a text file", remedy=remedy) from error
        places: dict[str, int] = {}
        for place, value in enumerate(values):
            if value in places:
                got = f"{value!r} at {places[value] + 1} and at {place + 1}"
                raise ConfigError(what, got, "each value once", "Leave one of them out.")
            places[value] = place
        if not values:
            raise ConfigError(what, "no values", "one or more", "Write one value a line.")
        object.__setattr__(self, "_known", pa.array(values, pa.large_string()))

    def ids(self, array: pa.Array, name: str, rows: Rows) -> IntArray:
        import pyarrow.compute as pc

        unknown = len(self._known) if self.unknown is None else self.unknown
        found = pc.index_in(as_text(array), value_set=self._known)
        return as_numpy(pc.fill_null(found.cast("int64"), unknown))


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """The number of boundaries that are at most a number: 0..len(edges).

    Raises:
        ConfigError: no edges, or edges that do not rise.
    """

    kind: ClassVar[str] = "boundaries"
    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in zip(self.edges, self.edges[1:], strict=False))
        if not self.edges or not rises:
            got, remedy = list(self.edges), "Sort them, and name each once."
            raise ConfigError("edges of boundaries", got, "one or more, rising", remedy)

    def ids(self, array: pa.Array, name: str, rows: Rows) -> IntArray:
        import pyarrow as pa

        # float32 columns meet edges rounded like them; times in seconds need float64.
        kind = pa.float32() if pa.types.is_float32(array.type) else pa.float64()
        numbers = columns.numbers(array, name, replace(rows, spelled=True), kind=kind).numpy()
        edges = np.asarray(self.edges, numbers.dtype)
        return np.searchsorted(edges, numbers, side="right").astype(np.int64)


ID_RULES: dict[str, type] = {cls.kind: cls for cls in (HashBuckets, Range, Vocabulary, Boundaries)}


def _check_size(what: str, size: int) -> None:
    if not 0 < size < 1 << 31:
        raise ConfigError(what, got=size, allowed="1..2147483647", remedy="Set it so.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementWise:
    """A sequence: the feature is computed of each element of its columns' lists.

    Args:
        delimiter: between elements of text; None: the columns hold lists.
        length: elements that are kept, the first ones; None: all.
        columns: those that are sequences, of one length in an example; (): all. Others have one
            value for all elements.
        group: features of one group have sequences of one length in an example.
    """

    delimiter: str | None = None
    length: int | None = None
    columns: tuple[str, ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """A feature: what is computed of which columns, and what becomes of it.

    Numbers are dense columns of the model, unless `ids` makes ids of them; all else becomes ids:
    integers are ids, text becomes one (`shoal.ids.ids_of_text`), or `ids` says how.

    Args:
        name: of the feature.
        kind: what is computed.
        default: takes the place of a missing value (of each column of a combo), of an empty list,
            and of an element that has none; an empty sequence stays empty. "" leaves it out (ids
            only). None: a missing value is an error, and a list that is missing or empty has no
            ids.
        separator: splits text of several values; None: text is one value.
        sequence: computes each element of lists on its own; ids only.
        ids: how values become ids.
        width: dense columns; each example has a list of so many numbers. 1: one number.
        max_length: most ids of an example; more is an error. None: any number.
        stub: the feature is only an input of others.

    Raises:
        ConfigError: settings that exclude each other.
    """

    name: str
    kind: Kind
    default: str | float | int | None = None
    separator: str | None = None
    sequence: ElementWise | None = None
    ids: IdRule | None = None
    width: int = 1
    max_length: int | None = None
    stub: bool = False

    def __post_init__(self) -> None:
        if "" in columns_of(self.kind) or not columns_of(self.kind):
            named = renamed(self.kind, {"": self.name})
            object.__setattr__(self, "kind", named)
        dense = self.is_dense
        for key, wrong, allowed in (
            ("default", dense and isinstance(self.default, str), "a number for a dense feature"),
            ("sequence", dense and self.sequence is not None, "ids of the numbers: set ids"),
            ("sequence", self.sequence is not None and getattr(self.kind, "weighted", False),
             "none of weighted ids"),
            ("width", self.width < 1 or (not dense and self.width > 1), "1, or more if dense"),
            ("max_length", self.max_length is not None and (dense or self.max_length < 1),
             "1 or more, of ids"),
            ("separator", self.separator == "", "one or more letters"),
        ):  # fmt: skip
            if wrong:
                got, remedy = getattr(self, key), "Change it, or leave it out."
                raise ConfigError(f"{key} of feature {self.name!r}", got, allowed, remedy)
        for name in self.sequence.columns if self.sequence else ():
            what = f"sequence column of feature {self.name!r}"
            known_name(what, name, columns_of(self.kind))

    @property
    def is_dense(self) -> bool:
        """Whether it becomes dense columns."""
        return self.kind.numeric and self.ids is None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns, and "feature:NAME"."""
        return columns_of(self.kind)

    def evaluate(self, given: Mapping[str, pa.Array], size: int, rows: Rows) -> Values:
        """The feature's values of N examples.

        Args:
            given: its columns [N], by name.
            size: N.
            rows: where the examples are, for messages.

        Raises:
            DataError: a sequence element of several values, or as the kind's `evaluate`.
        """
        rows = replace(rows, feature=self.name)
        if self.sequence is None:
            most = self.max_length or MOST_COMBINATIONS
            own = Given(dict(given), size, self.separator, rows, most, self._fill(rows))
            return self.kind.evaluate(own)
        elements, lengths = _elements(self.sequence, given, self.separator, rows)
        flat_rows = within(rows, lengths)
        flat = Given(
            elements, int(lengths.sum()), self.separator, flat_rows, fill=self._fill(flat_rows)
        )
        values = self.kind.evaluate(flat)
        array, weights = values.array, values.weights
        if values.lengths is not None:
            if (values.lengths > 1).any():
                place = int(np.flatnonzero(values.lengths > 1)[0])
                got, allowed = f"{values.lengths[place]} values", "one value an element"
                remedy = "Use a feature of one value, or no sequence."
                raise flat_rows.error("sequence element", place, got, allowed, remedy)
            import pyarrow as pa

            at = pa.array(starts_of(values.lengths)[:-1], mask=values.lengths == 0)
            array = array.take(at)
        return Values(_filled(array, self.default, self.name, flat_rows), lengths, weights)

    def _fill(self, rows: Rows) -> Callable[[Values, str], Values] | None:
        """Gives a column its default where it is missing, before it is crossed with others."""
        if self.default == "":
            return None

        def filled(values: Values, name: str) -> Values:
            if values.lengths is not None:
                return values
            return Values(_filled(values.array, self.default, name, rows))

        return filled


def _elements(
    sequence: ElementWise, given: Mapping[str, pa.Array], separator: str | None, rows: Rows
) -> tuple[dict[str, pa.Array], IntArray]:
    """Columns by element [M], and how many elements each example has [N]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, pa.Array] = {}
    first: tuple[str, IntArray] | None = None
    chosen = sequence.columns or tuple(given)
    for name in chosen:
        column = given[name]
        if columns.is_text(column) and sequence.delimiter is not None:
            text = pc.fill_null(as_text(column), "")
            column = columns.without_empty(text, pc.split_pattern(text, sequence.delimiter))
        if not columns.is_list(column.type):
            raise rows.wrong_type(name, column, "lists, or text with sequence.delimiter")
        if sequence.length is not None:
            if pa.types.is_fixed_size_list(column.type):  # a slice would be filled up with nulls
                column = column.cast(pa.list_(column.type.value_type))
            column = pc.list_slice(column, 0, sequence.length)
        lengths = lengths_of(column)
        if first is None:
            first = name, lengths
        elif (lengths != first[1]).any():
            row = int(np.flatnonzero(lengths != first[1])[0])
            raise _uneven(rows, row, (name, lengths[row]), (first[0], first[1][row]))
        found[name] = columns.decoded(column.flatten())
    assert first is not None
    repeated = pa.array(np.repeat(np.arange(len(first[1])), first[1]))
    rest = {name: column.take(repeated) for name, column in given.items() if name not in found}
    return {**found, **rest}, first[1]


def _uneven(rows: Rows, row: int, one: tuple[str, int], other: tuple[str, int]) -> Exception:
    got = f"{one[1]} elements, and {other[1]} of {other[0]!r}"
    remedy = "Correct the data: an element of each belongs to one of the others."
    return rows.error(f"sequence {one[0]!r}", row, got, "sequences of one length", remedy)


def _without_nan(array: pa.Array) -> pa.Array:
    """NaN is a missing number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(array.type) and pc.any(pc.is_nan(array)).as_py():
        return pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    return array


def _filled(array: pa.Array, default: Any, name: str, rows: Rows) -> pa.Array:
    """Values without nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _without_nan(array)
    if array.null_count and default not in (None, ""):
        if pa.types.is_null(array.type):
            return pa.array([default] * len(array))
        return pc.fill_null(array, _as_type(default, array.type, name))
    remedy = "Set default, drop these rows, or correct the data."
    rows.refuse_nulls(array, f"column {name!r}", remedy)
    return array


# A scalar of Python's costs Arrow a search for pandas.
@lru_cache(maxsize=4096)
def _as_type(default: Any, kind: pa.DataType, name: str) -> pa.Scalar:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    textual = str(kind) in TEXT_TYPES
    try:
        return pa.scalar(str(default) if textual else default).cast(kind)
    except pa.ArrowException as error:
        remedy = "Write a default as the column's values are."
        raise ConfigError(
            f"default of feature {name!r}", got=default, allowed=f"a {kind}", remedy=remedy
        ) from error


def sequence_group(
    name: str, features: Sequence[FeatureSpec], *, delimiter: str | None = None,
    length: int | None = None,
) -> tuple[FeatureSpec, ...]:  # fmt: skip
    """Features over the sequences of one thing, such as the last clicks.

    Feature f becomes NAME__f, and its sequence columns c become NAME__c: all of them, or those that
    its own `sequence.columns` names. In an example all have one length.

    Args:
        name: NAME.
        features: of one element, such as a click.
        delimiter: between elements of text; None: columns are lists.
        length: elements at the end that are kept; None: all.
    """
    made = []
    for spec in features:
        own = spec.sequence.columns if spec.sequence else spec.inputs
        to = {column: f"{name}__{column}" for column in own if not column.startswith(_FEATURE)}
        inputs = tuple(to.get(column, column) for column in own)
        sequence = ElementWise(delimiter=delimiter, length=length, columns=inputs, group=name)
        kind = renamed(spec.kind, to)
        made.append(replace(spec, name=f"{name}__{spec.name}", kind=kind, sequence=sequence))
    return tuple(made)


class ModelInputs(NamedTuple):
    """Ids of a batch, and dense numbers float32 [B, n] or None."""

    ids: KeyedRagged
    dense: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """Features of N examples, in order: int64 [N] or jagged ids, weights of some, dense columns."""

    ids: dict[str, Tensor | Ragged]
    weights: dict[str, Tensor]
    dense: list[Tensor]

    def inputs(self) -> ModelInputs:
        """Joined, as a model takes them.

        Raises:
            InputError: no feature has ids.
        """
        values = [one.values if isinstance(one, Ragged) else one for one in self.ids.values()]
        first = next(iter(self.ids.values()), Ragged.from_lists([]))
        size = first.batch_size if isinstance(first, Ragged) else first.numel()
        offsets_FB1 = empty_rows(1, len(values) * size + 1, torch.float64).view(torch.int64)[0]
        offsets_FB1[0] = 0
        base = 0
        for f, (part, own) in enumerate(zip(self.ids.values(), values, strict=True)):
            ends_B = offsets_FB1[f * size + 1 : (f + 1) * size + 1]
            if isinstance(part, Ragged):
                torch.add(part.offsets_B1[1:], base, out=ends_B)
            else:
                torch.arange(base + 1, base + size + 1, out=ends_B, device="cpu")
            base += own.numel()
        weights = [
            self.weights.get(name, torch.ones(own.numel(), device="cpu"))
            for name, own in zip(self.ids, values, strict=True)
            if self.weights
        ]
        keyed = KeyedRagged(
            tuple(self.ids),
            _joined(values) if values else offsets_FB1[:0],
            offsets_FB1,
            torch.cat(weights) if weights else None,
        )
        return ModelInputs(keyed, self.joined_dense())

    def joined_dense(self) -> Tensor | None:
        """float32 [N, n], or None without dense columns."""
        if not self.dense:
            return None
        widths = [d.shape[1] if d.ndim == 2 else 1 for d in self.dense]
        joined_Bn = empty_rows(len(self.dense[0]), sum(widths), torch.float32)
        for part_Bw, own in zip(joined_Bn.split_with_sizes(widths, dim=1), self.dense, strict=True):
            part_Bw.copy_(own.view(part_Bw.shape))
        return joined_Bn


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """Features that are computed together.

    Raises:
        ConfigError: a name twice, or features that need each other in a circle.
        UnknownName: an input "feature:NAME" that is none of them.
    """

    features: tuple[FeatureSpec, ...]
    _order: tuple[FeatureSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named: dict[str, FeatureSpec] = {}
        for spec in self.features:
            if spec.name in named:
                remedy = "Name each feature once."
                raise ConfigError("features", f"{spec.name!r} twice", "distinct names", remedy)
            named[spec.name] = spec
        needs: dict[str, list[str]] = {}
        for spec in self.features:
            inputs = [i.removeprefix(_FEATURE) for i in spec.inputs if i.startswith(_FEATURE)]
            for name in inputs:
                known_name(f"feature that {spec.name!r} is computed of", name, named)
            needs[spec.name] = inputs
        try:
            order = [named[name] for name in TopologicalSorter(needs).static_order()]
        except CycleError as error:
            got, remedy = " of ".join(reversed(error.args[1])), "Compute one of them of columns."
            raise ConfigError("features computed", got, "no circle", remedy) from error
        object.__setattr__(self, "_order", tuple(order))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read, each once."""
        every = (name for spec in self.features for name in spec.inputs)
        return tuple(dict.fromkeys(name for name in every if not name.startswith(_FEATURE)))

    @property
    def names(self) -> tuple[str, ...]:
        """Features with ids, in order."""
        return tuple(f.name for f in self.features if not f.stub and not f.is_dense)

    @property
    def num_dense(self) -> int:
        """Dense columns."""
        return sum(f.width for f in self.features if not f.stub and f.is_dense)

    def __call__(self, table: pa.Table, *, where: str = "batch", threads: int = 1) -> ModelInputs:
        """Model inputs of an Arrow table or record batch of N rows.

        Args:
            table: has the columns, and others maybe.
            where: names the table in messages.
            threads: that compute features.

        Raises:
            DataError: a column that is missing or does not fit, or a value that is not allowed.
            InputError: no feature has ids.
        """
        columns.check_present(self.columns, table.schema.names, where)
        there = {name: columns.decoded(table.column(name)) for name in self.columns}
        return self.evaluate(there, table.num_rows, Rows(where), threads=threads).inputs()

    def evaluate(
        self, there: Mapping[str, pa.Array], size: int, rows: Rows, *, threads: int = 1
    ) -> Evaluated:
        """Features of N rows; raises as a call does.

        Args:
            there: columns [N] by name.
            size: N.
            rows: where they are, for messages.
            threads: features computed at a time.
        """
        arrays = dict(there)
        used = {name for spec in self.features for name in spec.inputs}
        lengths: dict[str, tuple[str, IntArray]] = {}
        done: dict[str, Any] = {}
        whole = [spec.name for spec in self.features if _is_one_text(spec, arrays)]
        # Side by side, as a model takes them, in memory that is used again.
        ids_FN = empty_rows(len(whole), size, torch.float64).view(torch.int64)
        outs = dict(zip(whole, ids_FN, strict=True))

        def compute(spec: FeatureSpec) -> tuple[FeatureSpec, Values, Any]:
            own = replace(rows, feature=spec.name)
            with _as_data_error(spec, own):
                values = spec.evaluate({name: arrays[name] for name in spec.inputs}, size, rows)
                if spec.stub:
                    return spec, values, None
                if spec.is_dense:
                    return spec, values, _dense(spec, values, own)
                return spec, values, _ids(spec, values, own, outs.get(spec.name))

        def note(found: tuple[FeatureSpec, Values, Any]) -> None:
            spec, values, done[spec.name] = found
            if _FEATURE + spec.name in used:
                arrays[_FEATURE + spec.name] = values.to_arrow()
            if spec.sequence and spec.sequence.group and values.lengths is not None:
                name, first = lengths.setdefault(spec.sequence.group, (spec.name, values.lengths))
                if (first != values.lengths).any():
                    row = int(np.flatnonzero(first != values.lengths)[0])
                    raise _uneven(rows, row, (spec.name, values.lengths[row]), (name, first[row]))

        alone = [s for s in self._order if not any(i.startswith(_FEATURE) for i in s.inputs)]
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                for found in pool.map(compute, alone):
                    note(found)
        for spec in self._order:
            if spec.name not in done:
                note(compute(spec))
        result = Evaluated({}, {}, [])
        for spec in self.features:
            if spec.stub:
                continue
            if spec.is_dense:
                result.dense.append(done[spec.name])
                continue
            result.ids[spec.name], weights = done[spec.name]
            if weights is not None:
                result.weights[spec.name] = weights
        return result


@contextmanager
def _as_data_error(spec: FeatureSpec, rows: Rows) -> Iterator[None]:
    """What Arrow refuses, as an error that names the feature and its columns."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowMemoryError:
        raise
    except pa.ArrowException as error:
        named = ", ".join(map(repr, spec.inputs))
        raise DataError(
            f"column {named} for feature {spec.name!r} of {rows.where}",
            got=error,
            allowed="values that the feature takes; text in UTF-8",
            remedy="Convert the column, or correct the data.",
        ) from error


def _dense(spec: FeatureSpec, values: Values, rows: Rows) -> Tensor:
    """float32 [N], or [N, width] of lists."""
    fill = None if spec.default is None else float(spec.default)
    remedy = "Set default to what stands for a missing value, or correct the data."
    name = spec.inputs[0] if len(spec.inputs) == 1 else spec.name
    spelled = replace(rows, spelled=True)
    if values.lengths is None and spec.width == 1:
        return columns.numbers(_number_text(values.array), name, spelled, fill=fill, remedy=remedy)
    array, lengths = values.listed()
    if fill is not None:
        array, lengths = _with_default(array, lengths, fill, spec)
    wrong = lengths != spec.width
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        got, allowed = f"{lengths[row]} numbers", f"{spec.width} (width)"
        remedy = remedy if not lengths[row] else "Correct the data, or change width."
        raise rows.error(f"column {name!r}", row, got, allowed, remedy)
    numbers = columns.numbers(_number_text(array), name, within(spelled, lengths), remedy=remedy)
    return numbers if spec.width == 1 else numbers.view(-1, spec.width)


def _number_text(array: pa.Array) -> pa.Array:
    return as_text(array) if columns.is_text(array) else array


def _ids(
    spec: FeatureSpec, values: Values, rows: Rows, out: Tensor | None
) -> tuple[Tensor | Ragged, Tensor | None]:
    """int64 [N], maybe written to `out`, or jagged, and weights of ids."""
    name = spec.inputs[0] if len(spec.inputs) == 1 else spec.name
    array, lengths, weights = values.array, values.lengths, values.weights
    if lengths is None:
        array = _without_nan(array)
    if spec.kind.numeric and lengths is None and columns.is_text(array):
        numbers = floats(array, name, rows)
        import pyarrow as pa

        array = pa.array(numbers, from_pandas=True)
    if out is not None and (spec.default is not None or not array.null_count):
        missing = None if spec.default is None else str(spec.default)
        return ids_of_text(array, missing=missing, out=out), None
    if lengths is None and spec.default != "":
        array = _filled(array, spec.default, name, rows)
    elif lengths is None:
        array, lengths = values.listed() if array is values.array else Values(array).listed()
    elif spec.default not in (None, "") and spec.sequence is None:
        if weights is not None and (lengths == 0).any():
            weights = np.insert(weights, starts_of(lengths)[:-1][lengths == 0], 1.0)
        array, lengths = _with_default(array, lengths, spec.default, spec)
    if spec.max_length is not None and lengths is not None and (lengths > spec.max_length).any():
        row = int(np.flatnonzero(lengths > spec.max_length)[0])
        remedy = "Shorten the lists, or raise max_length."
        got, allowed = f"{lengths[row]} ids", f"at most {spec.max_length}"
        raise rows.error(f"column {name!r}", row, got, allowed, remedy)
    flat = within(rows, lengths)
    if spec.ids is None:
        ids_N = columns.words(array, name, flat)
    else:
        ids_N = torch.from_numpy(spec.ids.ids(array, name, flat))
    made = None if weights is None else torch.from_numpy(weights)
    if lengths is None:
        return ids_N, made
    return Ragged.from_lengths(ids_N, torch.from_numpy(lengths)), made


def _is_one_text(spec: FeatureSpec, arrays: Mapping[str, pa.Array]) -> bool:
    """Whether a feature's ids are those of a column's texts, one each."""
    if type(spec.kind) is not Id or spec.kind.weighted or spec.stub:
        return False
    as_it_is = spec.sequence is None and spec.separator is None and spec.ids is None
    kind = getattr(arrays.get(spec.kind.column), "type", None)
    return as_it_is and spec.default != "" and str(kind) in ("string", "large_string")


def _joined(parts: list[Tensor]) -> Tensor:
    """Vectors one after the other; those that lie so already are not copied."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(parts)
        if part.storage_offset() != end:
            return torch.cat(parts)
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _with_default(
    array: pa.Array, lengths: IntArray, default: Any, spec: FeatureSpec
) -> tuple[pa.Array, IntArray]:
    """Lists in which empty ones hold the default, as often as a dense feature is wide."""
    import pyarrow as pa

    empty = lengths == 0
    if not empty.any():
        return array, lengths
    times = spec.width if spec.is_dense else 1
    if pa.types.is_null(array.type):
        array = array.cast(pa.large_string() if isinstance(default, str) else pa.float64())
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    whole = pa.concat_arrays([array, pa.array([_as_type(default, array.type, spec.name).as_py()],
                                              array.type)])  # fmt: skip
    at = np.repeat(starts_of(lengths)[:-1][empty], times)
    places = np.insert(np.arange(len(array)), at, len(array))
    return whole.take(pa.array(places)), np.where(empty, times, lengths)
