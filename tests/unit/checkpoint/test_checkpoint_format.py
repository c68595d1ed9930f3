"""Row files and files of ids: what was written comes back, or is told to be damaged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from shoal.checkpoint.manifest import SavedFile
from shoal.checkpoint.row_files import (
    ReadBuffer,
    RowFileWriter,
    RowLayout,
    chunk_of,
    read_rows,
    selected,
)
from shoal.checkpoint.storage import DurableFile, Storage
from shoal.errors import CheckpointError
from support.saved_rows import joined, rows_of, same

DTYPES = ("float32", "float64", "float16", "bfloat16")


def written(storage: Storage, layout: RowLayout, *, steps: int = 1, rows: int = 1000) -> SavedFile:
    chunk = rows_of("t", torch.arange(rows) * 3 - 700, layout)
    writer = RowFileWriter(storage, "rows/00000.arrow", layout, ["c/t"])
    size = -(-rows // steps)
    for at in range(0, rows, size):
        writer.add(0, selected(chunk.columns, slice(at, at + size)))
    return writer.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "state"), [(1, 0), (3, 1), (32, 33), (5, 10)])
def test_rows_come_back(tmp_path: Path, dtype: str, dim: int, state: int):
    storage, layout = Storage(tmp_path / "x"), RowLayout.rows(dim, state, dtype)
    saved = written(storage, layout)
    got = [chunk_of("t", part) for table, part in read_rows(storage, saved, layout) if table == 0]
    assert same(joined(got), rows_of("t", torch.arange(1000) * 3 - 700, layout))
    assert saved.rows == 1000 and saved.bytes == storage.size(saved.path)


def test_bytes_do_not_depend_on_how_rows_were_added(tmp_path: Path):
    layout = RowLayout.rows(2000, 2000, "float32")  # 512 rows to a batch
    assert layout.batch_rows == 512
    files = []
    for steps in (1, 7, 1000):
        storage = Storage(tmp_path / str(steps))
        written(storage, layout, steps=steps)
        files.append(storage.read("rows/00000.arrow"))
    assert files[0] == files[1] == files[2]
    reader = pa.ipc.open_file(files[0])
    assert [reader.get_batch(k).num_rows for k in range(2)] == [512, 488]


def test_several_tables_share_a_file_but_no_batch(tmp_path: Path):
    storage, layout = Storage(tmp_path), RowLayout.rows(2, 1, "bfloat16")
    chunks = [rows_of(name, torch.arange(n), layout) for name, n in (("a", 10), ("b", 0), ("c", 3))]
    writer = RowFileWriter(storage, "rows/00000.arrow", layout, ["m/a", "m/b", "m/c"])
    for k, chunk in enumerate(chunks):
        writer.add(k, chunk.columns)
    saved = writer.close()
    got = list(read_rows(storage, saved, layout))
    assert [table for table, _ in got] == [0, 2]
    assert same(chunk_of("", got[0][1]), chunks[0]) and same(chunk_of("", got[1][1]), chunks[2])
    with pytest.raises(CheckpointError, match="ascending"):
        backwards = RowFileWriter(storage, "rows/00001.arrow", layout, ["m/a", "m/b"])
        backwards.add(1, chunks[1].columns)
        backwards.add(0, chunks[0].columns)


def test_floats_that_are_no_numbers_keep_their_bits(tmp_path: Path):
    storage, layout = Storage(tmp_path), RowLayout.rows(2, 1, "float32")
    bits = torch.tensor([[0x7FC00001, -1], [0x7F800000, -(1 << 31)]], dtype=torch.int32)
    chunk = rows_of("a", torch.arange(2), layout)
    writer = RowFileWriter(storage, "rows/00000.arrow", layout, ["m/a"])
    writer.add(0, dataclasses.replace(chunk, weights=bits.view(torch.float32)).columns)
    ((_, got),) = read_rows(storage, writer.close(), layout)
    assert torch.equal(got[4].view(torch.int32), bits)


def test_a_file_without_rows(tmp_path: Path):
    storage, layout = Storage(tmp_path), RowLayout.rows(2, 1, "float32")
    saved = RowFileWriter(storage, "rows/00000.arrow", layout, ["m/a"]).close()
    assert saved.rows == 0 and list(read_rows(storage, saved, layout)) == []


def test_rows_lie_in_the_reused_buffer(tmp_path: Path):
    storage, layout = Storage(tmp_path), RowLayout.rows(4, 4, "float32")
    saved = written(storage, layout)
    buffer = ReadBuffer()
    memory = buffer.take(saved.bytes)
    (_, columns), *_ = read_rows(storage, saved, layout, buffer)
    inside = range(memory.data_ptr(), memory.data_ptr() + saved.bytes)
    assert all(part.data_ptr() in inside for part in (columns[0], *columns[4:]))


def test_arrow_hands_its_memory_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    layout = RowLayout.rows(32, 32, "float32")
    chunk = rows_of("t", torch.arange(layout.batch_rows + 900), layout)
    seen = []
    write = DurableFile.write

    def spy(self: DurableFile, data: object) -> int:
        seen.append(getattr(data, "address", 0))
        return write(self, data)

    monkeypatch.setattr(DurableFile, "write", spy)
    writer = RowFileWriter(Storage(tmp_path), "rows/00000.arrow", layout, ["c/t"])
    writer.add(0, chunk.columns)
    wanted = {chunk.ids.data_ptr(), chunk.weights.data_ptr(), chunk.state.data_ptr()}
    assert wanted <= set(seen)
    writer.abort()
    assert Storage(tmp_path).files() == ()


@pytest.mark.parametrize("kind", ["deleted", "admission"])
def test_ids_come_back(tmp_path: Path, kind: str):
    storage = Storage(tmp_path)
    layout, path = RowLayout.ids(counted=kind == "admission"), f"{kind}/00000.arrow"
    writer = RowFileWriter(storage, path, layout, ["m/a", "m/b"], kind=kind)  # type: ignore[arg-type]
    counts = torch.arange(9) + (1 << 31)
    columns = (torch.cat([torch.tensor([-(1 << 63), 5]), torch.arange(7)]), counts)
    columns = columns[: len(layout.fields)]
    writer.add(0, selected(columns, slice(0, 2)))
    writer.add(1, selected(columns, slice(2, 9)))
    got = list(read_rows(storage, writer.close(), layout))
    assert [table for table, _ in got] == [0, 1]
    for found, wanted in zip(zip(*(part for _, part in got), strict=True), columns, strict=True):
        assert torch.equal(torch.cat(found), wanted)


def test_every_flipped_byte_is_told_with_the_files_name(tmp_path: Path):
    storage, layout = Storage(tmp_path), RowLayout.rows(2, 1, "float32")
    saved = written(storage, layout, rows=5)
    file = tmp_path / saved.path
    good = file.read_bytes()
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match=r"rows/00000\.arrow.*checksum"):
            list(read_rows(storage, saved, layout))
    file.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=r"rows/00000\.arrow.*bytes"):
        list(read_rows(storage, saved, layout))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rows/00000\.arrow.*missing"):
        list(read_rows(storage, saved, layout))


def test_pyarrow_never_sees_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage, layout = Storage(tmp_path), RowLayout.rows(2, 1, "float32")
    saved = dataclasses.replace(written(storage, layout), crc32=1)
    monkeypatch.setattr(pa.ipc, "open_file", lambda *_: pytest.fail("parsed"))
    with pytest.raises(CheckpointError, match="checksum"):
        list(read_rows(storage, saved, layout))


def test_files_that_are_not_what_the_manifest_says(tmp_path: Path):
    storage, layout = Storage(tmp_path), RowLayout.rows(2, 1, "float32")
    saved = written(storage, layout)
    with pytest.raises(CheckpointError, match=r"float\[3\]|3 ?\]"):
        list(read_rows(storage, saved, RowLayout.rows(3, 1, "float32")))
    with pytest.raises(CheckpointError, match="999 rows"):
        list(read_rows(storage, dataclasses.replace(saved, rows=999), layout))
    with storage.create("rows/junk") as file:
        file.write(b"junk")
    junk = dataclasses.replace(saved, path="rows/junk", bytes=4, crc32=file.crc32)
    with pytest.raises(CheckpointError, match=r"rows/junk.*Arrow"):
        list(read_rows(storage, junk, layout))


def test_rows_of_another_layout_are_refused(tmp_path: Path):
    storage = Storage(tmp_path)
    writer = RowFileWriter(storage, "rows/00000.arrow", RowLayout.rows(2, 1, "float32"), ["m/a"])
    with pytest.raises(CheckpointError, match="weights of rows"):
        writer.add(0, rows_of("a", torch.arange(1 << 17), RowLayout.rows(3, 1, "float32")).columns)
    writer.abort()
    with pytest.raises(CheckpointError, match="layout of a row"):
        RowLayout.rows(2, 1, "int8")
    chunk = rows_of("a", torch.arange(4), RowLayout.rows(2, 1, "float32"))
    late = dataclasses.replace(chunk, counts=torch.full((4,), 1 << 32))
    writer = RowFileWriter(storage, "rows/00000.arrow", RowLayout.rows(2, 1, "float32"), ["m/a"])
    writer.add(0, late.columns)
    with pytest.raises(CheckpointError, match="count of rows"):
        writer.close()
