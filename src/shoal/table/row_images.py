"""Copies of rows of a cut on the host: in bounded memory, then in an unnamed file.

The core keeps them, as it does those of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import _core
from shoal.address import address
from shoal.hashing import salt
from shoal.kernels.row_form import RowForm
from shoal.kernels.row_images import HEAD_WORDS, IMAGE_VERSION
from shoal.placement import hash_ids, sort_key
from shoal.table import refusals, rows
from shoal.table.row_values import RowChunk
from shoal.table.spec import TableSpec

__all__ = ["RowImages", "chosen", "joined_by_hash"]

_WORD = 0xFFFFFFFF
_COLUMNS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


class RowImages:
    """One thread adds, another reads.

    Args:
        specs, forms: the tables, and the row form of each.
        epochs: rows stamped in `(since, epoch]` are those of the cut.
        buffer_bytes: memory for copies; the rest goes to the file.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        forms: Sequence[RowForm],
        epochs: tuple[int, int],
        buffer_bytes: int,
    ) -> None:
        self._specs = tuple(specs)
        self._core = _core.RowImages(
            [
                (
                    form.dim * form.dtype.itemsize,
                    form.state_width * form.real.itemsize,
                    8 * HEAD_WORDS + form.weight_bytes,
                    salt(spec.hash_name),
                )
                for spec, form in zip(specs, forms, strict=True)
            ],
            *epochs,
            buffer_bytes,
        )

    def keep(self, records_L: NDArray[np.int64], places_R: NDArray[np.int64], first: int) -> None:
        """Add records as `kernels.row_images` writes them; waits while the file is behind.

        Args:
            records_L: words of whole records, the first of which is word `first` of all.
            places_R: table << 32 | word of each.
        """
        tables_R, words_R = places_R >> 32, (places_R & _WORD) - first
        for k in np.unique(tables_R).tolist():
            own_R = words_R[tables_R == k]
            versions_R = records_L[own_R + IMAGE_VERSION].astype(np.uint32)
            places = own_R.astype(np.int32)
            self._core.keep(
                k, records_L.ctypes.data, places.ctypes.data, versions_R.ctypes.data, len(own_R)
            )

    def tick(self) -> int:
        """What is added from now on is not before the number this returns."""
        return self._core.tick()

    def check(self) -> None:
        """Raise if a copy was lost.

        Raises:
            CheckpointError: memory or the file failed.
        """
        refusals.kept(self._core.check)

    def stats(self) -> tuple[int, int]:
        """Rows added, and bytes of those in the file."""
        return self._core.stats()[:2]

    def histogram(self, table: int, bits: int, before: int) -> Tensor:
        """Rows added before that `tick`, by the top `bits` of their hash: int64 [2^bits].

        Raises:
            CheckpointError: a copy was lost.
        """
        counts = torch.zeros(1 << bits, dtype=torch.int64, device="cpu")
        refusals.kept(lambda: self._core.histogram(table, bits, before, address(counts)))
        return counts

    def read(self, table: int, start: int, stop: int) -> RowChunk:
        """Rows added so far with `start <= h < stop`, ordered by h.

        Raises:
            CheckpointError: a copy was lost.
        """
        count = 0
        if start < stop:
            count = refusals.kept(lambda: self._core.find(table, start, stop - 1))
        chunk = rows.empty_chunk(self._specs[table], count)
        if count:
            self._core.copy(rows.pointers(chunk))
        return chunk


def chosen(chunk: RowChunk, rows: Tensor) -> RowChunk:
    """Some rows of a chunk: a mask, or numbers."""
    return RowChunk(chunk.table, *(getattr(chunk, name)[rows] for name in _COLUMNS))


def joined_by_hash(hashed_as: str, first: RowChunk, second: RowChunk) -> RowChunk:
    """Rows of two chunks of one table, each ordered by hash, in that order.

    An id that both have is taken from the first.
    """
    if not len(second.ids):
        return first
    keys_A, keys_B = (sort_key(hash_ids(hashed_as, part.ids)) for part in (first, second))
    if len(keys_A):
        at_B = torch.searchsorted(keys_A, keys_B).clamp(max=len(keys_A) - 1)
        new_B = keys_A[at_B] != keys_B
        if not bool(new_B.all()):
            second, keys_B = chosen(second, new_B), keys_B[new_B]
    order_R = torch.cat([keys_A, keys_B]).argsort()
    both = (torch.cat([getattr(first, name), getattr(second, name)])[order_R] for name in _COLUMNS)
    return RowChunk(first.table, *both)
