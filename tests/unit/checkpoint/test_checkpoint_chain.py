"""Deltas on top of a full checkpoint show the rows that a dictionary would hold."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.chain import Chain
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.row_files import RowLayout, chunk_of
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore, folder_name
from shoal.errors import CheckpointError
from support.saved_rows import HandTable, between, by_hash, histogram, rows_of, same, save_by_hand

LAYOUT = RowLayout.rows(3, 2, "float32")
WHOLE = 1 << 64
IDS = st.sets(st.integers(-20, 20))


def table(ids: set[int], *, salt: int = 0, deleted: set[int] = frozenset()) -> HandTable:  # type: ignore[assignment]
    rows = rows_of("t", torch.tensor(sorted(ids), dtype=torch.int64), LAYOUT, salt=salt)
    gone = by_hash("t", torch.tensor(sorted(deleted), dtype=torch.int64))
    return HandTable("t", LAYOUT, rows, gone)


@dataclass
class Delta:
    deleted: set[int]
    upserted: set[int]
    file_rows: int


def chain_of(root: Storage, full: set[int] | None, deltas: list[Delta]) -> list[Manifest]:
    links = [save_by_hand(root, [table(full or set())], step=1, file_bytes=600, small_bytes=1)]
    for k, delta in enumerate(deltas):
        one = table(delta.upserted, salt=k + 1, deleted=delta.deleted)
        size = delta.file_rows * LAYOUT.row_bytes
        links.append(
            save_by_hand(root, [one], step=k + 2, parent=links[-1], file_bytes=size, small_bytes=1)
        )
    return links


def opened(root: Storage, last: Manifest) -> Chain:
    return Chain(CheckpointStore(root), folder_name(last.step, last.kind))


deltas_of = st.lists(st.builds(Delta, IDS, IDS, st.integers(1, 40)), max_size=4)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(full=IDS, deltas=deltas_of, cut=st.integers(0, WHOLE - 1))
def test_a_chain_is_a_dictionary(full: set[int], deltas: list[Delta], cut: int):
    folder = tempfile.mkdtemp()
    try:
        root = Storage(folder)
        links = chain_of(root, full, deltas)
        model = dict.fromkeys(full, 0)
        for k, delta in enumerate(deltas):
            for id in delta.deleted:
                model.pop(id, None)
            model.update(dict.fromkeys(delta.upserted, k + 1))
        rows = opened(root, links[-1])
        ids = by_hash("t", torch.tensor(sorted(model), dtype=torch.int64))
        for start, stop in ((0, cut), (cut, WHOLE), (0, WHOLE)):
            wanted = ids[between("t", ids, start, stop)]
            got = chunk_of("t", rows.read(0, start, stop))
            assert got.ids.tolist() == wanted.tolist()
            for salt in set(model.values()):
                places = torch.tensor([model[i] == salt for i in wanted.tolist()], dtype=torch.bool)
                expected = rows_of("t", wanted[places], LAYOUT, salt=salt)
                assert torch.equal(got.weights[places], expected.weights)
                assert torch.equal(got.state[places], expected.state)
                assert torch.equal(got.versions[places], expected.versions)
                assert torch.equal(got.last_seen_s[places], expected.last_seen_s)
        for bits in (0, 1, 5):
            assert torch.equal(rows.histogram(0, bits), histogram("t", ids, bits))
        pieces = [columns[0] for columns in rows.chunks(0, piece_bytes=5 * LAYOUT.row_bytes)]
        assert torch.equal(torch.cat([ids[:0], *pieces]), ids)
    finally:
        shutil.rmtree(folder)


def test_a_table_that_comes_later(tmp_path: Path):
    root = Storage(tmp_path)
    first = save_by_hand(root, [table({1, 2})], step=1)
    other = HandTable("u", LAYOUT, rows_of("u", torch.arange(5), LAYOUT))
    second = save_by_hand(root, [other, table({3})], step=2, parent=first)
    rows = opened(root, second)
    assert [one.key for one in rows.tables] == ["m/u", "m/t"]
    assert same(chunk_of("u", rows.read(0, 0, WHOLE)), other.rows)
    assert sorted(rows.read(rows.index("m/t"), 0, WHOLE)[0].tolist()) == [1, 2, 3]
    assert rows.histogram(0, 0).tolist() == [5]


def test_no_more_than_a_piece_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a file of many batches, a narrow range reads those that it meets."""
    layout = RowLayout.rows(500, 500, "float32")
    root = Storage(tmp_path)
    many = HandTable("t", layout, rows_of("t", torch.arange(4000), layout))
    links = [save_by_hand(root, [many], step=1)]
    rows = opened(root, links[-1])
    start, stop = 1 << 62, (1 << 62) + (1 << 58)
    read = []
    convert = RowLayout.to_columns
    monkeypatch.setattr(
        RowLayout,
        "to_columns",
        lambda self, batch, *a: read.append(batch) or convert(self, batch, *a),
    )
    got = chunk_of("t", rows.read(0, start, stop))
    inside = between("t", many.rows.ids, start, stop)
    assert torch.equal(got.ids, many.rows.ids[inside]) and torch.equal(
        got.weights, many.rows.weights[inside]
    )
    whole = [one.num_rows for one in read if "weights" in one.schema.names]
    assert sum(whole) <= 2 * layout.batch_rows


def test_damage_is_told_before_rows_are_read(tmp_path: Path):
    root = Storage(tmp_path)
    links = [save_by_hand(root, [table({1, 2, 3})], step=1)]
    file = tmp_path / "step-000000000001-full" / "rows" / "00000.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    rows = opened(root, links[-1])
    with pytest.raises(CheckpointError, match=r"rows/00000\.arrow.*checksum"):
        rows.histogram(0, 3)
    with pytest.raises(CheckpointError, match=r"rows/00000\.arrow.*checksum"):
        rows.read(0, 0, WHOLE)


def test_a_table_that_changed_along_the_chain(tmp_path: Path):
    root = Storage(tmp_path)
    first = save_by_hand(root, [table({1})], step=1)
    wider = RowLayout.rows(4, 2, "float32")
    changed = HandTable("t", wider, rows_of("t", torch.arange(2), wider))
    second = save_by_hand(root, [changed], step=2, parent=first)
    with pytest.raises(CheckpointError, match=r"'m/t'.*step-000000000001-full.*\[3\+2"):
        opened(root, second)


def test_a_renamed_folder(tmp_path: Path):
    save_by_hand(Storage(tmp_path), [table({1})], step=1)
    (tmp_path / "step-000000000001-full").rename(tmp_path / "best")
    rows = Chain(CheckpointStore(tmp_path), "best")
    assert rows.read(0, 0, WHOLE)[0].tolist() == [1]
