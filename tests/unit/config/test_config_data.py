from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

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
    read = data.evaluation.source
    assert read.features == ("user", "pair", "seen")
    assert read.num_dense == 1
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


def test_a_replay_needs_event_times_or_a_rate(file: str):
    untimed = {**SOURCE, "paths": [file], "eval_paths": [file], "time": None}
    with pytest.raises(ConfigError, match=r"data\.replay: got data\.source\.time: null"):
        opened(untimed, replay={})
    assert labels(opened(untimed, replay={"rate": 1000.0}).train) == COLUMNS["clicked"]


def test_a_replay_is_a_stream_in_order_of_time(file: str):
    data = opened({**SOURCE, "paths": [file]}, split=LATER, replay={"speed": 100.0})
    began_s = time.monotonic()
    assert labels(data.train) == [1, 0, 0]
    assert time.monotonic() - began_s >= 0.2  # from 10 s to 30 s


@pytest.mark.parametrize("wrong", [{"epochs": 2}, {"shuffle": "always"}, {"shuffle_window": 3}])
def test_a_stream_comes_once_and_in_order(file: str, wrong: dict[str, object]):
    with pytest.raises(ConfigError, match=rf"data\.{next(iter(wrong))} of a stream"):
        opened({**SOURCE, "paths": [file]}, split=LATER, replay={}, **wrong)


KAFKA = {**SOURCE, "kind": "kafka", "stream": {"servers": ["127.0.0.1:1"], "topic": "clicks"}}


def test_files_to_evaluate_on_take_the_place_of_a_split(file: str):
    both = {**SOURCE, "paths": [file], "eval_paths": [file]}
    with pytest.raises(ConfigError, match=r"Set data\.split=null\."):
        opened(both, split=LATER)
    with pytest.raises(ConfigError, match=r"got neither; .*Set one of them\."):
        opened({**both, "eval_paths": []})


@pytest.mark.parametrize(
    ("split", "side"), [("1970-01-01", "training"), ("1971-01-01", "evaluation")]
)
def test_a_split_with_nothing_on_one_side_names_it(file: str, split: str, side: str):
    with pytest.raises(DataError, match=rf"^{side} examples: got 0; .*Check the files and the spl"):
        opened({**SOURCE, "paths": [file]}, split=split)


def test_a_topic_of_a_config(file: str):
    data = opened({**KAFKA, "eval_paths": [file]}, max_examples=5)
    read = data.train.feed
    assert (read.features, read.num_dense) == (("user", "pair", "seen"), 1)
    assert (data.train.size, data.train.examples) == (5, 5)
    assert labels(data.evaluation) == COLUMNS["clicked"]
    with pytest.raises(ConfigError, match="what to evaluate on"):
        opened(KAFKA, split=LATER)
    with pytest.raises(ConfigError, match=r"data\.replay: got a stream"):
        opened({**KAFKA, "eval_paths": [file]}, replay={})
    settings = config.from_mapping({"name": "t", "data": {"source": KAFKA}})
    assert config.from_mapping(yaml.safe_load(config.to_yaml(settings))) == settings


def test_the_config_of_the_page_of_online_learning():
    page = Path(__file__).parents[3] / "docs" / "guide" / "online.md"
    text = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    settings = config.from_mapping(yaml.safe_load(text))
    assert settings.data.source.kind == "kafka" and settings.publish is not None
    assert settings.tables["default"].admission is not None


@pytest.mark.parametrize("rate", [0.25, "age"])
def test_rates_of_negatives(tmp_path: Path, rate: object):
    path = tmp_path / "sampled.parquet"
    pq.write_table(pa.table({**COLUMNS, "age": [0.25] * 6}), path)
    source = {**SOURCE, "dense": [], "paths": [str(path)], "sample_rate": rate}
    for batch in opened(source, split=LATER).train:
        assert batch.rates is not None
        assert batch.rates.tolist() == [0.25] * len(batch.labels)
    with pytest.raises((ConfigError, DataError), match=r"sample_rate|column 'age'"):
        pq.write_table(pa.table({**COLUMNS, "age": [0.0] * 6}), path)
        list(opened({**source, "sample_rate": 0.0 if rate == 0.25 else rate}, split=LATER).train)


FEATURES = {
    "user": "id",
    "page": {"kind": "id", "ids": {"kind": "vocabulary", "values": ["a", "b"]}},
    "old": {"kind": "raw", "column": "age", "ids": {"kind": "boundaries", "edges": [1, 2]}},
    "twice": {"kind": "expression", "expression": "age * 2"},
}


def test_computed_features_of_a_config(file: str):
    source = {**SOURCE, "ids": {}, "features": FEATURES, "paths": [file]}
    data = opened(source, split=LATER)
    read = data.evaluation.source
    assert (read.features, read.num_dense) == (("user", "page", "old"), 2)
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


def test_an_older_run_folder_may_name_a_setting_that_is_gone(file: str, tmp_path: Path):
    settings = config.from_mapping(
        {"name": "t", "data": {"source": {**SOURCE, "paths": [file]}, "split": LATER}}
    )
    text = config.to_yaml(settings)
    before = tmp_path / "config.yaml"
    before.write_text(text.replace("  replay: null\n", "  pace: null\n"))
    assert "pace: null" in before.read_text()
    assert config.load(before, environment={}) == settings
    before.write_text(text.replace("  replay: null\n", "  pace:\n    speed: 2.0\n"))
    with pytest.raises(ConfigError, match=r"data\.pace: got .*it is data\.replay now"):
        config.load(before, environment={})
