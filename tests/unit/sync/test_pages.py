"""Pages of published rows: what goes in comes out, and nothing damaged does."""

from __future__ import annotations

import pytest
import torch

from shoal import Segment, Table, TableSpec
from shoal.errors import DataError
from shoal.sync.pages import (
    ChangedRows,
    DeletedIds,
    pack_deleted,
    pack_dense,
    pack_rows,
    unpack,
    unpack_dense,
)

SPECS = tuple(
    TableSpec(name=dtype, segments=(Segment(dim=3),), dtype=dtype)
    for dtype in ("float32", "float16", "bfloat16", "float64")
)


@pytest.mark.parametrize("table", range(len(SPECS)))
def test_rows_come_back_with_all_but_their_state(table: int) -> None:
    rows = Table(SPECS[table], seed=3)
    rows.apply([5, -7, 5], [[1.0] * 3] * 3)
    sent = rows.export()
    page = unpack(memoryview(pack_rows(table, sent)), SPECS)
    assert isinstance(page, ChangedRows) and page.table == table
    assert page.chunk.weights.dtype == sent.weights.dtype
    for name in ("ids", "weights", "versions", "last_seen_s", "counts"):
        assert torch.equal(getattr(page.chunk, name), getattr(sent, name))


def test_deletions_come_back() -> None:
    ids = torch.tensor([1 << 62, -1, 0])
    page = unpack(memoryview(pack_deleted(2, ids)), SPECS)
    assert isinstance(page, DeletedIds) and page.table == 2
    assert torch.equal(page.ids, ids)


def test_dense_tensors_come_back() -> None:
    tensors = {
        "a.weight": torch.randn(3, 4),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(7),
        "none": torch.empty(0, 5, dtype=torch.bfloat16),
    }
    found = unpack_dense(memoryview(pack_dense(tensors)))
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_every_damaged_byte_is_found() -> None:
    rows = Table(SPECS[0])
    rows.apply([1, 2], torch.ones(2, 3))
    page = bytearray(pack_rows(0, rows.export()))
    for at in range(len(page)):
        page[at] ^= 0x10
        with pytest.raises(DataError, match="page of published rows"):
            unpack(memoryview(page), SPECS)
        page[at] ^= 0x10
    for short in range(len(page)):
        with pytest.raises(DataError):
            unpack(memoryview(page)[:short], SPECS)


def test_pages_of_other_tables_or_kinds_are_refused() -> None:
    ids = torch.tensor([1])
    with pytest.raises(DataError, match="table 4"):
        unpack(memoryview(pack_deleted(4, ids)), SPECS)
    wide = Table(TableSpec(name="wide", segments=(Segment(dim=4),)))
    wide.apply([1], torch.ones(1, 4))
    with pytest.raises(DataError, match="bytes of columns"):
        unpack(memoryview(pack_rows(0, wide.export())), SPECS)
    with pytest.raises(DataError, match="dense"):
        unpack(memoryview(pack_dense({})), SPECS)
    with pytest.raises(DataError, match="dense tensors"):
        unpack_dense(memoryview(pack_deleted(0, ids)))
    with pytest.raises(DataError, match="complex64"):
        pack_dense({"c": torch.zeros(1, dtype=torch.complex64)})


def test_a_page_that_nobody_accepts_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sync.pages.MOST_BYTES", 1000)
    pack_dense({"w": torch.zeros(100)})
    with pytest.raises(DataError, match="1000 bytes"):
        pack_dense({"w": torch.zeros(250)})
