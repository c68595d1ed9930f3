"""Files being written, which are durable once they are closed, and refusals of file systems."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from shoal.errors import CheckpointError, ShoalError, describe

__all__ = ["Buffer", "DurableFile", "told"]

Buffer = Any  # whatever has the buffer protocol: bytes, memoryview, numpy and pyarrow buffers

_SMALL = 1 << 14  # writes below it are gathered
_ROOM = 1 << 20  # bytes gathered at most


class _Sink(Protocol):
    """Where the bytes of one file go."""

    def write(self, parts: list[memoryview], crc32: int) -> int: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...


class DurableFile:
    """A file being written, once from front to back; `close` makes it durable.

    Leaving a `with` block by an exception aborts it.

    Attributes:
        path: below its storage.
        bytes, crc32: of what was written so far.
    """

    def __init__(self, path: str, sink: _Sink, where: str) -> None:
        self.path = path
        self.bytes = 0
        self.crc32 = 0
        self._sink: _Sink | None = sink
        self._where = where
        self._small = bytearray()

    def write(self, data: Buffer) -> int:
        """Append the bytes of a buffer, which is not kept; returns how many."""
        view = memoryview(data).cast("B")
        size = len(view)
        if size < _SMALL:
            self._small += view
            if len(self._small) >= _ROOM:
                self._flush(None)
        else:
            self._flush(view)
        self.bytes += size
        return size

    def close(self) -> None:
        """Make it durable. A second call does nothing.

        Raises:
            CheckpointError: no space, or the device failed; the file is removed then, or does not
                count.
        """
        if self._sink is not None:
            try:
                self._flush(None)
            except CheckpointError:
                self.abort()
                raise
            sink, self._sink = self._sink, None
            with told(self._where):
                sink.commit()

    def abort(self) -> None:
        """Remove it. Does nothing to a closed file."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            with told(self._where):
                sink.discard()

    @property
    def closed(self) -> bool:
        """Whether `close` or `abort` was called."""
        return self._sink is None

    def _flush(self, view: memoryview | None) -> None:
        if self._sink is None:
            raise ValueError(f"{self._where} is closed")
        parts = [memoryview(self._small)] if self._small else []
        if view is not None:
            parts.append(view)
        with told(self._where):
            self.crc32 = self._sink.write(parts, self.crc32)
        self._small = bytearray()

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


_REASONS: dict[int, tuple[str, str, str]] = {
    errno.ENOSPC: ("no space left on it", "room for the whole checkpoint",
                   "Free space, keep fewer checkpoints, or choose another folder."),
    errno.EDQUOT: ("the quota is used up", "room for the whole checkpoint",
                   "Free space, keep fewer checkpoints, or choose another folder."),
    errno.EROFS: ("a read-only file system", "a folder that may be written",
                  "Choose a folder on a file system that is mounted for writing."),
    errno.EACCES: ("no permission", "a folder that this user may read and write",
                   "Change its permissions, or choose another folder."),
    errno.EPERM: ("no permission", "a folder that this user may read and write",
                  "Change its permissions, or choose another folder."),
    errno.ENOENT: ("missing", "a file or folder that is there",
                   "Check the path; a file of a checkpoint may have been removed."),
    errno.ENOTDIR: ("a file where a folder is needed", "a folder", "Choose another path."),
    errno.EEXIST: ("a file where a folder is needed", "a folder", "Choose another path."),
    errno.EISDIR: ("a folder where a file is needed", "a file", "Choose another path."),
}  # fmt: skip


_REMOTE_REASONS: dict[int, tuple[str, str, str]] = {
    errno.EACCES: ("no permission", "credentials that may list, read, write and remove there",
                   "Check the credentials that its package finds, and their rights."),
    errno.ENOENT: ("missing", "a file or folder that is there",
                   "Check the path: a bucket must exist; a file may have been removed."),
}  # fmt: skip


@contextmanager
def told(path: str) -> Iterator[None]:
    """What the file system refuses, as a CheckpointError that says what and why.

    path: where; a URL is of another machine, whose package raises errors of its own kinds.
    """
    try:
        yield
    except ShoalError:
        raise
    except OSError as error:
        raise (_of_remote(path, error) if "://" in path else _of_local(path, error)) from error
    except Exception as error:
        if "://" not in path:
            raise
        raise _of_remote(path, error) from error


def _of_local(path: str, error: OSError) -> CheckpointError:
    reason = _REASONS.get(error.errno or 0)
    if reason is None:
        reason = (_text(error), "a file system that answers", "Check the device.")
    got, allowed, remedy = reason
    what = f"checkpoint storage at {path}"
    return CheckpointError(describe(what, got=got, allowed=allowed, remedy=remedy))


def _of_remote(url: str, error: Exception) -> CheckpointError:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and isinstance(error, FileNotFoundError):  # fsspec gives no numbers
        number = errno.ENOENT
    if number is None and isinstance(error, PermissionError):
        number = errno.EACCES
    number = errno.EACCES if number == errno.EPERM else number
    found = _REMOTE_REASONS.get(number or 0) or _REASONS.get(number or 0)
    if found is None:
        got, allowed = _text(error), "a store that answers"
        remedy = "Check the address, the connection and the credentials that its package finds."
    else:
        (reason, allowed, remedy), said = found, _text(error)
        got = f"{reason} ({said})"
    what = f"checkpoint storage at {url}"
    return CheckpointError(describe(what, got=got, allowed=allowed, remedy=remedy))


def _text(error: Exception) -> str:
    name, text = type(error).__name__, " ".join(str(error).split())
    return text if text and isinstance(error, OSError) else f"{name}: {text}" if text else name
