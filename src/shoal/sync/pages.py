"""Pages: what travels from a publisher to its replicas, with a checksum.

A page is `SHPG`, the CRC-32 of all that follows, the length of its head, the head as JSON, and raw
columns. Pages of rows have ids, versions, last-seen times, counts and weights; pages of deletions
have ids; pages of dense tensors have one column a tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from shoal import _core
from shoal.comm.frames import memory
from shoal.errors import DataError
from shoal.placement import bucket_hashes, hash_ids, rank_buckets, ranks_of
from shoal.table.rows import real_dtype, weight_dtype
from shoal.table.shard import HASHES, MOST_BITS, Snapshot
from shoal.table.spec import TableSpec
from shoal.table.values import RowChunk

PAGE_ROWS = 1 << 14
MOST_BYTES = 1 << 30  # of a page

_MARK = b"SHPG"
_PREFIX = struct.Struct("<4sII")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_Whole = Annotated[int, Field(ge=0, lt=1 << 40)]


class _TensorHead(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=1000)]
    dtype: str
    shape: Annotated[tuple[_Whole, ...], Field(max_length=64)]

    @model_validator(mode="after")
    def _in_range(self) -> _TensorHead:
        # Sizes next to a 0 count, too: strides are their products.
        if prod(max(1, n) for n in self.shape) >= 1 << 40:
            raise ValueError(f"sizes {list(self.shape[:8])}")
        return self


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["rows", "deleted", "dense"]
    table: _Whole = 0
    rows: _Whole = 0
    tensors: tuple[_TensorHead, ...] = ()


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Rows of a table as they are now; the chunk's state has no columns."""

    table: int
    chunk: RowChunk


@dataclass(frozen=True, slots=True)
class DeletedIds:
    """Ids of a table that have no row any more."""

    table: int
    ids: Tensor


Page = ChangedRows | DeletedIds


@dataclass(frozen=True, slots=True)
class Share:
    """Rows whose hashes lie in part `index` of `of` even parts."""

    index: int = 0
    of: int = 1

    @property
    def hashes(self) -> tuple[int, int]:
        """They are in [start, stop)."""
        first, last = bucket_hashes(*rank_buckets(self.index, self.of))
        return first, last + 1

    def meets(self, start: int, stop: int) -> bool:
        """Whether hashes [start, stop) are partly its."""
        first, end = self.hashes
        return start < end and first < stop

    def holds(self, start: int, stop: int) -> bool:
        """Whether they are all its."""
        first, end = self.hashes
        return first <= start and stop <= end

    def of_page(self, data: bytes, specs: Sequence[TableSpec]) -> bytes:
        """A page with what of another page is in the share."""
        page = unpack(memoryview(data), specs)
        ids = page.ids if isinstance(page, DeletedIds) else page.chunk.ids
        kept = ranks_of(hash_ids(specs[page.table].hash_name, ids), self.of) == self.index
        if isinstance(page, DeletedIds):
            return pack_deleted(page.table, ids[kept])
        return pack_rows(page.table, RowChunk(page.chunk.table, *(
            column[kept] for column in (
                ids, page.chunk.weights, page.chunk.state, page.chunk.versions,
                page.chunk.last_seen_s, page.chunk.counts,
            )
        )))  # fmt: skip


ALL = Share()


@dataclass(frozen=True, slots=True)
class PackedPage:
    """A page to send, of hashes in [start, stop)."""

    data: bytes
    rows: int
    start: int
    stop: int


def pack_rows(table: int, chunk: RowChunk) -> bytes:
    """A page of rows."""
    meta = chunk.versions, chunk.last_seen_s, chunk.counts  # 32 bits, as loads ask for
    whole = [one.numpy().astype(np.uint32) for one in meta]
    head = _Head(kind="rows", table=table, rows=len(chunk.ids))
    return _packed(head, [chunk.ids.numpy(), *whole, memory(chunk.weights)])


def pack_deleted(table: int, ids: Tensor) -> bytes:
    """A page of deletions."""
    return _packed(_Head(kind="deleted", table=table, rows=len(ids)), [ids.numpy()])


def pack_dense(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors by name, of any device.

    Raises:
        DataError: as `check_dense`.
    """
    head = check_dense(tensors)
    return _packed(head, [memory(value.cpu()) for value in tensors.values()])


def check_dense(tensors: Mapping[str, Tensor]) -> _Head:
    """The head of a page of tensors.

    Raises:
        DataError: a dtype that pages do not know, or more bytes than a page may have.
    """
    heads = []
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise DataError(
                f"dtype of tensor {name!r} to publish",
                got=dtype,
                allowed=", ".join(_DTYPES),
                remedy="Leave it out, or convert it.",
            )
        heads.append(_TensorHead(name=name, dtype=dtype, shape=tuple(value.shape)))
    head = _Head(kind="dense", tensors=tuple(heads))
    _text(head, sum(value.nbytes for value in tensors.values()))
    return head


def unpack(page: memoryview, specs: Sequence[TableSpec]) -> Page:
    """Rows or deletions of a page that anybody sent.

    Raises:
        DataError: damaged, or of other tables.
    """
    head, data = _unpacked(page)
    if head.kind == "dense" or head.table >= len(specs):
        raise _refused(f"a page of {head.kind} of table {head.table}", "rows of known tables")
    spec, n = specs[head.table], head.rows
    if head.kind == "deleted":
        (ids,) = _columns(data, [(torch.int64, n)])
        return DeletedIds(head.table, ids)
    meta = [(torch.int32, n)] * 3  # 32 bits without a sign
    sizes = [(torch.int64, n), *meta, (weight_dtype(spec), n * spec.dim)]
    ids, *whole, weights = _columns(data, sizes)
    versions, last_seen_s, counts = (one.long() & 0xFFFFFFFF for one in whole)
    none = torch.empty(n, 0, dtype=real_dtype(spec), device="cpu")
    chunk = RowChunk(spec.name, ids, weights.view(n, spec.dim), none, versions, last_seen_s, counts)
    return ChangedRows(head.table, chunk)


def unpack_dense(page: memoryview) -> dict[str, Tensor]:
    """What `pack_dense` packed.

    Raises:
        DataError: damaged, or of another kind.
    """
    head, data = _unpacked(page)
    unknown = [one.dtype for one in head.tensors if one.dtype not in _DTYPES]
    if head.kind != "dense" or unknown:
        raise _refused(f"a page of {head.kind} with dtypes {unknown}", "dense tensors")
    sizes = [(_DTYPES[one.dtype], int(np.prod(one.shape, dtype=object))) for one in head.tensors]
    columns = zip(head.tensors, _columns(data, sizes), strict=True)
    return {one.name: column.view(one.shape) for one, column in columns}


def pages_of(
    snapshot: Snapshot,
    tables: Mapping[int, int],
    specs: Sequence[TableSpec],
    share: Share = ALL,
) -> Iterator[PackedPage]:
    """Pages of a snapshot: of each table its deletions, then its rows, ordered by hash.

    Args:
        snapshot: of a shard.
        tables: those to read there, by what they are called in pages: indices of `specs`.
        specs: whole tables.
        share: of rows; deletions come whole.
    """
    for table, index in tables.items():
        if snapshot.since:
            for ids in torch.split(snapshot.deleted(index), PAGE_ROWS):
                if len(ids):
                    ends = hash_ids(specs[table].hash_name, ids[[0, -1]]).tolist()
                    first, last = (one % HASHES for one in ends)
                    yield PackedPage(pack_deleted(table, ids), len(ids), first, last + 1)
        for start, stop in row_ranges(snapshot, index, share):
            chunk = snapshot.read(index, start, stop, state=False)
            yield PackedPage(pack_rows(table, chunk), len(chunk.ids), start, stop)


def row_ranges(snapshot: Snapshot, table: int, share: Share = ALL) -> Iterator[tuple[int, int]]:
    """Ranges of hashes with about `PAGE_ROWS` rows each; none without rows."""
    rows = int(snapshot.histogram(table, 0).sum())
    if not rows:
        return
    bits = min(MOST_BITS, max(0, (4 * rows // PAGE_ROWS).bit_length()))
    first, end = share.hashes
    step, start, held = HASHES >> bits, first, 0
    for k, count in enumerate(snapshot.histogram(table, bits).tolist()):
        if not share.meets(k * step, (k + 1) * step):
            continue
        if held and held + count > PAGE_ROWS:
            yield start, k * step
            start, held = k * step, 0
        held += count
    if held:
        yield start, end


def sealed(text: bytes) -> bytes:
    """A question or an answer with its checksum."""
    return struct.pack("<I", _core.crc32(memoryview(text), 0)) + text


def unsealed(data: bytes) -> bytes:
    """What `sealed` sealed.

    Raises:
        DataError: damaged.
    """
    if len(data) <= 4 or sealed(data[4:]) != data:
        raise _refused("a message with another checksum", "messages as they were sent")
    return data[4:]


def _text(head: _Head, column_bytes: int) -> bytes:
    text = head.model_dump_json(exclude_defaults=True).encode()
    size = _PREFIX.size + len(text) + column_bytes
    if size > MOST_BYTES:
        raise DataError(
            f"{head.kind} to publish",
            got=f"{size} bytes",
            allowed=f"at most {MOST_BYTES} bytes of a page",
            remedy="Publish a smaller module, or leave publish out.",
        )
    return text


def _packed(head: _Head, columns: Sequence[np.ndarray[Any, Any] | memoryview]) -> bytes:
    text = _text(head, sum(column.nbytes for column in columns))
    parts: list[Any] = [struct.pack("<I", len(text)), text]
    parts += [np.ascontiguousarray(column).view(np.uint8) for column in columns]
    crc32 = 0
    for part in parts:
        crc32 = _core.crc32(memoryview(part), crc32)
    return b"".join([_MARK, struct.pack("<I", crc32), *parts])


def _unpacked(page: memoryview) -> tuple[_Head, memoryview]:
    if not _PREFIX.size <= len(page) <= MOST_BYTES:
        raise _refused(f"{len(page)} bytes", f"{_PREFIX.size}..{MOST_BYTES} bytes")
    mark, crc32, size = _PREFIX.unpack_from(page)
    if mark != _MARK or _core.crc32(page[8:], 0) != crc32:
        raise _refused("bytes with another checksum", "pages as they were sent")
    text = page[_PREFIX.size : _PREFIX.size + size]
    try:
        return _Head.model_validate_json(bytes(text)), page[_PREFIX.size + size :]
    except ValidationError as error:
        raise _refused(str(error.errors()[0]["msg"]), "heads that this version writes") from None


def _columns(data: memoryview, sizes: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Copies, so that the page's memory may go."""
    wanted = sum(dtype.itemsize * count for dtype, count in sizes)
    if wanted != len(data):
        raise _refused(f"{len(data)} bytes of columns", f"{wanted} bytes")
    found, at = [], 0
    for dtype, count in sizes:
        column = torch.empty(count, dtype=dtype, device="cpu")
        size = dtype.itemsize * count
        if size:
            memory(column)[:] = data[at : at + size]
        found.append(column)
        at += size
    return found


def _refused(got: str, allowed: str) -> DataError:
    return DataError(
        "page of published rows",
        got=got,
        allowed=allowed,
        remedy="It is asked for again; run one version of Shoal on trainer and replicas.",
    )
