"""Folders of a checkpoint on any file system that fsspec knows; local ones without a detour.

A file that was closed is durable: locally it was synced, and so was its folder's entry. Object
stores have no rename, and need none: there a whole object appears at once or not at all.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from shoal.errors import CheckpointError, describe

__all__ = ["Buffer", "DurableFile", "Storage"]

Buffer = Any  # whatever has the buffer protocol: bytes, memoryview, numpy and pyarrow buffers

_TEMPORARY = ".tmp"
_SMALL = 1 << 14  # writes below it are gathered
_ROOM = 1 << 20  # bytes gathered at most


class _Sink(Protocol):
    """Where the bytes of one file go."""

    def write(self, parts: list[memoryview]) -> None: ...
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
            with _told(self._where):
                sink.commit()

    def abort(self) -> None:
        """Remove it. Does nothing to a closed file."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            with _told(self._where):
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
        for part in parts:
            self.crc32 = zlib.crc32(part, self.crc32)
        with _told(self._where):
            self._sink.write(parts)
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


class Storage:
    """A folder, local or by URL; it need not exist yet.

    Paths below it use "/" and never leave it. What the file system refuses is a CheckpointError
    that names the path and the reason.

    Args:
        url: a local path, or a URL of a protocol that fsspec knows ("memory://", "s3://", ...).

    Raises:
        CheckpointError: an unknown protocol, or its package is not installed.
    """

    def __init__(self, url: str | Path) -> None:
        self._fs: Any = None
        text = os.fspath(url)
        if "://" in text and not text.startswith(("file://", "local://")):
            self._fs, root = _open(text)
            self._root = root.rstrip("/")
            self.url = text.rstrip("/")
        else:
            self._root = os.path.abspath(text.split("://", 1)[-1])
            self.url = self._root

    @property
    def name(self) -> str:
        """Last part of its path."""
        return self._root.rsplit("/", 1)[-1]

    @property
    def local(self) -> Path | None:
        """Its path where it is a local folder."""
        return Path(self._root) if self._fs is None else None

    def parent(self) -> Storage:
        """The folder that it lies in."""
        if self._fs is None:
            return Storage(os.path.dirname(self._root))
        return Storage(self.url.rsplit("/", 1)[0] if "/" in self._root.strip("/") else self.url)

    def child(self, name: str) -> Storage:
        """A folder below it."""
        return Storage(f"{self.url.rstrip('/')}/{_checked(name)}")

    def exists(self, path: str) -> bool:
        """Whether there is a file of that path."""
        full = self._full(path)
        with _told(full):
            return bool(os.path.isfile(full) if self._fs is None else self._fs.isfile(full))

    def folders(self) -> tuple[str, ...]:
        """Names of the folders directly below, sorted; none where it does not exist."""
        with _told(self._root):
            if self._fs is None:
                if not os.path.isdir(self._root):
                    return ()
                with os.scandir(self._root) as entries:
                    return tuple(sorted(entry.name for entry in entries if entry.is_dir()))
            self._fs.invalidate_cache()
            if not self._fs.isdir(self._root):
                return ()
            found = self._fs.ls(self._root, detail=True)
            names = (one["name"].rstrip("/").rsplit("/", 1)[-1] for one in found
                     if one["type"] == "directory")  # fmt: skip
            return tuple(sorted(names))

    def files(self) -> tuple[str, ...]:
        """Paths of all files below it, sorted; none where it does not exist."""
        with _told(self._root):
            if self._fs is None:
                found = [
                    os.path.relpath(os.path.join(folder, name), self._root).replace(os.sep, "/")
                    for folder, _, names in os.walk(self._root)
                    for name in names
                ]
                return tuple(sorted(found))
            self._fs.invalidate_cache()
            if not self._fs.isdir(self._root):
                return ()
            cut = len(self._fs._strip_protocol(self._root).rstrip("/")) + 1
            return tuple(sorted(path[cut:] for path in self._fs.find(self._root)))

    def make(self) -> None:
        """Make the folder where it is missing, durably.

        Raises:
            CheckpointError: read-only, or something else lies in the way.
        """
        with _told(self._root):
            if self._fs is None:
                _make_folder(self._root)
            else:
                self._fs.makedirs(self._root, exist_ok=True)

    def create(self, path: str) -> DurableFile:
        """A new file, or one in place of an old one, with the folders that it needs."""
        full = self._full(path)
        with _told(full):
            sink = _LocalSink(full) if self._fs is None else _RemoteSink(self._fs, full)
        return DurableFile(path, sink, full)

    def open(self, path: str) -> BinaryIO:
        """A file to read and seek in."""
        full = self._full(path)
        with _told(full):
            if self._fs is None:
                return open(full, "rb", buffering=0)
            return self._fs.open(full, "rb")  # type: ignore[no-any-return]

    def open_arrow(self, path: str) -> Any:
        """A file for pyarrow to read and seek in (`pyarrow.NativeFile`); to be closed."""
        import pyarrow as pa  # much to import for whoever only lists

        full = self._full(path)
        with _told(full):
            return pa.OSFile(full) if self._fs is None else pa.PythonFile(self.open(path), "r")

    def read(self, path: str) -> bytes:
        """The whole of a file."""
        full = self._full(path)
        with _told(full):
            if self._fs is None:
                with open(full, "rb") as file:
                    return file.read()
            return bytes(self._fs.cat_file(full))

    def read_into(self, path: str, buffer: memoryview) -> int:
        """Read a file from its start until it ends or the buffer is full; returns the bytes."""
        done = 0
        with self.open(path) as file, _told(self._full(path)):
            while done < len(buffer):
                got = file.readinto(buffer[done:])  # type: ignore[attr-defined]
                if not got:
                    break
                done += got
        return done

    def size(self, path: str) -> int:
        """Bytes of a file."""
        full = self._full(path)
        with _told(full):
            return os.stat(full).st_size if self._fs is None else int(self._fs.info(full)["size"])

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file whole: atomically and durably, where the file system can."""
        full = self._full(path)
        if self._fs is not None:
            with _told(full):
                self._fs.pipe_file(full, data)
            return
        with self.create(path + _TEMPORARY) as file:
            file.write(data)
        with _told(full):
            os.replace(full + _TEMPORARY, full)
            _sync_folder(os.path.dirname(full))

    def remove(self, path: str) -> None:
        """Remove a file, durably; one that is not there is fine."""
        full = self._full(path)
        with _told(full):
            if self._fs is None:
                try:
                    os.unlink(full)
                except FileNotFoundError:
                    return
                _sync_folder(os.path.dirname(full))
            elif self._fs.exists(full):
                self._fs.rm_file(full)

    def remove_tree(self) -> None:
        """Remove the folder and all below it; one that is not there is fine."""
        with _told(self._root):
            if self._fs is None:
                if os.path.isdir(self._root):
                    shutil.rmtree(self._root)
            else:
                self._fs.invalidate_cache()
                if self._fs.exists(self._root):
                    self._fs.rm(self._root, recursive=True)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def _full(self, path: str) -> str:
        return f"{self._root}/{_checked(path)}"


class _LocalSink:
    """A file by its descriptor: no buffer of Python's between the caller's and the kernel's."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        try:
            self._fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            _make_folder(os.path.dirname(path))
            self._fd = os.open(path, flags, 0o666)

    def write(self, parts: list[memoryview]) -> None:
        while parts:
            done = os.writev(self._fd, parts)
            while parts and done >= len(parts[0]):
                done -= len(parts.pop(0))
            if done:
                parts[0] = parts[0][done:]

    def commit(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
        _sync_folder(os.path.dirname(self._path))

    def discard(self) -> None:
        os.close(self._fd)
        os.unlink(self._path)


class _RemoteSink:
    """A file of fsspec's, which is there once it is closed."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._file = fs.open(path, "wb")

    def write(self, parts: list[memoryview]) -> None:
        for part in parts:
            self._file.write(part)

    def commit(self) -> None:
        self._file.close()

    def discard(self) -> None:
        # A file that cannot forget what it was given is closed and removed instead.
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            discard()
        self._file.close()
        if self._fs.exists(self._path):
            self._fs.rm_file(self._path)


def _open(url: str) -> tuple[Any, str]:
    import fsspec  # local folders do without it

    protocol = url.split("://", 1)[0]
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            describe(
                f"checkpoint folder {url}",
                got=" ".join(str(error).split()),
                allowed="a local path, or a protocol that fsspec has a package for",
                remedy=f"Check the spelling, or install the package for {protocol}://.",
            )
        ) from error
    return fs, root


def _checked(path: str) -> str:
    parts = path.split("/")
    if not path or "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise CheckpointError(
            describe(
                "path below a checkpoint folder",
                got=repr(path),
                allowed="names with '/' between them",
                remedy="Name a file or folder inside it.",
            )
        )
    return path


def _make_folder(path: str) -> None:
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        # Another rank of this machine may make it at the same moment.
        os.makedirs(folder, exist_ok=True)
        _sync_folder(os.path.dirname(folder))


def _sync_folder(path: str) -> None:
    if os.name == "nt":  # where a folder's entries cannot be synced
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


@contextmanager
def _told(path: str) -> Iterator[None]:
    """What the file system refuses, as a CheckpointError that says what and why."""
    try:
        yield
    except OSError as error:
        number = error.errno
        if number is None and isinstance(error, FileNotFoundError):  # fsspec gives no numbers
            number = errno.ENOENT
        if number is None and isinstance(error, PermissionError):
            number = errno.EACCES
        reason = _REASONS.get(number or 0)
        got, allowed, remedy = reason or (
            " ".join(str(error).split()) or type(error).__name__,
            "a file system that answers",
            "Check the device or the connection.",
        )
        raise CheckpointError(
            describe(f"checkpoint storage at {path}", got=got, allowed=allowed, remedy=remedy)
        ) from error
