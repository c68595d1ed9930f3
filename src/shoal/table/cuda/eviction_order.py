"""Which rows a GPU shard drops: over its budget, or out of time; and what scans are told of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels.host_copies import sent
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
)
from shoal.rules.expiry import Expiry
from shoal.table.cuda.admission import SlotValues
from shoal.table.spec import OnFull

# Rows that a scan may have room for whatever its tables hold: 4 to 8 bytes each.
_ROWS_AT_LEAST = 1 << 25


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


def scored_jobs(scored: Sequence[tuple[int, OnFull]], device: torch.device) -> Tensor:
    """Jobs of `lowest_rows`, int64 [E, words] on the device: tables, and what their rows go by.

    "lru" drops rows of least last-seen time first, then of least count, then of least hash;
    "lfu" of least count first, then of least last-seen time, then of least hash: the core's order.
    Rows of others go as with "lru".
    """
    jobs = torch.zeros(len(scored), JOB_WORDS, dtype=torch.int64, device="cpu")
    for job, (table, kind) in zip(jobs, scored, strict=True):
        job[JOB_TABLE] = table
        order = (SCORE_COUNTS, SCORE_SEEN) if kind == "lfu" else (SCORE_SEEN, SCORE_COUNTS)
        job[JOB_SCORE], job[JOB_SECOND] = order
    return sent(jobs, device)
