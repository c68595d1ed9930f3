"""Flights out of New York in 2013: will one arrive more than 15 minutes late, or not at all?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shoal.data.batch import TensorSource
from shoal.data.features import IdFeature, Recipe, encode
from shoal.errors import DataError, ShapeError

if TYPE_CHECKING:
    import pyarrow as pa


_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """For each of N events, the earlier events of its key that were settled when it asked.

    Args:
        order_M: int64 [M], numbers of events, by key and then by the time they were settled.
        start_N, stop_N: int64 [N]; event n may use `order_M[start_N[n]:stop_N[n]]`, oldest first.
    """

    order_M: _Array
    start_N: _Array
    stop_N: _Array

    @property
    def count_N(self) -> _Array:
        """int64 [N]: earlier events of each event."""
        return self.stop_N - self.start_N

    def mean(self, values_N: _Array) -> _Array:
        """float64 [N]: mean of a value over the earlier events; NaN where there are none."""
        sums = np.concatenate([[0.0], np.cumsum(values_N[self.order_M].astype(np.float64))])
        total_N = sums[self.stop_N] - sums[self.start_N]
        count_N = self.count_N
        mean_N = np.full(count_N.shape, np.nan)
        np.divide(total_N, count_N, out=mean_N, where=count_N > 0)
        return mean_N

    def latest(self, values_N: _Array) -> _Array:
        """float64 [N]: a value of the event settled last; NaN where there is none."""
        latest_N = np.full(self.start_N.shape, np.nan)
        some = self.count_N > 0
        latest_N[some] = values_N[self.order_M[self.stop_N[some] - 1]]
        return latest_N

    def pairs(self) -> tuple[_Array, _Array]:
        """Numbers of the asking and of the earlier event of all pairs, int64 [P] each.

        By asking event, the event settled last first.
        """
        count_N = self.count_N
        ends_N = np.cumsum(count_N)
        asking_P = np.repeat(np.arange(count_N.size), count_N)
        back_P = np.arange(asking_P.size) - (ends_N - count_N)[asking_P]
        return asking_P, self.order_M[self.stop_N[asking_P] - 1 - back_P]


def earlier(
    key_N: _Array,
    settled_s_N: _Array,
    asked_s_N: _Array,
    *,
    last: int | None = None,
    window_s: int | None = None,
) -> Earlier:
    """Find the earlier events of each event.

    Args:
        key_N: int64 [N], at least 0; events of one key are of one kind. A negative key has no
            history and is in nobody's.
        settled_s_N, asked_s_N: int64 [N], seconds.
        last: at most so many, those settled last; None for all.
        window_s: only those settled less than so many seconds ago; None for all.

    Raises:
        ShapeError: arrays of different lengths.
    """
    shapes = {key_N.shape, settled_s_N.shape, asked_s_N.shape}
    if len(shapes) != 1 or key_N.ndim != 1:
        remedy = "Give one key and two times per event."
        raise ShapeError("shapes of events", got=sorted(shapes), allowed="one [N]", remedy=remedy)
    used = np.flatnonzero(key_N >= 0)
    order_M = used[np.lexsort((settled_s_N[used], key_N[used]))]
    # Key and time in one number, so that one sorted array answers all events.
    first_s = int(min(settled_s_N.min(initial=0), asked_s_N.min(initial=0) - (window_s or 0)))
    span = int(max(settled_s_N.max(initial=0), asked_s_N.max(initial=0))) - first_s + 2
    place_M = key_N[order_M] * span + (settled_s_N[order_M] - first_s)
    base_N = key_N * span - first_s
    stop_N = np.searchsorted(place_M, base_N + asked_s_N, side="right")
    oldest_N = base_N + first_s if window_s is None else base_N + asked_s_N - window_s + 1
    start_N = np.searchsorted(place_M, oldest_N, side="left")
    if last is not None:
        start_N = np.maximum(start_N, stop_N - last)
    stop_N = np.where(key_N >= 0, stop_N, start_N)
    return Earlier(order_M, start_N, stop_N)


LATE_MIN = 15
SPLIT_S = int(datetime(2013, 11, 1, 4, tzinfo=timezone.utc).timestamp())
"""First second of November in New York: what is before trains, the rest evaluates."""

HISTORY_LEGS = 8
_HOUR_S = 3600

WEATHER = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib")
GROUPS = ("tail", "flight", "origin", "carrier_origin", "dest", "city")
"""Whose past is summarised in dense columns: see `_pasts`."""
SUMMARIES = ("count", "late_rate", "mean_delay", "last_delay", "hours_since")
DENSE = (
    "distance",
    "minute_of_day",
    *WEATHER,
    *(f"{group}_{summary}" for group in GROUPS for summary in SUMMARIES),
)
"""Dense columns, in batch order."""

RECIPE = Recipe(
    ids=(
        IdFeature(name="carrier"),
        IdFeature(name="flight", columns=("carrier", "number")),
        IdFeature(name="tail"),
        IdFeature(name="origin"),
        IdFeature(name="dest"),
        IdFeature(name="route", columns=("origin", "dest")),
        IdFeature(name="origin_hour", columns=("origin", "hour")),
        IdFeature(name="dest_hour", columns=("dest", "hour")),
        IdFeature(name="weekday"),
        IdFeature(name="month_day"),
        IdFeature(name="history", is_list=True, max_length=HISTORY_LEGS),
        IdFeature(name="flight_history", is_list=True, max_length=HISTORY_LEGS),
    ),
    dense=DENSE,
    label="late",
    time="departure",
)

# Edges of the delay classes of a history item, minutes; the last class is "did not arrive".
_DELAY_EDGES_MIN = (-15, -5, 5, 15, 45, 120)
_NOT_ARRIVED = len(_DELAY_EDGES_MIN) + 1
# In means a delay counts at most so much; a flight that did not arrive counts as two hours.
_DELAY_RANGE_MIN = (-60, 240)
_NOT_ARRIVED_MIN = 120


@dataclass(frozen=True, slots=True, eq=False)
class Flights:
    """The flights, ready to train on.

    Args:
        table: one row per example, in order of scheduled departure: the columns of `RECIPE`, raw
            (dense columns in their own units, null where nothing is known).
        examples: the same, encoded; dense columns are normal scores (see `load`).
        known_s: int64 [N], when each label is known: 15 minutes after the scheduled arrival.
    """

    table: pa.Table
    examples: TensorSource
    known_s: torch.Tensor


class _Legs(NamedTuple):
    """All scheduled flights, columns [N] of the file in numbers."""

    departure_s: _Array
    settled_s: _Array
    arrived: _Array
    late: _Array
    delay_min: _Array
    local_s: _Array


def load(path: str | Path | None = None, *, fit_before_s: int = SPLIT_S) -> Flights:
    """Read the flights and make their features.

    Dense columns become normal scores: the standard normal quantile of a value's rank among the
    examples before `fit_before_s`, within +-2.75; an unknown value becomes 0.

    Args:
        path: the file; None is the one in the package.
        fit_before_s: examples from this event time on do not take part in the ranks.

    Raises:
        DataError: the file is missing or damaged, lacks a column, or has no example before
            `fit_before_s`.
    """
    raw = _read(path)
    table = _feature_table(raw)
    known_s = _seconds(raw["departure"]) + 60 * (raw["scheduled_min"].to_numpy() + LATE_MIN)
    known_s = known_s[raw["tailnum"].is_valid().to_numpy()].astype(np.int64)
    departure_s = _seconds(table["departure"])
    fit = departure_s < fit_before_s
    if not fit.any():
        remedy = "Split later."
        got = f"none before second {fit_before_s}"
        raise DataError("flights to train on", got=got, allowed="at least 1", remedy=remedy)
    scored = table
    for name in DENSE:
        at = table.schema.get_field_index(name)
        raw = table[name].to_numpy(zero_copy_only=False)
        scored = scored.set_column(at, name, _arrow(_normal_scores(raw, raw[fit])))
    return Flights(table, encode(scored, RECIPE, "the flights"), torch.from_numpy(known_s))


def _read(path: str | Path | None) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = ["departure", "utc_offset_h", "scheduled_min", "arrival_delay_min", "cancelled"]
    wanted += ["carrier", "flight", "tailnum", "origin", "dest", "distance", *WEATHER]
    file = path if path is not None else resources.files("shoal.data").joinpath("flights.parquet")
    try:
        table = pq.read_table(str(file))
    except (OSError, pa.ArrowException) as error:
        remedy = "Install the package again; scripts/build_flights.py makes the file again."
        raise DataError(
            "file of flights", got=error, allowed="a whole Parquet file", remedy=remedy
        ) from error
    for name in wanted:
        if name not in table.column_names:
            remedy = "Make the file with scripts/build_flights.py."
            got, allowed = "no such column", ", ".join(wanted)
            raise DataError(f"column {name!r} of {file}", got=got, allowed=allowed, remedy=remedy)
    return table.select(wanted)


def _legs(raw: pa.Table) -> _Legs:
    import pyarrow.compute as pc

    departure_s = _seconds(raw["departure"])
    arrived = raw["arrival_delay_min"].is_valid().to_numpy()
    delay_min = pc.fill_null(raw["arrival_delay_min"], 0).to_numpy().astype(np.int64)
    settled_min = raw["scheduled_min"].to_numpy().astype(np.int64)
    settled_min += np.where(arrived, delay_min, LATE_MIN)
    return _Legs(
        departure_s=departure_s,
        settled_s=departure_s + 60 * settled_min,
        arrived=arrived,
        late=~arrived | (delay_min > LATE_MIN),
        delay_min=np.where(arrived, delay_min.clip(*_DELAY_RANGE_MIN), _NOT_ARRIVED_MIN),
        local_s=departure_s + _HOUR_S * raw["utc_offset_h"].to_numpy().astype(np.int64),
    )


def _feature_table(raw: pa.Table) -> pa.Table:
    import pyarrow as pa

    legs = _legs(raw)
    pasts = _pasts(raw, legs)
    days = legs.local_s // (24 * _HOUR_S)
    months = days.astype("datetime64[D]").astype("datetime64[M]")
    day_of_month = days - months.astype("datetime64[D]").astype(np.int64) + 1
    columns: dict[str, Any] = {
        "departure": raw["departure"],
        "late": _arrow(legs.late.astype(np.float32)),
        "carrier": raw["carrier"],
        "number": raw["flight"],
        "tail": raw["tailnum"],
        "origin": raw["origin"],
        "dest": raw["dest"],
        "hour": _arrow(legs.local_s // _HOUR_S % 24),
        # 1970 began on a Thursday; 0 is Monday.
        "weekday": _arrow((days + 3) % 7),
        "month_day": _arrow((months.astype(np.int64) % 12 + 1) * 100 + day_of_month),
        "history": _items(legs, pasts["tail"], (2, 4, 8, 16, 30, 60)),
        "flight_history": _items(legs, pasts["flight"], (20, 30, 54, 100, 200)),
        "distance": raw["distance"].cast("float32"),
        "minute_of_day": _arrow((legs.local_s // 60 % 1440).astype(np.float32)),
        **{name: raw[name] for name in WEATHER},
    }
    for group in GROUPS:
        for summary, values_N in _summaries(legs, pasts[group]).items():
            columns[f"{group}_{summary}"] = pa.array(
                values_N, pa.float32(), mask=np.isnan(values_N)
            )
    return pa.table(columns).filter(raw["tailnum"].is_valid())


def _pasts(raw: pa.Table, legs: _Legs) -> Mapping[str, Earlier]:
    """The settled flights that each flight may look back on, by what they share with it."""
    carrier, origin, dest, tail = (_codes(raw[c]) for c in ("carrier", "origin", "dest", "tailnum"))
    flight = carrier * 10_000 + raw["flight"].to_numpy()
    when = (legs.settled_s, legs.departure_s)
    return {
        "tail": earlier(tail, *when, last=HISTORY_LEGS),
        "flight": earlier(flight, *when, last=HISTORY_LEGS),
        "origin": earlier(origin, *when, window_s=2 * _HOUR_S),
        "carrier_origin": earlier(carrier * 100 + origin, *when, window_s=3 * _HOUR_S),
        "dest": earlier(dest, *when, window_s=6 * _HOUR_S),
        "city": earlier(np.zeros_like(origin), *when, window_s=_HOUR_S),
    }


def _summaries(legs: _Legs, past: Earlier) -> Mapping[str, _Array]:
    """Columns [N] by the names of `SUMMARIES`; NaN where there is no past."""
    return {
        "count": past.count_N.astype(np.float64),
        "late_rate": past.mean(legs.late),
        "mean_delay": past.mean(legs.delay_min),
        "last_delay": past.latest(legs.delay_min),
        "hours_since": (legs.departure_s - past.latest(legs.settled_s)) / _HOUR_S,
    }


def _items(legs: _Legs, past: Earlier, age_edges_h: tuple[float, ...]) -> pa.Array:
    """History as lists of ids: the class of the delay and the class of the outcome's age.

    id = delay class * (number of age classes) + age class; classes are numbered from 0 upwards.
    """
    import pyarrow as pa

    asking_P, old_P = past.pairs()
    age_h_P = (legs.departure_s[asking_P] - legs.settled_s[old_P]) / _HOUR_S
    delay_class = np.digitize(legs.delay_min, _DELAY_EDGES_MIN, right=True)
    delay_class[~legs.arrived] = _NOT_ARRIVED
    items_P = delay_class[old_P] * (len(age_edges_h) + 1) + np.digitize(age_h_P, age_edges_h)
    offsets = np.concatenate([[0], np.cumsum(past.count_N)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(items_P, pa.int64()))


def _seconds(column: pa.ChunkedArray) -> _Array:
    import pyarrow as pa

    seconds: _Array = column.cast(pa.timestamp("s", tz="UTC")).cast(pa.int64()).to_numpy()
    return seconds


def _codes(column: pa.ChunkedArray) -> _Array:
    """int64 [N]: the number of each value among the distinct ones; -1 for null."""
    import pyarrow.compute as pc

    indices = column.combine_chunks().dictionary_encode().indices
    codes: _Array = pc.fill_null(indices, -1).to_numpy().astype(np.int64)
    return codes


def _normal_scores(values_N: _Array, fit_M: _Array) -> _Array:
    """float32 [N]: normal quantile of the mid-rank in `fit_M`, linear in between; NaN gives 0."""
    known, count = np.unique(fit_M[~np.isnan(fit_M)], return_counts=True)
    if not known.size:
        return np.zeros(values_N.shape, dtype=np.float32)
    rank = torch.from_numpy((np.cumsum(count) - count / 2) / count.sum())
    scores = torch.special.ndtri(rank.clamp(0.003, 0.997)).numpy()
    scores_N: _Array = np.nan_to_num(np.interp(values_N, known, scores), nan=0.0)
    return scores_N.astype(np.float32)


def _arrow(values: _Array) -> pa.Array:
    import pyarrow as pa

    return pa.array(values)
