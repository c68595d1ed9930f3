"""Bad rows and files: named, counted and left out, up to a limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal.data import (
    CsvSource,
    IdFeature,
    Loader,
    ParquetSource,
    Quarantine,
    RankShare,
    Recipe,
    split_by_time,
)
from shoal.data.quarantine import BadRow
from shoal.errors import ConfigError, DataError

RECIPE = Recipe(
    ids=(IdFeature(name="u"), IdFeature(name="seen", is_list=True, max_length=2)),
    label="y",
    dense=("x",),
    time="at",
)
SIZE = 12
COLUMNS: dict[str, pa.Array] = {
    "u": pa.array(range(SIZE)),
    "seen": pa.array([[n] for n in range(SIZE)]),
    "y": pa.array([float(n % 2) for n in range(SIZE)]),
    "x": pa.array([n / 2 for n in range(SIZE)]),
    "at": pa.array(range(100, 100 + SIZE)),
}


def parquet(path: Path, changes: dict[str, dict[int, Any]], *, group: int = 4) -> Path:
    """Good rows but for some values, in row groups of 4."""
    made = {}
    for name, column in COLUMNS.items():
        values = column.to_pylist()
        for row, value in changes.get(name, {}).items():
            values[row] = value
        made[name] = pa.array(values, column.type)
    pq.write_table(pa.table(made), path, row_group_size=group)
    return path


def lines_of(quarantine: Quarantine) -> list[dict[str, Any]]:
    return [json.loads(line) for line in quarantine.path.read_text().splitlines()]


BAD = {"u": {1: None}, "seen": {2: [1, 2, 3]}, "x": {6: float("inf")}, "y": {9: 7.0, 10: None}}


def test_bad_rows_are_left_out_named_and_counted(tmp_path: Path):
    path = parquet(tmp_path / "rows.parquet", BAD)
    quarantine = Quarantine(tmp_path / "out" / "bad.jsonl")
    source = ParquetSource([path], RECIPE, quarantine=quarantine)
    assert len(source) == SIZE
    # In any order, over row groups, some of them twice.
    batch = source.take(torch.tensor([11, 1, 6, 3, 3, 0, 10, 5]))
    assert batch.ids.to_lists()["u"] == [[11], [3], [3], [0], [5]]
    assert batch.labels.tolist() == [1, 1, 1, 0, 1]
    assert quarantine.rows == 3
    seen = [own for batch in Loader(source, 5) for own in batch.ids.to_lists()["u"]]
    assert seen == [[n] for n in (0, 3, 4, 5, 7, 8, 11)]
    assert (quarantine.rows, quarantine.files) == (5, 0)
    lines = {line["row"]: line for line in lines_of(quarantine)}
    assert sorted(lines) == [1, 2, 6, 9, 10]
    assert {line["file"] for line in lines.values()} == {str(path)}
    for row, words in {
        1: "id column 'u' in row 1 of",
        2: "list column 'seen' in row 2",
        6: "column 'x' in row 6",
        9: "column 'y' in row 9 of",
        10: "column 'y' in row 10",
    }.items():
        assert words in lines[row]["reason"]
    assert lines[9]["values"] == {"u": "9", "seen": "[9]", "y": "7.0", "x": "4.5", "at": "109"}
    assert lines[10]["values"]["y"] is None


def test_a_row_counts_once_in_all_epochs_and_one_more_than_allowed_ends_training(tmp_path: Path):
    path = parquet(tmp_path / "rows.parquet", BAD)
    for most in (5, 4):
        quarantine = Quarantine(tmp_path / f"{most}.jsonl", most_rows=most)
        source = ParquetSource([path], RECIPE, cached_groups=1, quarantine=quarantine)
        rows = torch.arange(SIZE)
        if most == 5:
            assert [source.take(rows).labels.numel() for _ in range(3)] == [7, 7, 7]
        else:
            with pytest.raises(DataError, match=r"bad rows of the data: got 5.*most_rows"):
                source.take(rows)
        assert len(lines_of(quarantine)) == 5


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("column", ["y", "at"])
def test_one_more_than_allowed_in_a_single_group_names_the_limit(
    most: int, column: str, tmp_path: Path
):
    path = parquet(tmp_path / "rows.parquet", {column: dict.fromkeys((1, 5, 6, 7), -3)}, group=12)
    quarantine = Quarantine(tmp_path / "bad.jsonl", most_rows=most)
    source = ParquetSource([path], RECIPE, quarantine=quarantine)
    last = (1, 5, 6)[most]
    words = rf"bad rows of the data: got {most + 1}, the last: .*column '{column}' in row {last} of"
    with pytest.raises(DataError, match=rf"{words}.*{most} \(data\.quarantine\.most_rows\)"):
        source.times() if column == "at" else source.take(torch.tensor([0]))
    assert [line["row"] for line in lines_of(quarantine)] == [1, 5, 6][: most + 1]
    assert quarantine.rows == most + 1


def test_a_group_of_bad_rows_only_is_an_empty_batch(tmp_path: Path):
    path = parquet(tmp_path / "rows.parquet", {"x": dict.fromkeys(range(4), float("nan"))})
    quarantine = Quarantine(tmp_path / "bad.jsonl")
    source = ParquetSource([path], RECIPE, quarantine=quarantine)
    sizes = [batch.labels.numel() for batch in Loader(source, 4)]
    assert (sizes, quarantine.rows) == ([0, 4, 4], 4)


@pytest.mark.parametrize(
    ("world_size", "least", "sizes"),
    [
        (1, 1, [1, 2, 4]),
        (1, 2, [0, 2, 4]),
        (2, 4, [0, 2, 2]),  # workers, each by itself
        (2, 2, [1, 2, 2]),  # together they have enough
    ],
)
def test_a_share_that_is_left_too_few_rows_is_empty(
    world_size: int, least: int, sizes: list[int], tmp_path: Path
):
    bad = {"x": dict.fromkeys((1, 2, 3, 6, 7), float("nan"))}
    path = parquet(tmp_path / "rows.parquet", bad)
    source = ParquetSource([path], RECIPE, quarantine=Quarantine(tmp_path / "bad.jsonl"))
    loader = Loader(source, 4, least=least, share=RankShare(0, world_size))
    batches = list(loader)
    assert [len(batch.labels) for batch in batches] == sizes
    assert [batch.position for batch in batches] == [4, 8, 12]
    assert loader.emptied == (0 if sizes[0] else 1)


def test_a_bad_time_counts_as_0_and_its_row_is_left_out_where_it_is_taken(tmp_path: Path):
    path = parquet(tmp_path / "rows.parquet", {"at": {5: None, 7: -3}})
    quarantine = Quarantine(tmp_path / "bad.jsonl")
    source = ParquetSource([path], RECIPE, quarantine=quarantine)
    assert source.times()[4:8].tolist() == [104, 0, 106, 0]
    assert quarantine.rows == 0
    before, after = split_by_time(source, 106)
    assert before.take(torch.arange(len(before))).ids.to_lists()["u"] == [[n] for n in range(5)]
    assert quarantine.rows == 2
    assert after.take(torch.arange(len(after))).labels.numel() == 5  # 6, 8 and on


def test_ranks_count_the_rows_of_their_shares(tmp_path: Path):
    path = parquet(tmp_path / "rows.parquet", BAD)
    counts = []
    for rank in range(2):
        quarantine = Quarantine(tmp_path / "bad.jsonl", rank=rank)
        source = ParquetSource([path], RECIPE, quarantine=quarantine)
        share = RankShare(rank, 2)
        assert len(list(Loader(source, 6, share=share))) == 2
        counts.append(quarantine.rows)
        assert len(lines_of(quarantine)) == quarantine.rows
    assert counts == [3, 2]  # rows 0..2 and 6..8; 3..5 and 9..11
    assert (tmp_path / "bad.rank1.jsonl").is_file()


def damage(path: Path, group: int, column: str = "u") -> None:
    """Overwrite the pages of a column of a row group."""
    at = [*COLUMNS].index(column)
    chunk = pq.ParquetFile(path).metadata.row_group(group).column(at)
    data = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)


def test_a_damaged_row_group_is_left_out(tmp_path: Path):
    path = parquet(tmp_path / "rows.parquet", {})
    damage(path, 1)
    with pytest.raises(DataError, match="data file"):
        ParquetSource([path], RECIPE).take(torch.arange(SIZE))
    quarantine = Quarantine(tmp_path / "bad.jsonl")
    source = ParquetSource([path], RECIPE, quarantine=quarantine)
    batch = source.take(torch.arange(SIZE))
    assert batch.ids.to_lists()["u"] == [[n] for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert quarantine.rows == 4
    (line,) = lines_of(quarantine)
    assert line["rows"] == [4, 8]
    with pytest.raises(DataError, match="bad rows of the data: got 4"):
        ParquetSource(
            [path], RECIPE, quarantine=Quarantine(tmp_path / "few.jsonl", most_rows=3)
        ).take(torch.arange(SIZE))


@pytest.mark.parametrize("by_time", [False, True])
def test_the_rank_that_finds_a_damaged_row_group_names_it(
    by_time: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = parquet(tmp_path / "rows.parquet", {})
    damage(path, 1)
    own = [Quarantine(tmp_path / "bad.jsonl", rank=rank) for rank in range(2)]
    for rank, quarantine in enumerate(own):
        source = ParquetSource([path], RECIPE, quarantine=quarantine)
        if by_time:  # every rank reads all of that column
            damage(path, 1, "at")
            source.times()
        assert len(list(Loader(source, 8, share=RankShare(rank, 2)))) == 2  # 4..7 are rank 1's
    finder = own[0] if by_time else own[1]
    (line,) = lines_of(finder)
    assert line["rows"] == [4, 8]
    assert [quarantine.rows for quarantine in own] == ([4, 4] if by_time else [0, 4])
    assert [quarantine.path.exists() for quarantine in own] == [by_time, not by_time]
    assert [record.message for record in caplog.records if str(finder.path) in record.message]


def test_a_rank_logs_the_first_row_that_it_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    quarantine = Quarantine(tmp_path / "bad.jsonl", rank=1)
    quarantine.row(tmp_path / "a", 0, BadRow("found by all"), alike=True)
    quarantine.row(tmp_path / "a", 1, BadRow("found here"))
    quarantine.row(tmp_path / "a", 2, BadRow("found later"))
    (record,) = caplog.records
    assert "found here" in record.message


def table_without(name: str) -> pa.Table:
    return pa.table({key: column for key, column in COLUMNS.items() if key != name})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "data file"),
        ("truncated", "data file"),
        ("no column", "column 'x' of .*no such column"),
        ("other type", "type of column 'u' of .*double"),
        ("empty", "examples of .*got none"),
    ],
)
def test_a_bad_file_is_an_error_or_left_out(kind: str, words: str, tmp_path: Path):
    good, bad = parquet(tmp_path / "good.parquet", {}), tmp_path / "bad.parquet"
    if kind == "truncated":
        bad.write_bytes(good.read_bytes()[:-20])
    elif kind == "no column":
        pq.write_table(table_without("x"), bad)
    elif kind == "other type":
        pq.write_table(table_without("u").append_column("u", pa.array([0.5] * SIZE)), bad)
    elif kind == "empty":
        pq.write_table(pa.table(COLUMNS).slice(0, 0), bad)
    strict = Quarantine(tmp_path / "strict.jsonl")
    with pytest.raises(DataError, match=words):
        ParquetSource([good, bad], RECIPE, quarantine=strict)
    quarantine = Quarantine(tmp_path / "bad.jsonl", most_files=1)
    source = ParquetSource([bad, good], RECIPE, quarantine=quarantine)
    assert (len(source), quarantine.files, quarantine.rows) == (SIZE, 1, 0)
    assert source.take(torch.arange(SIZE)).labels.numel() == SIZE
    (line,) = lines_of(quarantine)
    assert line["file"] == str(bad)
    with pytest.raises(DataError, match=r"got 2, the last: data file .*x.*most_files"):
        ParquetSource([good, bad, tmp_path / "x"], RECIPE, quarantine=quarantine)
    with pytest.raises(DataError, match=words):  # nothing is left
        ParquetSource([bad], RECIPE, quarantine=Quarantine(tmp_path / "a", most_files=9))


def test_drift_of_columns_that_could_be_read_is_refused_where_that_is_wanted(tmp_path: Path):
    first, new, typed = (tmp_path / f"{name}.parquet" for name in ("first", "new", "typed"))
    parquet(first, {})
    pq.write_table(pa.table({**COLUMNS, "extra": COLUMNS["u"]}), new)
    text = COLUMNS["u"].cast(pa.string())
    pq.write_table(pa.table({**COLUMNS, "u": text}), typed)
    free = Quarantine(tmp_path / "free", most_files=2)
    assert len(ParquetSource([first, new, typed], RECIPE, quarantine=free)) == 3 * SIZE
    same = Quarantine(tmp_path / "same", most_files=2, same_columns=True)
    assert len(ParquetSource([first, new, typed], RECIPE, quarantine=same)) == SIZE
    reasons = [line["reason"] for line in lines_of(same)]
    assert "'extra': int64, not missing" in reasons[0]
    assert "'u': string, not int64" in reasons[1]


def csv(path: Path, rows: list[bytes], header: bytes = b"u,seen,y,x,at") -> Path:
    path.write_bytes(b"\n".join([header, *rows, b""]))
    return path


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("path", [".", "", "/", "here"])
def test_a_folder_is_no_quarantine(
    path: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"path of a quarantine: got the folder .*bad\.jsonl"):
        Quarantine(path, rank=rank)


def test_bad_rows_of_csv(tmp_path: Path):
    rows = [
        b"1,5,0,0.5,7",
        b"2,5,0,0.5",  # a value is missing
        b"3,5,0,0.5,8",
        b"4,5,0,word,8",
        b"caf\xe9,5,0,0.5,8",  # no UTF-8
        b"6,5,0,0.5,8,9,9",
        b"7,5 6 7,1,1,9",
        b"8,5,0,0.5,-1",
        b"9,5 6,1,1,9",
    ]
    path = csv(tmp_path / "rows.csv", rows)
    for unusable in (None, Quarantine(tmp_path / "few.jsonl", most_rows=5)):
        with pytest.raises(DataError):
            CsvSource((path,), RECIPE, unusable)
    quarantine = Quarantine(tmp_path / "bad.jsonl", most_rows=6)
    source = CsvSource((path,), RECIPE, quarantine)
    assert source.take(torch.arange(len(source))).ids.to_lists()["u"] == [[1], [3], [9]]
    assert source.times().tolist() == [7, 8, 9]
    lines = {line["row"]: line for line in lines_of(quarantine)}
    assert sorted(lines) == [1, 3, 4, 5, 6, 7]
    assert lines[1]["reason"] == "4 values, not 5"
    assert lines[5]["values"] == {"line": "6,5,0,0.5,8,9,9"}
    assert "column 'x' in row 3 of" in lines[3]["reason"]
    assert "text in row 4 of" in lines[4]["reason"]
    assert "UTF-8" in lines[4]["reason"]
    assert lines[4]["values"] == {"u": "caf\\xe9", "seen": "5", "y": "0", "x": "0.5", "at": "8"}
    assert "column 'at' in row 7 of" in lines[7]["reason"]
    other = Quarantine(tmp_path / "bad.jsonl", rank=1)
    assert len(CsvSource((path,), RECIPE, other)) == 3
    assert other.rows == 6
    assert not other.path.exists()  # rank 0 wrote what all ranks find


SPELLED = {"seconds": "7", "plain": "1970-01-01 00:00:07", "offset": "1970-01-01 02:00:07+02:00"}


@pytest.mark.parametrize("first", SPELLED)
def test_times_of_a_csv_are_spelled_alike(first: str, tmp_path: Path):
    rows = [b"1,5,0,word,8", *(b"%d,5,0,0.5,%s" % (n, SPELLED[first].encode()) for n in (2, 3))]
    rows[2:2] = [b"9,5,0,0.5,%s" % SPELLED[kind].encode() for kind in SPELLED if kind != first]
    path = csv(tmp_path / "rows.csv", rows)
    quarantine = Quarantine(tmp_path / "bad.jsonl")
    source = CsvSource((path,), RECIPE, quarantine)
    assert source.times().tolist() == [7, 7]
    assert source.take(torch.arange(2)).ids.to_lists()["u"] == [[2], [3]]
    lines = {line["row"]: line["reason"] for line in lines_of(quarantine)}
    assert sorted(lines) == [0, 2, 3]
    for row in (2, 3):
        assert f"column 'at' in row {row} of" in lines[row]
        assert "with an offset in all or in none" in lines[row]


@pytest.mark.parametrize(
    ("stray", "values"),
    [
        (b'"2,5,0,0.5,8', 1),
        (b'2,5,0,0.5,"8', 5),  # the row has as many values as it should
    ],
)
def test_rows_behind_a_stray_quote_count(stray: bytes, values: int, tmp_path: Path):
    good = b"3,5,0,0.5,8"
    # A quote at the end of a value ends the span: rows 1 to 4.
    rows = [b"1,5,0,0.5,7", stray, good, good, b'9"', b"word,5,0,0.5", b"7,5 6,1,1,9", b"8,,7,1,1"]
    path = csv(tmp_path / "rows.csv", rows)
    quarantine = Quarantine(tmp_path / "bad.jsonl", most_rows=6)
    source = CsvSource((path,), RECIPE, quarantine)
    assert source.take(torch.arange(len(source))).ids.to_lists()["u"] == [[1], [7]]
    span, uneven, last = lines_of(quarantine)
    assert span["rows"] == [1, 5]
    assert ("1 values, not 5" in span["reason"]) == (values == 1)
    assert (uneven["row"], uneven["reason"]) == (5, "4 values, not 5")
    assert last["row"] == 7
    assert "column 'y' in row 7 of" in last["reason"]
    assert quarantine.rows == 6
    with pytest.raises(DataError, match="bad rows of the data: got 4"):
        CsvSource((path,), RECIPE, Quarantine(tmp_path / "few.jsonl", most_rows=3))


def test_a_stray_quote_that_swallows_the_file_is_not_one_row(tmp_path: Path):
    rows = [b"%s%d,5,0,0.5,7" % (b'"' if n == 3 else b"", n) for n in range(1000)]
    path = csv(tmp_path / "rows.csv", rows)
    quarantine = Quarantine(tmp_path / "bad.jsonl", most_rows=997)
    assert len(CsvSource((path,), RECIPE, quarantine)) == 3
    assert [line["rows"] for line in lines_of(quarantine)] == [[3, 1000]]
    with pytest.raises(DataError, match="bad rows of the data: got 997"):
        CsvSource((path,), RECIPE, Quarantine(tmp_path / "few.jsonl", most_rows=996))


def test_bad_files_of_csv(tmp_path: Path):
    good = csv(tmp_path / "good.csv", [b"1,5,0,0.5,7"])
    bad = csv(tmp_path / "bad.csv", [b"1,5,0,0.5"], b"u,seen,y,x")
    more = csv(tmp_path / "more.csv", [b"1,5,0,0.5,7,8"], b"u,seen,y,x,at,z")
    quarantine = Quarantine(tmp_path / "bad.jsonl", most_files=1)
    assert len(CsvSource((good, bad, more), RECIPE, quarantine)) == 2
    strict = Quarantine(tmp_path / "strict.jsonl", most_files=2, same_columns=True)
    assert len(CsvSource((good, bad, more), RECIPE, strict)) == 1
    assert strict.files == 2
    with pytest.raises(DataError, match=r"column 'at' of .*bad\.csv"):
        CsvSource((good, bad), RECIPE, Quarantine(tmp_path / "none.jsonl"))
