"""Folders of a checkpoint on any file system that fsspec knows; local ones without a detour.

A file that was closed is durable: locally it was synced, and so was its folder's entry. Object
stores have no rename, and need none: there a whole object appears at once or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from shoal import _core
from shoal.checkpoint.caching import forget, in_order
from shoal.checkpoint.durable import Buffer, DurableFile, told
from shoal.checkpoint.local_files import LocalSink, make_folder, sync_folder
from shoal.checkpoint.remote import (
    RemoteSink,
    find_info,
    list_folder,
    make_remote,
    open_url,
    remove_remote,
    replace_remote,
)
from shoal.errors import CheckpointError, describe

__all__ = ["Buffer", "DurableFile", "Storage"]

_TEMPORARY = ".tmp"
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
            raise CheckpointError(
                describe(
                    "checkpoint folder",
                    got=f"{text} as a Path, which lost a slash of a URL",
                    allowed="a URL as a str, or a local Path",
                    remedy="Pass the URL as it is.",
                )
            )
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
        full = self._full(path)
        with self._told(path):
            if self._fs is None:
                return os.path.isfile(full)
            found = find_info(self._fs, full)
            return found is not None and found["type"] == "file"

    def folders(self) -> tuple[str, ...]:
        """Names of the folders directly below, sorted; none where it does not exist."""
        with self._told():
            if self._fs is None:
                if not os.path.isdir(self._root):
                    return ()
                with os.scandir(self._root) as entries:
                    return tuple(sorted(entry.name for entry in entries if entry.is_dir()))
            names = (one["name"].rstrip("/").rsplit("/", 1)[-1]
                     for one in list_folder(self._fs, self._root, deep=False)
                     if one["type"] == "directory")  # fmt: skip
            return tuple(sorted(names))

    def files(self) -> tuple[str, ...]:
        """Paths of all files below it, sorted; none where it does not exist."""
        return tuple(sorted(self.sizes()))

    def sizes(self) -> dict[str, int]:
        """Bytes of all files below it, by path."""
        with self._told():
            if self._fs is None:
                paths = (
                    os.path.join(folder, name)
                    for folder, _, names in os.walk(self._root)
                    for name in names
                )
                return {
                    os.path.relpath(path, self._root).replace(os.sep, "/"): os.lstat(path).st_size
                    for path in paths
                }
            cut = len(self._fs._strip_protocol(self._root).rstrip("/")) + 1
            below = list_folder(self._fs, self._root, deep=True)
            return {one["name"][cut:]: int(one["size"] or 0) for one in below}

    def make(self) -> None:
        """Make the folder where it is missing, durably.

        Raises:
            CheckpointError: read-only, or something else lies in the way.
        """
        with self._told():
            if self._fs is None:
                make_folder(self._root)
            else:
                make_remote(self._fs, self._root)

    def create(self, path: str) -> DurableFile:
        """A new file, or one in place of an old one, with the folders that it needs."""
        full = self._full(path)
        with self._told(path):
            sink = LocalSink(full) if self._fs is None else RemoteSink(self._fs, full)
        return DurableFile(path, sink, self._where(path))

    def open(self, path: str) -> BinaryIO:
        """A file to read and seek in."""
        full = self._full(path)
        with self._told(path):
            if self._fs is None:
                return open(full, "rb", buffering=0)
            return self._fs.open(full, "rb")  # type: ignore[no-any-return]

    def open_arrow(self, path: str) -> Any:
        """A file for pyarrow to read and seek in (`pyarrow.NativeFile`); to be closed."""
        import pyarrow as pa  # much to import for whoever only lists

        full = self._full(path)
        with self._told(path):
            return pa.OSFile(full) if self._fs is None else pa.PythonFile(self.open(path), "r")

    def read(self, path: str) -> bytes:
        """The whole of a file."""
        full = self._full(path)
        with self._told(path):
            if self._fs is None:
                with open(full, "rb") as file:
                    return file.read()
            return bytes(self._fs.cat_file(full))

    def read_into(self, path: str, buffer: memoryview, *, once: bool = False) -> tuple[int, int]:
        """Read a file from its start until it ends or the buffer is full.

        Args:
            once: nobody else reads it soon: the system's cache need not keep it.

        Returns:
            Bytes read, and their CRC-32.
        """
        done = crc32 = 0
        # A remote file is asked for in one go.
        most = _PIECE_BYTES if self._fs is None else max(1, len(buffer))
        with self.open(path) as file, self._told(path):
            in_order(file)
            while done < len(buffer):
                got = file.readinto(buffer[done : done + most])  # type: ignore[attr-defined]
                if not got:
                    break
                crc32 = _core.crc32(buffer[done : done + got], crc32)
                done += got
                if once:
                    forget(file, done)
        return done, crc32

    def pieces(self, path: str, piece_bytes: int = 1 << 20) -> Iterator[memoryview]:
        """The bytes of a file, in pieces that are good until the next one is asked for."""
        piece = memoryview(bytearray(piece_bytes))
        file = self.open(path)
        with file:
            with self._told(path):
                in_order(file)
            while True:
                with self._told(path):
                    got = file.readinto(piece)  # type: ignore[attr-defined]
                if not got:
                    return
                yield piece[:got]

    def size(self, path: str) -> int:
        """Bytes of a file."""
        full = self._full(path)
        with self._told(path):
            return os.stat(full).st_size if self._fs is None else int(self._fs.info(full)["size"])

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file whole: atomically and durably, where the file system can."""
        full = self._full(path)
        if self._fs is not None:
            with self._told(path):
                replace_remote(self._fs, full, data)
            return
        with self.create(path + _TEMPORARY) as file:
            file.write(data)
        with self._told(path):
            os.replace(full + _TEMPORARY, full)
            sync_folder(os.path.dirname(full))

    def remove(self, path: str) -> None:
        """Remove a file, durably; one that is not there is fine."""
        full = self._full(path)
        with self._told(path):
            if self._fs is None:
                try:
                    os.unlink(full)
                except FileNotFoundError:
                    return
                sync_folder(os.path.dirname(full))
            else:
                remove_remote(self._fs, full)

    def remove_tree(self) -> None:
        """Remove the folder and all below it; one that is not there is fine, also where another
        process removes it at the same time. Of a symbolic link only the link goes."""
        with self._told():
            if self._fs is None:
                if os.path.islink(self._root):
                    os.unlink(self._root)
                while os.path.isdir(self._root):
                    with contextlib.suppress(FileNotFoundError):
                        shutil.rmtree(self._root)
            else:
                remove_remote(self._fs, self._root, tree=True)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def _told(self, path: str | None = None) -> AbstractContextManager[None]:
        return told(self._where(path))

    def _where(self, path: str | None) -> str:
        """For messages: local paths and URLs."""
        return self.url if path is None else f"{self.url.rstrip('/')}/{path}"

    def _full(self, path: str) -> str:
        return f"{self._root}/{_checked(path)}"


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
