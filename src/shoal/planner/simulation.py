"""Plans for clusters that one does not have, over numbers of devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, known_name
from shoal.planner.cost import dense_work
from shoal.planner.make_plan import make_plan
from shoal.planner.options import TableInput
from shoal.planner.report import Point, point_of
from shoal.planner.statistics import zipf
from shoal.planner.topology import Topology, overridden, read_topology
from shoal.rules.rule import whole

_KEYS = (
    "rows", "dim", "state_width", "dtype", "copies", "ids_per_sample", "exponent", "tiers",
    "rows_later", "new_per_sample",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is planned for each number of devices.

    Args:
        tables: of the model.
        dense_weights: of its dense part.
        batch_size: examples of a rank.
        divided: examples of all ranks together, which share them, as a run's do; None: each rank
            has `batch_size`, however many there are.
        tier_on: of a number of devices: tier and cached part of every table, as of `host_tier`;
            None: those of `tables`.
    """

    tables: Sequence[TableInput]
    dense_weights: int = 0
    batch_size: int = 4096
    divided: int | None = None
    tier_on: Callable[[int], dict[str, Any]] | None = None

    def tables_on(self, devices: int) -> Sequence[TableInput]:
        """The tables, with the tier and cache of this number of devices."""
        if self.tier_on is None:
            return self.tables
        tier = self.tier_on(devices)
        return [replace(one, **tier) for one in self.tables]

    def batch_of(self, devices: int) -> int:
        """Examples of the rank that has most."""
        return self.batch_size if self.divided is None else -(-self.divided // devices)


def read_tables(path: str | Path) -> Simulated | None:
    """The tables of a YAML file that describes tables only; None of the config of a run.

    Raises:
        UnknownName: a key that tables do not have.
        ConfigError: no such file, or values without sense.
    """
    from omegaconf import OmegaConf  # brings a YAML reader, and is not needed otherwise

    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        if not isinstance(content, dict) or "data" in content or "tables" not in content:
            return None
        tables = [one for key, own in content["tables"].items() for one in _tables(str(key), own)]
        weights = _whole("dense_weights", content.get("dense_weights", 0), 0)
        return Simulated(tables, weights, _whole("batch_size", content.get("batch_size", 4096)))
    except ConfigError:
        raise
    except Exception as error:  # of the YAML reader, which raises whatever it meets
        raise ConfigError(
            "YAML of tables",
            got=f"{path} ({' '.join(str(error).split())[:200]})",
            allowed="tables: name -> rows, dim, ...; or the config of a run",
            remedy="See docs/guide/planner.md.",
        ) from error


def _tables(name: str, own: dict[str, Any]) -> list[TableInput]:
    for key in own:
        known_name(f"key of table {name!r}", key, _KEYS)
    rows, dim = float(own["rows"]), _whole(f"dim of table {name!r}", own["dim"])
    copies = _whole(f"copies of table {name!r}", own.get("copies", 1))
    statistics = zipf(
        rows,
        float(own.get("exponent", 1.05)),
        ids_per_sample=float(own.get("ids_per_sample", 1.0)),
        new_per_sample=float(own.get("new_per_sample", 0.0)),
    )
    one = TableInput(
        name=name,
        dim=dim,
        rows=rows,
        rows_later=float(own.get("rows_later", rows)),
        state_width=float(own.get("state_width", dim)),
        statistics=statistics,
        dtype=own.get("dtype", "float32"),
        tiers=tuple(own.get("tiers", ("device",))),
    )
    return [replace(one, name=f"{name}_{k}") for k in range(copies)] if copies > 1 else [one]


def _whole(what: str, value: Any, low: int = 1) -> int:
    number = float(value)  # of 3.0e7 in YAML, or of a text
    if not number.is_integer() or number < low:
        raise ConfigError(what, repr(value), whole(low).words, "Set it to a whole number.")
    return int(number)


def sizes_of(text: str) -> list[int]:
    """Numbers of devices of "8,64,512", ascending.

    Raises:
        ConfigError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 16 for part in parts):
        raise ConfigError(
            "numbers of devices", got=repr(text), allowed="1..65536, with commas between",
            remedy="Write them as 8,64,512.",
        )  # fmt: skip
    return sorted({int(part) for part in parts})


def machines_of(path: Path | None) -> Topology:
    """Nodes of a file; of 8 GPUs as they are assumed if there is none."""
    found = Topology(nodes=1, local_size=8, notes=("speeds are assumed, not measured",))
    return overridden(found if path is None else read_topology(path), os.environ)


def simulate(
    what: Simulated,
    machines: Topology,
    sizes: Sequence[int],
    *,
    batch_size: int | None = None,
    groups: bool = False,
    time_limit_s: float = 20.0,
) -> list[Point]:
    """A plan for each number of devices, as a point; one that does not fit says why.

    Args:
        what: tables and dense part.
        machines: nodes of which there are as many as it takes.
        sizes: numbers of devices.
        batch_size: examples of a rank, instead of those of `what`.
        groups: also try groups that hold all tables each, from 64 devices up.
        time_limit_s: of each search.
    """
    points = []
    for devices in sizes:
        batch = batch_size or what.batch_of(devices)
        try:
            topology = machines.with_devices(devices)
            work = dense_work(topology, batch, what.dense_weights)
            tables = what.tables_on(devices)
            plan = make_plan(tables, topology, work, groups=groups, time_limit_s=time_limit_s)
        except ConfigError as error:
            points.append(Point(devices, failed=str(error)))
            continue
        points.append(point_of(plan, batch))
    return points
