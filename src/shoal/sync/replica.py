"""A replica: a trainer's rows for inference, kept seconds behind it."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.comm.transport import Client, Frames, Secret
from shoal.errors import ConfigError, DataError, ServerLost
from shoal.placement import hash_ids, ranks_of
from shoal.rules.optimizers import SGD
from shoal.sync.pages import DeletedIds, row_ranges, unpack, unpack_dense
from shoal.sync.publisher import Ask
from shoal.table.cpu.shard import CpuShard
from shoal.table.rows import real_dtype, weight_dtype
from shoal.table.shard import Found, IdGroups
from shoal.table.spec import RowDType, TableSpec

_log = logging.getLogger(__name__)

_TRIES = 5  # of a page

State = Literal["LOADING", "AVAILABLE"]


def serving_spec(spec: TableSpec, dtype: RowDType | None = None) -> TableSpec:
    """A table as replicas keep it: rows of `dtype`, without optimizer state and limits."""
    segments = tuple(replace(one, optimizer=SGD()) for one in spec.segments)
    return replace(
        spec,
        segments=segments,
        dtype=dtype or spec.dtype,
        capacity_rows=None,
        admission=None,
        expiry=None,
    )


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How far a replica is with one publisher.

    Args:
        state: AVAILABLE once all rows have been there.
        incarnation, version: what it has.
        staleness_s: age of the newest state of the trainer that it shows; None: none yet.
        passes, segments: how many it has taken.
        failures: requests that failed or brought damaged pages; they are repeated.
    """

    state: State
    incarnation: int
    version: int
    staleness_s: float | None
    passes: int
    segments: int
    failures: int


class _Source:
    """What is known of one publisher; changed by one thread."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnation = self.version = 0
        self.closed_s: float | None = None
        self.passes = self.segments = self.failures = self.dense_version = 0

    def status(self) -> SourceStatus:
        closed_s = self.closed_s
        return SourceStatus(
            "LOADING" if closed_s is None else "AVAILABLE",
            self.incarnation,
            self.version,
            None if closed_s is None else max(0.0, time.time() - closed_s),
            self.passes,
            self.segments,
            self.failures,
        )


class Replica:
    """Rows of a trainer, or of all ranks of one, for lookups of any thread.

    A thread a publisher asks for what follows the version that the replica has, and takes it in
    pages, deletions before rows. Lookups continue meanwhile: each sees a row whole, old or new. A
    publisher that is down is asked again, ever more slowly; one that started again, or a replica
    that was away for too long, takes all rows again, and then drops those that are gone.

    Args:
        specs: the tables, as the trainer has them.
        publishers: addresses, one a rank, in order: "tcp://HOST:PORT".
        dtype: of the rows here; None: as trained.
        every_s: from one question to the next.
        reply_s: how long to wait for a reply.
        secret: what the publishers were given.

    Raises:
        ConfigError: an address that is none.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        publishers: Sequence[str],
        *,
        dtype: RowDType | None = None,
        every_s: float = 0.1,
        reply_s: float = 10.0,
        secret: Secret | None = None,
    ) -> None:
        self._trained = tuple(specs)
        self.specs = tuple(serving_spec(spec, dtype) for spec in specs)
        self.shard = CpuShard(self.specs)
        self._client = Client(publishers, secret=secret)
        self._every_s, self._reply_s = every_s, reply_s
        self._sources = [_Source(index) for index in range(len(publishers))]
        self._dense: dict[str, Tensor] = {}
        self._name = uuid.uuid4().hex
        self._ending = threading.Event()
        self._refused: ConfigError | None = None
        self._threads = [
            threading.Thread(target=self._follow, args=(one,), daemon=True) for one in self._sources
        ]

    def __enter__(self) -> Replica:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._client.close()
        for thread in self._threads:
            thread.join()

    def find(self, groups: IdGroups) -> Found:
        """Rows of ids; missing ones read as zeros."""
        return self.shard.find(groups)

    def dense(self) -> dict[str, Tensor]:
        """The newest dense weights of rank 0's publisher; empty before the first."""
        return self._dense

    def status(self) -> tuple[SourceStatus, ...]:
        """How far it is with each publisher.

        Raises:
            ConfigError: a publisher has other tables, another rank or another number of ranks.
        """
        if self._refused is not None:
            raise self._refused
        return tuple(one.status() for one in self._sources)

    def _follow(self, source: _Source) -> None:
        pause_s = self._every_s
        while not self._ending.wait(pause_s) and self._refused is None:
            pause_s = self._every_s if self._try(source) else min(5.0, max(0.1, 2 * pause_s))

    def _try(self, source: _Source) -> bool:
        """Whether a turn did not fail."""
        try:
            self._turn(source)
        except ConfigError as error:
            if not self._ending.is_set():
                self._refused = error
        except Exception as error:  # noqa: BLE001  the thread must live on, whatever it runs into
            if not self._ending.is_set():
                source.failures += 1
                _log.warning("publisher %d: %s", source.index, error)
        else:
            return True
        return False

    def _turn(self, source: _Source) -> None:
        ask = Ask(
            method="after",
            incarnation=source.incarnation,
            version=source.version,
            # Dense weights are taken from rank 0; the others need not wait for them.
            number=source.dense_version if source.index == 0 else (1 << 62),
        )
        said, _ = self._ask(source, ask)
        if not said["known"]:  # a trainer that started, maybe with another config
            self._greet(source)
            self._take_all(source)
            return
        for number, version, closed_s, pages in said["segments"]:
            for page in range(pages):
                self._take(source, Ask(method="page", number=number, page=page))
            source.version, source.closed_s = version, closed_s
            source.segments += 1
        if said["closed_s"] is not None:
            source.closed_s = said["closed_s"]
        self.shard.last_step = said["last_step"]
        if source.index == 0 and said["dense"] not in (0, source.dense_version):
            version, (data,) = self._ask(source, Ask(method="dense"))
            self._dense = unpack_dense(data)
            source.dense_version = version

    def _greet(self, source: _Source) -> None:
        said, _ = self._ask(source, Ask(method="hello"))
        mine = [[spec.name, spec.dim, spec.dtype] for spec in self._trained]
        wanted = {"tables": mine, "rank": source.index, "world_size": len(self._sources)}
        for what, value in wanted.items():
            if said[what] != value:
                raise ConfigError(
                    f"publisher {source.index}",
                    got=f"{what} {said[what]}",
                    allowed=f"{what} {value}",
                    remedy="Give the replica the config of the run that it follows, and the "
                    "addresses of all its ranks in order.",
                )

    def _take_all(self, source: _Source) -> None:
        """All rows of a publisher, then none of its rows that are gone."""
        said, _ = self._ask(source, Ask(method="pass"))
        if said["number"] is None:
            return  # others take one; asked again
        before = [self._owned(source, table) for table in range(len(self.specs))]
        seen: list[list[Tensor]] = [[] for _ in self.specs]
        for page in itertools.count():
            taken = self._take(source, Ask(method="next", number=said["number"], page=page))
            if taken is None:
                break
            seen[taken[0]].append(taken[1])
        for table, ids in enumerate(before):
            gone = ids[~torch.isin(ids, torch.cat(seen[table]))] if seen[table] else ids
            self._remove(table, gone)
        if source.incarnation != said["incarnation"]:
            source.dense_version = 0  # another trainer counts again
        self.shard.last_step = said["last_step"]
        source.incarnation, source.version = said["incarnation"], said["version"]
        source.closed_s = said["closed_s"]
        source.passes += 1

    def _owned(self, source: _Source, table: int) -> Tensor:
        """Ids of rows here that come from a publisher."""
        found = [torch.empty(0, dtype=torch.int64, device="cpu")]
        with self.shard.snapshot() as snapshot:
            found += [snapshot.read(table, *ends).ids for ends in row_ranges(snapshot, table)]
        self.shard.release(None)  # deletions need not be kept
        ids = torch.cat(found)
        if len(self._sources) == 1:
            return ids
        owners = ranks_of(hash_ids(self.specs[table].hash_name, ids), len(self._sources))
        return ids[owners == source.index]

    def _take(self, source: _Source, ask: Ask) -> tuple[int, Tensor] | None:
        """Put a page in place; its table and ids, or None after the last page.

        One that does not arrive, or damaged, is asked for again, so that what came before it is
        not lost.
        """
        for left in reversed(range(_TRIES)):
            try:
                _, frames = self._ask(source, ask)
                page = unpack(frames[0], self._trained) if frames else None
                break
            except (ServerLost, DataError):
                source.failures += 1
                if not left or self._ending.is_set():
                    raise
        if page is None:
            return None
        if isinstance(page, DeletedIds):
            self._remove(page.table, page.ids)
            return page.table, page.ids
        spec, chunk = self.specs[page.table], page.chunk
        weights, state = chunk.weights.to(weight_dtype(spec)), chunk.state.to(real_dtype(spec))
        self.shard.load(page.table, replace(chunk, weights=weights, state=state))
        return page.table, page.chunk.ids

    def _remove(self, table: int, ids: Tensor) -> None:
        if len(ids):
            splits = torch.tensor([0, len(ids)], device="cpu")
            tables = torch.tensor([table], dtype=torch.int32, device="cpu")
            self.shard.remove(IdGroups(ids, splits, tables))

    def _ask(self, source: _Source, ask: Ask) -> tuple[Any, Frames]:
        ask = ask.model_copy(update={"replica": self._name})
        head = ask.model_dump_json(exclude_defaults=True).encode()
        future = self._client.call(source.index, head, timeout_s=self._reply_s)
        said, frames = future.result()
        return json.loads(said), frames
