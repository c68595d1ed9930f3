"""Monolith's dumps: files of `EntryDump` records, one table's or several tables' in order.

A dump is `BASENAME-00000-of-00004` and so on. One of several tables has beside each file a
`BASENAME.meta-00000-of-00004` that says how many records of which table come in which order.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.checkpoint.interchange.entries import Entries, Offered, Source, malformed, need_file
from shoal.checkpoint.interchange.tfrecord import read_records

__all__ = ["open_monolith", "parse_entry"]

_SHARD = re.compile(r"^(?P<base>.+)-(?P<shard>\d{5})-of-(?P<shards>\d{5})$")
_META = ".meta"
_ID, _NUM, _LAST_SEEN = 1, 2, 4  # fields of EntryDump
_NAME, _COUNT = 1, 2  # fields of MultiHashTableMetadata
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_ALLOWED = "a dump's base name, one of its files, or the folder of one dump"


@dataclass(frozen=True, slots=True)
class _Entry:
    id: int
    weights: bytes
    last_seen_s: int


def open_monolith(path: Path, table: str | None) -> Source:
    """Open a dump.

    Args:
        path: its base name, one of its files, or a folder that has one dump.
        table: the name of the table of a dump of one table; one of several tables has names.

    Raises:
        DataError: no dump there, files of it missing, or damaged.
    """
    base, files = _files_of(path)
    metas = [file.with_name(f"{base}{_META}{file.name[len(base) :]}") for file in files]
    if not any(meta.exists() for meta in metas):
        if table is None:
            raise malformed(
                path,
                "a dump of one table, which has no name in it",
                "one table to be named",
                "Name the table: --table NAME.",
            )
        return _one_table(files, table)
    for meta in metas:
        need_file(meta, "one for each file of the dump")
    return _MonolithDump(tuple(files), tuple(tuple(_order(meta)) for meta in metas))


def parse_entry(record: bytes) -> _Entry:
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
    return _Entry(entry_id, packed, last_seen_s)


def _one_table(files: Sequence[Path], table: str) -> _MonolithDump:
    # Without a count the table goes on to the end of the file.
    return _MonolithDump(tuple(files), tuple(((table, -1),) for _ in files))


class _MonolithDump:
    def __init__(
        self, files: tuple[Path, ...], orders: tuple[tuple[tuple[str, int], ...], ...]
    ) -> None:
        self._files, self._orders = files, orders
        self._tables = tuple(
            Offered(name=name, dim=dim) for name, dim in self._dims().items() if dim
        )

    @property
    def tables(self) -> tuple[Offered, ...]:
        return self._tables

    def entries(self, wanted: frozenset[str]) -> Iterator[tuple[str, Entries]]:
        for file, order in zip(self._files, self._orders, strict=True):
            for name, records in _in_order(file, order):
                if name in wanted:
                    yield name, _entries_of(file, name, records)

    def _dims(self) -> dict[str, int]:
        """Columns of each table, by its first record; 0: none in the dump."""
        dims: dict[str, int] = {}
        for file, order in zip(self._files, self._orders, strict=True):
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


def _parsed(file: Path, record: bytes) -> _Entry:
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
