"""File systems that fsspec knows, asked so that no refusal passes for "there is nothing".

fsspec's own `exists`, `isfile` and `isdir` answer False to whatever goes wrong: a job with wrong
credentials would start over. And `makedirs` makes a bucket whose name was misspelt.
"""

from __future__ import annotations

from typing import Any

from shoal import _core
from shoal.errors import CheckpointError

# A bucket is made by its owner, with a region and rights; folders in it need no making.
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "obs", "tos"))
_TEMPORARY = ".tmp"
# Bytes gathered before they are sent; 10,000 such parts are the most that S3 takes in a file.
_PART_BYTES = 16 << 20


class RemoteSink:
    """A file of fsspec's, which is there once it is closed."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        if not _has_buckets(fs):
            fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._file = fs.open(path, "wb", block_size=_PART_BYTES)

    def write(self, parts: list[memoryview], crc32: int) -> int:
        """Append the bytes of buffers; `crc32` goes on over them."""
        for part in parts:
            crc32 = _core.crc32(part, crc32)
            self._file.write(part)
        return crc32

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
    except OSError as error:
        raise CheckpointError(
            f"checkpoint folder {url}",
            got=" ".join(str(error).split()),
            allowed=f"a {protocol}:// that answers",
            remedy="Check the address, and what else its package needs (hdfs:// wants a Java "
            "machine and Hadoop's libraries).",
        ) from error
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint folder {url}",
            got=" ".join(str(error).split()),
            allowed="a local path, or a protocol that fsspec has a package for",
            remedy=f"Check the spelling, or install the package for {protocol}://.",
        ) from error
    return fs, root


def find_info(fs: Any, path: str) -> dict[str, Any] | None:
    """What is at a path: fsspec's record of it; None: nothing."""
    fs.invalidate_cache()  # other processes write there, too
    try:
        found: dict[str, Any] = fs.info(path)
    except FileNotFoundError:
        return None
    return found


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


def make_remote(fs: Any, path: str) -> None:
    """Make a folder where it is missing.

    Raises:
        FileNotFoundError: the bucket that it would lie in does not exist.
    """
    if _has_buckets(fs):
        _check_bucket(fs, path)
    else:
        fs.makedirs(path, exist_ok=True)


def replace_remote(fs: Any, path: str, data: bytes) -> None:
    """Write a small file whole: at once, where the file system can."""
    from fsspec.spec import AbstractFileSystem

    if _has_buckets(fs) or type(fs).mv is AbstractFileSystem.mv:  # which copies, then removes
        fs.pipe_file(path, data)
        return
    sink = RemoteSink(fs, path + _TEMPORARY)
    sink.write([memoryview(data)], 0)
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
