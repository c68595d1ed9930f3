"""Folders, local and as an object store: durable files, and refusals that say why."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.checkpoint.storage import DurableFile, Storage
from shoal.errors import CheckpointError
from support.remote_stores import REMOTE, FakeArrow, FakeObjects, remote_url


@pytest.fixture(params=["local", *REMOTE])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield Storage(tmp_path / "root")
    else:
        one = Storage(f"{remote_url(request.param, tmp_path)}/root")
        yield one
        one.parent().remove_tree()


def put(storage: Storage, path: str, data: bytes) -> DurableFile:
    with storage.create(path) as file:
        file.write(data)
    return file


def test_files_come_back_with_size_and_checksum(storage: Storage):
    big = os.urandom(3_000_001)
    with storage.create("rows/00000.arrow") as file:
        for at in (0, 10, 5000, 100_000, len(big)):
            file.write(memoryview(big)[file.bytes : at])
    assert (file.bytes, file.crc32) == (len(big), zlib.crc32(big))
    assert storage.size(file.path) == len(big) and storage.read(file.path) == big
    buffer = bytearray(len(big) + 5)
    assert b"".join(map(bytes, storage.pieces(file.path))) == big
    assert sum(map(len, storage.pieces(file.path, memoryview(buffer)))) == len(big)
    assert bytes(buffer[: len(big)]) == big
    short = bytearray(100)
    assert sum(map(len, storage.pieces(file.path, memoryview(short)))) == 100 and short == big[:100]
    with storage.open(file.path) as opened:
        opened.seek(1000)
        assert opened.read(10) == big[1000:1010]


def test_many_small_writes_are_one_file(storage: Storage):
    parts = [bytes([k % 256]) * (k % 50) for k in range(100_000)]
    with storage.create("x") as file:
        for part in parts:
            assert file.write(part) == len(part)
    assert storage.read("x") == b"".join(parts) and file.crc32 == zlib.crc32(b"".join(parts))


def test_listing(storage: Storage):
    assert storage.files() == () == storage.folders() and not storage.exists("a")
    for path in ("b/c/d", "a", "b/a"):
        put(storage, path, b"1")
    assert storage.files() == ("a", "b/a", "b/c/d")
    assert storage.folders() == ("b",) and storage.child("b").folders() == ("c",)
    assert storage.exists("b/a") and not storage.exists("b") and not storage.exists("b/x")
    assert storage.child("b").parent().url == storage.url
    assert storage.child("b").name == "b"


def test_replacing_and_removing(storage: Storage):
    storage.replace("manifest.json", b"one")
    storage.replace("manifest.json", b"two")
    assert storage.read("manifest.json") == b"two" and storage.files() == ("manifest.json",)
    storage.remove("manifest.json")
    storage.remove("manifest.json")
    assert storage.files() == ()
    put(storage, "b/a", b"1")
    storage.child("b").remove_tree()
    storage.child("b").remove_tree()
    assert storage.files() == ()


def test_an_aborted_file_is_gone(storage: Storage):
    with pytest.raises(KeyError), storage.create("x") as file:
        file.write(b"1" * 100_000)
        raise KeyError
    assert file.closed and storage.files() == ()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"1" * 100_000)


def test_what_is_missing(storage: Storage):
    for call in (storage.read, storage.size, storage.open):
        with pytest.raises(CheckpointError, match=r"nowhere: got missing.*; allowed"):
            call("nowhere")


@pytest.mark.parametrize("path", ["", "..", "a/../b", "/a", "a//b", "a\\b", "a/", "./a"])
def test_paths_stay_inside(storage: Storage, path: str):
    with pytest.raises(CheckpointError, match="path below"):
        storage.read(path)


def test_the_files_of_a_local_folder_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or sync(fd)
    )
    storage = Storage(tmp_path / "new")
    with storage.create("rows/x") as file:
        file.write(b"1")
        made = [str(tmp_path), str(tmp_path / "new")]
        assert synced == made, "folders are entered in those above them"
    assert synced == [*made, str(tmp_path / "new/rows/x"), str(tmp_path / "new/rows")]
    synced.clear()
    storage.replace("m", b"2")
    assert synced == [str(tmp_path / f"new{end}") for end in ("/m.tmp", "", "")]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_no_space(tmp_path: Path):
    (tmp_path / "x").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"/x: got no space left.*Free space"):
        put(Storage(tmp_path), "x", b"1" * 100_000)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left.*Free space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only file system"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    storage = Storage(tmp_path / "sub")
    with monkeypatch.context() as patch:
        patch.setattr(os, "makedirs", refuse)
        with pytest.raises(CheckpointError, match=rf"sub: got .*{words}"):
            storage.make()
        with pytest.raises(CheckpointError, match=rf"sub/x: got .*{words}"):
            storage.create("x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        with pytest.raises(CheckpointError, match=rf"sub/x: got .*{words}"):
            put(storage, "x", b"1")
    assert storage.files() == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="no permission"):
        put(Storage(tmp_path), "x", b"1")


def test_a_file_in_the_way(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a file where a folder is needed"):
        Storage(tmp_path / "file").make()
    with pytest.raises(CheckpointError, match="a file where a folder is needed"):
        put(Storage(tmp_path / "file"), "x", b"1")


def test_unknown_protocols():
    with pytest.raises(CheckpointError, match=r"nosuch://a.*protocol"):
        Storage("nosuch://a/b")


def test_a_file_system_that_does_not_start(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: FakeObjects, **_: object) -> None:
        raise OSError("Unable to load libjvm")

    monkeypatch.setattr(FakeObjects, "__init__", refuse)
    monkeypatch.setattr(FakeObjects, "cachable", False)
    with pytest.raises(CheckpointError, match=r"objects://b/x: got Unable to load .*wants a Java"):
        Storage("objects://b/x")


def test_what_is_replaced_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = Storage(remote_url("arrow", tmp_path))
    storage.replace("manifest.json", b"one")
    with monkeypatch.context() as patch:
        patch.setattr(FakeArrow, "mv", None)  # as if it was killed there
        with pytest.raises(CheckpointError):
            storage.replace("other.json", b"two")
    assert not storage.exists("other.json") and storage.read("manifest.json") == b"one"


class TestBuckets:
    """A store in a bucket that is not there, or may not be read, is not an empty one."""

    def test_a_bucket_is_never_made(self, tmp_path: Path):
        storage = Storage("objects://missspelt/job")
        for call in (storage.make, storage.folders, storage.files, storage.remove_tree):
            with pytest.raises(CheckpointError, match=r"objects://missspelt/job: got missing"):
                call()
        with pytest.raises(CheckpointError, match=r"missspelt/job/x: got missing.*bucket must"):
            put(storage, "x", b"1")
        assert "missspelt" not in FakeObjects.buckets
        Storage(remote_url("objects", tmp_path)).make()

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (PermissionError("Forbidden"), "no permission .Forbidden.*Check the credentials"),
            (KeyError("token"), "KeyError: 'token'.*credentials"),
            (OSError(errno.EIO, "reset by peer"), ".Errno 5. reset by peer"),
        ],
    )
    def test_refusals_are_told(self, tmp_path: Path, error: Exception, words: str):
        storage = Storage(remote_url("objects", tmp_path))
        put(storage, "a/x", b"1")
        calls = (
            lambda: storage.exists("a/x"), storage.folders, storage.files, storage.make,
            lambda: storage.read("a/x"), lambda: storage.open("a/x"), storage.remove_tree,
            lambda: storage.remove("a/x"), lambda: put(storage, "b", b"1"),
            lambda: storage.replace("b", b"1"), lambda: storage.size("a/x"),
        )  # fmt: skip
        with FakeObjects.refusing(error):
            for call in calls:
                with pytest.raises(CheckpointError, match=rf"objects://.*got {words}"):
                    call()
        assert storage.files() == ("a/x",)

    def test_what_is_aborted_is_never_sent(self, tmp_path: Path):
        storage = Storage(remote_url("objects", tmp_path))
        sent = len(FakeObjects.log)
        for size in (10, 40 << 20):  # the longer one is sent in parts
            with pytest.raises(KeyError), storage.create("x") as file:
                file.write(bytes(size))
                raise KeyError
        assert "commit" not in FakeObjects.log[sent:] and storage.files() == ()


def test_urls_of_local_files(tmp_path: Path):
    put(Storage(f"file://{tmp_path}"), "x", b"1")
    assert Storage(tmp_path).files() == ("x",) and Storage(tmp_path).local == tmp_path
