"""Folders and files of a checkpoint on any file system that fsspec knows."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from shoal import _core
from shoal.errors import CheckpointError, ShoalError

Buffer = Any  # whatever has the buffer protocol: bytes, memoryview, numpy and pyarrow buffers


class _Sink(Protocol):
    """Where the bytes of one file go."""

    def write(self, part: memoryview, crc32: int) -> int: ...
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

    def write(self, data: Buffer) -> int:
        """Append the bytes of a buffer, which is not kept; returns how many."""
        if self._sink is None:
            raise ValueError(f"{self._where} is closed")
        view = memoryview(data).cast("B")
        with storage_errors(self._where):
            self.crc32 = self._sink.write(view, self.crc32)
        self.bytes += len(view)
        return len(view)

    def close(self) -> None:
        """Make it durable. A second call does nothing.

        Raises:
            CheckpointError: no space, or the device failed; the file is removed then, or does not
                count.
        """
        self._end(lambda sink: sink.commit())

    def abort(self) -> None:
        """Remove it. Does nothing to a closed file."""
        self._end(lambda sink: sink.discard())

    def _end(self, how: Callable[[_Sink], None]) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with storage_errors(self._where):
                how(sink)

    @property
    def closed(self) -> bool:
        """Whether `close` or `abort` was called."""
        return self._sink is None

    def tell(self) -> int:
        """Bytes so far, for those who write into it as a Python file."""
        return self.bytes

    def flush(self) -> None:
        """Nothing: only what is closed counts."""

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
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
def storage_errors(path: str) -> Iterator[None]:
    """What the file system refuses, as a CheckpointError that says what and why.

    path: where; a URL is of another machine, whose package raises errors of its own kinds.
    """
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        if "://" not in path and not isinstance(error, OSError):
            raise
        raise _refused(path, error, remote="://" in path) from error


def _refused(path: str, error: Exception, *, remote: bool) -> CheckpointError:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and isinstance(error, FileNotFoundError):  # fsspec gives no numbers
        number = errno.ENOENT
    if number == errno.EPERM or (number is None and isinstance(error, PermissionError)):
        number = errno.EACCES
    found = (_REMOTE_REASONS.get(number or 0) if remote else None) or _REASONS.get(number or 0)
    if found is not None:
        got, allowed, remedy = found
        got = f"{got} ({_text(error)})" if remote else got
    elif remote:
        got, allowed = _text(error), "a store that answers"
        remedy = "Check the address, the connection and the credentials that its package finds."
    else:
        got, allowed, remedy = _text(error), "a file system that answers", "Check the device."
    what = f"checkpoint storage at {path}"
    return CheckpointError(what, got=got, allowed=allowed, remedy=remedy)


def _text(error: Exception) -> str:
    name, text = type(error).__name__, " ".join(str(error).split())
    return text if text and isinstance(error, OSError) else f"{name}: {text}" if text else name


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
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            make_folder(os.path.dirname(path))
            self._fd = os.open(path, flags, 0o666)

    def write(self, part: memoryview, crc32: int) -> int:
        """Append the bytes of a buffer, which is not kept; `crc32` continues over them."""
        while part:
            held = self._block[self._held : self._held + len(part)]
            crc32 = _core.crc32_copy(held, part[: len(held)], crc32)
            self._held += len(held)
            part = part[len(held) :]
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
            # What stopped it is what is raised.
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
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_TEMPORARY = ".tmp"
# File systems that fsspec knows, asked so that no refusal passes for "there is nothing".
#
# fsspec's own `exists`, `isfile` and `isdir` answer False to whatever goes wrong: a job with wrong
# credentials would start over. And `makedirs` makes a bucket whose name was misspelt.
# A bucket is made by its owner, with a region and rights; folders in it need no making.
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "obs", "tos"))
# Bytes gathered before they are sent; 10,000 such parts are the most that S3 takes in a file.
_PART_BYTES = 16 << 20


class RemoteSink:
    """A file of fsspec's, which is there once it is closed."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        if not _has_buckets(fs):
            fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._file = fs.open(path, "wb", block_size=_PART_BYTES)

    def write(self, part: memoryview, crc32: int) -> int:
        """Append the bytes of a buffer; `crc32` continues over them."""
        self._file.write(part)
        return int(_core.crc32(part, crc32))

    def commit(self) -> None:
        self._file.close()

    def discard(self) -> None:
        from fsspec.spec import AbstractBufferedFile  # local folders do without it

        if isinstance(self._file, AbstractBufferedFile):
            self._file.discard()
            self._file.closed = True  # to close it would send what is left
        else:
            self._file.close()
        remove_remote(self._fs, self._path)


def open_url(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there.

    Raises:
        CheckpointError: an unknown protocol, its package is not installed, or it does not start.
    """
    import fsspec  # local folders do without it

    protocol = url.split("://", 1)[0]
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, OSError):
            allowed = f"a {protocol}:// that answers"
            remedy = "Check the address, and what else its package needs (hdfs:// wants a Java "
            remedy += "machine and Hadoop's libraries)."
        else:
            allowed = "a local path, or a protocol that fsspec has a package for"
            remedy = f"Check the spelling, or install the package for {protocol}://."
        what, got = f"checkpoint folder {url}", " ".join(str(error).split())
        raise CheckpointError(what, got=got, allowed=allowed, remedy=remedy) from error
    return fs, root


def list_folder(fs: Any, path: str, *, deep: bool) -> list[dict[str, Any]]:
    """Records of what lies in a folder; none where it does not exist.

    deep: of all files below it, too.

    Raises:
        FileNotFoundError: the bucket that it would lie in does not exist.
    """
    fs.invalidate_cache()
    try:
        found = fs.ls(path, detail=True)  # `find` may leave out what is refused
        return list(fs.find(path, detail=True).values() if deep else found)
    except (FileNotFoundError, NotADirectoryError):
        _check_bucket(fs, path)
        return []


def replace_remote(fs: Any, path: str, data: bytes) -> None:
    """Write a small file whole: at once, where the file system can."""
    from fsspec.spec import AbstractFileSystem

    if _has_buckets(fs) or type(fs).mv is AbstractFileSystem.mv:  # which copies, then removes
        fs.pipe_file(path, data)
        return
    sink = RemoteSink(fs, path + _TEMPORARY)
    sink.write(memoryview(data), 0)
    sink.commit()
    remove_remote(fs, path)  # hdfs:// does not rename onto a file
    fs.mv(path + _TEMPORARY, path)


def remove_remote(fs: Any, path: str, *, tree: bool = False) -> None:
    """Remove a file, or a folder with all below it; nothing there is fine."""
    fs.invalidate_cache()
    try:
        if tree:
            fs.info(path)
            fs.rm(path, recursive=True)
        else:
            fs.rm_file(path)
    except FileNotFoundError:
        _check_bucket(fs, path)


def _has_buckets(fs: Any) -> bool:
    names = fs.protocol
    return not _BUCKETS.isdisjoint((names,) if isinstance(names, str) else names)


def _check_bucket(fs: Any, path: str) -> None:
    if _has_buckets(fs):
        fs.info(path.strip("/").split("/", 1)[0])


_PIECE_BYTES = 512 << 10  # what was read is in a near cache when its checksum is taken
_URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/")


class Storage:
    """A folder, local or by URL; it need not exist yet.

    Paths below it use "/" and never leave it. What the file system refuses is a CheckpointError
    that names the path and the reason.

    Args:
        url: a local path, or a URL of a protocol that fsspec knows ("memory://", "s3://", ...).

    Raises:
        CheckpointError: an unknown protocol, or its package is not installed; a URL as a Path.
    """

    def __init__(self, url: str | Path) -> None:
        self._fs: Any = None
        text = os.fspath(url)
        if isinstance(url, Path) and _URL_AS_PATH.match(text):
            got = f"{text} as a Path, which lost a slash of a URL"
            allowed = "a URL as a str, or a local Path"
            raise CheckpointError("checkpoint folder", got, allowed, "Pass the URL as it is.")
        if "://" in text and not text.startswith(("file://", "local://")):
            self._fs, root = open_url(text)
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

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link to a folder."""
        return self._fs is None and os.path.islink(self._root)

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
        with self._at(path) as full:
            if self._fs is None:
                return os.path.isfile(full)
            self._fs.invalidate_cache()  # other processes write there, too
            try:
                return bool(self._fs.info(full)["type"] == "file")
            except FileNotFoundError:
                return False

    def folders(self) -> tuple[str, ...]:
        """Names of the folders directly below, sorted; none where it does not exist."""
        with self._errors():
            if (root := self.local) is not None:
                below = root.iterdir() if root.is_dir() else ()
                return tuple(sorted(path.name for path in below if path.is_dir()))
            names = (one["name"].rstrip("/").rsplit("/", 1)[-1]
                     for one in list_folder(self._fs, self._root, deep=False)
                     if one["type"] == "directory")  # fmt: skip
            return tuple(sorted(names))

    def files(self) -> tuple[str, ...]:
        """Paths of all files below it, sorted; none where it does not exist."""
        return tuple(sorted(self.sizes()))

    def sizes(self) -> dict[str, int]:
        """Bytes of all files below it, by path."""
        with self._errors():
            if (root := self.local) is not None:
                files = (path for path in root.rglob("*") if not path.is_dir())
                return {path.relative_to(root).as_posix(): path.lstat().st_size for path in files}
            skip = len(self._fs._strip_protocol(self._root).rstrip("/")) + 1
            below = list_folder(self._fs, self._root, deep=True)
            return {one["name"][skip:]: int(one["size"] or 0) for one in below}

    def make(self) -> None:
        """Make the folder where it is missing, durably.

        Raises:
            CheckpointError: read-only, or something else lies in the way.
        """
        with self._errors():
            if self._fs is None:
                make_folder(self._root)
            elif _has_buckets(self._fs):
                _check_bucket(self._fs, self._root)
            else:
                self._fs.makedirs(self._root, exist_ok=True)

    def create(self, path: str) -> DurableFile:
        """A new file, or one in place of an old one, with the folders that it needs."""
        with self._at(path) as full:
            sink = LocalSink(full) if self._fs is None else RemoteSink(self._fs, full)
        return DurableFile(path, sink, self._where(path))

    def open(self, path: str) -> BinaryIO:
        """A file to read and seek in."""
        with self._at(path) as full:
            if self._fs is None:
                return open(full, "rb", buffering=0)
            return self._fs.open(full, "rb")  # type: ignore[no-any-return]

    def open_arrow(self, path: str) -> Any:
        """A file for pyarrow to read and seek in (`pyarrow.NativeFile`); to be closed."""
        with self._at(path) as full:
            return pa.OSFile(full) if self._fs is None else pa.PythonFile(self.open(path), "r")

    def read(self, path: str) -> bytes:
        """The whole of a file."""
        with self._at(path) as full:
            return Path(full).read_bytes() if self._fs is None else bytes(self._fs.cat_file(full))

    def pieces(
        self, path: str, into: memoryview | None = None, *, once: bool = False
    ) -> Iterator[memoryview]:
        """The bytes of a file from its start, in pieces.

        Args:
            into: memory for them, one behind the other, until the file ends or it is full; None:
                a piece is good until the next one is asked for.
            once: nobody else reads it soon: the system's cache need not keep it. The memory that
                held these bytes holds those that are read next; else a load would fill as much
                memory a second time as its tables take, and new pages cost more than all else.
        """
        room = memoryview(bytearray(1 << 20)) if into is None else into
        # A remote file is asked for in one go.
        most = _PIECE_BYTES if self._fs is None else max(1, len(room))
        with self.open(path) as file, self._errors(path):
            # Advice, which some systems do not take: files are read the same without.
            advised = hasattr(os, "posix_fadvise") and isinstance(file, FileIO)
            if advised:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            at = done = 0
            while into is None or done < len(room):
                got = file.readinto(room[at : at + most])  # type: ignore[attr-defined]
                if not got:
                    return
                yield room[at : at + got]
                done += got
                at = 0 if into is None else done
                if once and advised:
                    # Always from the start: a page that was read in part only would stay.
                    os.posix_fadvise(file.fileno(), 0, done, os.POSIX_FADV_DONTNEED)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        with self._at(path) as full:
            return os.stat(full).st_size if self._fs is None else int(self._fs.info(full)["size"])

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file whole: atomically and durably, where the file system can."""
        with self._at(path) as full:
            if self._fs is not None:
                replace_remote(self._fs, full, data)
                return
            with self.create(path + _TEMPORARY) as file:
                file.write(data)
            os.replace(full + _TEMPORARY, full)
            sync_folder(os.path.dirname(full))

    def remove(self, path: str) -> None:
        """Remove a file, durably; one that is not there is fine."""
        with self._at(path) as full:
            if self._fs is None:
                with suppress(FileNotFoundError):
                    os.unlink(full)
                    sync_folder(os.path.dirname(full))
            else:
                remove_remote(self._fs, full)

    def remove_tree(self) -> None:
        """Remove the folder and all below it; one that is not there is fine, also where another
        process removes it at the same time. Of a symbolic link only the link goes."""
        with self._errors():
            if self._fs is None:
                if os.path.islink(self._root):
                    os.unlink(self._root)
                while os.path.isdir(self._root):
                    with suppress(FileNotFoundError):
                        shutil.rmtree(self._root)
            else:
                remove_remote(self._fs, self._root, tree=True)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def _errors(self, path: str | None = None) -> AbstractContextManager[None]:
        return storage_errors(self._where(path))

    def _where(self, path: str | None) -> str:
        """For messages: local paths and URLs."""
        return self.url if path is None else f"{self.url.rstrip('/')}/{path}"

    @contextmanager
    def _at(self, path: str) -> Iterator[str]:
        """A path as the file system has it; what that refuses is an error that names it."""
        with self._errors(path):
            yield f"{self._root}/{_checked(path)}"


def _checked(path: str) -> str:
    parts = path.split("/")
    if not path or "\\" in path or "\0" in path or any(p in ("", ".", "..") for p in parts):
        what, allowed = "path below a checkpoint folder", "names with '/' between them"
        raise CheckpointError(what, repr(path), allowed, "Name a file or folder inside it.")
    return path
