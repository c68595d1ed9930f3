"""Monolith's dumps: TFRecord files of `EntryDump` records, of one table or several."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import torch

from shoal.checkpoint.formats.foreign import Entries, ForeignSource, Offered, malformed, need_file
from shoal.errors import DataError

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
        # One byte of all records a step, so their bytes are laid next to each other.
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


def read_records(path: Path, *, many: int = 4096) -> Iterator[list[bytes]]:
    """The records of a file, in lists of up to `many`, checksums checked.

    Raises:
        DataError: the file ends inside a record, or a checksum differs; or it is no file of
            records, as they are or compressed with zlib, gzip or Snappy.
    """
    at = 0
    with path.open("rb", buffering=_PIECE) as file:
        stream = _unpacked(file, path)
        while True:
            records: list[bytes] = []
            checks: list[int] = []
            try:
                while len(records) < many and (header := stream.read(_HEADER)):
                    record, check = _rest_of_record(stream, header, path, at)
                    at += len(record) + _HEADER + 4
                    records.append(record)
                    checks.append(check)
            except OSError as error:
                raise _damaged(path, str(error)) from error
            if masked_crc32c(records) != checks:
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


def _unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    """The records as they were before they were compressed."""
    head = file.read(64)
    file.seek(0)
    if not head or _is_frame(head):
        return file
    zlib = head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    if zlib or head[:2] == b"\x1f\x8b":
        packed = pa.CompressedInputStream(file, "gzip")  # zlib, too
        return cast(BinaryIO, io.BufferedReader(packed, _PIECE))
    with suppress(DataError):
        if _is_frame(next(_snappy(file, path), b"")):
            file.seek(0)
            return cast(BinaryIO, io.BufferedReader(_Pieces(_snappy(file, path)), _PIECE))
    allowed = "TFRecord: as it is, or with zlib, gzip or Snappy"
    remedy = "Check that this is the dump, and that it was copied whole."
    raise malformed(path, "a file that does not begin with a record", allowed, remedy)


def _snappy(file: BinaryIO, path: Path) -> Iterator[bytes]:
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


_SHARD = re.compile(r"^(?P<base>.+)-(?P<shard>\d{5})-of-(?P<shards>\d{5})$")
_META = ".meta"
_ID, _NUM, _LAST_SEEN = 1, 2, 4  # fields of EntryDump
_NAME, _COUNT = 1, 2  # fields of MultiHashTableMetadata
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_ALLOWED = "a dump's base name, one of its files, or the folder of one dump"


def open_monolith(path: Path, table: str | None) -> ForeignSource:
    """Open a dump.

    Args:
        path: its base name, one of its files, or a folder that has one dump.
        table: the name of the table of a dump of one table; one of several tables has names.

    Raises:
        DataError: no dump there, files of it missing, or damaged.
    """
    base, files = _files_of(path)
    metas = [file.with_name(f"{base}{_META}{file.name[len(base) :]}") for file in files]
    orders: list[tuple[tuple[str, int], ...]]
    if any(meta.exists() for meta in metas):
        for meta in metas:
            need_file(meta, "one for each file of the dump")
        orders = [tuple(_order(meta)) for meta in metas]
    elif table is None:
        got = "a dump of one table, which has no name in it"
        raise malformed(path, got, "one table to be named", "Name the table: --table NAME.")
    else:
        orders = [((table, -1),)] * len(files)  # without a count, to the end of the file
    parts = list(zip(files, orders, strict=True))

    def entries(wanted: frozenset[str]) -> Iterator[tuple[str, Entries]]:
        for file, order in parts:
            for name, records in _in_order(file, order):
                if name in wanted:
                    yield name, _entries_of(file, name, records)

    dims = _dims(parts)
    return ForeignSource(
        tuple(Offered(name=name, dim=dim) for name, dim in dims.items() if dim), entries
    )


def _parsed(file: Path, record: bytes) -> tuple[int, bytes, int]:
    """An `EntryDump`: id, weights as little-endian float32, seconds of the last update."""
    entry_id, last_seen_s = None, 0
    weights: list[bytes] = []
    try:
        for field, wire, value in _fields(record):
            if field == _ID and wire == _FIXED64:
                entry_id = int.from_bytes(value, "little", signed=True)
            elif field == _NUM and wire in (_FIXED32, _BYTES):
                weights.append(value)
            elif field == _LAST_SEEN and wire == _VARINT:
                last_seen_s = value
        packed = b"".join(weights)
        if entry_id is None or len(packed) % 4:
            raise ValueError("no id" if entry_id is None else "weights that are not of 4 bytes")
    except (ValueError, IndexError) as error:
        allowed = "EntryDump messages"
        raise malformed(file, f"a record with {error}", allowed, "Check the file.") from error
    return entry_id, packed, last_seen_s


def _dims(parts: Sequence[tuple[Path, Sequence[tuple[str, int]]]]) -> dict[str, int]:
    """Columns of each table, by its first record; 0: none in the dump."""
    dims = {name: 0 for _, order in parts for name, _ in order}
    for file, order in parts:
        missing = {name for name, count in order if count and not dims[name]}
        for name, records in _in_order(file, order) if missing else ():
            if name in missing:
                dims[name] = len(_parsed(file, records[0])[1]) // 4
                missing.remove(name)
            if not missing:
                break
    return dims


def _in_order(file: Path, order: Sequence[tuple[str, int]]) -> Iterator[tuple[str, list[bytes]]]:
    """Records of a file with the names of their tables."""
    left = [(name, count) for name, count in order if count]
    for records in read_records(file):
        while records:
            if not left:
                raise malformed(
                    file, "more records than its meta file says", "the dump whole", _AGAIN
                )
            name, count = left[0]
            taken = len(records) if count < 0 else min(count, len(records))
            yield name, records[:taken]
            records = records[taken:]
            if count >= 0:
                left[0] = (name, count - taken)
                if count == taken:
                    left.pop(0)
    if any(count > 0 for _, count in left):
        raise malformed(file, "fewer records than its meta file says", "the dump whole", _AGAIN)


_AGAIN = "Copy the dump again, its meta files with it."


def _entries_of(file: Path, name: str, records: Sequence[bytes]) -> Entries:
    ids, packed, seen_s = zip(*(_parsed(file, record) for record in records), strict=True)
    widths = {len(one) for one in packed}
    if len(widths) > 1:
        got = f"vectors of {' and '.join(str(width // 4) for width in sorted(widths)[:2])} columns"
        raise malformed(f"table {name!r} in {file}", got, "one length", "Dump one table a name.")
    weights = np.frombuffer(b"".join(packed), dtype="<f4").reshape(len(ids), -1).copy()
    return Entries(
        ids=torch.tensor(ids, dtype=torch.int64, device="cpu"),
        weights=torch.from_numpy(weights),
        last_seen_s=torch.tensor(seen_s, dtype=torch.int64, device="cpu"),
    )


def _order(meta: Path) -> Iterator[tuple[str, int]]:
    for records in read_records(meta):
        for record in records:
            name, count = "", 0
            try:
                for field, wire, value in _fields(record):
                    if field == _NAME and wire == _BYTES:
                        name = value.decode("utf-8")
                    elif field == _COUNT and wire == _VARINT:
                        count = value
            except (ValueError, IndexError) as error:
                allowed = "MultiHashTableMetadata messages"
                got = f"a record with {error}"
                raise malformed(meta, got, allowed, "Check the file.") from error
            yield name, count


def _fields(record: bytes) -> Iterator[tuple[int, int, Any]]:
    """Fields of a message: number, wire type, and the number or bytes it has."""
    at, end = 0, len(record)
    while at < end:
        tag, at = _varint(record, at)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(record, at)
            yield field, wire, value
            continue
        if wire == _BYTES:
            size, at = _varint(record, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > end:
            raise ValueError("a field that ends after it")
        yield field, wire, record[at : at + size]
        at += size


def _varint(record: bytes, at: int) -> tuple[int, int]:
    byte = record[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = record[at]
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at + 1
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _files_of(path: Path) -> tuple[str, list[Path]]:
    """Base name and files of a dump, in order."""
    folder = path if path.is_dir() else path.parent
    named = _SHARD.match(path.name)
    base = None if path.is_dir() else named["base"] if named else path.name
    matches = [
        (match, file)
        for file in sorted(folder.glob("*-?????-of-?????"))
        if (match := _SHARD.match(file.name))
        and not match["base"].endswith(_META)
        and base in (None, match["base"])
    ]
    found = {match["base"] for match, _ in matches}
    if not found:
        if path.is_file():
            return path.name, [path]  # one plain file of records
        raise malformed(path, "no files named BASENAME-00000-of-00001", _ALLOWED, "Check the path.")
    if len(found) > 1:
        names = ", ".join(sorted(found)[:5])
        raise malformed(path, f"dumps {names}", "one dump", "Name one of them.")
    files = {int(match["shard"]): file for match, file in matches}
    shards = {int(match["shards"]) for match, _ in matches}
    count = max(shards)
    if len(shards) > 1 or sorted(files) != list(range(count)):
        got = f"files {sorted(files)} of {' or '.join(map(str, sorted(shards)))}"
        raise malformed(path, got, "all files of one dump", "Copy those that are missing.")
    return found.pop(), [files[shard] for shard in range(count)]
