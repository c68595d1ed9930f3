"""What the system is told of files that are read from front to back; nothing of remote ones."""

from __future__ import annotations

import os
from io import FileIO
from typing import BinaryIO

__all__ = ["forget", "in_order"]

# Advice, which some systems do not take: files are read the same without.
_TAKEN = hasattr(os, "posix_fadvise")


def in_order(file: BinaryIO) -> None:
    """The whole file will be read in order: what comes next may be fetched early."""
    if _TAKEN and isinstance(file, FileIO):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)


def forget(file: BinaryIO, size: int) -> None:
    """The first `size` bytes are not read again soon.

    The memory that held them holds those that are read next; else a load would fill as much
    memory a second time as its tables take, and new pages cost more than all else. Always from
    the start: a page that was read in part only would stay.
    """
    if _TAKEN and isinstance(file, FileIO):
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
