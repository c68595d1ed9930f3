"""Rows that leave or enter a CPU shard whole, as chunks of tensors."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.address import address, empty_rows
from shoal.table import checks
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, Entry, RowChunk, TableStats

_LINE = 64  # bytes

WEIGHT_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
"""Name of a row dtype -> that of its weights."""

REAL_DTYPES = dict.fromkeys(WEIGHT_DTYPES, torch.float32) | {"float64": torch.float64}
"""The same -> that of its optimizer state, and of what is computed."""


def weight_dtype(spec: TableSpec) -> torch.dtype:
    """Storage dtype of a table's weights."""
    return torch.int8 if spec.dtype == "int8" else WEIGHT_DTYPES[spec.dtype]


def real_dtype(spec: TableSpec) -> torch.dtype:
    """Dtype in which a table computes and keeps optimizer state."""
    return REAL_DTYPES.get(spec.dtype, torch.float32)


def stored(spec: TableSpec, weights: Tensor) -> Tensor:
    """Weights [R, D] as a table stores them, to nearest, ties to even.

    Of int8: codes -127..127, then the 4 bytes of the row's fp32 scale, the largest finite weight
    divided by 127. Infinities become the largest code, NaN becomes 0.
    """
    if spec.dtype != "int8":
        return weights.to(weight_dtype(spec))
    weights = weights.float()
    scale = weights.abs().masked_fill_(~weights.isfinite(), 0.0).amax(1, keepdim=True) / 127
    codes = (weights / scale).nan_to_num_(0.0).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], 1)


def empty_chunk(spec: TableSpec, count: int, *, state: bool = True) -> RowChunk:
    """An uninitialised chunk of `count` rows; a large one is one block of reused memory."""
    whole = torch.int64
    wide = (weight_dtype(spec), spec.stored_width), (real_dtype(spec), spec.state_width * state)
    columns = [((count,), whole)] * 4 + [((count, width), dtype) for dtype, width in wide]
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in columns]
    starts = [0, *accumulate(-(-size // _LINE) * _LINE for size in sizes)]
    memory = empty_rows(starts[-1] // 4, 1, torch.float32).view(-1).view(torch.uint8)
    parts = [
        memory[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, columns, strict=False)
    ]
    ids, versions, last_seen_s, counts, weights, states = parts
    return RowChunk(spec.name, ids, weights, states, versions, last_seen_s, counts)


def pointers(chunk: RowChunk) -> list[int]:
    """Where the columns of a chunk lie, in the order the core takes them."""
    return [address(column) for column in chunk.columns]


def entry_of(chunk: RowChunk) -> Entry | None:
    """The one row of a chunk, or None when it has none."""
    if chunk.ids.numel() == 0:
        return None
    return Entry(
        int(chunk.ids[0]),
        chunk.weights[0].clone(),
        chunk.state[0].clone(),
        int(chunk.versions[0]),
        int(chunk.last_seen_s[0]),
        int(chunk.counts[0]),
    )


def admission_of(core: Any, table: int) -> AdmissionState:
    """Admission counters of a table."""
    ids, counts = core.admission_counts(table)
    return AdmissionState(
        torch.tensor(ids, dtype=torch.int64, device="cpu"),
        torch.tensor(counts, dtype=torch.int64, device="cpu"),
        core.admission_cells(table),
    )


def load_admission(core: Any, table: int, spec: TableSpec, state: AdmissionState) -> None:
    """Restore admission counters.

    Raises:
        ShapeError: the sketch has another size than the spec's.
    """
    admission = spec.admission
    sketch = admission is not None and admission.counter == "sketch"
    expected = 4 * admission.sketch_width * admission.sketch_depth if admission and sketch else 0
    checks.sketch(spec.name, state.cells, expected)
    core.load_admission(table, state.ids.tolist(), state.counts.tolist(), state.cells)


def stats_of(name: str, raw: dict[str, int], *, on_host: bool = False) -> TableStats:
    """Counters of a table."""
    parts = (raw["weights"], raw["state"], raw["metadata"], raw["index"])
    return TableStats(
        name=name,
        rows=raw["rows"],
        bytes_total=sum(parts),
        bytes_weights=parts[0],
        bytes_state=parts[1],
        bytes_metadata=parts[2],
        bytes_index=parts[3],
        index_load=raw["rows"] / raw["slots"],
        inserted=raw["inserted"],
        refused=raw["refused"],
        evicted=raw["evicted"],
        nonfinite_skipped=raw["nonfinite"],
        on_host=on_host,
    )
