"""Admission counters of the reference shard, out and in."""

from __future__ import annotations

import torch

from shoal.table.values import AdmissionState
from support.admission_counters import Counter, ExactCounter, SketchCounter

__all__ = ["AdmissionVerbs"]


class AdmissionVerbs:
    _counters: list[Counter]

    def admission_state(self, table: int) -> AdmissionState:
        counter = self._counters[table]
        pairs = counter._counts if isinstance(counter, ExactCounter) else {}
        cells = b""
        if isinstance(counter, SketchCounter):
            cells = counter._cells.to(torch.uint32).numpy().tobytes()
        ids = torch.tensor(list(pairs), dtype=torch.int64)
        return AdmissionState(ids, torch.tensor(list(pairs.values()), dtype=torch.int64), cells)

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        counter = self._counters[table]
        if isinstance(counter, ExactCounter):
            counter._counts = dict(zip(state.ids.tolist(), state.counts.tolist(), strict=True))
        if isinstance(counter, SketchCounter):
            flat = torch.frombuffer(bytearray(state.cells), dtype=torch.uint32)
            counter._cells = flat.to(torch.int64).reshape(counter._cells.shape)
