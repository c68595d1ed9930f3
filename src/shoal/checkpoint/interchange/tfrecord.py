"""Frames of a TFRecord file: length, masked CRC-32C of it, bytes, masked CRC-32C of those.

A file may be compressed as a whole: with zlib or gzip, or with Snappy in blocks that each follow
their length (4 bytes, big-endian), as TensorFlow's record writer makes them.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from shoal.checkpoint.interchange.entries import malformed

__all__ = ["compression_of", "frame", "masked_crc32c", "read_records"]

_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_PIECE = 1 << 22
_HEADER = 12
_LARGEST_BLOCK = 1 << 30
_LARGEST_RECORD = 1 << 26


def _table() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(_POLYNOMIAL), values >> 1)
    return values.astype(np.uint32)


_TABLE = _table()


def masked_crc32c(records: Sequence[bytes]) -> list[int]:
    """Masked CRC-32C of each of some byte strings; those of one length are computed together."""
    result = [0] * len(records)
    by_length: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        by_length.setdefault(len(record), []).append(index)
    for length, indices in by_length.items():
        joined = b"".join(records[index] for index in indices)
        # One byte of all records a step, so their bytes are laid beside each other.
        columns = np.frombuffer(joined, dtype=np.uint8).reshape(len(indices), length).T.copy()
        crc = np.full(len(indices), 0xFFFFFFFF, dtype=np.uint32)
        for column in columns:
            crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
        crc ^= np.uint32(0xFFFFFFFF)
        rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
        masked = (rotated.astype(np.uint64) + _MASK_DELTA) & 0xFFFFFFFF
        for index, value in zip(indices, masked.tolist(), strict=True):
            result[index] = value
    return result


def frame(record: bytes) -> bytes:
    """A record with its length and checksums around it."""
    length = struct.pack("<Q", len(record))
    crc_length, crc_record = masked_crc32c([length, record])
    return length + struct.pack("<I", crc_length) + record + struct.pack("<I", crc_record)


def compression_of(path: Path) -> str:
    """What a file of records is compressed with: "", "zlib", "gzip" or "snappy".

    Raises:
        DataError: it has records in none of these.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if not head or _is_frame(head):
        return ""
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0:
        return "zlib"
    if _snappy_begins(path):
        return "snappy"
    raise malformed(
        path,
        "a file that does not begin with a record",
        "TFRecord: as it is, or with zlib, gzip or Snappy",
        "Check that this is the dump, and that it was copied whole.",
    )


def read_records(path: Path, *, many: int = 4096) -> Iterator[list[bytes]]:
    """The records of a file, in lists of up to `many`, checksums checked.

    Raises:
        DataError: the file ends inside a record, or a checksum differs.
    """
    compression = compression_of(path)
    with path.open("rb") as file:
        pieces = _Pieces(_opened(file, path, compression))
        stream = cast(BinaryIO, io.BufferedReader(pieces, _PIECE))
        at = 0
        while True:
            records: list[bytes] = []
            checks: list[int] = []
            while len(records) < many:
                header = stream.read(_HEADER)
                if not header:
                    break
                record, check = _rest_of_record(stream, header, path, at)
                at += len(record) + _HEADER + 4
                records.append(record)
                checks.append(check)
            for index, crc in enumerate(masked_crc32c(records)):
                if crc != checks[index]:
                    raise _damaged(path, "a record whose checksum differs")
            if not records:
                return
            yield records


def _rest_of_record(stream: BinaryIO, header: bytes, path: Path, at: int) -> tuple[bytes, int]:
    if len(header) < _HEADER or not _is_frame(header):
        raise _damaged(path, f"no record at byte {at} (of what is compressed in it, if it is)")
    (length,) = struct.unpack_from("<Q", header)
    if length > _LARGEST_RECORD:
        raise _damaged(path, f"a record of {length} bytes at byte {at}")
    record, tail = stream.read(length), stream.read(4)
    if len(record) < length or len(tail) < 4:
        raise _damaged(path, f"the end of the file inside the record at byte {at}")
    return record, struct.unpack("<I", tail)[0]


def _is_frame(head: bytes) -> bool:
    return len(head) >= _HEADER and masked_crc32c([head[:8]])[0] == int.from_bytes(
        head[8:_HEADER], "little"
    )


def _opened(file: BinaryIO, path: Path, compression: str) -> Iterator[bytes]:
    if compression == "snappy":
        yield from _snappy(file, path)
    elif compression:
        yield from _deflated(file, path)
    else:
        while piece := file.read(_PIECE):
            yield piece


def _deflated(file: BinaryIO, path: Path) -> Iterator[bytes]:
    inflate = zlib.decompressobj(wbits=47)  # zlib or gzip, told by the header
    try:
        while piece := file.read(_PIECE):
            while piece:
                yield inflate.decompress(piece, _PIECE)
                piece = inflate.unconsumed_tail
        yield inflate.flush()
    except zlib.error as error:
        raise _damaged(path, str(error)) from error
    if not inflate.eof:
        raise _damaged(path, "the end of the file inside what is compressed")


def _snappy(file: BinaryIO, path: Path) -> Iterator[bytes]:
    import pyarrow as pa

    codec = pa.Codec("snappy")
    while head := file.read(4):
        length = int.from_bytes(head, "big")
        if len(head) < 4 or length > _LARGEST_BLOCK:
            raise _damaged(path, "a Snappy block without an end")
        block = file.read(length)
        size = _snappy_size(block)
        if len(block) < length or size is None or size > _LARGEST_BLOCK:
            raise _damaged(path, "the end of the file inside a Snappy block")
        try:
            yield codec.decompress(block, decompressed_size=size, asbytes=True)
        except (OSError, pa.ArrowException) as error:
            raise _damaged(path, " ".join(str(error).split())) from error


def _snappy_begins(path: Path) -> bool:
    from shoal.errors import DataError

    with path.open("rb") as file:
        try:
            return _is_frame(next(_snappy(file, path), b""))
        except DataError:
            return False


def _snappy_size(block: bytes) -> int | None:
    """The length before compression, a varint that a block begins with."""
    size = 0
    for index, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return size
    return None


def _damaged(path: Path, got: str) -> Exception:
    return malformed(path, got, "whole records", "Copy the file again, or dump it again.")


class _Pieces(io.RawIOBase):
    """A stream of byte strings as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
