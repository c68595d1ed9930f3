"""Rows of whole tables, counted where they lie."""

from __future__ import annotations

from shoal.table.hosting import HostedTables, hosted_spec

__all__ = ["counted_rows"]


def counted_rows(tables: HostedTables, rank: int) -> dict[str, int]:
    """Rows of each whole table that count on this rank; over all ranks they add up to all rows.

    Of columns in slices the first one's rows count, of replicas the first rank's.
    """
    shard = tables.shard
    local = {spec.name: k for k, spec in enumerate(shard.specs)}
    if tables.placement is None:
        return {spec.name: shard.size(local[spec.name]) for spec in tables.specs}
    rows = dict.fromkeys((spec.name for spec in tables.specs), 0)
    for spec in tables.specs:
        first = tables.placement.of(spec.name)[0]
        ranks = first.ranks[:1] if first.replicated else first.ranks
        if rank in ranks:
            rows[spec.name] += shard.size(local[hosted_spec(spec, first).name])
    return rows
