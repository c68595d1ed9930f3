"""What may be done with a table: sharding types, where its rows live, their dtype, and limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from shoal.errors import ConfigError, known_name, unknown_name
from shoal.placement import Hosted, Sharding, column_wise
from shoal.planner.statistics import TableStatistics, zipf
from shoal.planner.topology import Topology
from shoal.table.hosting import hosted_spec
from shoal.table.spec import RowDType, ServedDType, TableSpec

Tier = Literal["device", "cache", "host"]
"""Where rows live: on the device, on the host behind a cache on the device, on the host."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
CACHE_RATIOS = (0.05, 0.2, 0.5)
_SLICES = (2, 4, 8, 16)
_LEAST_COLUMNS = 8  # of a column slice that is proposed unasked
GLOBAL = "*"
FEATURE = "feature:"


@dataclass(frozen=True, kw_only=True)
class TableInput:
    """A table that is to be planned.

    Args:
        name: its name.
        dim, state_width: columns of weights and of optimizer state.
        rows, rows_later: rows now, and at the horizon that is planned for.
        statistics: of its ids.
        dtype: of its weights, unless a constraint allows others.
        slices: into how many column slices its rules let it be split.
        tiers: where its rows may live unless a constraint says so.
        cache: of tier "cache", part of the rows that is cached.

    Raises:
        UnknownName: no such dtype or tier.
        ConfigError: a number out of range.
    """

    name: str
    dim: int
    rows: float
    statistics: TableStatistics
    state_width: float = 0
    rows_later: float = 0
    dtype: ServedDType = "float32"
    slices: tuple[int, ...] = _SLICES
    tiers: tuple[Tier, ...] = ("device",)
    cache: float | None = None

    def __post_init__(self) -> None:
        for what, value, known in (
            ("dtype of rows", self.dtype, get_args(RowDType)),
            *(("tier", tier, get_args(Tier)) for tier in self.tiers),
        ):
            known_name(f"{what} of table {self.name!r} of a plan", value, known)
        finite = math.isfinite(self.rows) and math.isfinite(self.rows_later)
        if not (finite and self.dim >= 1 and self.rows >= 0 and self.state_width >= 0):
            raise ConfigError(
                f"table {self.name!r} of a plan",
                got=f"{self.rows} rows of {self.dim} columns, {self.state_width} of state",
                allowed="one column or more, 0 rows or more",
                remedy="Give what the table is like.",
            )

    @property
    def row_count(self) -> float:
        """Rows that there must be room for."""
        return max(self.rows, self.rows_later)


def table_input(
    spec: TableSpec,
    statistics: TableStatistics | None = None,
    *,
    rows: float | None = None,
    horizon_samples: float = 0.0,
    tiers: tuple[Tier, ...] = ("device",),
    cache: float | None = None,
) -> TableInput:
    """What is to be planned for a table.

    Args:
        spec: of the table.
        statistics: of its ids; a Zipf law over its expected rows when left out.
        rows: that it has; `expected_rows`, `capacity_rows` or the ids of the statistics otherwise.
        horizon_samples: examples it is to grow for.
        tiers, cache: as of `TableInput`.
    """
    if rows is None:
        known = 0.0 if statistics is None else statistics.ids
        rows = float(spec.expected_rows or known or spec.capacity_rows or 1_000_000)
    if statistics is None:
        statistics = zipf(max(rows, 1.0))
    most = float("inf") if spec.capacity_rows is None else float(spec.capacity_rows)
    later = rows + horizon_samples * statistics.new_per_sample
    return TableInput(
        name=spec.name,
        dim=spec.dim,
        state_width=spec.state_width,
        rows=min(rows, most),
        rows_later=min(later, most),
        statistics=statistics,
        dtype=spec.dtype,
        slices=tuple(count for count in _SLICES if _may_split(spec, count)),
        tiers=tiers,
        cache=cache,
    )


def _may_split(spec: TableSpec, count: int) -> bool:
    if spec.dim < count:
        return False
    try:
        for one in column_wise(spec.name, spec.dim, range(count)):
            hosted_spec(spec, one)
    except ConfigError:  # it goes through what a rule couples
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Limits of one table, of those that a pattern names, or of all; None: as it is otherwise.

    Args:
        sharding: sharding types that are allowed.
        tiers: where rows may live: "device", "cache", "host".
        dtypes: of rows.
        cache_ratios: parts of the rows, above 0 and below 1, that tier "cache" may cache.
        slices: numbers of column slices.
        min_ranks, max_ranks: how many ranks hold a part of the table.
        ranks: the ranks that may.

    Raises:
        UnknownName: no such sharding type, tier or dtype.
        ConfigError: a value without sense.
    """

    sharding: tuple[str, ...] | None = None
    tiers: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    cache_ratios: tuple[float, ...] | None = None
    slices: tuple[int, ...] | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for what, values, known in (
            ("sharding type", self.sharding, get_args(Sharding)),
            ("tier", self.tiers, get_args(Tier)),
            ("dtype of rows", self.dtypes, get_args(RowDType)),
        ):
            for value in values or ():
                known_name(f"{what} of a constraint", value, known)
        limits = (x for x in (self.min_ranks, self.max_ranks) if x is not None)
        whole = [*(self.slices or ()), *limits]
        fine = (
            all(isinstance(x, int) and x >= 1 for x in whole)
            and all(isinstance(x, int) and x >= 0 for x in self.ranks or ())
            and all(isinstance(x, float) and 0 < x < 1 for x in self.cache_ratios or ())
            and () not in (getattr(self, one.name) for one in fields(self))
        )
        if not fine or (self.min_ranks or 0) > (self.max_ranks or self.min_ranks or 0):
            raise ConfigError(
                "constraint of a plan",
                got=self.summary(),
                allowed="lists that are not empty, ranks from 0, counts from 1, min_ranks at most "
                "max_ranks, cache ratios between 0 and 1",
                remedy="Correct it, or leave it out.",
            )

    def under(self, other: Constraint) -> Constraint:
        """This constraint, with what it leaves open taken from another."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(other, **{name: value for name, value in own.items() if value is not None})

    def clashes(self, other: Constraint) -> list[str]:
        """Settings that both have, and not alike."""
        pairs = (
            (one.name, getattr(self, one.name), getattr(other, one.name)) for one in fields(self)
        )
        return [name for name, a, b in pairs if a is not None and b is not None and a != b]

    def summary(self) -> str:
        """What it says, on one line."""
        said = ((one.name, getattr(self, one.name)) for one in fields(self))
        return ", ".join(f"{name}={value}" for name, value in said if value is not None) or "none"


_ALIASES = {"sharding_types": "sharding", "compute_kernels": "tiers"}  # names of TorchEasyRec
_VALUES = {
    "grid_shard": "grid",
    "table_column_wise": "column_wise",
    "dense": "device",
    "fused": "device",
    "fused_uvm_caching": "cache",
    "fused_uvm": "host",
}


def constraint_of(value: Any, what: str = "constraint of a plan") -> Constraint:
    """A constraint of settings named as its fields, or as TorchEasyRec names them.

    Raises:
        UnknownName: another setting, or a value that is none.
        ConfigError: a value without sense.
    """
    if isinstance(value, Constraint):
        return value
    if not isinstance(value, Mapping):
        # A configuration object of the seed system: its fields are attributes.
        if not any(hasattr(value, name) for name in _ALIASES):
            raise ConfigError(
                what,
                got=repr(value)[:200],
                allowed="settings by name, such as {'sharding': ['row_wise']}",
                remedy="Give a mapping, or an object with sharding_types or compute_kernels.",
            )
        value = {name: list(found) for name in _ALIASES if (found := getattr(value, name, None))}
    known = [one.name for one in fields(Constraint)]
    settings: dict[str, Any] = {}
    for key, setting in value.items():
        name = _ALIASES.get(key, key)
        if name not in known:
            raise unknown_name(f"setting of {what}", str(key), known)
        if setting is None:
            continue
        if name in ("min_ranks", "max_ranks"):
            settings[name] = setting
            continue
        listed = setting if isinstance(setting, list | tuple) else (setting,)
        settings[name] = tuple(_VALUES.get(x, x) if key in _ALIASES else x for x in listed)
    return Constraint(**settings)


def constraints_by_table(
    given: Mapping[str, Any], tables: Sequence[str], features: Mapping[str, str] | None = None
) -> dict[str, Constraint]:
    """The constraint of each table: of all ("*"), then of patterns, then its own.

    Args:
        given: name, pattern, "*" or "feature:NAME" -> `Constraint` or its settings.
        tables: names of the tables.
        features: feature -> its table.

    Raises:
        UnknownName: a table, feature or pattern that fits nothing.
        ConfigError: features of one table that contradict each other.
    """
    found = {table: Constraint() for table in tables}
    features = features or {}
    by_table: dict[str, Constraint] = {}
    ordered = sorted(given, key=lambda key: (key != GLOBAL, not any(c in key for c in "*?[")))
    for key in ordered:
        one = constraint_of(given[key], f"constraint of {key!r}")
        if key.startswith(FEATURE):
            name = key.removeprefix(FEATURE)
            known_name("feature of a constraint", name, features)
            table = features[name]
            by_table[table] = _both(table, by_table.get(table, Constraint()), one)
            continue
        hits = [table for table in tables if key == table or fnmatchcase(table, key)]
        if not hits and key != GLOBAL:
            raise unknown_name("table of a constraint", key, tables)
        for table in hits:
            found[table] = one.under(found[table])
    for table, one in by_table.items():
        found[table] = _both(table, found[table], one)
    return found


def _both(table: str, first: Constraint, second: Constraint) -> Constraint:
    """What both allow."""
    settings: dict[str, Any] = {}
    for one in fields(Constraint):
        a, b = getattr(first, one.name), getattr(second, one.name)
        if a is None or b is None:
            settings[one.name] = b if a is None else a
        elif isinstance(a, tuple):
            settings[one.name] = tuple(x for x in a if x in b)
        else:
            settings[one.name] = max(a, b) if one.name == "min_ranks" else min(a, b)
        if settings[one.name] == ():
            raise ConfigError(
                f"constraints of features of table {table!r}",
                got=f"{one.name} of {a} and of {b}",
                allowed="features of one table that have a choice in common",
                remedy="Give the features the same constraint, or tables of their own.",
            )
    return Constraint(**settings)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place a table.

    Args:
        sharding: its type.
        slices: column slices.
        tier, cache: where rows live, and the part of them that is cached on the device.
        dtype: of the rows.
        ranks: those it must lie on; empty: any.
    """

    sharding: Sharding
    slices: int
    tier: Tier
    cache: float
    dtype: RowDType
    ranks: tuple[int, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether its rows lie on just `ranks`."""
        return self.sharding == "row_wise" and self.ranks != ()

    def row_shares(self, topology: Topology) -> int:
        """Ranks over which the rows of a column slice are split."""
        if self.pinned:
            return len(self.ranks)
        whole = topology.world_size
        return {"row_wise": whole, "table_row_wise": topology.local_size,
                "grid": topology.local_size}.get(self.sharding, 1)  # fmt: skip

    def rank_count(self, topology: Topology) -> int:
        """Ranks that hold a part of the table."""
        if self.sharding == "data_parallel":
            return topology.world_size
        return self.slices * self.row_shares(topology)

    def label(self) -> str:
        """For people: column_wise x4, bfloat16."""
        parts = [self.sharding + (f" x{self.slices}" if self.slices > 1 else "")]
        if self.tier != "device":
            parts.append(f"host, {self.cache:.0%} cached" if self.tier == "cache" else "host")
        return ", ".join([*parts, self.dtype])

    def hosted(self, table: TableInput, groups: Sequence[tuple[int, ...]]) -> tuple[Hosted, ...]:
        """Its slices, the k-th on groups[k]."""
        if self.sharding == "data_parallel":
            return (Hosted(table.name, 0, table.dim, groups[0], replicated=True),)
        whole = column_wise(table.name, table.dim, range(len(groups)))
        return tuple(replace(one, ranks=ranks) for one, ranks in zip(whole, groups, strict=True))


def options_of(table: TableInput, constraint: Constraint, topology: Topology) -> tuple[Option, ...]:
    """Every option that a table has under a constraint; none if they exclude each other.

    Raises:
        ConfigError: ranks that the job does not have.
    """
    world = topology.world_size
    if constraint.ranks is not None and max(constraint.ranks) >= world:
        raise ConfigError(
            f"ranks of a constraint of table {table.name!r}",
            got=constraint.ranks,
            allowed=f"0..{world - 1}",
            remedy="Name ranks of the job.",
        )
    ranks = tuple(sorted(set(constraint.ranks or ())))
    dtypes: Iterable[Any] = constraint.dtypes or (table.dtype,)
    found = []
    for sharding, slices in _shardings(table, constraint, topology):
        for tier, cache in _tiers(table, constraint, topology):
            for dtype in dtypes:
                one = Option(sharding, slices, tier, cache, dtype, ranks)
                count = one.rank_count(topology)
                # On one rank, rows that are split are a whole table.
                if (
                    one.pinned
                    and count == 1
                    and (constraint.sharding or ("table_wise",)) != ("row_wise",)
                ):
                    continue
                fits = (constraint.min_ranks or 1) <= count <= (constraint.max_ranks or world)
                if fits and _reaches(one, topology):
                    found.append(one)
    return tuple(found)


def _shardings(
    table: TableInput, constraint: Constraint, topology: Topology
) -> Iterator[tuple[Sharding, int]]:
    asked = constraint.sharding
    wanted = constraint.slices
    least = _LEAST_COLUMNS if asked is None else 1
    columns = [
        count
        for count in table.slices
        if (table.dim // count >= least if wanted is None else count in wanted)
    ]
    whole = wanted is None or 1 in wanted
    for sharding in get_args(Sharding):
        if asked is not None and sharding not in asked:
            continue
        if sharding == "column_wise":
            most = topology.world_size
            yield from ((sharding, count) for count in columns if count <= most)
            if asked is not None and most == 1:  # its one slice
                yield sharding, 1
        elif sharding == "grid":
            if topology.nodes > 1 or asked is not None:
                yield from ((sharding, count) for count in columns if count <= topology.nodes)
        elif whole and (sharding != "table_row_wise" or topology.nodes > 1 or asked is not None):
            yield sharding, 1


def _tiers(
    table: TableInput, constraint: Constraint, topology: Topology
) -> Iterator[tuple[Tier, float]]:
    ratios = constraint.cache_ratios or (CACHE_RATIOS if table.cache is None else (table.cache,))
    for tier in constraint.tiers or table.tiers:
        if tier == "device":
            yield "device", 1.0
        elif topology.device == "cuda":  # of a CPU, the device is the host
            if tier == "host":
                yield "host", 0.0
            else:
                yield from (("cache", ratio) for ratio in ratios)


def _reaches(option: Option, topology: Topology) -> bool:
    """Whether pinned ranks have room for the option's slices."""
    ranks = set(option.ranks)
    if not ranks:
        return True
    if option.sharding == "data_parallel":
        return len(ranks) == topology.world_size
    if option.sharding in ("table_row_wise", "grid"):
        size = topology.local_size
        nodes = (set(range(k * size, (k + 1) * size)) for k in range(topology.nodes))
        return sum(node <= ranks for node in nodes) >= option.slices
    return option.slices <= len(ranks)
