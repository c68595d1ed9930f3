"""The flights that ship with the package: counts, label, and no look into the future."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from shoal.data import Loader, flights, split_by_time
from shoal.data.flights import earlier
from shoal.errors import DataError, ShapeError

FILE = Path(flights.__file__).with_name("flights.parquet")
LATE_MIN = 15


@pytest.fixture(scope="module")
def raw() -> pa.Table:
    return pq.read_table(FILE)


@pytest.fixture(scope="module")
def loaded() -> flights.Flights:
    return flights.load()


def seconds(column: pa.ChunkedArray) -> np.ndarray:
    return column.cast(pa.timestamp("s", tz="UTC")).cast(pa.int64()).to_numpy()


def settled(raw: pa.Table) -> np.ndarray:
    """When each outcome was known: on landing, else 15 minutes after scheduled arrival."""
    delay = pc.fill_null(raw["arrival_delay_min"], LATE_MIN).to_numpy().astype(np.int64)
    return seconds(raw["departure"]) + 60 * (raw["scheduled_min"].to_numpy() + delay)


def test_the_file_is_small_and_holds_every_scheduled_flight(raw: pa.Table):
    assert FILE.stat().st_size <= 4_000_000
    assert raw.num_rows == 336_776
    assert pc.sum(raw["cancelled"]).as_py() == 8_255
    assert raw["arrival_delay_min"].null_count == 8_255 + 1_175
    assert not {"dep_time", "dep_delay", "air_time", "arr_time"} & set(raw.column_names)
    assert (np.diff(seconds(raw["departure"])) >= 0).all()


def test_flights_without_a_tail_number_were_all_cancelled(raw: pa.Table):
    unknown = raw.filter(raw["tailnum"].is_null())
    assert unknown.num_rows == 2_512
    assert pc.all(unknown["cancelled"]).as_py()


def test_local_times_are_new_yorks(raw: pa.Table):
    first = raw.slice(0, 1).to_pylist()[0]
    # The year's first flight left Newark at 5:15, to reach Houston at 8:19, an hour behind.
    assert (first["carrier"], first["flight"], first["dest"]) == ("UA", 1545, "IAH")
    assert seconds(raw["departure"])[0] == 1_357_035_300
    assert (first["utc_offset_h"], first["scheduled_min"]) == (-5, 244)
    assert set(raw["utc_offset_h"].unique().to_pylist()) == {-5, -4}


def test_scheduled_times_fit_distances(raw: pa.Table):
    hours = raw["scheduled_min"].to_numpy() / 60
    speed = raw["distance"].to_numpy() / hours
    assert speed.max() < 530
    assert hours.min() > 0.5
    assert hours.max() < 12


@pytest.mark.slow
def test_examples_and_label(raw: pa.Table, loaded: flights.Flights):
    assert len(loaded.examples) == loaded.table.num_rows == 334_264
    known = raw.filter(raw["tailnum"].is_valid())
    delay = known["arrival_delay_min"]
    want = pc.fill_null(pc.greater(delay, LATE_MIN), True).to_numpy(zero_copy_only=False)
    labels = loaded.table["late"].to_numpy()
    assert np.array_equal(labels, want)
    assert labels.mean() == pytest.approx(0.2529, abs=5e-5)


def test_split(loaded: flights.Flights):
    train, held = split_by_time(loaded.examples, flights.SPLIT_S)
    assert (len(train), len(held)) == (279_204, 55_060)
    months = loaded.table["month_day"].to_numpy() // 100
    assert (months <= 10).sum() == len(train)


def test_ids_keep_arriving(loaded: flights.Flights):
    train, held = split_by_time(loaded.examples, flights.SPLIT_S)
    known, new = (side.take(torch.arange(len(side))).ids for side in (train, held))
    share = {
        name: float((~torch.isin(new[name].values, known[name].values)).float().mean())
        for name in ("tail", "flight", "month_day", "origin")
    }
    assert share["month_day"] == 1
    assert share["origin"] == 0
    assert 0.001 < share["tail"] < 0.2
    assert 0.001 < share["flight"] < 0.2


def test_features_are_the_recipes(loaded: flights.Flights):
    assert loaded.examples.features == flights.RECIPE.features
    assert loaded.examples.num_dense == len(flights.DENSE) == 40
    batch = loaded.examples.take(torch.arange(334_000, 334_064))
    lengths = batch.ids.lengths
    for at, feature in enumerate(flights.RECIPE.ids):
        if feature.is_list:
            assert int(lengths[at].max()) <= flights.HISTORY_LEGS
        else:
            assert bool((lengths[at] == 1).all())
    assert batch.dense is not None
    assert bool(torch.isfinite(batch.dense).all())


@pytest.mark.slow
def test_no_history_item_was_settled_after_departure(raw: pa.Table):
    legs, known_s = flights._legs(raw), settled(raw)
    departure_s = seconds(raw["departure"])
    assert np.array_equal(legs.settled_s, known_s)
    for name, past in flights._pasts(raw, legs).items():
        asking, old = past.pairs()
        assert asking.size > 1_000_000, name
        assert (known_s[old] <= departure_s[asking]).all(), name
        assert (asking != old).all(), name


def test_history_is_the_tails_last_legs(raw: pa.Table, loaded: flights.Flights):
    known_s, departure_s = settled(raw), seconds(raw["departure"])
    tails = raw["tailnum"].to_pylist()
    rows_of: dict[str, list[int]] = {}
    for row, tail in enumerate(tails):
        rows_of.setdefault(tail, []).append(row)
    examples = np.flatnonzero(raw["tailnum"].is_valid().to_numpy())
    lists = loaded.table["history"]
    counts = loaded.table["tail_count"].to_numpy()
    for at in range(1000, examples.size, 30_011):
        row = examples[at]
        old = [other for other in rows_of[tails[row]] if known_s[other] <= departure_s[row]]
        old = sorted(old, key=lambda other: known_s[other])[-8:]
        assert counts[at] == len(lists[at]) == len(old)
        late = [
            other
            for other in old
            if not raw["arrival_delay_min"][int(other)].is_valid
            or raw["arrival_delay_min"][int(other)].as_py() > LATE_MIN
        ]
        rate = loaded.table["tail_late_rate"][at].as_py()
        assert rate is None if not old else rate == pytest.approx(len(late) / len(old))
        # Delay classes 4 and up are late: over 15 minutes, or never arrived.
        assert sum(item // 7 >= 4 for item in lists[at].as_py()) == len(late)


@pytest.mark.slow
def test_scores_of_the_training_months_do_not_see_the_others(loaded: flights.Flights):
    early = flights.load(fit_before_s=1_360_000_000)
    train, _ = split_by_time(early.examples, 1_360_000_000)
    dense = train.take(torch.arange(len(train))).dense
    assert dense is not None
    # Scores are standard normal over what they were fitted on.
    at = flights.DENSE.index("temp")
    assert float(dense[:, at].mean()) == pytest.approx(0, abs=0.01)
    assert float(dense[:, at].std()) == pytest.approx(1, abs=0.03)
    # All else is the same on each load.
    assert early.table.equals(loaded.table)
    rows = torch.arange(0, len(early.examples), 97)
    left, right = early.examples.take(rows).ids, loaded.examples.take(rows).ids
    assert torch.equal(left.values_N, right.values_N)


def test_the_first_example_has_golden_ids(loaded: flights.Flights):
    first = next(iter(Loader(loaded.examples, 1, prefetch=0)))
    assert first.ids.to_lists() == {name: [ids] for name, ids in GOLDEN.items()}


def test_bad_files_are_data_errors(tmp_path: Path, raw: pa.Table):
    with pytest.raises(DataError, match="file of flights"):
        flights.load(tmp_path / "absent.parquet")
    empty = tmp_path / "empty.parquet"
    empty.touch()
    with pytest.raises(DataError, match="file of flights"):
        flights.load(empty)
    path = tmp_path / "fewer.parquet"
    pq.write_table(raw.slice(0, 1000).drop_columns(["tailnum"]), path)
    with pytest.raises(DataError, match="'tailnum'"):
        flights.load(path)
    pq.write_table(raw.slice(0, 1000), path)
    with pytest.raises(DataError, match="flights to train on"):
        flights.load(path, fit_before_s=0)
    assert len(flights.load(path).examples) > 900


def test_earlier_events_by_hand():
    key = np.array([0, 0, 1, 0, -1, -1])
    settled_s = np.array([10, 20, 5, 40, 1, 2])
    asked_s = np.array([0, 10, 30, 20, 50, 50])
    past = earlier(key, settled_s, asked_s)
    assert past.count_N.tolist() == [0, 1, 1, 2, 0, 0]
    assert past.latest(settled_s).tolist()[3] == 20
    assert past.mean(settled_s).tolist()[3] == 15
    asking, old = past.pairs()
    assert list(zip(asking.tolist(), old.tolist(), strict=True)) == [(1, 0), (2, 2), (3, 1), (3, 0)]
    assert earlier(key, settled_s, asked_s, last=1).count_N.tolist() == [0, 1, 1, 1, 0, 0]
    # Less than ten seconds ago: 20 asks at 20, but 10 is out.
    assert earlier(key, settled_s, asked_s, window_s=10).count_N.tolist() == [0, 1, 0, 1, 0, 0]
    with pytest.raises(ShapeError, match="shapes of events"):
        earlier(key, settled_s[:2], asked_s)


GOLDEN: dict[str, list[int]] = {
    "carrier": [-5001092095243403813],
    "flight": [4236080651057795579],
    "tail": [6382560174508429078],
    "origin": [12011206863962458],
    "dest": [-8705206287788373638],
    "route": [-7660165144142660167],
    "origin_hour": [5262698374101449594],
    "dest_hour": [-6379319803607927913],
    "weekday": [1],
    "month_day": [101],
    "history": [],
    "flight_history": [],
}
