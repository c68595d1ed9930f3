"""What one table of a GPU shard has allocated, and what it lacks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.kernels import table_index
from shoal.kernels.row_form import RowForm
from shoal.kernels.table_layout import BUCKET_BYTES, BUCKET_SLOTS
from shoal.table.device_chunks import METADATA_BYTES, Block

__all__ = ["Growth", "Part", "TableMemory", "bytes_of_row", "longer_list"]

_FIRST_SLOTS = 64


class TableMemory:
    """What one table has allocated."""

    __slots__ = ("blocks", "chunks", "directory", "entries", "form", "free_list", "rows", "slots")

    def __init__(self, form: RowForm, device: torch.device) -> None:
        self.form = form
        self.slots = _FIRST_SLOTS
        self.entries: Tensor = table_index.new_entries(_FIRST_SLOTS, device)
        self.directory: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self.free_list: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self.blocks: list[Block] = []
        self.chunks: list[int] = []
        self.rows = 0  # that its chunks have room for

    @property
    def index_bytes(self) -> int:
        return 8 * self.entries.numel() + 4 * (self.free_list.numel() + self.directory.numel())


@dataclass(frozen=True, slots=True)
class Growth:
    """What a table lacks: sizes of further chunks, slots of another index or 0."""

    table: int
    form: RowForm
    sizes: tuple[int, ...]
    slots: int

    @property
    def bytes_wanted(self) -> int:
        """Bytes of its chunks and its index."""
        row_bytes = bytes_of_row(self.form)
        buckets = self.slots // BUCKET_SLOTS + 1 if self.slots else 0
        return sum(self.sizes) * row_bytes + buckets * BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """A growth, the number of its first chunk, and what was allocated for it.

    blocks: each with the sizes of its chunks, in their order.
    """

    growth: Growth
    first: int
    blocks: tuple[tuple[Block, tuple[int, ...]], ...]
    directory: Tensor | None
    entries: Tensor | None


def bytes_of_row(form: RowForm) -> int:
    """Bytes that a row takes in its chunk."""
    return form.weight_bytes + form.state_bytes + METADATA_BYTES


def longer_list(handles: Tensor, size: int) -> Tensor:
    """A list of handles with room for `size` of them, and those of a shorter one at its head."""
    longer = torch.zeros(size, dtype=torch.int32, device=handles.device)
    longer[: handles.numel()] = handles
    return longer
