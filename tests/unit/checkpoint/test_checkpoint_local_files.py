"""Local files being written: whole blocks past the system's cache, and what file systems refuse."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from pathlib import Path

import pytest

from shoal.checkpoint import storage
from shoal.checkpoint.storage import LocalSink

BLOCK = 8192
DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_BLOCK", BLOCK)
    monkeypatch.setattr(storage, "_spare", [])


def written(path: Path, data: bytes, cut: int = 3001) -> bytes:
    sink, crc32 = LocalSink(str(path)), 0
    for at in range(0, len(data), cut):
        crc32 = sink.write(memoryview(data[at : at + cut]), crc32)
    sink.commit()
    assert crc32 == zlib.crc32(data)
    return path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 77])
def test_what_was_written_is_there(tmp_path: Path, size: int):
    data = os.urandom(size)
    assert written(tmp_path / "deep" / "file", data) == data
    assert written(tmp_path / "one", data, cut=max(1, size)) == data


def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | DIRECT, 0o600))
    except OSError:
        pytest.skip("this file system takes no direct writes")
    seen: list[tuple[int, bool]] = []
    write = os.writev

    def look(fd: int, parts: list[memoryview]) -> int:
        seen.append((len(parts[0]), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT)))
        return write(fd, parts)

    monkeypatch.setattr(os, "writev", look)
    data = os.urandom(2 * BLOCK + 5)
    assert written(tmp_path / "file", data) == data
    assert seen == [(BLOCK, True), (BLOCK, True), (5, False)]


@pytest.mark.skipif(not DIRECT, reason="this system has no direct writes")
@pytest.mark.parametrize("told", ["when asked", "when written"])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
):
    switch, write = fcntl.fcntl, os.writev
    refused: list[str] = []

    def no_switch(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & DIRECT:
            refused.append(told)
            raise OSError(errno.EINVAL, "Invalid argument")
        return switch(fd, command, flags)

    def no_write(fd: int, parts: list[memoryview]) -> int:
        if switch(fd, fcntl.F_GETFL) & DIRECT:
            refused.append(told)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, parts)

    if told == "when asked":
        monkeypatch.setattr(fcntl, "fcntl", no_switch)
    else:
        monkeypatch.setattr(os, "writev", no_write)
    data = os.urandom(3 * BLOCK + 100)
    assert written(tmp_path / "file", data) == data
    assert refused == [told]  # once for the file, not for each block


def test_writes_that_do_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: write(fd, [parts[0][:1000]]))
    data = os.urandom(3 * BLOCK + 100)
    assert written(tmp_path / "file", data) == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_made_durable_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    sink = LocalSink(str(tmp_path / "file"))
    sink.write(memoryview(b"some"), 0)
    monkeypatch.setattr(os, "writev" if number == errno.ENOSPC else "fsync", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        sink.commit()
    assert not (tmp_path / "file").exists()


def test_no_two_files_share_memory(tmp_path: Path):
    for turn in range(3):
        some = [LocalSink(str(tmp_path / f"{turn}.{k}")) for k in range(4)]
        data = [os.urandom(3 * BLOCK + 100) for _ in some]
        for at in range(0, len(data[0]), 1000):
            for sink, bytes_ in zip(some, data, strict=True):
                sink.write(memoryview(bytes_[at : at + 1000]), 0)
        for k, sink in enumerate(some):
            if k == turn:
                sink.discard()
            else:
                sink.commit()
                assert (tmp_path / f"{turn}.{k}").read_bytes() == data[k]
        spare = [id(one.obj) for one in storage._spare]
        assert len(set(spare)) == len(spare) == storage._SPARE
    before = list(storage._spare)
    sink = LocalSink(str(tmp_path / "next"))
    assert any(sink._block is one for one in before)
    assert len(storage._spare) == len(before) - 1
    sink.discard()


def test_a_file_that_lost_bytes_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sink = LocalSink(str(tmp_path / "file"))

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        with pytest.raises(OSError, match="Input/output"):
            sink.write(memoryview(bytes(BLOCK + 1)), 0)
    with pytest.raises(OSError, match="Input/output"):
        sink.commit()
    assert not (tmp_path / "file").exists()


def test_what_stopped_it_is_told_though_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sink = LocalSink(str(tmp_path / "file"))

    def stopped(fd: int) -> None:
        (tmp_path / "file").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    descriptor = sink._fd
    with pytest.raises(KeyboardInterrupt):
        sink.commit()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
