"""The bytes of a tiny checkpoint, pinned: they may change only with the schema's number."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import torch

from shoal.checkpoint.manifest import SCHEMA
from shoal.checkpoint.row_files import RowLayout
from shoal.checkpoint.storage import Storage
from support.saved_rows import HandTable, by_hash, rows_of, save_by_hand

# sha256 of what `tiny` below wrote with pyarrow 26.0 on x86-64.
# They follow from ids 0..9 of table "item" and 0..2 of table "user", whose weights are
# (id % 1000) / 2 + column / 4 and whose state is the same further on, with small metadata.
# A change of these bytes makes older checkpoints another schema: do not just pin new ones.
GOLDEN = {
    "rows/00000.arrow": "dc9b7167382e84af2ce04f5a0652a534c75799c58c9afa57b02028f7adb2b8b2",
    "deleted/00000.arrow": "5551747323fdca12d93a4458633627a34d265d29c51d5296131cbb29105d1cdc",
}


def tiny(root: Path) -> Path:
    layout = RowLayout.rows(3, 2, "float32")
    tables = [
        HandTable(name, layout, rows_of(name, torch.arange(rows), layout), by_hash(name, gone))
        for name, rows, gone in (
            ("item", 10, torch.tensor([77, -1, 1 << 62])),
            ("user", 3, torch.tensor([5])),
        )
    ]
    storage = Storage(root)
    first = save_by_hand(storage, [HandTable("item", layout, tables[0].rows)], step=1)
    save_by_hand(storage, tables, step=2, parent=first)
    return root / "step-000000000002-delta"


def test_bytes_are_pinned(tmp_path: Path):
    folder = tiny(tmp_path)
    assert SCHEMA == 3
    found = {path: hashlib.sha256((folder / path).read_bytes()).hexdigest() for path in GOLDEN}
    assert found == GOLDEN


def test_plain_pyarrow_reads_them(tmp_path: Path):
    folder = tiny(tmp_path)
    rows = pa.ipc.open_file(folder / "rows/00000.arrow").read_all()
    assert rows.schema.names == [
        "table", "id", "version", "last_seen_s", "count", "weights", "state",
    ]  # fmt: skip
    assert rows.schema.metadata is None
    first = rows.slice(0, 10).to_pydict()
    # ids in the order of mix64(id ^ salt("item"))
    assert first["id"] == by_hash("item", torch.arange(10)).tolist()
    at = first["id"].index(4)
    assert first["table"] == [0] * 10
    assert first["weights"][at] == [2.0, 2.25, 2.5] and first["state"][at] == [2.75, 3.0]
    assert (first["version"][at], first["last_seen_s"][at], first["count"][at]) == (5, 4, 5)
    assert rows.slice(10).to_pydict()["table"] == [1] * 3
    gone = pa.ipc.open_file(folder / "deleted/00000.arrow").read_all().to_pydict()
    assert gone["table"] == [0, 0, 0, 1] and gone["id"][3] == 5
    assert set(gone["id"][:3]) == {77, -1, 1 << 62}
