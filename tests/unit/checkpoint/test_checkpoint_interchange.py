"""Foreign rows in and out: what is read, what is refused, and that nothing is lost on the way."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq
from torch import Tensor, nn

from shoal.checkpoint.formats.dumps import open_embeddings, open_npz, open_text
from shoal.checkpoint.formats.foreign import CollectedRows, Entries, ForeignSource, form_of
from shoal.checkpoint.formats.monolith import masked_crc32c, open_monolith, read_records
from shoal.checkpoint.formats.parquet import open_parquet, write_parquet
from shoal.checkpoint.row_files import chunk_of as chunk_of_columns
from shoal.errors import DataError, UnknownName
from shoal.rules.optimizers import SGD, Adagrad
from shoal.table.shard import HASHES
from shoal.table.spec import Segment, TableSpec
from support.foreign_rows import NAMES, chunk_of, frame, in_order, rows_of, same

I64 = torch.iinfo(torch.int64)


def dump_of(entry_id: int, weights: list[float], last_seen_s: int | None = 7) -> bytes:
    """An EntryDump as Monolith writes it, with an optimizer dump that is skipped."""
    record = b"\x09" + struct.pack("<q", entry_id)
    record += b"".join(b"\x15" + struct.pack("<f", weight) for weight in weights)
    record += b"\x1a\x09" + b"\x0a\x07\x0a\x05\x0d" + struct.pack("<f", 0.5)
    if last_seen_s is None:
        return record
    seen = b""
    while last_seen_s >= 0x80:
        seen, last_seen_s = seen + bytes([last_seen_s & 0x7F | 0x80]), last_seen_s >> 7
    return record + b"\x20" + seen + bytes([last_seen_s])


def meta_of(table: str, count: int) -> bytes:
    return b"\x0a" + bytes([len(table)]) + table.encode() + b"\x10" + bytes([count])


def snappy(stream: bytes, block: int = 100) -> bytes:
    codec = pa.Codec("snappy")
    parts = [
        codec.compress(stream[at : at + block], asbytes=True) for at in range(0, len(stream), block)
    ]
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def all_of(source: ForeignSource, name: str) -> Entries:
    parts = [entries for table, entries in source.entries(frozenset({name})) if table == name]

    def joined(field: str) -> Tensor | None:
        values = [getattr(part, field) for part in parts]
        return None if values[0] is None else torch.cat(values)

    return Entries(**{field: joined(field) for field in NAMES})


# --- TFRecord


def test_checksums_are_those_of_the_castagnoli_polynomial():
    # RFC 3720's vectors, before the mask.
    def unmasked(data: bytes) -> int:
        rotated = (masked_crc32c([data])[0] - 0xA282EAD8) & 0xFFFFFFFF
        return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF

    assert unmasked(bytes(32)) == 0x8A9136AA
    assert unmasked(b"\xff" * 32) == 0x62A8AB43
    assert unmasked(bytes(range(32))) == 0x46DD794E
    assert unmasked(b"123456789") == 0xE3069283


PACKED = {
    "plain": lambda stream: stream,
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "snappy": snappy,
}


@pytest.mark.parametrize("packing", PACKED)
def test_records_come_back(tmp_path: Path, packing: str):
    records = [bytes([n % 251]) * (n % 90) for n in range(1000)]
    file = tmp_path / "records"
    file.write_bytes(PACKED[packing](b"".join(frame(record) for record in records)))
    batches = list(read_records(file, many=300))
    assert [len(batch) for batch in batches] == [300, 300, 300, 100]
    assert [record for batch in batches for record in batch] == records


def test_a_flipped_byte_or_a_cut_of_records_is_refused(tmp_path: Path):
    stream = frame(b"first") + frame(b"second")
    file = tmp_path / "records"
    for at in range(len(stream)):
        file.write_bytes(stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :])
        with pytest.raises(DataError, match=str(file)):
            list(read_records(file))
    for end in range(1, len(stream)):
        file.write_bytes(stream[:end])
        if end != len(frame(b"first")):
            with pytest.raises(DataError, match=str(file)):
                list(read_records(file))


@pytest.mark.parametrize("packing", ["zlib", "gzip", "snappy"])
def test_a_cut_of_compressed_records_is_refused(tmp_path: Path, packing: str):
    stream = PACKED[packing](b"".join(frame(bytes([n]) * 40) for n in range(50)))
    file = tmp_path / "records"
    file.write_bytes(stream[: len(stream) // 2])
    with pytest.raises(DataError, match=str(file)):
        list(read_records(file))


# --- Monolith's dumps


def test_a_dump_of_one_table(tmp_path: Path):
    ids = [0, -1, I64.min, I64.max, 1 << 48]
    for shard, some in enumerate((ids[:2], ids[2:])):
        records = b"".join(frame(dump_of(n, [1.5, -float(shard), 3.0], 300 + shard)) for n in some)
        (tmp_path / f"table-{shard:05d}-of-00002").write_bytes(records)
    for path in (tmp_path, tmp_path / "table", tmp_path / "table-00001-of-00002"):
        source = open_monolith(path, "user")
        assert [(table.name, table.dim) for table in source.tables] == [("user", 3)]
    found = all_of(source, "user")
    assert found.ids.tolist() == ids
    assert found.weights.tolist() == [[1.5, -0.0, 3.0]] * 2 + [[1.5, -1.0, 3.0]] * 3
    assert found.last_seen_s is not None
    assert found.last_seen_s.tolist() == [300, 300, 301, 301, 301]


def write_two_tables(folder: Path) -> None:
    for shard in range(2):
        users = [dump_of(shard * 10 + n, [float(n), 1.0]) for n in range(3)]
        items = [dump_of(shard * 10 + n, [float(n)], None) for n in range(shard)]
        stream = b"".join(frame(record) for record in (*users, *items))
        meta = frame(meta_of("user", 3)) + frame(meta_of("none", 0)) + frame(meta_of("item", shard))
        (folder / f"all-{shard:05d}-of-00002").write_bytes(snappy(stream))
        (folder / f"all.meta-{shard:05d}-of-00002").write_bytes(meta)


def test_a_dump_of_several_tables(tmp_path: Path):
    write_two_tables(tmp_path)
    source = open_monolith(tmp_path / "all", None)
    assert [(table.name, table.dim) for table in source.tables] == [("user", 2), ("item", 1)]
    assert all_of(source, "user").ids.tolist() == [0, 1, 2, 10, 11, 12]
    assert all_of(source, "item").ids.tolist() == [10]
    assert {name for name, _ in source.entries(frozenset({"item"}))} == {"item"}


def test_dumps_that_are_not_whole_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="BASENAME"):
        open_monolith(tmp_path, "user")
    write_two_tables(tmp_path)
    (tmp_path / "all.meta-00001-of-00002").rename(tmp_path / "kept")
    with pytest.raises(DataError, match=r"all.meta-00001-of-00002: got nothing"):
        open_monolith(tmp_path, None)
    (tmp_path / "kept").rename(tmp_path / "all.meta-00001-of-00002")
    (tmp_path / "all.meta-00001-of-00002").write_bytes(frame(meta_of("user", 3)))
    with pytest.raises(DataError, match="more records than its meta file"):
        all_of(open_monolith(tmp_path, None), "user")
    (tmp_path / "all.meta-00001-of-00002").write_bytes(
        frame(meta_of("user", 3)) + frame(meta_of("item", 5))
    )
    with pytest.raises(DataError, match="fewer records than its meta file"):
        all_of(open_monolith(tmp_path, None), "user")
    (tmp_path / "all-00000-of-00002").unlink()
    with pytest.raises(DataError, match=r"files \[1\] of 2"):
        open_monolith(tmp_path, None)


def test_records_that_are_no_entries_are_refused(tmp_path: Path):
    file = tmp_path / "table-00000-of-00001"
    file.write_bytes(frame(b"\x15\x00\x00\x00\x00"))
    with pytest.raises(DataError, match="no id"):
        open_monolith(file, "user")
    file.write_bytes(frame(dump_of(1, [1.0])) + frame(dump_of(2, [1.0, 2.0])))
    with pytest.raises(DataError, match="vectors of 1 and 2 columns"):
        all_of(open_monolith(file, "user"), "user")
    with pytest.raises(DataError, match="Name the table"):
        open_monolith(file, None)


# --- plain dumps


@pytest.mark.parametrize("between", [",", "\t", " ", ";"])
@pytest.mark.parametrize("header", ["", "id,a,b\n"])
def test_lines(tmp_path: Path, between: str, header: str):
    file = tmp_path / "rows.txt"
    lines = ["5,0.5,-1e-3", "-9223372036854775808,nan,2", "9223372036854775807,3,inf"]
    text = header + "\n".join(lines) + "\n"
    file.write_text(text.replace(",", between))
    source = open_text(file, "t")
    assert source.tables[0].dim == 2
    found = all_of(source, "t")
    assert found.ids.tolist() == [5, I64.min, I64.max]
    expected = torch.tensor([[0.5, -1e-3], [torch.nan, 2], [3, torch.inf]], dtype=torch.float64)
    assert torch.equal(found.weights.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize("line", ["6,1.0", "6,1.0,2.0,3.0", "x,1.0,2.0", "6,1.0,y", "6,,1.0"])
def test_lines_that_differ_are_refused(tmp_path: Path, line: str):
    file = tmp_path / "rows.txt"
    file.write_text(f"5,0.5,1.0\n{line}\n")
    with pytest.raises(DataError, match=r"rows\.txt"):
        all_of(open_text(file, "t"), "t")


def test_npz(tmp_path: Path):
    file = tmp_path / "rows.npz"
    ids = np.array([4, -4, 1 << 40])
    np.savez(file, ids=ids, vectors=np.arange(6, dtype=np.float16).reshape(3, 2))
    found = all_of(open_npz(file, "t"), "t")
    assert found.ids.tolist() == ids.tolist()
    assert found.weights.tolist() == [[0, 1], [2, 3], [4, 5]]
    np.savez(file, ids=ids, other=ids, vectors=np.zeros((3, 2)))
    with pytest.raises(DataError, match=r"other int64\[3\]"):
        open_npz(file, "t")
    file.write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"rows\.npz"):
        open_npz(file, "t")


# --- torch


def test_embeddings_of_a_state_dict(tmp_path: Path):
    model = nn.ModuleDict({"user": nn.Embedding(5, 3), "item": nn.EmbeddingBag(4, 2)})
    bags = {f"embedding_bags.{name}.weight": part.weight for name, part in model.items()}
    file = tmp_path / "model.pt"
    for saved in (model.state_dict(), {"epoch": 3, "model": bags}):
        torch.save(saved, file)
        source = open_embeddings(file, {"item": None, "people": "user.weight"})
        assert [(one.name, one.dim) for one in source.tables] == [("item", 2), ("people", 3)]
        found = all_of(source, "people")
        assert found.ids.tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(found.weights, model["user"].weight)
    with pytest.raises(UnknownName, match=r"embedding_bags\.user\.weight"):
        open_embeddings(file, {"users": None})
    torch.save({"weight": torch.ones(2, 2)}, file)
    assert all_of(open_embeddings(file, {"any": None}), "any").ids.tolist() == [0, 1]


def test_a_file_that_would_run_code_is_refused(tmp_path: Path):
    file = tmp_path / "model.pt"
    torch.save(nn.Embedding(2, 2), file)
    with pytest.raises(DataError, match=r"torch\.save"):
        open_embeddings(file, {"t": None})
    file.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"model\.pt"):
        open_embeddings(file, {"t": None})


# --- Parquet


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("optimizer", [SGD(), Adagrad()], ids=["no_state", "state"])
def test_parquet_round_trip(tmp_path: Path, dtype: str, optimizer: SGD | Adagrad):
    spec = TableSpec(name="t", segments=(Segment(dim=3, optimizer=optimizer),), dtype=dtype)
    form = form_of("c", spec)
    chunk = chunk_of(1000, 3, spec.state_width, getattr(torch, dtype))
    none = chunk_of(0, 3, spec.state_width)
    assert write_parquet(tmp_path / "c.t", form.table, [chunk.columns, none.columns]) == 1000
    source = open_parquet(tmp_path / "c.t")
    assert source.tables[0].saved == form.table
    assert source.tables[0].has_state
    with CollectedRows([form]) as collected:
        for _, entries in source.entries(frozenset({"t"})):
            collected.add(0, entries)
        collected.finish()
        found = chunk_of_columns("t", collected.read(0, 0, HASHES))
        assert same(found, in_order(chunk))


def test_parquet_is_what_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.checkpoint.formats.parquet._FILE_BYTES", 20_000)
    spec = TableSpec(name="t", segments=(Segment(dim=3),), dtype="bfloat16")
    chunk = chunk_of(1000, 3, 3, torch.bfloat16)
    pieces = [rows_of(chunk, slice(start, start + 100)).columns for start in range(0, 1000, 100)]
    write_parquet(tmp_path / "t", form_of("c", spec).table, pieces)
    assert len(list((tmp_path / "t").iterdir())) == 2
    read = pq.read_table(tmp_path / "t")
    assert str(read.schema.field("weights").type) == "list<element: float>"
    assert read.column_names == ["id", "weights", "state", "version", "last_seen_s", "count"]
    assert read["id"].to_pylist() == chunk.ids.tolist()
    assert read["weights"].to_pylist() == chunk.weights.float().tolist()
    assert read["last_seen_s"].to_pylist() == chunk.last_seen_s.tolist()
    write_parquet(tmp_path / "w", form_of("c", spec).table, [chunk.columns], weights_only=True)
    assert pq.read_table(tmp_path / "w").column_names == ["id", "weights"]
    assert not open_parquet(tmp_path / "w").tables[0].has_state


def test_any_parquet_with_ids_and_vectors(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    vectors = pa.array([[1.0, 2.0], [3.0, float("nan")]], pa.list_(pa.float16(), 2))
    ids = pa.array([3, (1 << 64) - 1], pa.uint64())
    pq.write_table(pa.table({"fid": ids, "embedding": vectors, "x": ["a", "b"]}), file)
    source = open_parquet(file, "t")
    found = all_of(source, "t")
    assert found.ids.tolist() == [3, -1]
    assert found.weights.nan_to_num(-1).tolist() == [[1, 2], [3, -1]]
    with pytest.raises(DataError, match="without a name"):
        open_parquet(file)
    with pytest.raises(UnknownName, match="embedding"):
        open_parquet(file, "t", vectors="embeding")


BAD_PARQUET = {
    "a column of ids": pa.table({"user": [1], "weights": [[1.0]]}),
    "a column of vectors": pa.table({"id": [1], "vectors": [[1.0]]}),
    "got string": pa.table({"id": ["a"], "weights": [[1.0]]}),
    "got nulls": pa.table({"id": pa.array([1, None]), "weights": [[1.0], [2.0]]}),
    "got list<": pa.table({"id": [1], "weights": [[1]]}),
    "got 1 values at id 8": pa.table({"id": [7, 8], "weights": [[1.0, 2.0], [1.0]]}),
    "got no values at id 9": pa.table({"id": [7, 9], "weights": [[1.0, 2.0], None]}),
    "no rows": pa.table(
        {"id": pa.array([], pa.int64()), "weights": pa.array([], pa.list_(pa.float32()))}
    ),
}


@pytest.mark.parametrize("message", BAD_PARQUET)
def test_bad_parquet_is_refused(tmp_path: Path, message: str):
    file = tmp_path / "rows.parquet"
    pq.write_table(BAD_PARQUET[message], file)
    with pytest.raises(DataError, match=message):
        all_of(open_parquet(file, "t"), "t")


def test_files_of_two_forms_are_refused(tmp_path: Path):
    pq.write_table(pa.table({"id": [1], "weights": [[1.0]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [2], "vector": [[1.0]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: got no column 'weights'"):
        all_of(open_parquet(tmp_path, "t"), "t")


def test_what_is_no_parquet_is_refused(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            open_parquet(path, "t")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        open_parquet(tmp_path, "t")
