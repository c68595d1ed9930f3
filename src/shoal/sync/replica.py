"""A replica: a trainer's rows for inference, kept seconds behind it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import Manifest, read_manifest
from shoal.checkpoint.loading_rows import does_not_fit, unfit
from shoal.comm.transport import Client, Frames, Reply, Secret
from shoal.errors import CheckpointError, ConfigError, DataError, ServerLost
from shoal.placement import BUCKETS, Placement, hash_ids, owners
from shoal.rules.optimizers import SGD
from shoal.sync.checkpoints import Only, load_checkpoint, newest_checkpoint
from shoal.sync.pages import DeletedIds, Share, row_ranges, sealed, unpack, unpack_dense, unsealed
from shoal.sync.protocol import LONGEST_PAUSE_S, MOST_REPLY_S, TRIES, Ask, answer_of
from shoal.sync.status import Rate, ReplicaStatus, SourceStatus
from shoal.table.cpu.shard import CpuShard
from shoal.table.rows import real_dtype, stored
from shoal.table.shard import Found, IdGroups
from shoal.table.spec import ServedDType, TableSpec

_log = logging.getLogger(__name__)

_GOODBYE_S = 0.5


def serving_spec(spec: TableSpec, dtype: ServedDType | None = None) -> TableSpec:
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


class _Source:
    """What is known of one publisher, or of the checkpoint; changed by one thread."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.greeted = False
        self.at_checkpoint = False  # its rows are those of the checkpoint, and nothing else
        self.placement: Placement | None = None
        self.incarnation = self.version = 0
        self.closed_s: float | None = None
        self.refused: ConfigError | None = None  # by the last turn
        self.error = ""  # of the last turn
        self.passes = self.segments = self.failures = self.dense_version = 0
        self.rate = Rate()

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
            self.rate.per_s(),
            self.error,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Rows, and dense weights, that belong together."""

    shard: CpuShard
    dense: Mapping[str, Tensor]


class Replica:
    """Rows of a trainer, or of all ranks of one, for lookups of any thread.

    A thread a publisher asks for what follows the version that the replica has, and takes it in
    pages, deletions before rows. Lookups continue meanwhile: each sees a row whole, old or new. A
    publisher that is down is asked again, ever more slowly, and so is one of another run; one that
    started again, or a replica that was away for too long, takes all rows again, and then drops
    those that are gone.

    With a checkpoint it has its rows when it is entered, and follows on from there if publishers
    still can. Without publishers it serves the checkpoint alone.

    Args:
        specs: the tables, as the trainer has them.
        publishers: addresses, one a rank, in order: "tcp://HOST:PORT".
        dtype: of the rows here; None: as trained.
        every_s: from one question to the next.
        reply_s: how long to wait for a reply.
        secret: what the publishers were given.
        checkpoint: a checkpoint's folder, that of a store or of a run: the newest in it.
        collection: that the tables were saved as; None: the one that has them.
        follow_checkpoints_s: without publishers: how often to look for a newer checkpoint. It is
            loaded next to the rows in use, and takes their place as a whole.
        share, of: hold part `share` of `of` of the rows, split by hash as a placement splits them
            over ranks, however many ranks the trainer has.
        only: "rows" or "dense", for servers of one half of a model; the publisher sends no more
            than that. Dense weights are asked of rank 0 alone.

    Raises:
        ConfigError: an address that is none, neither publishers nor a checkpoint, or no such share.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        publishers: Sequence[str],
        *,
        dtype: ServedDType | None = None,
        every_s: float = 0.1,
        reply_s: float = 10.0,
        secret: Secret | None = None,
        checkpoint: str | None = None,
        collection: str | None = None,
        follow_checkpoints_s: float | None = None,
        share: int = 0,
        of: int = 1,
        only: Only | None = None,
    ) -> None:
        _check(publishers, checkpoint, follow_checkpoints_s, share, of)
        self._trained = tuple(specs)
        self.specs = tuple(serving_spec(spec, dtype) for spec in specs)
        self._served = Served(CpuShard(self.specs), {})
        self._share = Share(share, of)
        self._only, self._ranks = only, len(publishers)
        asked = publishers[:1] if only == "dense" else publishers
        self._client = Client(asked, secret=secret) if asked else None
        self._every_s, self._reply_s = every_s, reply_s
        self._url, self._collection = checkpoint, collection
        self._follow_s = follow_checkpoints_s
        self._checkpoint: tuple[str, Manifest] | None = None  # its folder
        self._sources = [_Source(index) for index in range(max(1, len(asked)))]
        self._listing = threading.Lock()  # a shard has 8 snapshots, a trainer any number of ranks
        self._name = uuid.uuid4().hex
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=args, daemon=True) for args in self._jobs()
        ]

    def _jobs(self) -> list[tuple[_Source, Callable[[_Source], None], float]]:
        if self._client is not None:
            turn = self._turn_dense if self._only == "dense" else self._turn
            return [(one, turn, self._every_s) for one in self._sources]
        if self._follow_s is not None:
            return [(self._sources[0], self._reload, self._follow_s)]
        return []

    def __enter__(self) -> Replica:
        """Load the checkpoint, if there is one, and begin to follow.

        Raises:
            CheckpointError: it is missing or damaged, or of other tables, and there is nothing
                else to wait for.
        """
        if self._url is not None:
            try:
                self._reload(self._sources[0])
            except CheckpointError as error:
                if not self._threads:
                    raise
                self._sources[0].failures += 1
                _log.warning("no checkpoint to begin with: %s", error)
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
        if self._client is not None:
            there = [one for one in self._sources if one.greeted and not one.error]
            goodbye = [self._call(one, Ask(method="goodbye"), _GOODBYE_S) for one in there]
            for future in goodbye:
                with suppress(Exception):  # it is idle soon enough
                    future.result()
            self._client.close()
        for thread in self._threads:
            thread.join()

    def find(self, groups: IdGroups) -> Found:
        """Rows of ids; missing ones read as zeros."""
        return self.shard.find(groups)

    def served(self) -> Served:
        """Rows and dense weights; after a newer checkpoint both are its."""
        return self._served

    @property
    def shard(self) -> CpuShard:
        """The rows."""
        return self._served.shard

    def dense(self) -> Mapping[str, Tensor]:
        """The newest dense weights of rank 0's publisher, before that those of the checkpoint;
        empty before the first."""
        return self._served.dense

    def status(self) -> tuple[SourceStatus, ...]:
        """How far it is with each publisher; without publishers, with its checkpoint.

        Raises:
            ConfigError: a publisher has other tables, another rank or another number of ranks, and
                there are no rows from before.
        """
        for one in self._sources:
            if one.refused is not None and one.closed_s is None:
                raise one.refused
        return tuple(one.status() for one in self._sources)

    def summary(self) -> ReplicaStatus:
        """The replica as a whole.

        Raises:
            ConfigError: as `status`.
        """
        sources, tables = self.status(), self.shard.stats()
        ages = [one.staleness_s for one in sources if one.staleness_s is not None]
        whole = len(ages) == len(sources)
        return ReplicaStatus(
            state="AVAILABLE" if whole else "LOADING",
            version=min(one.version for one in sources),
            staleness_s=max(ages) if whole else None,
            rows=tuple((one.name, one.rows) for one in tables),
            row_bytes=sum(one.bytes_total for one in tables),
            rows_per_s=sum(one.rows_per_s for one in sources),
            failures=sum(one.failures for one in sources),
            dense_version=self._sources[0].dense_version,
            checkpoint=None if self._checkpoint is None else self._checkpoint[0],
            share=self._share.index,
            of=self._share.of,
            sources=sources,
        )

    def _repeat(self, source: _Source, turn: Callable[[_Source], None], every_s: float) -> None:
        pause_s = every_s
        while not self._ending.wait(pause_s):
            slower_s = min(LONGEST_PAUSE_S, max(0.1, 2 * pause_s))
            if self._try(source, turn):
                pause_s = every_s
            else:
                pause_s = max(every_s, LONGEST_PAUSE_S if source.refused else slower_s)

    def _try(self, source: _Source, turn: Callable[[_Source], None]) -> bool:
        """Whether a turn did not fail."""
        try:
            turn(source)
        except Exception as error:  # noqa: BLE001  the thread must live on, whatever it runs into
            if not self._ending.is_set():
                source.failures += 1
                self._serve_checkpoint(source)
                source.refused = error if isinstance(error, ConfigError) else None
                source.error = str(error)
                _log.warning("source %d of a replica: %s", source.index, error)
            return False
        source.refused, source.error = None, ""
        return True

    def _serve_checkpoint(self, source: _Source) -> None:
        """Where there is nothing to follow yet, the checkpoint's age says how old the rows are."""
        if source.closed_s is None and self._checkpoint is not None:
            source.closed_s = float(self._checkpoint[1].created_s)

    def _reload(self, source: _Source) -> None:
        """Load the newest checkpoint, unless it is the one in use."""
        assert self._url is not None
        url = newest_checkpoint(self._url)
        if self._checkpoint is not None and read_manifest(url).id == self._checkpoint[1].id:
            return
        loaded = load_checkpoint(
            url, self.specs, self._share, collection=self._collection, only=self._only
        )
        self._served = Served(loaded.shard, loaded.dense)
        self._checkpoint = url, loaded.manifest
        for one in self._sources:
            one.at_checkpoint = True
        if self._client is None:
            source.version, source.closed_s = (
                loaded.manifest.version,
                float(loaded.manifest.created_s),
            )
            source.passes += 1

    def _turn(self, source: _Source) -> None:
        if not source.greeted:
            self._greet(source)
        begins = self._checkpoint if source.at_checkpoint else None
        ask = Ask(
            method="after",
            incarnation=source.incarnation,
            version=source.version,
            checkpoint="" if begins is None else begins[1].id,
            # Publishers whose dense weights are not taken need not wait for that.
            number=source.dense_version if self._takes_dense(source) else (1 << 62),
        )
        said, _ = self._ask(source, ask)
        if not said["known"]:  # a trainer that started, maybe with another config
            self._greet(source)
            self._serve_checkpoint(source)
            self._take_all(source)
            return
        source.incarnation, source.version = said["incarnation"], said["version"]
        source.at_checkpoint = False
        for number, version, closed_s, pages in said["segments"]:
            for page in pages:
                self._take(source, Ask(method="page", number=number, page=page))
            source.version = version
            if source.closed_s is not None:  # else only the whole replay is
                source.closed_s = closed_s
            source.segments += 1
        if said["closed_s"] is not None:
            source.closed_s = said["closed_s"]
        self.shard.last_step = said["last_step"]
        if self._takes_dense(source):
            self._take_dense(source, said["dense"])

    def _takes_dense(self, source: _Source) -> bool:
        return source.index == 0 and self._only != "rows"

    def _take_dense(self, source: _Source, newest: int) -> None:
        if newest not in (0, source.dense_version):
            version, frames = self._ask(source, Ask(method="dense"))
            if len(frames) != 1:
                remedy = "Run both with the same version."
                raise DataError("frames of dense weights", len(frames), 1, remedy)
            self._served = replace(self._served, dense=unpack_dense(frames[0]))
            source.dense_version = version

    def _turn_dense(self, source: _Source) -> None:
        """Dense weights alone."""
        if not source.greeted:
            self._greet(source)
        has = source.incarnation, source.version, source.dense_version
        ask = Ask(method="newest", incarnation=has[0], version=has[1], number=has[2])
        said, _ = self._ask(source, ask)
        if said["incarnation"] != source.incarnation:
            self._greet(source)  # a trainer that started, maybe with another config
            source.dense_version = 0  # it counts again
        self._take_dense(source, said["dense"])
        source.incarnation, source.version = said["incarnation"], said["version"]
        if said["closed_s"] is not None:
            source.closed_s = said["closed_s"]

    def _greet(self, source: _Source) -> None:
        said, _ = self._ask(source, Ask(method="hello"))
        mine = [(spec.name, spec.dim, spec.dtype) for spec in self._trained]
        wanted = {"tables": mine, "rank": source.index, "world_size": self._ranks}
        for what, value in wanted.items():
            if said[what] != value:
                raise ConfigError(
                    f"publisher {source.index}",
                    got=f"{what} {said[what]}",
                    allowed=f"{what} {value}",
                    remedy="Give the replica the config of the run that it follows, and the "
                    "addresses of all its ranks in order.",
                )
        placed = said["placement"]
        source.placement = None if placed is None else Placement.from_json(placed)
        source.greeted = True

    def _take_all(self, source: _Source) -> None:
        """All rows of a publisher, then none of its rows that are gone."""
        said, _ = self._ask(source, Ask(method="pass"))
        if said["number"] is None:
            return  # others take one; asked again
        source.at_checkpoint = False  # also if it fails in the middle
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
        spec, placed = self.specs[table], source.placement
        hosted = None if placed is None else placed.of(spec.name)[0]
        found = [torch.empty(0, dtype=torch.int64, device="cpu")]
        if hosted is not None and hosted.replicated and not hosted.answers(source.index):
            return found[0]
        with self._listing, self.shard.snapshot() as snapshot:
            for ends in row_ranges(snapshot, table):
                ids = snapshot.read(table, *ends, state=False).ids
                if hosted is not None and not hosted.replicated:
                    ids = ids[owners(hosted, hash_ids(spec.hash_name, ids)) == source.index]
                found.append(ids)
            self.shard.release(None)  # deletions need not be kept
        return torch.cat(found)

    def _take(self, source: _Source, ask: Ask) -> tuple[int, Tensor] | None:
        """Put a page in place; its table and ids, or None after the last page.

        One that does not arrive, or damaged, is asked for again, so that what came before it is
        not lost.
        """
        for left in reversed(range(TRIES)):
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
            source.rate.add(len(page.ids))
            return page.table, page.ids
        spec, chunk = self.specs[page.table], page.chunk
        weights, state = stored(spec, chunk.weights), chunk.state.to(real_dtype(spec))
        if lost := unfit(chunk.weights, weights):
            raise does_not_fit({spec.name: lost})
        self.shard.load(page.table, replace(chunk, weights=weights, state=state))
        source.rate.add(len(chunk.ids))
        return page.table, chunk.ids

    def _remove(self, table: int, ids: Tensor) -> None:
        if len(ids):
            splits = torch.tensor([0, len(ids)], device="cpu")
            tables = torch.tensor([table], dtype=torch.int32, device="cpu")
            self.shard.remove(IdGroups(ids, splits, tables))

    def _ask(self, source: _Source, ask: Ask) -> tuple[Any, Frames]:
        said, frames = self._call(source, ask, self._reply_s).result()
        return answer_of(ask.method, unsealed(said)), frames

    def _call(self, source: _Source, ask: Ask, timeout_s: float) -> Reply:
        assert self._client is not None
        who = {
            "replica": self._name,
            "share": self._share.index,
            "of": self._share.of,
            "reply_s": min(self._reply_s, MOST_REPLY_S),
        }
        text = ask.model_copy(update=who).model_dump_json(exclude_defaults=True).encode()
        return self._client.call(source.index, sealed(text), timeout_s=timeout_s)


def _check(
    publishers: Sequence[str], checkpoint: str | None, follow_s: float | None, share: int, of: int
) -> None:
    if not 1 <= of <= BUCKETS or not 0 <= share < of:
        raise ConfigError(
            "share of a replica",
            got=f"{share} of {of}",
            allowed=f"0 <= share < of <= {BUCKETS}",
            remedy="Shares count from 0.",
        )
    if not publishers and checkpoint is None:
        raise ConfigError(
            "sources of a replica",
            got="neither publishers nor a checkpoint",
            allowed="one of them, or both",
            remedy="Give the addresses of a run's publishers, or a checkpoint's folder.",
        )
    if follow_s is not None and publishers:
        raise ConfigError(
            "follow_checkpoints_s of a replica",
            got=f"{follow_s} and publishers",
            allowed="None with publishers",
            remedy="Leave it out: publishers are ahead of every checkpoint.",
        )
