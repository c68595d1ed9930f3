"""Kinds of features: what each computes of columns, vectorised. One class a kind of computation.

A kind's inputs are names of columns, or "feature:NAME" for the values of another feature ahead of
its ids. Text and numbers stay what they are; `shoal.data.feature_set` makes ids of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from shoal.data import columns
from shoal.data.expressions import Formula
from shoal.data.values import (
    FloatArray,
    Given,
    IntArray,
    Values,
    as_text,
    codes,
    floats,
    lengths_of,
    matches,
    product,
    reduced,
    rows_of,
    within,
)
from shoal.errors import ConfigError
from shoal.ids import mix64

Reduce = Literal["sum", "mean", "min", "max"]
_ALL = "ALL"


@runtime_checkable
class Kind(Protocol):
    """What a feature computes. A frozen dataclass with the name of its kind in configs.

    `inputs` names the fields that name columns; `numeric` is whether the values are numbers, which
    are dense columns of a model unless something makes ids of them.
    """

    kind: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]

    @property
    def numeric(self) -> bool: ...

    def evaluate(self, given: Given) -> Values:
        """Values of N examples.

        Raises:
            DataError: a column of a type that does not fit, or a value that cannot be read.
        """
        ...


def columns_of(kind: Kind) -> tuple[str, ...]:
    """The inputs of a kind, each once."""
    named = [getattr(kind, name) for name in kind.inputs]
    each = [(one,) if isinstance(one, str) else one for one in named]
    return tuple(dict.fromkeys(name for part in each for name in part if name and name != _ALL))


def renamed(kind: Any, to: Mapping[str, str]) -> Any:
    """The same kind over other columns."""

    def of(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return to.get(name, name) if isinstance(name, str) else tuple(to.get(n, n) for n in name)

    return replace(kind, **{field: of(getattr(kind, field)) for field in kind.inputs})


@dataclass(frozen=True, slots=True, kw_only=True)
class Id:
    """The values of a column. `weighted`: each is text like "id:0.5"; a map column is that, too."""

    kind: ClassVar[str] = "id"
    inputs: ClassVar[tuple[str, ...]] = ("column",)
    column: str = ""
    weighted: bool = False

    @property
    def numeric(self) -> bool:
        return False

    def evaluate(self, given: Given) -> Values:
        if not self.weighted:
            return given.values(self.column)
        keys, items, lengths = given.pairs(self.column)
        numbers = floats(items, self.column, within(given.rows, lengths))
        bad = ~np.isfinite(numbers)
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            raise within(given.rows, lengths).error(
                f"column {self.column!r}",
                place,
                got=repr(keys[place].as_py()),
                allowed="an id, a colon and a finite weight",
                remedy="Correct the data, or set weighted to false.",
            )
        return Values(keys, lengths, numbers.astype(np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """The numbers of a column; text is parsed."""

    kind: ClassVar[str] = "raw"
    inputs: ClassVar[tuple[str, ...]] = ("column",)
    column: str = ""

    @property
    def numeric(self) -> bool:
        return True

    def evaluate(self, given: Given) -> Values:
        return given.values(self.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combo:
    """One id for each combination of one value of each column: a cross.

    Raises:
        ConfigError: fewer than two columns.
    """

    kind: ClassVar[str] = "combo"
    inputs: ClassVar[tuple[str, ...]] = ("columns",)
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.columns) < 2:
            remedy = "Name more columns, or use kind: id."
            raise ConfigError(
                "columns of a combo", got=list(self.columns), allowed="two or more", remedy=remedy
            )

    @property
    def numeric(self) -> bool:
        return False

    def evaluate(self, given: Given) -> Values:
        import pyarrow as pa

        read = [given.values(name) for name in self.columns]
        if given.fill is not None:
            read = [given.fill(*pair) for pair in zip(read, self.columns, strict=True)]
        whole = all(one.lengths is None and not one.array.null_count for one in read)
        listed = [(one.array, np.ones(0, np.int64)) if whole else one.listed() for one in read]
        ids = [
            columns.words(array, name, given.rows)
            for name, (array, _) in zip(self.columns, listed, strict=True)
        ]
        if whole:
            return Values(pa.array(cross(ids).numpy()))
        places, counts = product([n for _, n in listed], given.rows, given.most)
        picked = [own[torch.from_numpy(at)] for own, at in zip(ids, places, strict=True)]
        return Values(pa.array(cross(picked).numpy()), counts)


def cross(parts: list[torch.Tensor]) -> torch.Tensor:
    """One id of several, in order: int64 [N] each in, int64 [N] out.

    h = id_0, then h = mix64(mix64(h) ^ id_k): different pairs of ids give different bits for a
    fixed first or second id, and collide otherwise as 64-bit hashes do.
    """
    crossed = parts[0]
    for part in parts[1:]:
        crossed = mix64(mix64(crossed) ^ part)
    return crossed


@dataclass(frozen=True, slots=True, kw_only=True)
class MapLookup:
    """The values of an example's keys in its own map: a map column, or texts like "key:value".

    `numbers`: values are numbers, and those of an example's keys become one by `reduce`.
    """

    kind: ClassVar[str] = "lookup"
    inputs: ClassVar[tuple[str, ...]] = ("map", "key")
    map: str
    key: str
    numbers: bool = False
    reduce: Reduce = "sum"

    @property
    def numeric(self) -> bool:
        return self.numbers

    def evaluate(self, given: Given) -> Values:
        keys, items, lengths = given.pairs(self.map)
        asked, counts = given.values(self.key).listed()
        (have, wanted), size = codes(keys, asked)
        have = have + size * rows_of(lengths)
        places, found = matches(have, wanted + size * rows_of(counts))
        found = _summed(found, counts)
        return _picked(items, places, found, self.numbers, self.reduce, (self.map, given))


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The values of a pair of keys in an example's map of maps.

    Text is like "a^x:1,y:2|b^z:3". "ALL" as a key takes every one. `numbers` and `reduce` are as
    in `MapLookup`.
    """

    kind: ClassVar[str] = "match"
    inputs: ClassVar[tuple[str, ...]] = ("nested_map", "pkey", "skey")
    nested_map: str
    pkey: str
    skey: str
    numbers: bool = False
    reduce: Reduce = "sum"

    @property
    def numeric(self) -> bool:
        return self.numbers

    def evaluate(self, given: Given) -> Values:
        outer = replace(given, separator="|").pairs(self.nested_map, "^")
        outer_keys, inner, outer_lengths = outer
        nested = Given({"": inner}, len(inner), ",", within(given.rows, outer_lengths))
        inner_keys, items, lengths = nested.pairs("")
        have = rows_of(outer_lengths)[rows_of(lengths)]
        outer_keys = outer_keys.take(_indices(rows_of(lengths)))
        asked = [(outer_keys, self.pkey), (inner_keys, self.skey)]
        named = [(keys, *given.values(name).listed()) for keys, name in asked if name != _ALL]
        wanted_places, counts = product(
            [np.ones(given.size, np.int64), *(n[2] for n in named)], given.rows
        )
        wanted = rows_of(counts)
        for (keys, values, _), places in zip(named, wanted_places[1:], strict=True):
            (own, others), size = codes(keys, values)
            have, wanted = have * size + own, wanted * size + others[places]
        places, found = matches(have, wanted)
        return _picked(
            items,
            places,
            _summed(found, counts),
            self.numbers,
            self.reduce,
            (self.nested_map, given),
        )


def _summed(found: IntArray, counts: IntArray) -> IntArray:
    """Per example, of numbers for each of its keys."""
    return np.bincount(rows_of(counts), found, minlength=len(counts)).astype(np.int64)


def _indices(places: IntArray) -> Any:
    import pyarrow as pa

    return pa.array(places)


def _picked(
    items: Any, places: IntArray, lengths: IntArray, numbers: bool, how: str, at: tuple[str, Given]
) -> Values:
    import pyarrow as pa

    name, given = at
    chosen = items.take(_indices(places))
    rows = within(given.rows, lengths)
    if chosen.null_count:
        place = int(np.flatnonzero(columns.as_numpy(chosen.is_null()))[0])
        remedy = "Write each value after its key."
        raise rows.error(f"column {name!r}", place, "a key alone", "key:value", remedy)
    if not numbers:
        return Values(chosen, lengths)
    return Values(pa.array(reduced(floats(chosen, name, rows), lengths, how), from_pandas=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What two lists have in common.

    | method | number |
    |---|---|
    | query_common_ratio | share of the query's values that the title has, 0..1 |
    | title_common_ratio | share of the title's values that the query has |
    | common | values of the query that the title has |
    | is_contain | 1 if the title has all values of the query, in any order |
    | is_equal | 1 if both are the same, in order |
    """

    kind: ClassVar[str] = "overlap"
    inputs: ClassVar[tuple[str, ...]] = ("query", "title")
    query: str
    title: str
    method: Literal[
        "query_common_ratio", "title_common_ratio", "common", "is_contain", "is_equal"
    ] = "query_common_ratio"

    @property
    def numeric(self) -> bool:
        return True

    def evaluate(self, given: Given) -> Values:
        import pyarrow as pa

        sides = [given.values(name).listed() for name in (self.query, self.title)]
        if self.method == "title_common_ratio":
            sides.reverse()
        (own, own_lengths), (other, other_lengths) = sides
        (mine, theirs), size = codes(own, other)
        if self.method == "is_equal":
            alike = own_lengths == other_lengths
            rows = rows_of(own_lengths)[alike[rows_of(own_lengths)]]
            differ = mine[alike[rows_of(own_lengths)]] != theirs[alike[rows_of(other_lengths)]]
            wrong = np.bincount(rows, differ, minlength=given.size)
            return Values(pa.array((alike & (wrong == 0)).astype(np.float64)))
        rows = rows_of(own_lengths)
        common_M = np.isin(mine + size * rows, theirs + size * rows_of(other_lengths))
        common = np.bincount(rows, common_M, minlength=given.size)
        if self.method == "common":
            return Values(pa.array(common))
        if self.method == "is_contain":
            return Values(pa.array((common == own_lengths).astype(np.float64)))
        return Values(pa.array(common / np.maximum(own_lengths, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A number computed of others by a formula: see `shoal.data.expressions`.

    `variables` are the columns; () takes the formula's names. `names` are theirs in the formula; ()
    is their own without "feature:".

    Raises:
        ConfigError: a formula that is not one.
        UnknownName: a name in it that is neither a variable nor a function.
    """

    kind: ClassVar[str] = "expression"
    inputs: ClassVar[tuple[str, ...]] = ("variables",)
    expression: str
    variables: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.variables:
            object.__setattr__(self, "variables", Formula(self.expression).names)
        if not self.names:
            names = tuple(name.removeprefix("feature:") for name in self.variables)
            object.__setattr__(self, "names", names)
        Formula(self.expression).check(self.names)

    @property
    def numeric(self) -> bool:
        return True

    def evaluate(self, given: Given) -> Values:
        import pyarrow as pa

        read = (given.floats(column) for column in self.variables)
        result = Formula(self.expression).evaluate(dict(zip(self.names, read, strict=True)))
        return Values(pa.array(np.broadcast_to(result, given.size), from_pandas=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenize:
    """The words of a text: what blanks separate, or what the regular expression `pattern` does.

    Raises:
        ConfigError: a pattern that is none.
    """

    kind: ClassVar[str] = "tokenize"
    inputs: ClassVar[tuple[str, ...]] = ("column",)
    column: str = ""
    pattern: str | None = None
    lower: bool = False

    def __post_init__(self) -> None:
        import pyarrow as pa

        try:
            self._parts(pa.array(["a"], pa.large_string()))
        except pa.ArrowInvalid as error:
            remedy = "Correct it, or leave it out to split at blanks."
            allowed = "a regular expression (RE2)"
            raise ConfigError("pattern of tokenize", self.pattern, allowed, remedy) from error

    @property
    def numeric(self) -> bool:
        return False

    def _parts(self, text: Any) -> Any:
        import pyarrow.compute as pc

        if self.pattern is None:
            return pc.utf8_split_whitespace(text)
        return pc.split_pattern_regex(text, self.pattern)

    def evaluate(self, given: Given) -> Values:
        import pyarrow.compute as pc

        column = given.columns[self.column]
        if not columns.is_text(column):
            raise given.rows.wrong_type(self.column, column, "text")
        text = pc.fill_null(as_text(column), "")
        parts = self._parts(pc.utf8_lower(text) if self.lower else text)
        flat, lengths = Values(parts.flatten(), lengths_of(parts)).listed()
        some = pc.not_equal(flat, "")
        kept = np.bincount(
            rows_of(lengths), columns.as_numpy(some).astype(np.int64), minlength=given.size
        )
        return Values(flat.filter(some), kept.astype(np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDot:
    """Dot product of two vectors "key:number"; a key alone has the number 1."""

    kind: ClassVar[str] = "kv_dot"
    inputs: ClassVar[tuple[str, ...]] = ("query", "document")
    query: str
    document: str
    delimiter: str = ":"

    @property
    def numeric(self) -> bool:
        return True

    def evaluate(self, given: Given) -> Values:
        import pyarrow as pa

        query = given.pairs(self.query, self.delimiter)
        document = given.pairs(self.document, self.delimiter)
        (have, wanted), size = codes(document[0], query[0])
        rows = rows_of(query[2])
        places, counts = matches(have + size * rows_of(document[2]), wanted + size * rows)
        left = self._numbers(query, self.query, given).repeat(counts)
        right = self._numbers(document, self.document, given)[places]
        return Values(pa.array(np.bincount(rows.repeat(counts), left * right, given.size)))

    def _numbers(self, pairs: tuple[Any, Any, IntArray], name: str, given: Given) -> FloatArray:
        numbers = floats(pairs[1], name, within(given.rows, pairs[2]))
        return np.where(columns.as_numpy(pairs[1].is_null()), 1.0, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoolMask:
    """Those values of a list whose place in another list says true (or 1)."""

    kind: ClassVar[str] = "bool_mask"
    inputs: ClassVar[tuple[str, ...]] = ("column", "mask")
    column: str
    mask: str

    @property
    def numeric(self) -> bool:
        return False

    def evaluate(self, given: Given) -> Values:
        import pyarrow as pa

        array, lengths = given.values(self.column).listed()
        mask, mask_lengths = given.values(self.mask).listed()
        if (lengths != mask_lengths).any():
            row = int(np.flatnonzero(lengths != mask_lengths)[0])
            got = f"{mask_lengths[row]} values for {lengths[row]} of {self.column!r}"
            remedy = "Give each value one."
            raise given.rows.error(f"mask column {self.mask!r}", row, got, "as many", remedy)
        keep = floats(mask, self.mask, within(given.rows, lengths)) == 1
        kept = np.bincount(rows_of(lengths), keep, minlength=given.size).astype(np.int64)
        return Values(array.filter(pa.array(keep)), kept)


KINDS: dict[str, type] = {
    cls.kind: cls
    for cls in (Id, Raw, Combo, MapLookup, Match, Overlap, Expression, Tokenize, KvDot, BoolMask)
}
