"""Which rows a GPU shard drops: over its budget, or out of time. Nothing waits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.kernels.host_copies import sent
from shoal.kernels.lowest_rows import lowest_rows
from shoal.kernels.row_changes import (
    JOB_SCORE,
    JOB_SECOND,
    JOB_SHIFT,
    JOB_SLOTS,
    JOB_TABLE,
    JOB_VALUES,
    JOB_WORDS,
    SCORE_COUNTS,
    SCORE_SEEN,
    Scan,
    expired_rows,
)
from shoal.kernels.tables import ShardLayout
from shoal.rules.expiry import Expiry
from shoal.table.cuda.admission import SlotValues

Kind = Literal["lru", "lfu"]

# Rows that a scan may have room for whatever its tables hold: 4 to 8 bytes each.
_ROWS_AT_LEAST = 1 << 25


@dataclass(frozen=True, slots=True)
class Scored:
    """A table and what its rows are dropped by.

    "lru" drops rows of least last-seen time first, then of least count, then of least hash;
    "lfu" of least count first, then of least last-seen time, then of least hash: the core's order.
    """

    table: int
    kind: Kind


def scanned_together(rooms: Sequence[int]) -> list[list[int]]:
    """Which of some tables to scan in one call, by their capacity: indices, the largest first.

    Every table of a scan gets as much memory as the largest of them needs. So small tables are
    not scanned with a huge one, unless all of that is little.
    """
    parts: list[list[int]] = []
    largest = filled = 0
    for index in sorted(range(len(rooms)), key=lambda at: -rooms[at]):
        size = (len(parts[-1]) + 1) * largest if parts else 0
        if not parts or size > max(_ROWS_AT_LEAST, 2 * (filled + rooms[index])):
            parts.append([])
            largest, filled = rooms[index], 0
        parts[-1].append(index)
        filled += rooms[index]
    return parts


class Lives:
    """Times to live of some tables, on the device.

    Args:
        expiries: (table index, its rule) of each.
        device: where the shard is.
    """

    def __init__(self, expiries: Sequence[tuple[int, Expiry]], device: torch.device) -> None:
        self._values = [SlotValues(expiry.ttls, device) for _, expiry in expiries]
        jobs = torch.zeros(len(expiries), JOB_WORDS, dtype=torch.int64, device="cpu")
        for job, (table, _), values in zip(jobs, expiries, self._values, strict=True):
            job[JOB_TABLE] = table
            job[JOB_VALUES] = values.values_L.data_ptr()
            job[JOB_SHIFT], job[JOB_SLOTS] = values.shift, values.mask
        self.jobs_EW = sent(jobs, device)


def expired_many(
    layout: ShardLayout, lives: Lives, rows: int, now_s: int, marks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Drop the rows of these tables that have run out of time at event time `now_s`.

    A row goes if and only if now_s - last_seen_s >= its time to live; one seen later than `now_s`
    stays, and so does one that `marks` holds.

    Args:
        rows: no table has handed out more rows than that since it was empty.
        marks: what `pin_marks` made of the live tickets, or None.

    Returns:
        int32 handles and their number, int32 [1].
    """
    return expired_rows(layout, Scan(lives.jobs_EW, rows, marks=marks), now_s)


def scored_jobs(scored: Sequence[Scored], device: torch.device) -> Tensor:
    """Jobs of `lowest_many`, int64 [E, words] on the device; they may be kept."""
    jobs = torch.zeros(len(scored), JOB_WORDS, dtype=torch.int64, device="cpu")
    for job, one in zip(jobs, scored, strict=True):
        order = (SCORE_SEEN, SCORE_COUNTS) if one.kind == "lru" else (SCORE_COUNTS, SCORE_SEEN)
        job[JOB_TABLE] = one.table
        job[JOB_SCORE], job[JOB_SECOND] = order
    return sent(jobs, device)


def lowest_many(
    layout: ShardLayout,
    jobs_EW: Tensor,
    rows: int,
    drops_E: Tensor | Sequence[int],
    marks: Tensor | None = None,
    *,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop the rows of lowest score of several tables, exactly as many as asked for.

    A table with fewer rows that may go loses those.

    Args:
        jobs_EW: what `scored_jobs` made; a table once at most.
        rows: no table has handed out more rows than that since it was empty.
        drops_E: rows to drop per job; int64 on the device, or numbers.
        marks: what `pin_marks` made of the live tickets, or None.
        most: at least the sum of `drops_E`; needed where those are on the device.

    Returns:
        int32 handles and their number, int32 [1].
    """
    scan = Scan(jobs_EW, rows, marks=marks)
    if not isinstance(drops_E, Tensor):
        most = sum(max(drop, 0) for drop in drops_E)
        drops_E = sent(drops_E, jobs_EW.device)
    return lowest_rows(layout, scan, drops_E, rows * len(jobs_EW) if most is None else most)
