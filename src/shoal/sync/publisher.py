"""A publisher: what changed in a trainer's rows, twice a second, for any number of replicas."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import tempfile
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import TracebackType

from pydantic import ValidationError
from torch import Tensor

from shoal.comm.transport import Frames, Secret, Server
from shoal.errors import ConfigError, DataError, InputError
from shoal.sync.pages import (
    PackedPage,
    Share,
    check_dense,
    pack_dense,
    pages_of,
    sealed,
    unsealed,
)
from shoal.sync.protocol import LONGEST_PAUSE_S, TRIES, Ask
from shoal.sync.status import FollowerStatus, PublisherStatus, Rate
from shoal.table.hosting import HostedTables
from shoal.table.native import TooManySnapshots
from shoal.table.shard import Snapshot
from shoal.table.values import Cursor

_log = logging.getLogger(__name__)

MOST_PASSES = 2  # that are open at once; a shard has 8 snapshots for all purposes
_GONE_S = 2 * LONGEST_PAUSE_S  # who has not asked for so long is away
_LISTED_S = 60.0  # who has asked since is in the status
_MOST_SEGMENTS = 1000  # a page each costs more to ask for than a pass
_LOOK_S = 0.02
_MOST_REPLICAS = 10_000
_MOST_CHECKPOINTS = 1000  # to follow on from
_REQUEST_BYTES = 1 << 16  # a frame of a request
_FILE_BYTES = 64 << 20  # of segments, before the next file
_Answer = tuple[object, list[bytes]]


class _Spool:
    """An unlinked file of several segments, closed with the last of them."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile(prefix="shoal-segments-") as file:
            self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd)
        self.end = 0

    def append(self, page: bytes) -> int:
        """Write a page; where it ends. A failure leaves what was there before."""
        done = 0
        while done < len(page):
            done += os.pwrite(self.fd, memoryview(page)[done:], self.end + done)
        self.end += done
        return self.end

    def cut(self, end: int) -> None:
        """Give back what lies behind: of a segment that could not be written."""
        os.ftruncate(self.fd, end)
        self.end = end


@dataclass(frozen=True, slots=True)
class _Segment:
    """Changes in `(since, version]`: pages in a file, between the offsets in `ends`.

    hashes: [start, stop) of each page.
    """

    number: int
    since: int
    version: int
    closed_s: float
    spool: _Spool
    ends: tuple[int, ...]
    hashes: tuple[tuple[int, int], ...]

    @property
    def pages(self) -> int:
        return len(self.hashes)

    def pages_for(self, share: Share) -> list[int]:
        return [k for k, ends in enumerate(self.hashes) if share.meets(*ends)]

    @property
    def size(self) -> int:
        return self.ends[-1] - self.ends[0]

    def page(self, index: int) -> bytes:
        start, stop = self.ends[index : index + 2]
        return os.pread(self.spool.fd, stop - start, start)


class _Pass:
    """All rows at one version, page by page; the last page may be asked for again."""

    def __init__(self, ask: Ask, snapshot: Snapshot, pages: Iterator[PackedPage]) -> None:
        self.replica, self.snapshot = ask.replica, snapshot
        # A page is asked for TRIES times before its replica gives up.
        self.idle_s = max(LONGEST_PAUSE_S, 1.5 * TRIES * ask.reply_s)
        self.used_s = time.monotonic()
        self.ended = False
        self._pages, self._lock = pages, threading.Lock()
        self._last: tuple[int, bytes] | None = None
        self._lost = False

    def page(self, index: int) -> bytes:
        """Empty after the last one, as often as it is asked for.

        Raises:
            InputError: neither the last page nor the next, or of a pass that was closed or failed.
        """
        with self._lock:
            self.used_s = time.monotonic()
            wanted = 0 if self._last is None else self._last[0] + 1
            if self._last is not None and index == self._last[0]:
                return self._last[1]
            if index != wanted or self._lost:
                got = "a pass that was closed" if self._lost else f"page {index} of a pass"
                raise _unknown(got, f"page {wanted} of one that is open")
            self._lost = True  # until the page is there
            found = next(self._pages, None)
            page = b"" if found is None else found.data
            self._last, self._lost, self.ended = (index, page), not page, not page
            self.used_s = time.monotonic()  # reading may take long
            if not page:
                self.snapshot.close()
            return page

    def close(self) -> None:
        with self._lock:
            self._lost = True
            self.snapshot.close()


class Publisher:
    """Collects what changes in a rank's rows, and answers replicas that ask for it.

    A turn takes a snapshot point of its own and copies rows and deletions since the last one to a
    file (`$TMPDIR`, unlinked), in a thread of its own. Replicas ask for segments after their
    version; one that is new, or whose version is older than what is kept, takes a pass over all
    rows first. What a replica misses is asked for again: nothing waits for one that is down.

    Args:
        tables: of this rank; rows of replicated tables are published by their first rank.
        rank: this one, of those in the placement.
        every_s: from one turn to the next.
        keep_bytes: of segments; the oldest go.
        consumer: its name among the consumers of deletions.
        resumed: id of the checkpoint that the rows were loaded from, and a cursor at it: replicas
            with that checkpoint follow on from there.

    Raises:
        ConfigError: tables that are split by columns, or of int8 rows.
    """

    def __init__(
        self,
        tables: HostedTables,
        *,
        rank: int = 0,
        every_s: float = 0.4,
        keep_bytes: int = 1 << 30,
        consumer: str = "publisher",
        resumed: tuple[str, Cursor] | None = None,
    ) -> None:
        check_published(tables)
        placement = tables.placement
        self._rank, self._of = rank, 1 if placement is None else placement.world_size
        self._shard, self.specs, self._placement = tables.shard, tables.specs, placement
        names = [spec.name for spec in self.specs]
        self._tables = {
            names.index(spec.name): index
            for index, spec in enumerate(self._shard.specs)
            if placement is None or placement.of(spec.name)[0].answers(rank)
        }
        self._every_s, self._keep_bytes, self._consumer = every_s, keep_bytes, consumer
        self._lock = threading.Lock()  # of what replicas see
        self._turn = threading.Lock()
        self._segments: list[_Segment] = []
        self._kept = 0  # bytes of segments
        self._passes: dict[int, _Pass] = {}
        # Those of one that had this address before are unknown here.
        self._numbers = itertools.count(secrets.randbits(60))
        self._cursor: Cursor | None = None
        self._last_step = 0  # of the shard at the cursor
        self._dense: tuple[int, Mapping[str, Tensor]] = (0, {})
        self._dense_packed: tuple[int, bytes] = (0, b"")
        self._packing = threading.Lock()
        self._spool = _Spool()
        self._replicas: dict[str, tuple[float, Ask]] = {}  # when each asked last, and what
        self._gone: deque[str] = deque(maxlen=100)  # that said goodbye last
        self._checkpoints: dict[str, Cursor] = {}  # where those with a checkpoint follow on
        self._rate, self._turn_s, self._failures = Rate(), 0.0, 0
        self._closed_s: float | None = None
        self._methods: dict[str, Callable[[Ask], _Answer]] = {
            "hello": self._hello,
            "after": self._after,
            "newest": self._newest,
            "page": self._page,
            "pass": self._open_pass,
            "next": self._next,
            "dense": self._dense_page,
            "goodbye": self._goodbye,
        }
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if resumed is not None and resumed[1].incarnation == self._shard.incarnation:
            self.saved(*resumed)
            self._cursor, self._last_step = resumed[1], self._shard.last_step
            self._shard.release(resumed[1].version, consumer)  # from here on deletions are kept

    def serve(self, address: str, *, threads: int = 4, secret: Secret | None = None) -> Server:
        """Answer replicas at an address until the server is stopped."""
        return Server(address, self, threads=threads, most_bytes=_REQUEST_BYTES, secret=secret)

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()
        with self._lock:
            passes = list(self._passes.values())
            self._passes.clear()
            self._clear()
        for one in passes:
            one.close()
        self._shard.release(None, self._consumer)

    def publish(self) -> int:
        """Take a turn now; the version that replicas can have from here on."""
        with self._turn:
            return self._publish()

    def saved(self, checkpoint: str, cursor: Cursor) -> None:
        """Let replicas that load a checkpoint follow on from it.

        Args:
            checkpoint: its id.
            cursor: of this rank's shard at it.
        """
        with self._lock:
            self._checkpoints[checkpoint] = cursor
            while len(self._checkpoints) > _MOST_CHECKPOINTS:
                del self._checkpoints[next(iter(self._checkpoints))]

    def status(self) -> PublisherStatus:
        """What it keeps, and how far its replicas are."""
        now, now_s = time.monotonic(), time.time()
        with self._lock:
            cursor = self._cursor or Cursor()
            there = [one for one in self._replicas.items() if now - one[1][0] < _LISTED_S]
            segments, kept = list(self._segments), self._kept
            passes = sum(not one.ended for one in self._passes.values())
            dense, closed_s = self._dense[0], self._closed_s
        followers = []
        for name, (asked_s, ask) in there:
            lacks = [one for one in segments if one.version > ask.version]
            since = lacks[0].since if lacks else cursor.version
            lag_s = max(0.0, now_s - lacks[0].closed_s) if lacks else 0.0
            known = ask.incarnation == cursor.incarnation and since <= ask.version
            followers.append(
                FollowerStatus(name, ask.version, lag_s if known else None, now - asked_s)
            )
        return PublisherStatus(
            cursor.incarnation,
            cursor.version,
            closed_s,
            len(segments),
            kept,
            passes,
            self._rate.per_s(),
            self._turn_s,
            self._failures,
            dense,
            tuple(followers),
        )

    def publish_dense(self, tensors: Mapping[str, Tensor]) -> int:
        """Offer a copy of dense weights, whole, in place of those before; their version.

        They are packed once a replica asks for them.

        Raises:
            DataError: a dtype that cannot be sent, or more than a page takes.
        """
        check_dense(tensors)
        copies = {k: one.detach().to("cpu", copy=True) for k, one in tensors.items()}
        with self._lock:
            self._dense = self._dense[0] + 1, copies
            return self._dense[0]

    def _publish(self) -> int:
        cursor = self._cursor
        if cursor is not None and cursor.incarnation != self._shard.incarnation:
            cursor = None  # rows were loaded: versions before say nothing
        try:
            held = self._shard.snapshot(cursor)
        except InputError as error:
            if cursor is None or isinstance(error, TooManySnapshots):
                raise
            _log.warning("replicas take all rows again: %s", error)
            cursor, held = None, self._shard.snapshot()
        with held as snapshot:
            closed_s, last_step = time.time(), self._shard.last_step
            segment = None if cursor is None else self._written(snapshot, closed_s)
            now = Cursor(self._shard.incarnation, snapshot.version)
            with self._lock:
                if segment is None or now.incarnation != cursor.incarnation:  # type: ignore[union-attr]
                    self._clear()
                else:
                    self._append(segment)
                self._cursor, self._last_step, self._closed_s = now, last_step, closed_s
        self._shard.release(snapshot.version, self._consumer)
        self._end_passes()
        return snapshot.version

    def _written(self, snapshot: Snapshot, closed_s: float) -> _Segment:
        if self._spool.end > _FILE_BYTES:
            self._spool = _Spool()
        ends, hashes, spool = [self._spool.end], [], self._spool
        try:
            for page in pages_of(snapshot, self._tables, self.specs):
                ends.append(spool.append(page.data))
                hashes.append((page.start, page.stop))
                self._rate.add(page.rows)
        except BaseException:
            spool.cut(ends[0])
            raise
        number, version = next(self._numbers), snapshot.version
        return _Segment(
            number, snapshot.since, version, closed_s, spool, tuple(ends), tuple(hashes)
        )

    def _append(self, segment: _Segment) -> None:
        """Keep a segment, in place of one without pages before it."""
        if self._segments and not self._segments[-1].pages:
            segment = replace(segment, since=self._segments.pop().since)
        self._segments.append(segment)
        self._kept += segment.size
        while len(self._segments) > _MOST_SEGMENTS or (
            len(self._segments) > 1 and self._kept > self._keep_bytes
        ):
            self._kept -= self._segments.pop(0).size

    def _clear(self) -> None:
        self._segments.clear()
        self._kept = 0

    def _end_passes(self, replica: str | None = None) -> None:
        """Close those that nobody asks for, and those of a replica."""
        now = time.monotonic()
        with self._lock:
            gone = {
                k: one
                for k, one in self._passes.items()
                if one.replica == replica or now - one.used_s > one.idle_s
            }
            for number in gone:
                del self._passes[number]
        for one in gone.values():
            one.close()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._try()

    def _try(self) -> None:
        began_s = time.monotonic()
        try:
            self.publish()
            self._turn_s = time.monotonic() - began_s
        except Exception:  # noqa: BLE001  the thread must live on, whatever a turn runs into
            self._failures += 1
            _log.exception("rows were not published; the next turn takes them, too")

    def __call__(self, head: bytes, frames: Frames) -> tuple[bytes, list[bytes]]:
        """The reply to a replica.

        Raises:
            InputError: a request that is none, or of a segment that is gone.
        """
        try:
            ask = Ask.model_validate_json(unsealed(bytes(head)))
        except DataError:
            raise _unknown("another checksum", "requests as they were sent") from None
        except ValidationError as error:
            raise _unknown(str(error.errors()[0]["msg"]), "requests of this version") from None
        if ask.replica:
            self._note(ask)
        answer, pages = self._methods[ask.method](ask)
        return sealed(json.dumps(answer).encode()), pages

    def _goodbye(self, ask: Ask) -> _Answer:
        with self._lock:
            self._replicas.pop(ask.replica, None)
            self._gone.append(ask.replica)
        self._end_passes(ask.replica)
        return None, []

    def _hello(self, ask: Ask) -> _Answer:
        tables = [[one.name, one.dim, one.dtype] for one in self.specs]
        placement = None if self._placement is None else self._placement.to_json()
        found = {"tables": tables, "rank": self._rank, "world_size": self._of}
        return {**found, "placement": placement}, []

    def _note(self, ask: Ask) -> None:
        """That a replica is there; what it has, it says when it asks "after" or "newest"."""
        with self._lock:
            if ask.replica in self._gone:  # asked before its goodbye, and was heard after it
                return
            if len(self._replicas) > _MOST_REPLICAS:
                self._replicas.clear()
            _, last = self._replicas.get(ask.replica, (0.0, ask))
            has = ask if ask.method in ("after", "newest") else last
            self._replicas[ask.replica] = time.monotonic(), has

    def drain(self, timeout_s: float) -> bool:
        """Take a turn, and wait until all replicas that ask have it; whether they do."""
        version = self.publish()
        ends = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            with self._lock:
                wanted = self._shard.incarnation, version, self._dense[0]
                there = [one for asked_s, one in self._replicas.values() if now - asked_s < _GONE_S]
            behind = [one for one in there if not one.has(*wanted)]
            if not behind or now > ends:
                return not behind
            time.sleep(_LOOK_S)

    def _after(self, ask: Ask) -> _Answer:
        """Segments that lead on from a version or a checkpoint, or none: a pass is due."""
        with self._lock:
            cursor, dense, last_step = self._cursor, self._dense[0], self._last_step
            there = Cursor(ask.incarnation, min(ask.version, (1 << 32) - 1))
            if ask.checkpoint:
                there = self._checkpoints.get(ask.checkpoint, Cursor())
            first = bisect_right(self._segments, there.version, key=attrgetter("version"))
            found = self._segments[first:]
            closed_s = self._closed_s
        known = cursor is not None and cursor.incarnation == there.incarnation
        if known and cursor is not None:
            known = (found[0].since if found else cursor.version) <= there.version
        share = ask.rows
        listed = [[s.number, s.version, s.closed_s, s.pages_for(share)] for s in found if known]
        answer = {"known": known, "segments": listed, "closed_s": closed_s, "dense": dense}
        where = {"incarnation": there.incarnation, "version": there.version}
        return {**answer, **where, "last_step": last_step}, []

    def _newest(self, ask: Ask) -> _Answer:
        with self._lock:
            cursor, dense, closed_s = self._cursor or Cursor(), self._dense[0], self._closed_s
        where = {"incarnation": cursor.incarnation, "version": cursor.version}
        return {**where, "closed_s": closed_s, "dense": dense}, []

    def _page(self, ask: Ask) -> _Answer:
        with self._lock:
            at = bisect_left(self._segments, ask.number, key=attrgetter("number"))
            found = self._segments[at : at + 1]
        for one in found:
            if one.number == ask.number and ask.page < one.pages:
                data, share = one.page(ask.page), ask.rows
                whole = share.holds(*one.hashes[ask.page])
                return None, [data if whole else share.of_page(data, self.specs)]
        raise _unknown(f"segment {ask.number}, page {ask.page}", "segments that are kept")

    def _open_pass(self, ask: Ask) -> _Answer:
        self._end_passes(ask.replica)
        if not self._passes_left():
            return {"number": None}, []
        if self._cursor is None:
            self.publish()
        snapshot, closed_s = self._shard.snapshot(), time.time()
        pages = pages_of(snapshot, self._tables, self.specs, ask.rows)
        one = _Pass(ask, snapshot, pages)
        with self._lock:
            number = next(self._numbers)
            opened = self._passes_left()
            if opened:
                self._passes[number] = one
        if not opened:
            one.close()
            return {"number": None}, []
        incarnation, last_step = self._shard.incarnation, self._shard.last_step
        answer = {"number": number, "incarnation": incarnation, "closed_s": closed_s}
        return {**answer, "version": snapshot.version, "last_step": last_step}, []

    def _passes_left(self) -> bool:
        """Whether one more may be open."""
        reading = sum(not one.ended for one in list(self._passes.values()))
        return reading < MOST_PASSES and not self._ending.is_set()

    def _next(self, ask: Ask) -> _Answer:
        with self._lock:
            one = self._passes.get(ask.number)
        if one is None:
            raise _unknown(f"pass {ask.number}", "passes that are open")
        page = one.page(ask.page)
        return None, [page] if page else []

    def _dense_page(self, ask: Ask) -> _Answer:
        with self._packing:
            version, tensors = self._dense
            if version != self._dense_packed[0]:
                self._dense_packed = version, pack_dense(tensors)
            version, page = self._dense_packed
        return version, [page]


def check_published(tables: HostedTables) -> None:
    """On every rank alike, whichever rows it has.

    Raises:
        ConfigError: tables that are split by columns, or of int8 rows.
    """
    placement = tables.placement
    placed = () if placement is None else placement.tables()
    sliced = [name for name in placed if placement and len(placement.of(name)) > 1]
    if sliced:
        raise ConfigError(
            "tables to publish",
            got=f"columns of tables on several ranks: {sliced}",
            allowed="whole rows: row_wise, table_row_wise, table_wise or data_parallel tables",
            remedy="Choose another sharding than column_wise and grid for them.",
        )
    coded = [one.name for one in tables.specs if one.dtype == "int8"]
    if coded:
        raise ConfigError(
            "tables to publish",
            got=f"int8 tables: {coded}",
            allowed="rows of floats; a replica may keep them as int8",
            remedy="Train them as float32 or float16, and give the replica dtype=int8.",
        )


def address_of_rank(address: str, rank: int) -> str:
    """tcp://HOST:PORT with PORT + rank; port 0 stays, for a free one."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or port == "0" or not rank:
        return address
    return f"{host}:{int(port) + rank}"


def _unknown(got: str, allowed: str) -> InputError:
    return InputError(
        "request to a publisher",
        got=got,
        allowed=allowed,
        remedy="Ask for what follows the replica's version again.",
    )
