"""A plan: what lies where, what it costs; as JSON, as a placement, and against another one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from shoal.errors import ConfigError, known_name
from shoal.placement import Hosted, Placement, Sharding
from shoal.planner.cost import PHASES
from shoal.planner.options import Constraint, Tier
from shoal.table.hosting import check_placement
from shoal.table.spec import HostRows, RowDType, TableSpec

_FORMAT = "shoal-plan"
_MOST_RANKS = 1 << 16
_MOST_NAMED = 1 << 22  # ranks of all different lists in a file: more is no plan of any job


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """Where one table is.

    Args:
        name, dim, rows: of the table; rows at the horizon.
        sharding, tier, cache, dtype: the option taken.
        hosted: its column slices and their ranks.
        phases: seconds of `PHASES` on each rank that holds a piece.
        device_bytes, host_bytes: on each of these ranks.
    """

    name: str
    dim: int
    rows: float
    sharding: Sharding
    tier: Tier
    cache: float
    dtype: RowDType
    hosted: tuple[Hosted, ...]
    phases: tuple[float, ...]
    device_bytes: float
    host_bytes: float

    def label(self) -> str:
        """The option for people."""
        parts = [self.sharding + (f" x{len(self.hosted)}" if len(self.hosted) > 1 else "")]
        if self.tier != "device":
            parts.append(f"host, {self.cache:.0%} cached" if self.tier == "cache" else "host")
        return ", ".join([*parts, self.dtype])

    def ranks(self) -> list[int]:
        """Ranks of all slices, in order; a rank of two slices twice."""
        return sorted(rank for one in self.hosted for rank in one.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where all tables are, and what a step costs.

    Args:
        world_size, local_size: ranks of one group, and of a node.
        replicas: groups that hold all tables each; above 1 in simulations only.
        tables: by name.
        step_s: of the slowest rank; lower_bound_s: what no plan can beat.
        rank_seconds, rank_device_bytes, rank_host_bytes: of each rank.
        base_phases: seconds of every rank that no option changes.
        limits: bytes of a device and of a rank's host that plans may use.
        topology: the machines, on one line.
        notes: how it was found.
    """

    world_size: int
    local_size: int
    tables: tuple[TablePlan, ...]
    step_s: float
    lower_bound_s: float
    rank_seconds: tuple[float, ...]
    rank_device_bytes: tuple[float, ...]
    rank_host_bytes: tuple[float, ...]
    base_phases: Mapping[str, float]
    limits: tuple[float, float]
    topology: str
    replicas: int = 1
    notes: tuple[str, ...] = ()

    def placement(self) -> Placement:
        """What `DistributedModelParallel` takes.

        Raises:
            ConfigError: the plan has replicas of groups, which only simulations do.
        """
        if self.replicas > 1:
            raise ConfigError(
                "replicas of a plan that is used",
                got=self.replicas,
                allowed="1: several groups are for simulations",
                remedy="Plan again with one group.",
            )
        hosted = tuple(one for table in self.tables for one in table.hosted)
        return Placement(self.world_size, hosted)

    def check(self, specs: Sequence[TableSpec], world_size: int) -> None:
        """Check that it is a plan of these tables for this number of ranks.

        Raises:
            UnknownName: it has a table that is not there.
            ConfigError: another number of ranks, other columns or rows of another dtype, or a table
                without a plan.
        """
        if self.world_size * self.replicas != world_size:
            raise ConfigError(
                "world size of a plan",
                got=self.world_size * self.replicas,
                allowed=f"{world_size}, the ranks of this job",
                remedy="Plan again for this job.",
            )
        named = {spec.name: spec for spec in specs}
        for table in self.tables:
            known_name("table of a plan", table.name, named)
            spec = named[table.name]
            if (spec.dim, spec.dtype) != (table.dim, table.dtype):
                raise ConfigError(
                    f"table {spec.name!r} of a plan",
                    got=f"{table.dim} columns of {table.dtype}",
                    allowed=f"{spec.dim} columns of {spec.dtype}, as the model has",
                    remedy="Plan again for this model, or give the table the planned dtype.",
                )
        missing = sorted(named.keys() - {table.name for table in self.tables})
        if missing:
            raise ConfigError(
                "tables of a plan",
                got=f"none for {', '.join(missing)}",
                allowed="every table of the model",
                remedy="Plan again for this model.",
            )
        check_placement(specs, self.placement())

    def check_tiers(self, specs: Sequence[TableSpec], host_rows: HostRows | None) -> None:
        """Check that rows of a shard's tables live where the plan has them.

        Args:
            specs: tables of one shard.
            host_rows: of that shard.

        Raises:
            ConfigError: the plan has a table on another tier.
        """
        real, names = tier_of(host_rows), {spec.name for spec in specs}
        own = [table for table in self.tables if table.name in names]
        other = [f"{table.name}: {table.tier}" for table in own if table.tier != real]
        if not other:
            return
        more = f" and {len(other) - 5} more" if len(other) > 5 else ""
        wanted = {table.tier for table in own}
        remedy = "Plan again with tiers as they are: tables of one collection share a tier."
        if wanted == {"device"}:
            remedy = "Leave host_rows out, or plan again with it."
        elif wanted == {"host"}:
            remedy = "Set host_rows.cache_bytes=0 (HostRows() of a collection), or plan again."
        elif wanted == {"cache"}:
            cached = max(self.cache_bytes(rank, names) for rank in range(self.world_size))
            remedy = f"Set host_rows.cache_bytes={cached}, or plan again without a tier."
        raise ConfigError(
            "where a plan keeps rows",
            got="; ".join(other[:5]) + more,
            allowed=f"{real}, where rows of these tables live in this run",
            remedy=remedy,
        )

    def cache_bytes(self, rank: int, tables: Iterable[str]) -> int:
        """Device memory that the plan gives a rank to cache rows of some tables in."""
        names, total = set(tables), 0.0
        for table in self.tables:
            held = [one for one in table.hosted if rank in one.ranks]
            if table.name in names and table.tier == "cache" and held:
                total += len(held) * table.cache * table.host_bytes
        return math.ceil(total)

    def constraints(self) -> dict[str, Constraint]:
        """What keeps each table as it is here: type, slices, tier and ranks."""
        found = {}
        for one in self.tables:
            ranks = tuple(dict.fromkeys(one.ranks()))
            found[one.name] = Constraint(
                sharding=(one.sharding,),
                tiers=(one.tier,),
                cache_ratios=(one.cache,) if one.tier == "cache" else None,
                slices=(len(one.hosted),),
                ranks=ranks,
            )
        return found

    def rank_phases(self, rank: int) -> dict[str, float]:
        """Seconds of a rank by phase, all tables together."""
        found = dict.fromkeys(PHASES, 0.0)
        for table in self.tables:
            pieces = sum(rank in one.ranks for one in table.hosted)
            for phase, seconds in zip(PHASES, table.phases, strict=True):
                found[phase] += pieces * seconds
        return found

    def diff(self, other: Plan) -> list[str]:
        """What another plan has otherwise, a line a table."""
        mine = {table.name: table for table in self.tables}
        theirs = {table.name: table for table in other.tables}
        lines = []
        if self.world_size != other.world_size:
            lines.append(f"ranks: {self.world_size} -> {other.world_size}")
        for name in sorted(mine.keys() | theirs.keys()):
            a, b = mine.get(name), theirs.get(name)
            if a is None or b is None:
                lines.append(f"{name}: {'added' if a is None else 'removed'}")
            elif (a.label(), a.hosted) != (b.label(), b.hosted):
                lines.append(f"{name}: {_place(a)} -> {_place(b)}")
        if abs(self.step_s - other.step_s) > 1e-9 * self.step_s:
            lines.append(f"step: {self.step_s:.4g} s -> {other.step_s:.4g} s")
        return lines

    def to_json(self) -> str:
        """The plan as JSON text, a line a table."""
        content: dict[str, Any] = {"format": _FORMAT}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "tables":
                value = [_plain_table(table) for table in value]
            elif one.name.startswith("rank_"):
                value = [float(f"{x:.6g}") for x in value]
            content[one.name] = value
        tables = content.pop("tables")
        head = json.dumps(content)[:-1]
        lines = ",\n  ".join(json.dumps(table) for table in tables)
        return head + ',\n "tables": [\n  ' + lines + "\n ]}\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text of `to_json`.

        Raises:
            ConfigError: other text, or not a plan.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise KeyError("format")
            content.setdefault("replicas", 1)
            for name in ("world_size", "local_size", "replicas"):
                count = content[name]
                if type(count) is not int or not 0 < count <= _MOST_RANKS:
                    raise ValueError(f"{name} {str(count)[:40]}, not 1..{_MOST_RANKS}")
            lists = _RankLists(content["world_size"])
            tables = tuple(_table_of(one, lists) for one in content.pop("tables"))
            settings: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in content.items()
            }
            found = cls(tables=tables, **settings)
            _check_types(found)
            for table in tables:
                _check_types(table)
            if any(len(table.phases) != len(PHASES) for table in tables):
                raise ValueError(f"phases of a table: {len(PHASES)}")
            if found.replicas == 1:
                found.placement()  # ranks and columns are those of a placement
        except (
            ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError
        ) as error:  # fmt: skip
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                "plan",
                got=f"{text[:80]!r} ({type(error).__name__}: {error})",
                allowed="what Plan.to_json writes",
                remedy="Make the plan again with shoal plan.",
            ) from error
        return found


def read_plan(path: str | Path) -> Plan:
    """The plan in a file, or in the file plan.json of a folder.

    Raises:
        ConfigError: there is none.
    """
    file = Path(path)
    try:
        return Plan.from_json((file / "plan.json" if file.is_dir() else file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "file of a plan",
            got=f"{path} ({error})",
            allowed="a file that shoal plan wrote, or a folder with its plan.json",
            remedy="Make one with shoal plan CONFIG --devices N.",
        ) from None


def tier_of(host_rows: HostRows | None) -> Tier:
    """Where a shard made with this value keeps its rows."""
    if host_rows is None:
        return "device"
    return "cache" if host_rows.cache_bytes else "host"


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as text: "0-7,9"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


class _RankLists:
    """Reads lists such as "0-7,9" of a file, each once, and refuses ranks that no job has."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[str, tuple[int, ...]] = {}
        self._named = 0

    def read(self, text: str) -> tuple[int, ...]:
        """The ranks, within memory that the world size bounds."""
        if text not in self._known:
            spans = [self._span(one) for one in text.split(",")]
            count = sum(map(len, spans))
            self._named += count
            if count > self._world_size or self._named > _MOST_NAMED:
                raise ValueError(f"{count} ranks of a job of {self._world_size}")
            self._known[text] = tuple(rank for span in spans for rank in span)
        return self._known[text]

    def _span(self, text: str) -> range:
        first, _, last = text.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not 0 <= span.start < span.stop <= self._world_size:
            raise ValueError(f"ranks {text[:40]}, not within 0..{self._world_size - 1}")
        return span


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _all(value: object, kind: type, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, kind) and all(map(check, value))  # type: ignore[call-overload]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "int": lambda value: type(value) is int,
    "float": _is_number,
    "tuple[str, ...]": lambda value: _all(value, tuple, _is_text),
    "tuple[float, ...]": lambda value: _all(value, tuple, _is_number),
    "tuple[float, float]": lambda value: _all(value, tuple, _is_number) and len(value) == 2,
    "Mapping[str, float]": lambda value: (
        isinstance(value, dict) and _all(tuple(value.values()), tuple, _is_number)
    ),
}


def _check_types(made: Plan | TablePlan) -> None:
    """Refuse values of a file that are not what their fields say."""
    for one in fields(made):
        value = getattr(made, one.name)
        if not _TYPES.get(str(one.type), lambda _: True)(value):
            raise ValueError(f"{one.name} {str(value)[:40]}, not {one.type}")


def _place(table: TablePlan) -> str:
    return f"{table.label()} on {ranges(sorted(set(table.ranks())))}"


def _plain_table(table: TablePlan) -> dict[str, Any]:
    plain = asdict(table)
    plain["hosted"] = [
        {"start": one.start, "stop": one.stop, "ranks": ranges(one.ranks)} for one in table.hosted
    ]
    for name in ("phases", "device_bytes", "host_bytes"):
        value = plain[name]
        many = isinstance(value, tuple)
        plain[name] = [float(f"{x:.6g}") for x in value] if many else float(f"{value:.6g}")
    return plain


def _table_of(plain: dict[str, Any], lists: _RankLists) -> TablePlan:
    copied = plain["sharding"] == "data_parallel"
    hosted = tuple(
        Hosted(plain["name"], one["start"], one["stop"], lists.read(one["ranks"]), copied)
        for one in plain["hosted"]
    )
    for name, known in (("sharding", Sharding), ("tier", Tier), ("dtype", RowDType)):
        known_name(f"{name} of a plan", plain[name], get_args(known))
    return TablePlan(**{**plain, "hosted": hosted, "phases": tuple(plain["phases"])})
