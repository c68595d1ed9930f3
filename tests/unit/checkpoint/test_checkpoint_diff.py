"""What differs between two checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import diff, maintenance
from shoal.checkpoint.row_files import RowLayout
from shoal.checkpoint.storage import Storage
from support.saved_rows import HandTable, rows_of, save_by_hand

LAYOUT = RowLayout.rows(3, 2, "float32")


def table(name: str, ids: range, layout: RowLayout = LAYOUT) -> HandTable:
    return HandTable(name, layout, rows_of(name, torch.arange(ids.start, ids.stop), layout))


@pytest.mark.parametrize("piece_bytes", [8 << 20, 300])
def test_rows_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int):
    monkeypatch.setattr(maintenance, "_PIECE_BYTES", piece_bytes)
    a, b = table("t", range(100)), table("t", range(10, 120))
    rows = b.rows
    at = {int(id): k for k, id in enumerate(rows.ids)}
    rows.weights[at[50], 1] += 3.5
    rows.weights[at[51], 1] -= 1
    rows.state[at[51], 0] += 8
    rows.counts[at[52]] += 1
    rows.last_seen_s[at[53]] += 1
    rows.versions[at[54]] += 1
    save_by_hand(Storage(tmp_path / "a"), [a], step=1)
    save_by_hand(Storage(tmp_path / "b"), [b], step=9, file_bytes=900, small_bytes=1)
    found = diff(tmp_path / "a", tmp_path / "b")
    (one,) = found.tables
    assert (one.key, one.only_a, one.only_b) == ("m/t", 10, 20)
    assert (one.changed, one.touched, one.equal) == (2, 2, 86)
    assert (one.weights_difference, one.state_difference) == (3.5, 8.0)
    assert not found.same and not one.same
    back = diff(tmp_path / "b", tmp_path / "a").tables[0]
    assert (back.only_a, back.only_b, back.changed) == (20, 10, 2)
    assert diff(tmp_path / "a", tmp_path / "a").same


def test_a_chain_is_compared_as_what_it_stands_for(tmp_path: Path):
    root = Storage(tmp_path / "a")
    first = save_by_hand(root, [table("t", range(50))], step=1)
    more = dataclasses.replace(table("t", range(50, 60)), deleted=torch.empty(0, dtype=torch.int64))
    save_by_hand(root, [more], step=2, parent=first)
    save_by_hand(Storage(tmp_path / "b"), [table("t", range(60))], step=2)
    assert diff(tmp_path / "a", tmp_path / "b").same
    older = diff(tmp_path / "a" / "step-000000000001-full", tmp_path / "b")
    assert older.tables[0].only_b == 10


def test_tables_of_one_side(tmp_path: Path):
    wide = RowLayout.rows(4, 2, "float32")
    save_by_hand(Storage(tmp_path / "a"), [table("x", range(3)), table("t", range(3))], step=1)
    others = [table("t", range(3), wide), table("y", range(2))]
    save_by_hand(Storage(tmp_path / "b"), others, step=1)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.only_a, found.only_b, found.reshaped) == (("m/x",), ("m/y",), ("m/t",))
    assert found.tables == () and not found.same


def test_values_that_are_no_numbers(tmp_path: Path):
    a, b = table("t", range(3)), table("t", range(3))
    for rows in (a.rows, b.rows):
        rows.weights[0, 0] = float("nan")
        rows.weights[0, 1] = float("inf")
    save_by_hand(Storage(tmp_path / "a"), [a], step=1)
    save_by_hand(Storage(tmp_path / "b"), [b], step=1)
    assert diff(tmp_path / "a", tmp_path / "b").same
    b.rows.weights[1, 0] = float("nan")
    save_by_hand(Storage(tmp_path / "c"), [b], step=1)
    (one,) = diff(tmp_path / "a", tmp_path / "c").tables
    assert one.changed == 1 and one.weights_difference == float("inf")


def test_empty_tables_are_equal(tmp_path: Path):
    for name in ("a", "b"):
        save_by_hand(Storage(tmp_path / name), [table("t", range(0))], step=1)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.same and found.tables[0].equal == 0
