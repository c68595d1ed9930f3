"""File systems behind fsspec, without a network: one of objects in buckets, one as hdfs:// is."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from pyarrow import fs as arrow_fs

__all__ = ["REMOTE", "FakeArrow", "FakeObjects", "remote_url"]

REMOTE = ("memory", "objects", "arrow")
"""Kinds of stores that `remote_url` supports."""


class FakeObjects(AbstractFileSystem):
    """Objects in buckets, as in S3: no folders, no rename, no append; an object exists after its
    last part is written. As in fsspec, `exists` hides errors.

    Attributes:
        buckets: the content of each.
        log: "part" and "commit" of each file.
    """

    protocol = ("objects", "s3a")  # the second as a store that has buckets
    buckets: ClassVar[dict[str, dict[str, bytes]]] = {}
    log: ClassVar[list[str]] = []
    _error: ClassVar[Exception | None] = None

    @classmethod
    @contextlib.contextmanager
    def refusing(cls, error: Exception) -> Iterator[None]:
        """Every call raises the error meanwhile."""
        cls._error = error
        try:
            yield
        finally:
            cls._error = None

    def objects(self, path: str) -> tuple[dict[str, bytes], str]:
        """A bucket's objects, and the key."""
        if FakeObjects._error is not None:
            raise FakeObjects._error
        bucket, _, key = self._strip_protocol(path).partition("/")
        if bucket not in self.buckets:
            raise FileNotFoundError(f"The specified bucket does not exist: {bucket}")
        return self.buckets[bucket], key

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        held, key = self.objects(path)
        path = self._strip_protocol(path)
        prefix = f"{key}/" if key else ""
        names = {name[len(prefix) :].partition("/") for name in held if name.startswith(prefix)}
        found = [
            {"name": f"{path}/{name}", "type": "directory", "size": 0}
            if slash
            else {"name": f"{path}/{name}", "type": "file", "size": len(held[prefix + name])}
            for name, slash, _ in sorted(names)
        ]
        if not found and key in held:
            found = [{"name": path, "type": "file", "size": len(held[key])}]
        if not found and key:
            raise FileNotFoundError(path)
        once = list({one["name"]: one for one in found}.values())
        return once if detail else [one["name"] for one in once]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        held, key = self.objects(path)
        path = self._strip_protocol(path)
        if key in held:
            return {"name": path, "type": "file", "size": len(held[key])}
        if key and not any(name.startswith(f"{key}/") for name in held):
            raise FileNotFoundError(path)
        return {"name": path, "type": "directory", "size": 0}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a missing bucket, as s3fs does: nobody may call it."""
        raise AssertionError("a bucket would be made")

    def rm_file(self, path: str) -> None:
        held, key = self.objects(path)
        held.pop(key, None)  # one that is not there is fine with S3

    def mv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("objects cannot be renamed")

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **more: Any) -> Any:
        assert mode in ("rb", "wb"), mode
        more.pop("autocommit", None)
        return _ObjectFile(self, path, mode, block_size or "default", **more)


class _ObjectFile(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.fs.objects(self.path)
        self._parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        held, key = self.fs.objects(self.path)
        self.buffer.seek(0)
        self._parts.append(self.buffer.read())
        self.fs.log.append("part")
        if final:
            held[key] = b"".join(self._parts)
            self.fs.log.append("commit")
        return True

    def discard(self) -> None:
        self.buffer = None  # as s3fs has it: closing it would fail

    def _fetch_range(self, start: int, end: int) -> bytes:
        held, key = self.fs.objects(self.path)
        return held[key][start:end]


class FakeArrow(ArrowFSWrapper):
    """pyarrow's file systems behind fsspec, as hdfs:// is one, on a local disk."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(arrow_fs.LocalFileSystem(), **kwargs)


fsspec.register_implementation("objects", FakeObjects, clobber=True)
fsspec.register_implementation("arrow-local", FakeArrow, clobber=True)


def remote_url(kind: str, folder: Path) -> str:
    """URL of an empty place of a kind of `REMOTE`; of "arrow" it is below the folder."""
    name = uuid.uuid4().hex
    if kind == "objects":
        FakeObjects.buckets[name] = {}
    base = f"arrow-local://{folder}" if kind == "arrow" else f"{kind}://{name}"
    return f"{base}/job"
