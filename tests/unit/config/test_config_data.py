from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal import config
from shoal.config.build import RunData, open_data
from shoal.data import RankShare
from shoal.errors import ConfigError, DataError

COLUMNS = {
    "user": [3, 1, 4, 1, 5, 9],
    "page": ["a", "b", "a", "c", "b", "a"],
    "seen": [[1], [], [2, 3], [4], [], [5, 6]],
    "age": [0.5, 1.0, 1.5, 2.0, 2.5, 3.0],
    "clicked": [0, 1, 0, 0, 1, 1],
    "second": [60, 10, 30, 20, 50, 40],
}
SOURCE = {
    "kind": "parquet",
    "ids": {
        "user": {},
        "pair": {"columns": ["user", "page"]},
        "seen": {"is_list": True, "max_length": 4},
    },
    "label": "clicked",
    "dense": ["age"],
    "time": "second",
}
LATER = "1970-01-01T00:00:40"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table(COLUMNS), path)
    return str(path)


def opened(source: dict[str, object], **data: object) -> RunData:
    settings = {"name": "t", "data": {"source": source, "batch_size": 2, **data}}
    return open_data(config.from_mapping(settings))


def labels(batches: object) -> list[float]:
    return torch.cat([batch.labels for batch in batches]).tolist()  # type: ignore[attr-defined]


def test_a_file_is_split_by_time_and_read_in_its_order(file: str):
    data = opened({**SOURCE, "paths": [file]}, split=LATER)
    assert data.features == ("user", "pair", "seen")
    assert data.num_dense == 1
    assert labels(data.train) == [1, 0, 0]
    assert labels(data.evaluation) == [1, 1, 0]
    assert [batch.ids["user"].values.tolist() for batch in data.train] == [[1, 1], [4]]


def test_split_times_may_name_their_zone(file: str):
    data = opened({**SOURCE, "paths": [file]}, split="1970-01-01T01:00:40+01:00")
    assert labels(data.train) == [1, 0, 0]


def test_files_to_evaluate_on_may_be_named(file: str):
    data = opened({**SOURCE, "paths": [file], "eval_paths": [file]})
    assert labels(data.train) == labels(data.evaluation) == COLUMNS["clicked"]


@pytest.mark.parametrize("both", [True, False])
def test_what_to_evaluate_on_must_be_said_once(file: str, both: bool):
    source = {**SOURCE, "paths": [file], **({"eval_paths": [file]} if both else {})}
    with pytest.raises(ConfigError, match=r"data\.split"):
        opened(source, split=LATER if both else None)


def test_a_split_outside_the_data_leaves_nothing_to_judge(file: str):
    with pytest.raises(DataError, match="examples"):
        opened({**SOURCE, "paths": [file]}, split="2000-01-01")


def test_csv_reads_like_parquet(tmp_path: Path, file: str):
    lines = ["user,page,seen,age,clicked,second"]
    for user, page, seen, *rest in zip(*COLUMNS.values(), strict=True):
        lines.append(",".join([str(user), page, " ".join(map(str, seen)), *map(str, rest)]))
    csv = tmp_path / "clicks.csv"
    csv.write_text("\n".join(lines) + "\n")
    parquet = opened({**SOURCE, "paths": [file]}, split=LATER)
    text = opened({**SOURCE, "kind": "csv", "paths": [str(csv)]}, split=LATER)
    for ours, theirs in zip(text.train, parquet.train, strict=True):
        assert torch.equal(ours.ids.values_N, theirs.ids.values_N)
        assert torch.equal(ours.dense, theirs.dense)


def test_max_examples_cuts_either_side(file: str):
    settings = {
        "name": "t",
        "data": {"source": {**SOURCE, "paths": [file]}, "split": LATER, "max_examples": 2},
        "eval": {"max_examples": 1},
    }
    data = open_data(config.from_mapping(settings))
    assert (data.train.examples, data.evaluation.examples) == (2, 1)
    assert labels(data.train) == [1, 0]


def test_epochs_repeat_and_shuffle_as_asked(file: str):
    source = {**SOURCE, "paths": [file]}
    twice = opened(source, split=LATER, epochs=2)
    assert labels(twice.train) == [1, 0, 0, 1, 0, 0]
    replayed = opened(source, split=LATER, epochs=2, shuffle="replays")
    assert labels(replayed.train)[:3] == [1, 0, 0]
    assert sorted(labels(replayed.train)[3:]) == [0, 0, 1]


def test_made_up_evaluation_goes_on_where_training_ends():
    source = {"kind": "synthetic", "examples": 100, "eval_examples": 50}
    data = opened(source)
    longer = opened({**source, "examples": 150})
    assert labels(data.train) + labels(data.evaluation) == labels(longer.train)


@pytest.mark.slow
def test_flights_split_at_november_unless_told():
    default = opened({"kind": "flights"})
    told = opened({"kind": "flights"}, split="2013-11-01T00:00:00-04:00")
    assert default.train.examples == told.train.examples > 250_000
    assert default.evaluation.examples == told.evaluation.examples > 50_000


def test_each_rank_has_its_share_of_every_batch(file: str):
    settings = config.from_mapping(
        {
            "name": "t",
            "data": {"source": {**SOURCE, "paths": [file]}, "split": LATER, "batch_size": 2},
        }
    )
    shares = [open_data(settings, RankShare(rank, 2)) for rank in range(2)]
    per_batch = [[batch.labels.tolist() for batch in data.train] for data in shares]
    assert per_batch == [[[1], []], [[0], [0]]]
    assert [len(data.evaluation) for data in shares] == [1, 1]
    assert labels(shares[0].evaluation) + labels(shares[1].evaluation) == [1, 1, 0]


NORMED = {"kind": "deepfm", "hidden": [4], "batch_norm": True}


@pytest.mark.parametrize(
    ("last_batch", "model", "sizes"),
    [
        ("merge", NORMED, [5]),
        ("drop", NORMED, [4]),
        ("drop", {**NORMED, "batch_norm": False}, [4, 1]),
    ],
)
def test_batch_normalisation_gets_no_batch_of_one(
    file: str, last_batch: str, model: dict[str, object], sizes: list[int]
):
    source = {**SOURCE, "paths": [file], "eval_paths": [file]}
    data = {"source": source, "batch_size": 4, "max_examples": 5, "last_batch": last_batch}
    settings = {"name": "t", "data": data, "model": model, "eval": {"batch_size": 5}}
    opened = open_data(config.from_mapping(settings))
    assert [batch.labels.numel() for batch in opened.train] == sizes
    assert [batch.labels.numel() for batch in opened.evaluation] == [5, 1]


def test_batches_of_one_example_are_refused_with_batch_normalisation(file: str):
    data = {"source": {**SOURCE, "paths": [file], "eval_paths": [file]}, "batch_size": 1}
    settings = config.from_mapping({"name": "t", "data": data, "model": NORMED})
    with pytest.raises(ConfigError, match=r"data\.batch_size with model\.batch_norm: got 1"):
        open_data(settings)


def test_a_pace_needs_event_times(file: str):
    untimed = {**SOURCE, "paths": [file], "eval_paths": [file], "time": None}
    with pytest.raises(ConfigError, match=r"data\.pace: got data\.source\.time: null"):
        opened(untimed, pace={})


def test_a_pace_holds_batches_back(file: str, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    monkeypatch.setattr("shoal.data.loader.time.sleep", waits.append)
    data = opened({**SOURCE, "paths": [file]}, split=LATER, pace={"speed": 0.001})
    assert len(list(data.train)) == len(waits) == 2
    assert waits == pytest.approx([10_000, 20_000], rel=0.01)  # 20 s and 30 s follow 10 s


FEATURES = {
    "user": "id",
    "page": {"kind": "id", "ids": {"kind": "vocabulary", "values": ["a", "b"]}},
    "old": {"kind": "raw", "column": "age", "ids": {"kind": "boundaries", "edges": [1, 2]}},
    "twice": {"kind": "expression", "expression": "age * 2"},
}


def test_computed_features_of_a_config(file: str):
    source = {**SOURCE, "ids": {}, "features": FEATURES, "paths": [file]}
    data = opened(source, split=LATER)
    assert (data.features, data.num_dense) == (("user", "page", "old"), 2)
    first = next(iter(data.train))
    assert first.ids.to_lists() == {"user": [[1], [1]], "page": [[1], [2]], "old": [[1], [2]]}
    assert first.dense.tolist() == [[1.0, 2.0], [2.0, 4.0]]
    settings = config.from_mapping({"name": "t", "data": {"source": source, "split": LATER}})
    again = type(settings.data)(**settings.data.model_dump())
    assert again == settings.data


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"kind": "idd"}, r"kind of feature 'f'.*'idd'.*id"),
        ({"kind": "id", "colum": "x"}, r"feature 'f' \(id\).*'colum'.*column"),
        ({"kind": "id", "defalt": "x"}, r"'defalt'.*default"),
        ({"kind": "id", "ids": {"kind": "vocab"}}, "vocabulary"),
        ({"kind": "id", "ids": {"kind": "hash"}}, "ids hash.*size"),
        ({"kind": "expression", "expression": "age +"}, r"expression 'age \+'"),
        ({"kind": "raw", "width": "x"}, "width of feature 'f'"),
        ({"kind": "id", "sequence": {"delimeter": ";"}}, "'delimeter'.*delimiter"),
        ({"kind": "group", "lenght": 3}, "group 'f'.*'lenght'.*length"),
        ({"kind": "id", "column": "feature:f"}, "f of f"),
        (None, "feature 'f'.*None"),
    ],
)
def test_features_that_are_wrong(file: str, feature: object, message: str):
    source = {**SOURCE, "features": {"f": feature}, "paths": [file]}
    with pytest.raises(ConfigError, match=message):
        opened(source, split=LATER)
