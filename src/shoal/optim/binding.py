"""What an optimizer of rows steps: collections, their ledgers, and rates by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from shoal.embedding import EmbeddingCollection, GradientLedger
from shoal.errors import ConfigError, describe, unknown_name
from shoal.optim.proxies import TableGradient
from shoal.optim.rates import RateGroup
from shoal.rules.schedules import Constant, Schedule
from shoal.table.spec import TableSpec

__all__ = ["RateKey", "find_collections", "group_rates", "hosted_rates", "share_ledgers"]

RateKey = str | tuple[str, str]


def find_collections(modules: Iterable[nn.Module]) -> list[EmbeddingCollection]:
    found: dict[int, EmbeddingCollection] = {}
    for module in modules:
        for part in module.modules():
            if isinstance(part, EmbeddingCollection):
                found[id(part)] = part
    if not found:
        raise ConfigError(
            describe(
                "modules of a SparseOptimizer",
                got="no EmbeddingCollection",
                allowed="modules with one or more",
                remedy="Pass the model that holds the collection.",
            )
        )
    return list(found.values())


def share_ledgers(collections: Sequence[EmbeddingCollection]) -> tuple[GradientLedger, ...]:
    """One ledger per shard: rows that two collections touch take one step."""
    ledgers: dict[int, GradientLedger] = {}
    for collection in collections:
        ledger = ledgers.setdefault(id(collection.shard), collection.ledger)
        if ledger.inserts != collection.init_on_lookup:
            raise ConfigError(
                describe(
                    "init_on_lookup of collections on one shard",
                    got="True and False",
                    allowed="one mode",
                    remedy="Build both with the same init_on_lookup.",
                )
            )
        if ledger is not collection.ledger:
            ledger.take_over(collection.ledger)
            collection.ledger = ledger
    return tuple(ledgers.values())


def bind_rates(
    collections: Sequence[EmbeddingCollection], rates: Mapping[RateKey, float | Schedule]
) -> dict[str, dict[str, Schedule]]:
    """Of the tables that `rates` names: the rate of each segment by name."""
    specs: dict[str, TableSpec] = {}
    owners: dict[str, set[int]] = {}
    for collection in collections:
        specs.update(collection.tables)
        for name in collection.tables:
            owners.setdefault(name, set()).add(id(collection.shard))
    bound: dict[str, dict[str, Schedule]] = {}
    for key, rate in sorted(rates.items(), key=lambda item: isinstance(item[0], tuple)):
        name, segment = (key, None) if isinstance(key, str) else key
        if name not in specs:
            raise unknown_name("table in rates", name, specs)
        if len(owners[name]) > 1:
            raise ConfigError(
                describe(
                    f"rate of table {name!r}",
                    got=f"a name that {len(owners[name])} shards have",
                    allowed="a name of one table",
                    remedy="Use one SparseOptimizer per module, or rename a table.",
                )
            )
        own = own_rates(specs[name])
        if segment is not None and segment not in own:
            raise unknown_name(f"segment of table {name!r} in rates", segment, own)
        call = rate if isinstance(rate, Schedule) else Constant(rate)
        chosen = bound.setdefault(name, own)
        chosen.update(dict.fromkeys([segment] if segment is not None else own, call))
    return bound


def own_rates(spec: TableSpec) -> dict[str, Schedule]:
    """The rate of each segment's own rule, by name; 1 for a rule without one."""
    rates = {part.name: getattr(part.optimizer, "lr", 1.0) for part in spec.segments}
    return {
        name: rate if isinstance(rate, Schedule) else Constant(rate) for name, rate in rates.items()
    }


def group_rates(
    collections: Sequence[EmbeddingCollection],
    proxies: Iterable[TableGradient],
    rates: Mapping[RateKey, float | Schedule],
) -> dict[tuple[int, str], tuple[RateGroup, ...]]:
    """The param groups of every table, one per segment, by the id of its shard and its name.

    A table's proxies are in its first group. Groups are named "table", or "table/segment" where
    there are several; "#2" and so on tells tables of one name on several shards apart.
    """
    named, taken = bind_rates(collections, rates), Counter[str]()
    groups: dict[tuple[int, str], tuple[RateGroup, ...]] = {}
    for collection in collections:
        for table, spec in collection.tables.items():
            key = (id(collection.shard), table)
            if key in groups:
                continue
            taken[table] += 1
            name = table if taken[table] == 1 else f"{table}#{taken[table]}"
            own = named.get(table) or own_rates(spec)
            groups[key] = tuple(
                RateGroup(
                    f"{name}/{segment}" if len(own) > 1 else name, table, rate, table in named
                )
                for segment, rate in own.items()
            )
    (first, *_), *_ = groups.values()
    for proxy in proxies:
        slice_of = (id(proxy.shard), proxy.table.rpartition("[")[0])
        (group, *_) = groups.get((id(proxy.shard), proxy.table)) or groups.get(slice_of) or (first,)
        group.group["params"].append(proxy)
    return groups


def hosted_rates(
    specs: Sequence[TableSpec],
    rates: Mapping[str, tuple[float, ...]],
    tables: Mapping[str, TableSpec],
) -> dict[str, tuple[float, ...]]:
    """The rates of a shard's tables, which may be column slices of those that were named.

    Args:
        specs: the shard's.
        rates: whole table -> one rate per segment.
        tables: the whole tables by name.
    """
    found = {}
    for spec in specs:
        name = spec.name if spec.name in tables else spec.name.rpartition("[")[0]
        if name in rates:
            by_segment = dict(
                zip([s.name for s in tables[name].segments], rates[name], strict=True)
            )
            found[spec.name] = tuple(by_segment[segment.name] for segment in spec.segments)
    return found
