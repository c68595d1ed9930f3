from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from shoal import config, train
from shoal.config.build import open_data
from shoal.data import IdFeature, ParquetSource, Recipe
from shoal.errors import ConfigError, DataError
from shoal.telemetry import ProgressLine
from shoal.train.learner import Learner
from shoal.train.ranks import Ranks
from shoal.train.runs import _of_all, write_predictions

ROOT = Path(__file__).parents[3]
SILENT = Console(quiet=True)
ROWS = 50
NUMBERS = range(ROWS)
KEYS: dict[str, pa.Array] = {
    "order": pa.array([f"order-{n}" for n in NUMBERS]),
    "view": pa.array([f"order-{n}" for n in NUMBERS], pa.string_view()),
    "word": pa.array(["a", None, "b", "a", "c"] * (ROWS // 5)).dictionary_encode(),
    "price": pa.array([Decimal(n) / 4 for n in NUMBERS], pa.decimal128(12, 2)),
    "day": pa.array([date(2024, 1, 1) + timedelta(n) for n in NUMBERS]),
    "at": pa.array(list(NUMBERS), pa.timestamp("us", tz="Europe/Berlin")),
    "parts": pa.array([list(range(n % 3)) for n in NUMBERS]),
    "place": pa.array([{"x": n, "y": None} for n in NUMBERS]),
    "raw": pa.array([bytes([n]) for n in NUMBERS], pa.binary(1)),
    "nothing": pa.nulls(ROWS),
    "user": pa.array([n % 7 for n in NUMBERS]),  # of a feature, too
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose data have no keys, a weight, and are gone."""
    folder = tmp_path_factory.mktemp("run")
    file = folder / "train.parquet"
    columns = {"user": [n % 7 for n in range(200)], "bought": [n % 7 % 2 for n in range(200)]}
    pq.write_table(pa.table({**columns, "weight": [1.0] * 200}), file)
    source = {"kind": "parquet", "paths": [str(file)], "eval_paths": [str(file)]}
    source |= {"label": "bought", "weight": "weight", "ids": {"user": {}}}
    settings = config.from_mapping(
        {
            "name": "orders",
            "threads": 1,
            "data": {"source": source, "batch_size": 20},
            "eval": {"batch_size": 16},
            "tables": {"default": {"dim": 2}},
            "model": {"kind": "deepfm", "hidden": [4], "batch_norm": True},
            "baselines": [],
            "output": {"dir": str(folder)},
        }
    )
    result = train.run(settings, console=SILENT)
    file.unlink()
    return result.folder


def new(folder: Path, table: pa.Table, name: str = "new.parquet") -> str:
    pq.write_table(table, folder / name, row_group_size=12)
    return str(folder / name)


def predict(run: Path, *paths: str, keys: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> Any:
    named = f"data.source.eval_paths=[{','.join(paths)}]"
    out = Path(paths[0]).with_name("out.parquet")
    return pq.read_table(
        train.predict(str(run), (named, *also), out=out, keys=keys, console=SILENT)
    )


def test_keys_of_any_type_come_along_unchanged(run: Path, tmp_path: Path):
    table = pa.table(KEYS)
    path = new(tmp_path, table)
    found = predict(run, path, keys=tuple(KEYS))
    assert found.column_names == [*KEYS, "prediction", "label", "event_time_s"]
    wanted = pq.read_table(path)
    assert found.select(list(KEYS)).schema == wanted.schema == table.schema
    assert found.select(list(KEYS)).to_pydict() == table.to_pydict()
    assert found["label"].null_count == ROWS and found["prediction"].null_count == 0


def test_predictions_without_labels_are_those_with_them(run: Path, tmp_path: Path):
    plain = pa.table({"user": KEYS["user"]})
    labels = pa.array([float(n % 2) if n % 3 else None for n in NUMBERS])
    labelled = plain.append_column("bought", labels)
    without, some = (predict(run, new(tmp_path, table)) for table in (plain, labelled))
    assert without["prediction"] == some["prediction"]
    assert some["label"].to_pylist() == labels.to_pylist()


def test_files_with_and_without_labels_come_one_after_the_other(run: Path, tmp_path: Path):
    table = pa.table({"user": KEYS["user"], "order": KEYS["order"]})
    both = table.append_column("bought", pa.array([1] * ROWS))
    paths = (new(tmp_path, table, "a.parquet"), new(tmp_path, both, "b.parquet"))
    found = predict(run, *paths, keys=("order",))
    assert found["order"].to_pylist() == KEYS["order"].to_pylist() * 2
    assert found["label"].to_pylist() == [None] * ROWS + [1.0] * ROWS


def test_rows_in_quarantine_are_left_out_with_their_keys(run: Path, tmp_path: Path):
    users = [None if n in (3, 30) else n for n in NUMBERS]
    path = new(tmp_path, pa.table({"user": users, "order": KEYS["order"]}))
    also = (f"data.quarantine={{path: {tmp_path / 'bad.jsonl'}}}",)
    found = predict(run, path, keys=("order",), also=also)
    assert found["order"].to_pylist() == [f"order-{n}" for n in NUMBERS if n not in (3, 30)]


def test_keys_of_csv_are_the_text_of_the_file(run: Path, tmp_path: Path):
    path = tmp_path / "new.csv"
    table = {"user": KEYS["user"], "order": pa.array([f"{n:03}" for n in NUMBERS])}
    csv.write_csv(pa.table(table), path)
    found = predict(run, str(path), keys=("order", "order"), also=("data.source.kind=csv",))
    assert found["order"].to_pylist() == table["order"].to_pylist()


def test_a_file_of_one_row_is_predicted(run: Path, tmp_path: Path):
    assert predict(run, new(tmp_path, pa.table({"user": [3]}))).num_rows == 1


@contextmanager
def refused(error: type[Exception], words: str, folder: Path) -> Iterator[None]:
    with pytest.raises(error, match=words):
        yield
    assert not list(folder.glob("out*"))


def test_keys_that_cannot_be_are_refused(run: Path, tmp_path: Path):
    table = pa.table({"user": KEYS["user"], "order": KEYS["order"], "label": KEYS["day"]})
    path = new(tmp_path, table)
    words = r"'ordr' of .*allowed: user, order, label\. Did you mean order"
    with refused(DataError, words, tmp_path):
        predict(run, path, keys=("ordr",))
    with refused(ConfigError, "--key: got label; allowed: other names than predi", tmp_path):
        predict(run, path, keys=("label",))
    other = new(tmp_path, table.set_column(1, "order", KEYS["day"]), "other.parquet")
    with refused(DataError, "'order': date32.*, not string", tmp_path):
        predict(run, path, other, keys=("order",))


def test_a_label_that_is_none_is_refused_where_it_is(run: Path, tmp_path: Path):
    table = pa.table({"user": KEYS["user"], "bought": [None, 2, *[1] * (ROWS - 2)]})
    with refused(DataError, r"'bought' in row 1 .*got 2", tmp_path):
        predict(run, new(tmp_path, table))


def test_evaluation_needs_labels(run: Path, tmp_path: Path):
    path = new(tmp_path, pa.table({"user": KEYS["user"], "weight": [1.0] * ROWS}))
    named = tuple(f"data.source.{side}=[{path}]" for side in ("paths", "eval_paths"))
    with pytest.raises(DataError, match=r"column 'bought' of .*no such column"):
        train.evaluate(str(run), named, console=SILENT)


def test_keys_follow_their_examples_in_any_order(tmp_path: Path):
    path = new(tmp_path, pa.table({**KEYS, "bought": [n % 2 for n in NUMBERS]}))
    recipe = Recipe(ids=(IdFeature(name="user"),), label="bought", keys=("price", "order"))
    source = ParquetSource([path], recipe, cached_groups=1)
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    keys = source.take(rows).keys
    assert keys is not None
    assert keys["order"].to_pylist() == [f"order-{n}" for n in rows.tolist()]
    assert keys["price"].to_pylist() == [Decimal(n) / 4 for n in rows.tolist()]


def test_keys_may_be_nullable_in_one_file_only(run: Path, tmp_path: Path):
    strict = pa.schema([pa.field("user", pa.int64()), pa.field("n", pa.int64(), nullable=False)])
    paths = [
        new(tmp_path, pa.table({"user": [1, 2], "n": [1, 2]}, schema=strict), "strict.parquet"),
        new(tmp_path, pa.table({"user": [3, 4], "n": [3, None]}), "lax.parquet"),
    ]
    for order in (paths, paths[::-1]):
        found = predict(run, *order, keys=("n",))
        assert sorted(found["n"].drop_null().to_pylist()) == [1, 2, 3]


def test_errors_of_examples_are_none_of_the_file(tmp_path: Path):
    def broken() -> Iterator[Any]:
        raise ValueError("of examples")
        yield

    line = ProgressLine(SILENT, "predict", 1)
    with pytest.raises(ValueError, match=r"^of examples$"):
        write_predictions(tmp_path / "out.parquet", cast(Learner, None), broken(), line)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_not_published(tmp_path: Path):
    (tmp_path / "out.parquet.partial").write_bytes(b"stale")
    line = ProgressLine(SILENT, "predict", 1)
    assert write_predictions(tmp_path / "out.parquet", cast(Learner, None), [], line) == 0
    assert (tmp_path / "out.parquet").read_bytes() == b""


def test_ranks_send_rows_of_a_slice_alone():
    whole = pa.table({"order": pa.array([f"order-{n}" * 10 for n in range(20_000)])})
    rows, sent = whole.slice(5000, 10), list[bytes]()
    ranks = SimpleNamespace(many=True, gathered=lambda one, what: sent.append(one) or [one, one])
    assert _of_all(rows, cast(Ranks, ranks)) == [rows, rows]
    assert len(pickle.dumps(sent)) < 10_000


@pytest.mark.slow
def test_keys_of_the_flights_are_their_columns_before_scaling():
    settings = config.load(str(ROOT / "examples" / "flights.yaml"), ["data.prefetch=0"])
    batch = next(iter(open_data(settings, keys=("departure", "distance")).evaluation))
    assert batch.keys is not None
    seconds = [at.timestamp() for at in batch.keys["departure"].to_pylist()]
    assert seconds == batch.event_times_B.tolist()
    assert min(batch.keys["distance"].to_pylist()) > 50  # miles

    with pytest.raises(DataError, match=r"'tailnum' of the flights: .*tail, "):
        open_data(settings, keys=("tailnum",))
