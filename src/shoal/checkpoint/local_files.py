"""Local files being written: past the system's cache where the file system can, durable at the end.

A checkpoint is not read back soon. Bytes that go through the cache take new memory for as much as
is written, and threads of the kernel, which give way to nobody, to bring them to the disk.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress

from shoal import _core

__all__ = ["LocalSink", "make_folder", "sync_folder"]

_BLOCK = 4 << 20  # written at a time: long enough for a disk's full rate, one at a time
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where a system does not know it

# Blocks for the next files. New memory for each file costs more than the copies: it is cleared, and
# a virtual machine may have to get it from its host.
_SPARE = 2
_spare: list[memoryview] = []


def _block() -> memoryview:
    """Memory that begins at a page, which is this process's alone."""
    with suppress(IndexError):  # another thread may take the last one
        return _spare.pop()
    return memoryview(mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class LocalSink:
    """A file that takes bytes in order.

    Whole blocks are written from memory of its own, which is aligned as direct writes want it;
    the last bytes, fewer than a block, go through the cache.

    Args:
        path: where; folders that it needs are made.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._block, self._held = _block(), 0
        self._direct: bool | None = None  # None: not tried yet
        self._lost: OSError | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        try:
            self._fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            make_folder(os.path.dirname(path))
            self._fd = os.open(path, flags, 0o666)

    def write(self, parts: list[memoryview], crc32: int) -> int:
        """Append the bytes of buffers, which are not kept; `crc32` goes on over them."""
        for part in parts:
            at = 0
            while at < len(part):
                many = min(len(part) - at, _BLOCK - self._held)
                held = self._block[self._held : self._held + many]
                crc32 = _core.crc32_copy(held, part[at : at + many], crc32)
                self._held += many
                at += many
                if self._held == _BLOCK:
                    self._put()
        return crc32

    def commit(self) -> None:
        """Make it durable, and close it; removed where that fails."""
        try:
            if self._lost is not None:
                raise self._lost
            if self._held:
                self._cached()
                self._put()
            os.fsync(self._fd)
        except BaseException:
            # What stopped it is what is told.
            with suppress(OSError):
                self.discard()
            raise
        self._close()
        sync_folder(os.path.dirname(self._path))

    def discard(self) -> None:
        """Remove it."""
        try:
            self._close()
        finally:
            os.unlink(self._path)

    def _close(self) -> None:
        """Nothing is written any more: the block is free."""
        if len(_spare) < _SPARE:
            _spare.append(self._block)
        del self._block
        os.close(self._fd)

    def _put(self) -> None:
        """Write what is held."""
        left, self._held = self._block[: self._held], 0
        if self._direct is None:
            self._direct = bool(_DIRECT) and self._switch(_DIRECT)
        while left:
            try:
                done = os.writev(self._fd, [left])
            except OSError as error:
                # Larger blocks than these, or no direct writes at all though it was said so.
                if not self._direct or error.errno != errno.EINVAL:
                    self._lost = error
                    raise
                self._cached()
                continue
            left = left[done:]

    def _cached(self) -> None:
        """What follows goes through the system's cache."""
        if self._direct:
            self._switch(0)
        self._direct = False

    def _switch(self, direct: int) -> bool:
        """Whether the file system takes it."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True


def make_folder(path: str) -> None:
    """Make a local folder and those above it, each entered durably in the one above."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        # Another rank of this machine may make it at the same moment.
        os.makedirs(folder, exist_ok=True)
        sync_folder(os.path.dirname(folder))


def sync_folder(path: str) -> None:
    """Make the entries of a local folder durable."""
    if os.name == "nt":  # where a folder's entries cannot be synced
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
