"""Monolith's dumps: TFRecord files of `EntryDump` records, of one table or several."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from shoal.checkpoint.formats.foreign import Entries, ForeignSource, Offered, malformed, need_file

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
    inflate = zlib.decompressobj(wbits=47)  # zlib or gzip, as the header says
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


_SHARD = re.compile(r"^(?P<base>.+)-(?P<shard>\d{5})-of-(?P<shards>\d{5})$")
_META = ".meta"
_ID, _NUM, _LAST_SEEN = 1, 2, 4  # fields of EntryDump
_NAME, _COUNT = 1, 2  # fields of MultiHashTableMetadata
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_ALLOWED = "a dump's base name, one of its files, or the folder of one dump"


@dataclass(frozen=True, slots=True)
class _DumpedRow:
    id: int
    weights: bytes
    last_seen_s: int


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
        raise malformed(
            path,
            "a dump of one table, which has no name in it",
            "one table to be named",
            "Name the table: --table NAME.",
        )
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


def parse_entry(record: bytes) -> _DumpedRow:
    """An `EntryDump`: id, weights as little-endian float32, seconds of the last update.

    Raises:
        ValueError: not such a message.
    """
    entry_id, last_seen_s = None, 0
    weights: list[bytes] = []
    for field, wire, value in _fields(record):
        if field == _ID and wire == _FIXED64:
            assert isinstance(value, bytes)
            entry_id = int.from_bytes(value, "little", signed=True)
        elif field == _NUM and wire in (_FIXED32, _BYTES):
            assert isinstance(value, bytes)
            weights.append(value)
        elif field == _LAST_SEEN and wire == _VARINT:
            assert isinstance(value, int)
            last_seen_s = value
    packed = b"".join(weights)
    if entry_id is None or len(packed) % 4:
        raise ValueError("no id" if entry_id is None else "weights that are not of 4 bytes")
    return _DumpedRow(entry_id, packed, last_seen_s)


def _dims(parts: Sequence[tuple[Path, Sequence[tuple[str, int]]]]) -> dict[str, int]:
    """Columns of each table, by its first record; 0: none in the dump."""
    dims: dict[str, int] = {}
    for file, order in parts:
        for name, _ in order:
            dims.setdefault(name, 0)
        if all(dims[name] for name, count in order if count):
            continue
        for name, records in _in_order(file, order):
            dims[name] = dims[name] or len(_parsed(file, records[0]).weights) // 4
            if all(dims[name] for name, count in order if count):
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
    parsed = [_parsed(file, record) for record in records]
    widths = {len(entry.weights) for entry in parsed}
    if len(widths) > 1:
        got = f"vectors of {' and '.join(str(width // 4) for width in sorted(widths)[:2])} columns"
        raise malformed(f"table {name!r} in {file}", got, "one length", "Dump one table a name.")
    joined = b"".join(entry.weights for entry in parsed)
    weights = np.frombuffer(joined, dtype="<f4").reshape(len(parsed), -1).copy()
    return Entries(
        ids=torch.tensor([entry.id for entry in parsed], dtype=torch.int64, device="cpu"),
        weights=torch.from_numpy(weights),
        last_seen_s=torch.tensor(
            [entry.last_seen_s for entry in parsed], dtype=torch.int64, device="cpu"
        ),
    )


def _parsed(file: Path, record: bytes) -> _DumpedRow:
    try:
        return parse_entry(record)
    except (ValueError, IndexError, struct.error) as error:
        allowed = "EntryDump messages"
        raise malformed(file, f"a record with {error}", allowed, "Check the file.") from error


def _order(meta: Path) -> Iterator[tuple[str, int]]:
    for records in read_records(meta):
        for record in records:
            name, count = "", 0
            try:
                for field, wire, value in _fields(record):
                    if field == _NAME and wire == _BYTES and isinstance(value, bytes):
                        name = value.decode("utf-8")
                    elif field == _COUNT and wire == _VARINT and isinstance(value, int):
                        count = value
            except (ValueError, IndexError) as error:
                allowed = "MultiHashTableMetadata messages"
                got = f"a record with {error}"
                raise malformed(meta, got, allowed, "Check the file.") from error
            yield name, count


def _fields(record: bytes) -> Iterator[tuple[int, int, bytes | int]]:
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
    found: dict[str, dict[int, Path]] = {}
    shards: dict[str, set[int]] = {}
    for file in sorted(folder.glob("*-?????-of-?????")):
        match = _SHARD.match(file.name)
        if match and not match["base"].endswith(_META) and base in (None, match["base"]):
            found.setdefault(match["base"], {})[int(match["shard"])] = file
            shards.setdefault(match["base"], set()).add(int(match["shards"]))
    if not found:
        if path.is_file():
            return path.name, [path]  # one plain file of records
        raise malformed(path, "no files named BASENAME-00000-of-00001", _ALLOWED, "Check the path.")
    if len(found) > 1:
        names = ", ".join(sorted(found)[:5])
        raise malformed(path, f"dumps {names}", "one dump", "Name one of them.")
    ((base, files),) = found.items()
    count = max(shards[base])
    if len(shards[base]) > 1 or sorted(files) != list(range(count)):
        got = f"files {sorted(files)} of {' or '.join(map(str, sorted(shards[base])))}"
        raise malformed(path, got, "all files of one dump", "Copy those that are missing.")
    return base, [files[shard] for shard in range(count)]
