"""Statistics of ids from batches of data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.planner.statistics import Counter, TableStatistics
from shoal.ragged import KeyedRagged


def profile_data(
    batches: Iterable[KeyedRagged], features: Mapping[str, str], *, most: int = 64
) -> dict[str, TableStatistics]:
    """Statistics of each table's ids.

    Args:
        batches: ids, on the CPU; in time order, so that growth shows.
        features: feature -> its table.
        most: batches that are read.

    Returns:
        by table; none of a table without any id.
    """
    counters = {table: Counter() for table in features.values()}
    for _, batch in zip(range(most), batches, strict=False):
        ids: dict[str, list[int]] = {}
        for feature, table in features.items():
            ids.setdefault(table, []).append(batch.keys.index(feature))
        for table, keys in ids.items():
            picked = batch.select(tuple(batch.keys[k] for k in keys))
            values = picked.values_N.numpy()
            counters[table].add(values, batch.batch_size)
    return {table: one.statistics() for table, one in counters.items() if one.occurrences}
