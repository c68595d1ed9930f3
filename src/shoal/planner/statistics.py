"""What a table's ids are like: how many, how often which, and how they grow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.batch import Batch
from shoal.errors import ConfigError, known_name
from shoal.ragged import KeyedRagged

_FORMAT = "shoal-table-statistics"
_EXACT = 1 << 12  # ids of a Zipf law that are added up one by one
_STEPS = 96  # groups of the others
_Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class TableStatistics:
    """Ids of all features of a table.

    Args:
        ids_per_sample: occurrences in one example.
        frequency: (number of ids, share of all occurrences that they have) of groups of ids that
            are alike, the most frequent first; shares add up to 1.
        new_per_sample: ids that an example brings which no earlier one had.

    Raises:
        ConfigError: a number that cannot be.
    """

    ids_per_sample: float
    frequency: tuple[tuple[float, float], ...]
    new_per_sample: float = 0.0

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.frequency]
        shares = [share for _, share in self.frequency]
        fine = (
            all(map(math.isfinite, (self.ids_per_sample, self.new_per_sample, *counts, *shares)))
            and self.ids_per_sample >= 0
            and self.new_per_sample >= 0
            and counts != []
            and min(counts) > 0
            and min(shares) >= 0
            and abs(sum(shares) - 1) < 1e-3
        )
        if not fine:
            raise ConfigError(
                "statistics of a table",
                got=f"ids_per_sample {self.ids_per_sample}, new_per_sample {self.new_per_sample}, "
                f"{len(counts)} groups of ids with shares that add up to {sum(shares):.4g}",
                allowed="finite numbers, 0 or more, and shares that add up to 1",
                remedy="Take them from shoal plan profile-data.",
            )

    @property
    def ids(self) -> float:
        """Different ids that there are."""
        return float(self._counts.sum())

    def distinct(self, samples: float) -> float:
        """Different ids expected in this number of samples."""
        return float((self._counts * self._present(samples)).sum())

    def shared(self, samples: float) -> float:
        """Different ids expected in both of two sets of this number of samples."""
        return float((self._counts * self._present(samples) ** 2).sum())

    def missed(self, samples: float, cached: float) -> float:
        """Different ids of the samples that are not among the `cached` most frequent ones."""
        before = np.concatenate([[0.0], np.cumsum(self._counts)[:-1]])
        outside = np.clip(before + self._counts - cached, 0.0, self._counts)
        return float((outside * self._present(samples)).sum())

    def hot_share(self, ids: float) -> float:
        """Share of all occurrences that the most frequent `ids` have."""
        before = np.concatenate([[0.0], np.cumsum(self._counts)[:-1]])
        inside = np.clip(ids - before, 0.0, self._counts)
        return float((inside / self._counts * self._shares).sum())

    @cached_property
    def _counts(self) -> _Floats:
        return np.array([count for count, _ in self.frequency], dtype=np.float64)

    @cached_property
    def _shares(self) -> _Floats:
        return np.array([share for _, share in self.frequency], dtype=np.float64)

    def _present(self, samples: float) -> _Floats:
        """Chance that an id of each group is in the samples."""
        chance = np.minimum(self._shares / self._counts, 1 - 1e-12)
        return -np.expm1(samples * self.ids_per_sample * np.log1p(-chance))


def zipf(
    ids: float, exponent: float = 1.05, *, ids_per_sample: float = 1.0, new_per_sample: float = 0.0
) -> TableStatistics:
    """Statistics of ids whose n-th is drawn with a share near n^-exponent.

    Raises:
        ConfigError: no ids, or an exponent below 0.
    """
    if not ids >= 1 or not 0 <= exponent <= 64 or not math.isfinite(ids):
        raise ConfigError(
            "Zipf law of a table's ids",
            got=f"{ids} ids, exponent {exponent}",
            allowed="1 id or more, an exponent of 0 to 64",
            remedy="Give what the data is like.",
        )
    whole = min(int(ids), _EXACT)
    edges = np.arange(1, whole + 1, dtype=np.float64)
    counts, weights = np.ones(whole), edges**-exponent
    # Single ids matter at the hot end only; further down, groups of a factor of 2^(1/4).
    starts = np.unique(np.round(2.0 ** (np.arange(0, 4 * math.log2(whole) + 1) / 4)).astype(int))
    starts = starts[starts <= whole]
    counts = np.add.reduceat(counts, starts - 1)
    weights = np.add.reduceat(weights, starts - 1)
    if ids > whole:
        cuts = np.geomspace(whole + 0.5, ids + 0.5, _STEPS + 1)
        power = 1 - exponent
        inner = np.log(cuts) if abs(power) < 1e-9 else cuts**power / power
        counts = np.concatenate([counts, np.diff(cuts)])
        weights = np.concatenate([weights, np.diff(inner)])
    keep = counts > 0
    shares = weights[keep] / weights[keep].sum()
    frequency = tuple(zip(counts[keep].tolist(), shares.tolist(), strict=True))
    return TableStatistics(
        ids_per_sample=ids_per_sample, frequency=frequency, new_per_sample=new_per_sample
    )


class Counter:
    """Counts the ids of one table over batches, for `TableStatistics`."""

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.int64)
        self._growth: list[tuple[int, int]] = []  # samples and distinct ids after each batch
        self.samples = 0
        self.occurrences = 0

    def add(self, ids: np.ndarray[Any, np.dtype[np.int64]], samples: int) -> None:
        """Count a batch."""
        found, counts = np.unique(ids, return_counts=True)
        joined = np.concatenate([self._ids, found])
        self._ids, at = np.unique(joined, return_inverse=True)
        summed = np.concatenate([self._counts, counts])
        self._counts = np.bincount(at, weights=summed, minlength=len(self._ids)).astype(np.int64)
        self.samples += samples
        self.occurrences += len(ids)
        self._growth.append((self.samples, len(self._ids)))

    def statistics(self) -> TableStatistics:
        """What was counted; ids that the second half of the batches brought are its growth.

        Raises:
            ConfigError: no ids.
        """
        counts, ids = np.unique(self._counts, return_counts=True)
        if not len(counts):
            raise ConfigError(
                "ids of a table",
                got="none",
                allowed="one or more",
                remedy="Profile more data, or leave the table out.",
            )
        # Groups of counts within a factor of 2^(1/4), the most frequent ids first.
        group = np.floor(4 * np.log2(counts)).astype(np.int64)
        _, first = np.unique(group, return_index=True)
        sizes = np.add.reduceat(ids, first)[::-1]
        shares = np.add.reduceat(ids * counts, first)[::-1] / self.occurrences
        samples, before = self._growth[(len(self._growth) - 1) // 2]
        rest = self.samples - samples
        return TableStatistics(
            ids_per_sample=self.occurrences / self.samples,
            frequency=tuple(zip(sizes.astype(float).tolist(), shares.tolist(), strict=True)),
            new_per_sample=(len(self._ids) - before) / rest if samples and rest else 0.0,
        )


def profile_data(
    batches: Iterable[KeyedRagged | Batch], features: Mapping[str, str], *, most: int = 64
) -> dict[str, TableStatistics]:
    """Statistics of each table's ids.

    Args:
        batches: ids, on the CPU; in time order, so that growth shows. Items that a `Batch` has of a
            sampler are ids of its examples.
        features: feature -> its table.
        most: batches that are read.

    Returns:
        by table; none of a table without any id.
    """
    counters = {table: Counter() for table in features.values()}
    for _, given in zip(range(most), batches, strict=False):
        batch = given.ids if isinstance(given, Batch) else given
        examples = given.labels.numel() if isinstance(given, Batch) else given.batch_size
        ids: dict[str, list[int]] = {}
        for feature, table in features.items():
            ids.setdefault(table, []).append(batch.keys.index(feature))
        for table, keys in ids.items():
            picked = batch.select(tuple(batch.keys[k] for k in keys))
            values = picked.values_N.numpy()
            counters[table].add(values, examples)
    return {table: one.statistics() for table, one in counters.items() if one.occurrences}


def statistics_text(tables: Mapping[str, TableStatistics]) -> str:
    """Statistics by table as JSON."""
    content = {"format": _FORMAT, "tables": {name: asdict(one) for name, one in tables.items()}}
    return json.dumps(content, indent=1) + "\n"


def read_statistics(path: str | Path) -> dict[str, TableStatistics]:
    """Statistics by table of a file of `shoal plan profile-data`.

    Raises:
        ConfigError: no such file, or another kind of file.
    """
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != _FORMAT:
            raise KeyError("format")
        return {
            name: TableStatistics(
                ids_per_sample=one["ids_per_sample"],
                frequency=tuple((float(count), float(share)) for count, share in one["frequency"]),
                new_per_sample=one["new_per_sample"],
            )
            for name, one in content["tables"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "statistics of tables",
            got=f"{path} ({type(error).__name__}: {error})",
            allowed="a file that shoal plan profile-data wrote",
            remedy="Profile the data again.",
        ) from error


def check_known(statistics: Iterable[str], tables: Iterable[str]) -> None:
    """Refuse statistics of tables that there are not.

    Raises:
        UnknownName: of a table that is not planned.
    """
    known = tuple(tables)
    for name in statistics:
        known_name("table of the statistics", name, known)
