"""Who writes which file, in which pieces: a function of the rows and the placement."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.row_files import RowLayout
from shoal.checkpoint.writing_plan import (
    FilePlan,
    HashSpan,
    TableRows,
    WritingPlan,
    plan_writing,
    speakers,
    split,
)
from shoal.placement import Hosted, column_wise, data_parallel, grid, row_wise, table_wise

HASHES = 1 << 64
LAYOUT = RowLayout.rows(8, 8, "float32")


def placed(key: str, slices: Sequence[Hosted], rows: int, bits: int = 8) -> TableRows:
    counts = torch.full((1 << bits,), rows >> bits, dtype=torch.int64)
    counts[: rows - int(counts.sum())] += 1
    return TableRows(key, LAYOUT, counts, tuple(slices))


def planned(
    tables: Sequence[TableRows], world_size: int, piece_bytes: int = 40_000
) -> tuple[tuple[FilePlan, ...], WritingPlan]:
    files = split(tables, file_bytes=200_000, small_bytes=50_000)
    return files, plan_writing(files, tables, world_size, piece_bytes=piece_bytes)


def covered(spans: Sequence[HashSpan], table: TableRows) -> int:
    """Rows in spans, which follow each other."""
    bits = len(table.counts).bit_length() - 1
    for one, other in zip(spans, spans[1:], strict=False):  # noqa: RUF007 - indices matter
        assert one.stop <= other.start
    return sum(
        int(table.counts[one.start >> 64 - bits : one.stop >> 64 - bits].sum()) for one in spans
    )


def test_rows_stay_where_they_are_where_files_fall_between_ranks() -> None:
    table = placed("t", row_wise("t", 8, 4), 40_000)
    files, plan = planned([table], 4)
    assert len(files) == 32
    assert plan.writers == tuple(n // 8 for n in range(32))
    assert plan.rounds == ()


def test_a_table_on_one_rank_is_written_there() -> None:
    tables = [placed(f"t{r}", table_wise(f"t{r}", 8, r), 5_000) for r in (2, 0)]
    files, plan = planned(tables, 3)
    assert {(f.tables[0], w) for f, w in zip(files, plan.writers, strict=True)} == {
        ("t2", 2),
        ("t0", 0),
    }
    assert plan.pieces[1] == () and plan.rounds == ()


def test_slices_and_replicas_take_files_in_turn() -> None:
    for slices, travels in ((column_wise("t", 8, (0, 1)), True), (data_parallel("t", 8, 2), False)):
        _, plan = planned([placed("t", slices, 40_000)], 2)
        assert plan.writers.count(0) == plan.writers.count(1) == 16
        assert bool(plan.rounds) == travels


def test_the_rank_with_the_wide_slice_writes() -> None:
    narrow, wide = Hosted("t", 0, 2, (0,)), Hosted("t", 2, 8, (1,))
    _, plan = planned([placed("t", (narrow, wide), 20_000)], 2)
    assert set(plan.writers) == {1}


def test_small_tables_travel_together() -> None:
    """One round brings all of them, not one each."""
    tables = [placed(f"t{n}", row_wise(f"t{n}", 8, 2), 40, bits=3) for n in range(20)]
    files, plan = planned(tables, 2, piece_bytes=1 << 20)
    assert len(files) == 1 and len(plan.rounds) == 1
    assert len(plan.pieces[plan.writers[0]][0].spans) == 20


def test_files_of_which_rows_travel_come_first() -> None:
    tables = [
        placed("here", table_wise("here", 8, 1), 5_000),
        placed("split", column_wise("split", 8, (0, 1)), 20_000),
    ]
    files, plan = planned(tables, 2)
    travels = {
        number: any(piece.travels for piece in plan.pieces[1] if piece.file == number)
        for number in dict.fromkeys(piece.file for piece in plan.pieces[1])
    }
    assert list(travels.values()) == sorted(travels.values(), reverse=True)
    assert {*travels.values()} == {True, False} and list(travels) != sorted(travels)
    assert {files[number].tables for number in travels} == {("here",), ("split",)}


def test_speakers() -> None:
    (rows,) = row_wise("t", 8, 4)
    assert speakers(rows, 0, 0, HASHES) == (0, 1, 2, 3)
    assert speakers(rows, 0, HASHES // 4, HASHES // 2) == (1,)
    assert speakers(rows, 0, HASHES // 4 - 1, HASHES // 4 + 1) == (0, 1)
    (copies,) = data_parallel("t", 8, 4)
    assert speakers(copies, 2, 0, HASHES) == (2,)
    assert speakers(Hosted("t", 0, 8, (3, 1)), 0, 0, HASHES) == (3, 1)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[TableRows], int]:
    world_size = draw(st.integers(1, 5))
    tables = []
    for n in range(draw(st.integers(1, 6))):
        name, ranks = f"t{n}", list(range(world_size))
        slices = draw(
            st.sampled_from(
                [
                    row_wise(name, 8, world_size),
                    table_wise(name, 8, ranks[-1]),
                    column_wise(name, 8, ranks[:2]),
                    grid(name, 8, (tuple(ranks[::2]), tuple(ranks[-1:]))),
                    data_parallel(name, 8, world_size),
                ]
            )
        )
        rows = draw(st.sampled_from([0, 1, 300, 3_000, 9_000]))
        tables.append(placed(name, slices, rows, bits=draw(st.sampled_from([6, 8]))))
    return tables, world_size


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(job=jobs(), piece_bytes=st.sampled_from([1, 20_000, 100_000]))
def test_every_row_is_written_once(job: tuple[list[TableRows], int], piece_bytes: int) -> None:
    tables, world_size = job
    files, plan = planned(tables, world_size, piece_bytes)
    assert len(plan.writers) == len(files)
    total = {one.key: 0 for one in tables}
    for rank, pieces in enumerate(plan.pieces):
        order = [piece.file for piece in pieces]
        assert [n for n, k in enumerate(order) if k != order[n - 1] or n == 0] == [
            order.index(k) for k in dict.fromkeys(order)
        ]  # a file's pieces are together
        for number in dict.fromkeys(order):
            assert plan.writers[number] == rank
            spans = [s for piece in pieces if piece.file == number for s in piece.spans]
            keys = [tables[one.table].key for one in spans]
            assert list(dict.fromkeys(keys)) == list(files[number].tables)
            for key in dict.fromkeys(keys):
                table = next(one for one in tables if one.key == key)
                mine = [one for one in spans if tables[one.table] is table]
                total[key] += covered(mine, table)
    assert total == {one.key: int(one.counts.sum()) for one in tables}
    for rank, pieces in enumerate(plan.pieces):
        asked = [row[rank] for row in plan.rounds if row[rank] is not None]
        assert asked == [piece for piece in pieces if piece.travels]
        for piece in pieces:
            others = {
                one
                for span in piece.spans
                for hosted in tables[span.table].slices
                for one in speakers(hosted, rank, span.start, span.stop)
            } - {rank}
            assert piece.travels == bool(others)


@pytest.mark.parametrize("piece_bytes", [20_000, 100_000])
def test_pieces_are_no_larger_than_asked(piece_bytes: int) -> None:
    table = placed("t", row_wise("t", 8, 2), 40_000)
    _, plan = planned([table], 2, piece_bytes)
    for piece in (one for pieces in plan.pieces for one in pieces):
        rows = sum(covered([span], table) for span in piece.spans)
        assert 0 < rows * LAYOUT.row_bytes <= piece_bytes
