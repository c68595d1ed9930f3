"""Which rows go into which file follows from the rows alone."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.row_files import RowLayout
from shoal.checkpoint.writing_plan import TableRows, bits_for, split

LAYOUT = RowLayout.rows(1, 0, "float32")  # 24 bytes a row
OTHER = RowLayout.rows(2, 0, "float32")
WHOLE = (0, 1 << 64)


def table(key: str, rows: int, layout: RowLayout = LAYOUT, bits: int = 0) -> TableRows:
    """Rows spread evenly."""
    bits = max(bits, bits_for(rows))
    counts = torch.full((1 << bits,), rows >> bits)
    counts[: rows - int(counts.sum())] += 1
    return TableRows(key, layout, counts)


def test_small_tables_of_equal_layout_share_files_in_order():
    tables = [
        table("a", 10),
        table("b", 20, OTHER),
        table("none", 0),
        table("c", 60),
        table("d", 50),
    ]
    plans = split(tables, file_bytes=100 * 24, small_bytes=80 * 24)
    assert [(p.path, p.tables, p.rows) for p in plans] == [
        ("rows/00000.arrow", ("a", "c"), 70),
        ("rows/00001.arrow", ("b",), 20),
        ("rows/00002.arrow", ("d",), 50),
    ]
    assert all((p.start, p.stop) == WHOLE for p in plans)


def test_large_tables_are_halved_until_they_fit():
    plans = split([table("a", 3000)], "deleted", file_bytes=1000 * 24, small_bytes=100)
    assert [p.path for p in plans] == [f"deleted/{n:05d}.arrow" for n in range(4)]
    assert [(p.start, p.stop) for p in plans] == [(k << 62, (k + 1) << 62) for k in range(4)]
    assert sum(p.rows for p in plans) == 3000


def test_a_finer_histogram_changes_nothing():
    coarse = table("a", 5000)
    fine = TableRows("a", LAYOUT, coarse.counts.repeat_interleave(4) // 4)
    fine.counts[::4] += coarse.counts % 4
    kwargs = {"file_bytes": 1000 * 24, "small_bytes": 100}
    assert split([coarse], **kwargs) == split([fine], **kwargs)


def test_bits_grow_with_rows():
    assert [bits_for(n) for n in (0, 255, 256, 10_000_000, 1 << 40)] == [0, 0, 1, 16, 20]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=16, max_size=16),
    fit=st.integers(1, 200),
    skew=st.integers(0, 15),
)
def test_files_cover_every_row_once_and_fit(counts: list[int], fit: int, skew: int):
    cells = torch.tensor(counts)
    cells[skew] += 100
    one = TableRows("a", LAYOUT, cells)
    plans = split([one], file_bytes=fit * 24, small_bytes=1)
    bits = bits_for(one.rows)
    merged = cells.view(1 << bits, -1).sum(1)
    width = (1 << 64) >> bits
    at = 0
    for plan in plans:
        assert at <= plan.start < plan.stop and plan.start % width == plan.stop % width == 0
        assert not merged[at // width : plan.start // width].any()
        assert plan.rows == int(merged[plan.start // width : plan.stop // width].sum()) > 0
        assert plan.rows <= fit or plan.stop - plan.start == width
        at = plan.stop
    assert sum(plan.rows for plan in plans) == one.rows
    found = list(one.pieces(*WHOLE, fit * 24))
    assert sum(one.within(*piece) for piece in found) == one.rows
    assert all(
        0 < one.within(start, stop) <= fit or stop - start == (1 << 60) for start, stop in found
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
