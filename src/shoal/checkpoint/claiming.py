"""A folder that one writer has for itself, whatever other processes do."""

from __future__ import annotations

import errno
import logging
import os
import sys
import weakref

from shoal.checkpoint.durable import told
from shoal.checkpoint.storage import Storage

__all__ = ["WRITER", "Claim", "claim"]

WRITER = ".writer"  # in the folder while somebody writes there

_log = logging.getLogger(__name__)

# Of file systems that have no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP}


class Claim:
    """A lock on a local folder, which ends with its process. Object stores have none: there, and
    on file systems without locks, it stands for nothing.

    Args:
        path: of the file that is locked.
        fd: of it; None: nothing is locked.
    """

    def __init__(self, path: str = "", fd: int | None = None) -> None:
        self._path, self._fd = path, fd
        if fd is not None:
            _held.add(self)

    def release(self, *, keep: bool = True) -> None:
        """Let others have the folder. A second call does nothing.

        keep: leave the file where it is; it is removed with the folder.
        """
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            if not keep:
                os.unlink(self._path)
        except OSError as error:  # what was written is whole all the same
            _log.warning("%s stays: %s", self._path, error)
        finally:
            _unlock(fd)
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: the lock is its parent's alone."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_held: weakref.WeakSet[Claim] = weakref.WeakSet()


def claim(folder: Storage, *, make: bool = True) -> Claim | None:
    """Have a folder for oneself; None: another process, or another save of this one, has it.

    Args:
        folder: to lock.
        make: it where it is missing; else a missing folder is nobody's, and None.

    Raises:
        CheckpointError: the folder cannot be made or written.
    """
    if make:
        folder.make()
    local = folder.local
    if local is None or sys.platform == "win32":
        return Claim()
    path = f"{local}/{WRITER}"
    while True:
        with told(path):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                if not make:
                    return None
                folder.make()
                continue
        found = _locked(fd, path)
        if found == "ours":
            return Claim(path, fd)
        os.close(fd)
        if found == "no locks":
            return Claim()
        if found == "theirs":
            return None


def _locked(fd: int, path: str) -> str:
    """ "ours", "theirs", "no locks", or "gone": the file was removed before it was locked."""
    import fcntl  # not on Windows

    with told(path):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "theirs"
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return "no locks"
            raise
        try:
            there = os.stat(path)
        except FileNotFoundError:
            return "gone"
    here = os.fstat(fd)
    return "ours" if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) else "gone"


def _unlock(fd: int) -> None:
    import fcntl  # not on Windows

    fcntl.flock(fd, fcntl.LOCK_UN)  # also where a child that was just forked has it open


def _forget_all() -> None:
    for one in list(_held):
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
