"""Tables of all ranks as one rank would have them: to count, to save and to load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.checkpoint.whole import Rows
from shoal.comm.collectives import Collectives, Part
from shoal.embedding import EmbeddingCollection
from shoal.errors import ConfigError, describe
from shoal.exchange import AllToAllExchange
from shoal.placement import Hosted
from shoal.table.hosting import hosted_spec
from shoal.table.rejoin import joined_chunk
from shoal.table.resplit import hosted_rows, hosted_sights
from shoal.table.rows import real_dtype, weight_dtype
from shoal.table.shard import AdmissionState, RowChunk, Shard
from shoal.table.spec import TableSpec

__all__ = ["WholeTables", "counted_rows", "whole_tables"]

_PIECE_BYTES = 32 << 20
_COLUMNS = ("ids", "weights", "state", "versions", "last_seen_s", "counts")


@dataclass(frozen=True, slots=True)
class _Part:
    """A hosted table: of which whole one, and its index in this rank's shard, if it is there."""

    table: int
    hosted: Hosted
    spec: TableSpec
    local: int | None

    def speaks(self, rank: int) -> bool:
        """Whether a rank's rows of it are the ones to read: of replicas the first rank's."""
        ranks = self.hosted.ranks
        return rank == ranks[0] if self.hosted.replicated else rank in ranks


class WholeTables:
    """The tables of all ranks, read as those of one shard; only rank 0 gets rows.

    `export` and `admission_state` are collective calls. What is loaded is whole, too: every rank
    loads the same and keeps its part.

    Args:
        tables: a collection that is spread over ranks.
        votes: collectives between the hosts of all ranks.
    """

    def __init__(self, tables: EmbeddingCollection, votes: Collectives) -> None:
        exchange = _exchange_of(tables)
        self._shard: Shard = exchange.shard
        self._votes = votes
        self.specs: tuple[TableSpec, ...] = exchange.specs
        self.seed = self._shard.seed
        self._parts = _parts_of(exchange)

    @property
    def last_step(self) -> int:
        """Global step of the last update."""
        return self._shard.last_step

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._shard.last_step = step

    def export(self, table: int) -> RowChunk:
        """All rows of a table on rank 0, ordered by hash; none on other ranks."""
        found: list[tuple[Hosted, RowChunk]] = []
        for part in self._of(table):
            speaks = part.local is not None and part.speaks(self._votes.rank)
            chunk = self._shard.export(part.local) if speaks and part.local is not None else None
            found.extend((part.hosted, piece) for piece in self._brought(part.spec, chunk))
        if not found:
            return _no_rows(self.specs[table])
        return joined_chunk(self.specs[table], found)

    def admission_state(self, table: int) -> AdmissionState:
        """Sights of ids without rows, of all ranks. Of sketches each cell is the largest of any
        rank's: never less than an id was seen.
        """
        first = next(part for part in self._of(table) if part.hosted.start == 0)
        mine = None
        if first.local is not None and first.speaks(self._votes.rank):
            mine = self._shard.admission_state(first.local)
        said = self._votes.gather_objects(mine, what=f"sights of table {self.specs[table].name}")
        found = [state for state in said if state is not None]
        cells = [torch.frombuffer(bytearray(s.cells), dtype=torch.int32) for s in found if s.cells]
        largest = torch.stack(cells).amax(0).numpy().tobytes() if cells else b""
        return AdmissionState(
            torch.cat([state.ids for state in found]),
            torch.cat([state.counts for state in found]),
            largest,
        )

    def load(self, table: int, chunk: RowChunk) -> None:
        """Keep this rank's part of some rows of a whole table."""
        for part in self._of(table):
            if part.local is not None:
                rows = hosted_rows(self.specs[table], part.hosted, self._votes.rank, chunk)
                self._shard.load(part.local, rows)

    def load_admission_state(self, table: int, state: AdmissionState) -> None:
        """Keep this rank's part of the sights."""
        for part in self._of(table):
            if part.local is not None:
                sights = hosted_sights(self.specs[table], part.hosted, self._votes.rank, state)
                self._shard.load_admission_state(part.local, sights)

    def _of(self, table: int) -> list[_Part]:
        return [part for part in self._parts if part.table == table]

    def _brought(self, spec: TableSpec, chunk: RowChunk | None) -> Iterator[RowChunk]:
        """The rows of all ranks on rank 0, a piece of each at a time; nothing elsewhere."""
        votes = self._votes
        own = _no_rows(spec) if chunk is None else chunk
        sizes_W = torch.zeros(votes.world_size, dtype=torch.int64)
        sizes_W[votes.rank] = own.ids.numel()
        what = f"rows of table {spec.name}"
        (sizes_W,) = votes.all_reduce(sizes_W, "sum", what=what).wait()
        width = spec.dim * own.weights.element_size() + spec.state_width * own.state.element_size()
        step = max(_PIECE_BYTES // (width + 32), 1)
        for start in range(0, int(sizes_W.max()), step):
            counts = [min(max(size - start, 0), step) for size in sizes_W.tolist()]
            mine = counts[votes.rank]
            send = (mine, *(0,) * (votes.world_size - 1))
            receive = tuple(counts) if votes.rank == 0 else (0,) * votes.world_size
            columns = [getattr(own, name)[start : start + mine] for name in _COLUMNS]
            parts = [Part(_as_bytes(column), send, receive) for column in columns]
            received = votes.all_to_all(parts, what=what).wait()
            if votes.rank == 0:
                values = [
                    flat.view(column.dtype).view(-1, *column.shape[1:])
                    for flat, column in zip(received, columns, strict=True)
                ]
                yield RowChunk(spec.name, *values)


def whole_tables(tables: Mapping[str, EmbeddingCollection], votes: Collectives) -> dict[str, Rows]:
    """What a checkpoint saves and loads of some collections, whatever the number of ranks."""
    return {
        name: WholeTables(one, votes) if one.distributed else one.shard
        for name, one in tables.items()
    }


def counted_rows(tables: EmbeddingCollection, rank: int) -> dict[str, int]:
    """Rows of each whole table that count on this rank; over all ranks they add up to all rows."""
    shard = tables.shard
    if not tables.distributed:
        return {spec.name: shard.size(k) for k, spec in enumerate(shard.specs)}
    exchange = _exchange_of(tables)
    rows = dict.fromkeys((spec.name for spec in exchange.specs), 0)
    for part in _parts_of(exchange):
        if part.local is not None and part.hosted.start == 0 and part.speaks(rank):
            rows[part.hosted.table] += shard.size(part.local)
    return rows


def _exchange_of(tables: EmbeddingCollection) -> AllToAllExchange:
    _ = tables.exchange.collectives  # one that waits for the first batch comes into being
    exchange = tables.exchange
    if not isinstance(exchange, AllToAllExchange):
        raise ConfigError(
            describe(
                "exchange of tables over ranks",
                got=type(exchange).__name__,
                allowed="an AllToAllExchange",
                remedy="Spread the tables with DistributedModelParallel.",
            )
        )
    return exchange


def _parts_of(exchange: AllToAllExchange) -> Sequence[_Part]:
    local = {spec.name: k for k, spec in enumerate(exchange.shard.specs)}
    return [
        _Part(table, hosted, own, local.get(own.name))
        for table, spec in enumerate(exchange.specs)
        for hosted in exchange.placement.of(spec.name)
        for own in (hosted_spec(spec, hosted),)
    ]


def _no_rows(spec: TableSpec) -> RowChunk:
    none = torch.empty(0, dtype=torch.int64)
    return RowChunk(
        spec.name,
        none,
        torch.empty(0, spec.dim, dtype=weight_dtype(spec)),
        torch.empty(0, spec.state_width, dtype=real_dtype(spec)),
        none,
        none,
        none,
    )


def _as_bytes(column: Tensor) -> Tensor:
    """uint8 [rows, bytes of a row]."""
    row_bytes = math.prod(column.shape[1:]) * column.element_size()
    if not column.numel():
        return torch.empty(column.shape[0], row_bytes, dtype=torch.uint8)
    return column.contiguous().view(column.shape[0], -1).view(torch.uint8)
