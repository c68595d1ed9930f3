"""The rank of each id: hashes, buckets and splits, and placements as plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from shoal.address import check_int64
from shoal.errors import ConfigError, of_kind
from shoal.ids import mix64, salt, to_signed
from shoal.rules.rule import Allowed, Checked, named, whole

__all__ = [
    "BUCKETS",
    "BUCKET_BITS",
    "Hosted",
    "Placement",
    "Sharding",
    "bucket_hashes",
    "buckets_of",
    "column_wise",
    "data_parallel",
    "floormod",
    "grid",
    "hash_ids",
    "mix64",
    "owners",
    "rank_buckets",
    "ranks_of",
    "row_wise",
    "salt",
    "sharded",
    "sort_key",
    "table_row_wise",
    "table_wise",
    "unsigned_mod",
]

BUCKET_BITS = 16
"""Top bits of h that name a bucket."""

BUCKETS = 1 << BUCKET_BITS
"""Buckets of a table, and the maximum number of ranks of a uniform split."""

_LARGEST_DIVISOR = (1 << 31) - 1


def hash_ids(table: str, ids_N: Tensor) -> Tensor:
    """h of each id of a table: int64 of any shape in, uint64 bits in int64 of that shape out.

    Raises:
        DTypeError: ids that are not dense int64 tensors.
    """
    check_int64("ids", ids_N)
    return mix64(ids_N ^ to_signed(salt(table)))


def sort_key(hashes_N: Tensor) -> Tensor:
    """int64 whose signed order is the unsigned order of the hashes: the top bit flipped.

    Raises:
        DTypeError: hashes that are not dense int64 tensors.
    """
    check_int64("hashes", hashes_N)
    return hashes_N ^ to_signed(1 << 63)


def buckets_of(hashes_N: Tensor) -> Tensor:
    """Bucket 0..BUCKETS-1 of each hash, int64.

    Raises:
        DTypeError: hashes that are not dense int64 tensors.
    """
    check_int64("hashes", hashes_N)
    return (hashes_N >> (64 - BUCKET_BITS)) & (BUCKETS - 1)


def bucket_hashes(start: int, stop: int) -> tuple[int, int]:
    """First and last hash (unsigned, both inclusive) of the buckets [start, stop).

    Raises:
        ConfigError: the range is empty or not within 0..BUCKETS.
    """
    fits = whole(1, BUCKETS).fits(stop) and whole(0, stop - 1).fits(start)
    allowed = f"0 <= start < stop <= {BUCKETS}"
    _require(fits, "bucket range", f"[{start}, {stop})", allowed, "Name at least one bucket.")
    shift = 64 - BUCKET_BITS
    return start << shift, (stop << shift) - 1


def rank_buckets(rank: int, ranks: int) -> tuple[int, int]:
    """Buckets [start, stop) that a rank owns when `ranks` W split all buckets evenly.

    start = ceil(rank * BUCKETS / W), stop = ceil((rank + 1) * BUCKETS / W): sizes differ by at
    most one.

    Raises:
        ConfigError: W is not in 1..BUCKETS or rank not in 0..W-1.
    """
    _check_ranks(ranks)
    fits, allowed = whole(0, ranks - 1).fits(rank), f"0..{ranks - 1}"
    _require(fits, "rank of a uniform split", rank, allowed, "Ranks count from 0.")
    return -(-rank * BUCKETS // ranks), -(-(rank + 1) * BUCKETS // ranks)


def ranks_of(hashes_N: Tensor, ranks: int) -> Tensor:
    """Owner 0..W-1 of each hash under a uniform split: floor(bucket * W / BUCKETS), int64.

    Raises:
        ConfigError: W is not in 1..BUCKETS.
        DTypeError: hashes that are not dense int64 tensors.
    """
    _check_ranks(ranks)
    return (buckets_of(hashes_N) * ranks) >> BUCKET_BITS


def floormod(ids_N: Tensor, divisor: int) -> Tensor:
    """Ids modulo a divisor, floored: Python's %, never negative. int64 in, int64 out.

    Raises:
        ConfigError: the divisor is not in 1..2^31-1.
        DTypeError: ids that are not dense int64 tensors.
    """
    _check_divisor(divisor)
    check_int64("ids", ids_N)
    return torch.remainder(ids_N, divisor)


def unsigned_mod(ids_N: Tensor, divisor: int) -> Tensor:
    """Ids read as uint64, modulo a divisor. int64 in, int64 out.

    Raises:
        ConfigError: the divisor is not in 1..2^31-1.
        DTypeError: ids that are not dense int64 tensors.
    """
    _check_divisor(divisor)
    check_int64("ids", ids_N)
    high_N, low_N = (ids_N >> 32) & 0xFFFFFFFF, ids_N & 0xFFFFFFFF
    return ((high_N % divisor) * ((1 << 32) % divisor) + low_N) % divisor


def _check_ranks(ranks: int) -> None:
    fits, remedy = whole(1, BUCKETS).fits(ranks), "Split a table over fewer ranks."
    _require(fits, "ranks of a uniform split", ranks, f"1..{BUCKETS}", remedy)


def _check_divisor(divisor: int) -> None:
    fits, allowed = whole(1, _LARGEST_DIVISOR).fits(divisor), f"1..{_LARGEST_DIVISOR}"
    _require(fits, "divisor of a routing rule", divisor, allowed, "Pass the number of shards.")


_FORMAT = "shoal-placement"
_NOT_NEGATIVE = whole(0)
_RANKS = Allowed(
    f"a tuple of 1..{BUCKETS} distinct ranks, 0 or more each",
    lambda ranks: (
        isinstance(ranks, tuple)
        and 0 < len(ranks) <= BUCKETS
        and all(map(_NOT_NEGATIVE.fits, ranks))
        and len(set(ranks)) == len(ranks)
    ),
    "Name each rank that holds rows once.",
)


@dataclass(frozen=True, slots=True)
class Hosted(Checked):
    """Columns [start, stop) of a table's rows, on the ranks that hold them.

    Args:
        table: its name.
        start, stop: columns of the whole row.
        ranks: ranks[i] holds share i of len(ranks) of the buckets; each rank once.
        replicated: every rank of `ranks` holds all rows instead.

    Raises:
        ConfigError: no such columns, no ranks, or a rank named twice.
    """

    table: Annotated[str, named("Name the table that is placed.")]
    start: Annotated[int, _NOT_NEGATIVE]
    stop: Annotated[int, _NOT_NEGATIVE]
    ranks: Annotated[tuple[int, ...], _RANKS]
    replicated: Annotated[bool, Allowed("a bool", lambda value: isinstance(value, bool))] = False

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        object.__setattr__(self, "ranks", tuple(map(int, self.ranks)))  # numpy's are no JSON
        columns, remedy = f"[{self.start}, {self.stop})", "Give a slice one column or more."
        what = f"columns of {self.described()}"
        _require(self.start < self.stop, what, columns, "start < stop", remedy)

    def described(self) -> str:
        return f"table {self.table!r} in a placement" if self.table else "a placement"

    @property
    def shares(self) -> int:
        """Number of parts of the rows: 1 if every rank holds all rows."""
        return 1 if self.replicated else len(self.ranks)

    def holders(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranks that may have rows with hashes [start, stop), and how many of those hashes.

        In the order of hashes; all of them for each rank of a replicated slice.
        """
        if self.replicated:
            yield from ((rank, stop - start) for rank in self.ranks)
            return
        count, shift = len(self.ranks), 64 - BUCKET_BITS
        first = (start >> shift) * count >> BUCKET_BITS
        last = (stop - 1 >> shift) * count >> BUCKET_BITS
        for share in range(first, last + 1):
            low, high = (bucket << shift for bucket in rank_buckets(share, count))
            yield self.ranks[share], min(high, stop) - max(low, start)

    def answers(self, rank: int) -> bool:
        """Whether a rank that holds it answers for the table's rows, so that each counts once."""
        return self.start == 0 and (not self.replicated or rank == self.ranks[0])


@dataclass(frozen=True, slots=True)
class Placement(Checked):
    """The ranks of all tables of a job.

    Args:
        world_size: ranks W of the job.
        hosted: all slices of all tables, sorted by table name and then column,
            so that equal placements are equal values on every rank.

    Raises:
        ConfigError: ranks outside the world; slices of a table that overlap or leave a gap; a
            replicated slice that is not on every rank.
    """

    world_size: Annotated[int, whole(1, BUCKETS, remedy="Pass the number of ranks of the job.")]
    hosted: tuple[Hosted, ...]

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        ordered = tuple(sorted(self.hosted, key=lambda one: (one.table, one.start)))
        object.__setattr__(self, "hosted", ordered)
        for one in ordered:
            _require(
                max(one.ranks) < self.world_size,
                f"ranks of {one.described()}",
                one.ranks,
                f"0..{self.world_size - 1}",
                "Place tables on ranks of the job.",
            )
            _require(
                not one.replicated or sorted(one.ranks) == list(range(self.world_size)),
                f"ranks of the replicated table {one.table!r}",
                one.ranks,
                f"all of 0..{self.world_size - 1}",
                "Replicate a table on every rank, or split its rows.",
            )
        for table in self.tables():
            slices = self.of(table)
            _require(
                [one.start for one in slices] == [0, *(one.stop for one in slices[:-1])],
                f"column slices of table {table!r} in a placement",
                ", ".join(f"[{one.start}, {one.stop})" for one in slices),
                "slices that follow each other from column 0",
                "Place each column exactly once.",
            )

    def described(self) -> str:
        return "a placement"

    def of(self, table: str) -> tuple[Hosted, ...]:
        """The slices of a table in column order; none if the table is not placed."""
        return tuple(one for one in self.hosted if one.table == table)

    def on(self, rank: int) -> tuple[Hosted, ...]:
        """The slices that a rank holds, in the placement's order."""
        return tuple(one for one in self.hosted if rank in one.ranks)

    def tables(self) -> tuple[str, ...]:
        """Names of the tables placed, sorted."""
        return tuple(dict.fromkeys(one.table for one in self.hosted))

    def to_json(self) -> str:
        """The placement as JSON text, the same text for equal placements."""
        value = {
            "format": _FORMAT,
            "world_size": self.world_size,
            "hosted": [asdict(one) for one in self.hosted],
        }
        return json.dumps(value, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Read the text of `to_json`.

        Raises:
            ConfigError: other text, or not a placement.
        """
        try:
            value = json.loads(text)
            found = value.pop("hosted")
            hosted = [
                {**one, "ranks": tuple(one["ranks"]), "replicated": one["replicated"]}
                for one in found
            ]
            if value.pop("format") != _FORMAT or type(found) is not list:
                raise TypeError("another format")
            return cls(hosted=tuple(Hosted(**one) for one in hosted), **value)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "JSON of a placement",
                got=f"{str(text)[:80]!r} ({type(error).__name__}: {error})",
                allowed="what Placement.to_json writes",
                remedy="Write the placement again with to_json.",
            ) from None


def owners(hosted: Hosted, hashes_N: Tensor) -> Tensor:
    """The rank that holds each hash's row, int64 [N].

    Raises:
        ConfigError: the slice is replicated: every rank holds each row.
    """
    _require(
        not of_kind("slice of a table", hosted, Hosted).replicated,
        f"owner of rows of table {hosted.table!r}",
        "a replicated table",
        "a table whose rows are split",
        "Read replicated rows from the rank's own shard.",
    )
    shares_N = ranks_of(hashes_N, len(hosted.ranks))
    return torch.tensor(hosted.ranks, dtype=torch.int64, device=shares_N.device)[shares_N]


def _require(fine: bool, what: str, got: object, allowed: str, remedy: str) -> None:
    if not fine:
        raise ConfigError(what, got=got, allowed=allowed, remedy=remedy)


Sharding = Literal[
    "row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel"
]

_WIDE_LOAD = 4  # columns: one load of a row, and one block of random words


def sharded(
    kind: str, table: str, dim: int, nodes: Sequence[tuple[int, ...]], load_W: Sequence[int]
) -> tuple[Hosted, ...]:
    """The slices of a table by its sharding type, on the ranks or nodes that hold least so far.

    Args:
        kind: a `Sharding`.
        table, dim: name and columns.
        nodes: ranks of each node.
        load_W: what each of W ranks holds so far, in any unit.

    Raises:
        ConfigError: no such type.
    """
    ranks = sorted(range(len(load_W)), key=load_W.__getitem__)
    near = sorted(nodes, key=lambda node: sum(load_W[rank] for rank in node) / len(node))
    slices = max(1, dim // _WIDE_LOAD)
    kinds: dict[str, tuple[Callable[..., tuple[Hosted, ...]], object]] = {
        "row_wise": (row_wise, len(load_W)),
        "table_wise": (table_wise, ranks[0]),
        "column_wise": (column_wise, ranks[:slices]),
        "table_row_wise": (table_row_wise, near[0]),
        "grid": (grid, near[:slices]),
        "data_parallel": (data_parallel, len(load_W)),
    }
    what, allowed = f"sharding type of table {table!r}", ", ".join(kinds)
    _require(kind in kinds, what, repr(kind), allowed, "Name one of them.")
    place, where = kinds[kind]
    return place(table, dim, where)


def _all_ranks(table: str, world_size: int) -> tuple[int, ...]:
    fits, remedy = whole(1, BUCKETS).fits(world_size), "Pass the number of ranks of the job."
    _require(fits, f"ranks of table {table!r}", repr(world_size), f"1..{BUCKETS}", remedy)
    return tuple(range(world_size))


def _listed(table: str, ranks: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(of_kind(f"ranks of table {table!r}", ranks, Iterable))


def row_wise(table: str, dim: int, world_size: int) -> tuple[Hosted, ...]:
    """All columns, rows split over all ranks."""
    return (Hosted(table, 0, dim, _all_ranks(table, world_size)),)


def table_wise(table: str, dim: int, rank: int) -> tuple[Hosted, ...]:
    """The whole table on one rank."""
    return (Hosted(table, 0, dim, (rank,)),)


def column_wise(table: str, dim: int, ranks: Sequence[int]) -> tuple[Hosted, ...]:
    """One column slice for each of `ranks`, as even as possible; a rank may occur several times.

    Slices start at multiples of 4 columns if dim is one and each slice gets at least 4.

    Raises:
        ConfigError: more ranks than columns.
    """
    return grid(table, dim, [(rank,) for rank in _listed(table, ranks)])


def table_row_wise(table: str, dim: int, ranks: Sequence[int]) -> tuple[Hosted, ...]:
    """All columns, rows split over some ranks: those of one node."""
    return (Hosted(table, 0, dim, _listed(table, ranks)),)


def grid(table: str, dim: int, column_nodes: Sequence[tuple[int, ...]]) -> tuple[Hosted, ...]:
    """One column slice for each tuple of ranks, over which the slice's rows are split.

    Slices as in `column_wise`.

    Raises:
        ConfigError: more slices than columns.
    """
    slices = [_listed(table, ranks) for ranks in _listed(table, column_nodes)]
    count = len(slices)
    _require(
        type(dim) is int and 0 < count <= dim,
        f"column slices of table {table!r}",
        f"{count} of {dim!r} columns",
        "at least one, each with one column or more",
        "Split the table into fewer slices.",
    )
    unit = _WIDE_LOAD if dim % _WIDE_LOAD == 0 and dim // _WIDE_LOAD >= count else 1
    cuts = [-(-k * (dim // unit) // count) * unit for k in range(count + 1)]
    return tuple(
        Hosted(table, start, stop, ranks)
        for (start, stop), ranks in zip(pairwise(cuts), slices, strict=True)
    )


def data_parallel(table: str, dim: int, world_size: int) -> tuple[Hosted, ...]:
    """The whole table on every rank."""
    return (Hosted(table, 0, dim, _all_ranks(table, world_size), replicated=True),)
