"""Page-locked host memory for rows: the same addresses on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import OutOfDeviceMemory, describe

__all__ = ["PIECE_BYTES", "PageLocked", "grouped"]

PIECE_BYTES = 64 << 20
_FIRST_PIECE_BYTES = 1 << 20
_ALIGNED = 512


class PageLocked:
    """Hands out page-locked memory; each part lives as long as the tensor that views it.

    torch's allocator rounds page-locked sizes up to powers of two, so memory is taken from it in
    pieces of such sizes, growing with what is in use up to PIECE_BYTES, and cut here.

    device: where kernels read it; on the CPU, where they are interpreted, any memory will do.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._piece = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0
        self.bytes_held = 0  # of all pieces ever taken

    def take(self, size: int) -> Tensor:
        """uint8 [size], at a multiple of 512 bytes; contents are whatever was there.

        Raises:
            OutOfDeviceMemory: the system gives no more; nothing has changed.
        """
        if self._used + size > self._piece.numel():
            wanted = min(max(_FIRST_PIECE_BYTES, _power(self.bytes_held + 1) // 2), PIECE_BYTES)
            piece = self._allocated(max(_power(size), wanted))
            self.bytes_held += piece.numel()
            if piece.numel() - size < self._piece.numel() - self._used:
                return piece[:size]  # what the present piece has left is more than this one's
            self._piece, self._used = piece, 0
        start = self._used
        self._used = (start + size + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        return self._piece[start : start + size]

    def _allocated(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        except RuntimeError as error:  # torch.OutOfMemoryError is one, too
            raise OutOfDeviceMemory(
                describe(
                    "page-locked host memory for rows of a tiered shard",
                    got=f"{size} bytes wanted, {self.bytes_held} held, {_reason(error)}",
                    allowed="what the system lets a process lock",
                    remedy="Free host memory, raise the limit of locked memory (ulimit -l, or the "
                    "container's), give the tables a row budget (capacity_rows with "
                    "on_full='lru'), or spread them over more processes.",
                )
            ) from error


def grouped(sizes: Sequence[int], row_bytes: int) -> list[list[int]]:
    """Split chunks, given in rows, into runs whose bytes fit a piece: so that little is wasted."""
    groups: list[list[int]] = []
    room = 0
    for rows in sizes:
        if rows * row_bytes > room:
            groups.append([])
            room = PIECE_BYTES
        groups[-1].append(rows)
        room -= rows * row_bytes
    return groups


def _power(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(size - 1, 0).bit_length()


def _reason(error: RuntimeError) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
