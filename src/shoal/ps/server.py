"""A parameter server: one process's share of all tables, for any number of workers at once."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.comm.frames import memory, tensor
from shoal.comm.transport import Frames, Secret, Server
from shoal.errors import ConfigError, InputError, ShoalError
from shoal.exchange.partition import flat
from shoal.placement import Placement, row_wise
from shoal.ps.messages import (
    MOST_BYTES,
    REALS,
    Head,
    groups_of,
    identity,
    rows_of_frames,
    rows_of_segments,
    rows_to_frames,
)
from shoal.table.factory import make_shard
from shoal.table.hosting import hosted_specs
from shoal.table.rows import real_dtype
from shoal.table.shard import IdGroups, Shard, StepContext, Ticket
from shoal.table.spec import TableSpec

Reply = tuple[bytes, list[memoryview]]

_LOOKUPS = 64
_KEEP_S = 3600
_KEEP_AT_MOST_S = 86_400


def spread_over(specs: Sequence[TableSpec], servers: int) -> Placement:
    """Where rows are: every table by hash over all servers."""
    placed = [one for spec in specs for one in row_wise(spec.name, spec.dim, servers)]
    return Placement(servers, tuple(placed))


@dataclass(slots=True, eq=False)
class _Worker:
    """What a server knows of one worker's updates and lookups.

    keep_s: after it was seen last, none of its requests comes again.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    applied: int = 0
    lost: int = 0
    averaged: int = 0  # the last exchange of dense weights
    refused: tuple[type[Exception], str] | None = None  # the last update, if it was
    lookups: threading.Lock = field(default_factory=threading.Lock)
    looked_up: deque[int] = field(default_factory=lambda: deque(maxlen=_LOOKUPS))  # and counted
    seen_s: float = field(default_factory=time.monotonic)
    keep_s: int = _KEEP_S


class _Gate:
    """Lets any number of updates in, or one snapshot point: then no update is half done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Waits for a snapshot point, which takes milliseconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Waits for the updates inside, and keeps others out."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class _Average:
    """Dense weights that workers without a process group move towards; those of the first, first.

    They are in no save: after a restart the first worker that comes brings them again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values_P: Tensor | None = None

    def exchange(self, head: Head, frames: Frames, *, again: bool = False) -> Reply:
        """Without a frame, what there is; with a worker's float32 [P], both move by a share of
        their difference, and what the worker's become is returned. The average does not move
        `again`.
        """
        with self._lock:
            if not frames:
                return b"", [] if self._values_P is None else [memory(self._values_P.clone())]
            count = frames[0].nbytes // 4 if self._values_P is None else self._values_P.numel()
            own_P = tensor(frames[0], torch.float32, count, "dense weights")
            if not own_P.isfinite().all():
                raise InputError(
                    "dense weights of a worker",
                    got="NaN or infinity",
                    allowed="finite numbers",
                    remedy="Lower the learning rate, or set clip_norm: its training diverged.",
                )
            if self._values_P is None:
                self._values_P = own_P.clone()
            moved_P = head.share * (own_P - self._values_P)
            if not again:
                self._values_P = self._values_P + moved_P
            return b"", [memory(own_P - moved_P)]


class TableServer:
    """Rows of all tables whose ids fall to this server; a handler of requests (`Server`).

    Lookups and updates run side by side. An update that comes again, for its reply was lost, is
    not applied again: each worker numbers its own, and they are applied in order. Numbers that
    never came, say for they were applied by a server that died before it saved, are counted. A
    training lookup that comes again counts its ids once for admission.

    Args:
        specs: all tables, the same for all servers and workers.
        index, of: this server among all.
        seed: of initial values, the same for all servers.
        most_workers: that are remembered. Those whose requests can come no more are forgotten
            before others are refused.
        most_bytes: of a frame of a request, and of the rows in a reply: more is refused before
            memory is taken.

    Attributes:
        updates: applied so far, of all workers.
        forgotten: workers.
        saved: the newest checkpoint of its rows, by name.

    Raises:
        ConfigError: no such server.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        index: int,
        of: int,
        seed: int = 0,
        most_workers: int = 4096,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.specs = tuple(specs)
        self.shard: Shard = make_shard(
            hosted_specs(specs, spread_over(specs, of), index), seed=seed
        )
        self.index, self.of = index, of
        self._identity = identity(self.specs, index, of, self.shard.seed)
        self.updates = self.forgotten = 0
        self._most_workers, self._most_bytes = most_workers, most_bytes
        self._workers: dict[str, _Worker] = {}
        self._known = threading.Lock()
        self._gate = _Gate()
        self._average = _Average()
        self._serving: Server | None = None
        self.saved: str | None = None
        self._methods: dict[str, Callable[[Head, Frames], Reply]] = {
            "hello": self._hello,
            "find": self._find,
            "lookup": self._lookup,
            "apply": self._apply,
            "assign": lambda head, frames: self._write(head, frames, self.shard.assign),
            "assign_add": lambda head, frames: self._write(head, frames, self.shard.assign_add),
            "reinitialize": self._reinitialize,
            "evict": lambda head, _: _number(self.shard.evict(head.argument)),
            "close_version": lambda *_: _number(self.shard.close_version()),
            "clear": self._clear,
            "size": lambda head, _: _number(self.shard.size(self._table(head))),
            "stats": lambda *_: (json.dumps([asdict(s) for s in self.shard.stats()]).encode(), []),
            "entry": self._entry,
            "export": self._export,
            "average": self._averaged,
            "health": self._health,
            "count_lost": self._count_lost,
        }

    def serve(
        self, address: str, *, threads: int = 4, secret: Secret | None = None, waiting: int = 64
    ) -> Server:
        """Answer requests at an address until the server is stopped.

        Raises:
            ConfigError: no thread, an address that is taken or none, or pyzmq is missing.
        """
        if threads < 1:
            raise ConfigError("threads of a server", threads, "1 or more", "Set --threads.")
        self._serving = Server(
            address,
            self,
            threads=threads,
            secret=secret,
            waiting=waiting,
            most_bytes=self._most_bytes,
        )
        return self._serving

    def __call__(self, head: bytes, frames: Frames) -> Reply:
        """The reply to a request.

        Raises:
            ShoalError: the request is wrong, or a shard refuses it; nothing was changed.
            ConfigError: another server is meant.
        """
        parsed = Head.of(head)
        if parsed.server not in ("", self._identity) and parsed.method != "hello":
            raise ConfigError(
                "request to a parameter server",
                got=f"one for another server than {self.index} of {self.of}, or for other tables",
                allowed="the index, count, tables and seed that this server has",
                remedy="Start workers again when the number of servers or the config changes.",
            )
        return self._methods[parsed.method](parsed, frames)

    @contextmanager
    def between_updates(self) -> Iterator[dict[str, Any]]:
        """No update is under way inside; gives what to save with the rows."""
        with self._gate.closed(), self._known:
            workers = {
                name: [one.applied, one.lost, one.keep_s] for name, one in self._workers.items()
            }
            yield {"workers": workers, "updates": self.updates, "forgotten": self.forgotten}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved with the rows that were loaded."""
        self.updates, self.forgotten = state["updates"], state["forgotten"]
        for name, (applied, lost, *keep_s) in state["workers"].items():
            worker = self._workers[name] = _Worker()
            worker.applied, worker.lost = applied, lost
            worker.keep_s = keep_s[0] if keep_s else _KEEP_S  # saves before had none

    def _hello(self, head: Head, frames: Frames) -> Reply:
        with self._known:
            worker = self._workers.get(head.worker, _Worker())
        said = {
            "index": self.index,
            "of": self.of,
            "seed": self.shard.seed,
            "tables": [repr(spec) for spec in self.specs],
            "applied": worker.applied,
            "lost": worker.lost,
            "updates": self.updates,
            "forgotten": self.forgotten,
        }
        return json.dumps(said).encode(), []

    def _health(self, head: Head, frames: Frames) -> Reply:
        """What an operator asks of; it needs no worker's name."""
        serving = self._serving
        with self._known:
            workers, lost = len(self._workers), sum(one.lost for one in self._workers.values())
        said = {
            "state": "stopping" if serving is not None and serving.stopping else "serving",
            "server": self.index,
            "of": self.of,
            "rows": {spec.name: self.shard.size(k) for k, spec in enumerate(self.specs)},
            "queue": 0 if serving is None else serving.waiting,
            "saved": self.saved,
            "updates": self.updates,
            "workers": workers,
            "lost": lost,
        }
        return json.dumps(said).encode(), []

    def _count_lost(self, head: Head, frames: Frames) -> Reply:
        """Count a worker's updates up to its last that never came; all that were lost."""
        worker = self._worker(head)
        with worker.lock, self._gate.updating():
            worker.lost += max(0, head.number - worker.applied)
            worker.applied = max(worker.applied, head.number)
            return _number(worker.lost)

    def _find(self, head: Head, frames: Frames) -> Reply:
        self._check_reply(head)
        found = self.shard.find(self._groups(head, frames))
        return b"", [*self._rows(head, found.weights), memory(found.found_N)]

    def _lookup(self, head: Head, frames: Frames) -> Reply:
        """Find or insert, and read; nothing is held: the update brings the ids again."""
        self._check_reply(head)
        groups, counts_N, ctx = (
            self._groups(head, frames),
            self._counts(head, frames),
            head.context(),
        )
        updates = self.updates
        ticket = self._found_or_made(head, groups, counts_N, ctx)
        try:
            rows = self.shard.gather(ticket, ctx=ctx)
            flags = [memory(ticket.admitted_N), memory(ticket.found_N)]
        finally:
            ticket.end()
        return b"%d" % updates, [*self._rows(head, rows), *flags]

    def _found_or_made(
        self, head: Head, groups: IdGroups, counts_N: Tensor | None, ctx: StepContext
    ) -> Ticket:
        """Of a lookup that comes again, ids count for nothing."""
        if not head.number:
            return self.shard.find_or_init(groups, counts_N, ctx=ctx)
        worker = self._worker(head)
        with worker.lookups:
            if head.number in worker.looked_up:
                counts_N = torch.zeros_like(groups.ids_N)
            ticket = self.shard.find_or_init(groups, counts_N, ctx=ctx)
            worker.looked_up.append(head.number)
        return ticket

    def _apply(self, head: Head, frames: Frames) -> Reply:
        groups, counts_N = self._groups(head, frames), self._counts(head, frames)
        sets = self._sets(head, frames)
        seen = sets[1] if len(sets) > 1 else None
        with self._once(head) as fresh:
            behind = 0 if head.seen is None else max(0, self.updates - head.seen)
            if fresh:
                ctx = head.context()
                self.shard.apply_ids(groups, sets[0], counts_N, ctx=ctx, seen_weights=seen)
        if head.seen is None:
            return b"", []
        return json.dumps([behind, self._worker(head).lost]).encode(), []

    def _averaged(self, head: Head, frames: Frames) -> Reply:
        """A worker's share moves the average once, though its reply be lost."""
        if not head.number or not frames:
            return self._average.exchange(head, frames)
        worker = self._worker(head)
        with worker.lock:
            again = head.number <= worker.averaged
            reply = self._average.exchange(head, frames, again=again)
            worker.averaged = max(worker.averaged, head.number)
        return reply

    def _write(self, head: Head, frames: Frames, write: Callable[..., None]) -> Reply:
        groups, (rows,) = self._groups(head, frames), self._sets(head, frames)
        with self._once(head) as fresh:
            if fresh:
                write(groups, rows, ctx=head.context())
        return b"", []

    def _reinitialize(self, head: Head, frames: Frames) -> Reply:
        """Repeated, every id existed: the status that the first reply had is not known here."""
        groups = self._groups(head, frames)
        status_N = torch.ones(groups.ids_N.numel(), dtype=torch.int32, device="cpu")
        with self._once(head) as fresh:
            if fresh:
                status_N = self.shard.reinitialize(groups, ctx=head.context())
        return b"", [memory(status_N)]

    def _clear(self, head: Head, frames: Frames) -> Reply:
        self.shard.clear(self._table(head))
        return b"", []

    def _entry(self, head: Head, frames: Frames) -> Reply:
        entry = self.shard.entry(self._table(head), head.id)
        if entry is None:
            return b"", []
        head_bytes = json.dumps([entry.version, entry.last_seen_s, entry.count]).encode()
        return head_bytes, [memory(entry.weights), memory(entry.state)]

    def _export(self, head: Head, frames: Frames) -> Reply:
        spec = self.specs[self._table(head)]
        row = spec.dim + spec.state_width
        size = self.shard.size(head.argument) * row * real_dtype(spec).itemsize
        self._check_bytes("export", size, "Read the server's checkpoint instead.")
        chunk = self.shard.export(head.argument)
        columns = chunk.ids, chunk.weights, chunk.state, chunk.versions, chunk.last_seen_s
        return b"", [memory(column) for column in (*columns, chunk.counts)]

    def _check_reply(self, head: Head) -> None:
        """Before rows are read: a few bytes of ids may ask for many of rows."""
        groups = zip(head.tables, head.sizes, strict=False)  # `_groups` checks them
        specs = self.specs
        total = sum(
            n * specs[k].dim * real_dtype(specs[k]).itemsize for k, n in groups if k < len(specs)
        )
        self._check_bytes(head.method, total, "Ask for fewer ids at once.")

    def _check_bytes(self, method: str, total: int, instead: str) -> None:
        if total > self._most_bytes:
            raise InputError(
                f"rows of a reply to {method}",
                got=f"{total} bytes",
                allowed=f"{self._most_bytes} bytes at most",
                remedy=f"{instead} Or raise distributed.servers.most_mib, here and of workers.",
            )

    def _groups(self, head: Head, frames: Frames) -> IdGroups:
        wanted = 1 + head.counted + len(REALS) * head.sets
        if len(frames) != wanted:
            raise InputError(
                f"frames of a request to {head.method}",
                got=len(frames),
                allowed=wanted,
                remedy="Run one version of Shoal on workers and servers.",
            )
        return groups_of(head, frames[0], self.specs)

    def _counts(self, head: Head, frames: Frames) -> Tensor | None:
        if not head.counted:
            return None
        return tensor(frames[1], torch.int32, sum(head.sizes), "occurrences").long()

    def _sets(self, head: Head, frames: Frames) -> list[list[Tensor]]:
        """Rows [n, D] of each group, in sets."""
        segments = [head.segments(self.specs, real) for real in REALS]
        sets, first = [], 1 + head.counted
        for start in range(first, len(frames), len(REALS)):
            flats = rows_of_frames(segments, frames[start : start + len(REALS)], head.wire)
            parts = {
                real: iter(rows_of_segments(whole, pieces))
                for real, whole, pieces in zip(REALS, flats, segments, strict=True)
            }
            sets.append([next(parts[real_dtype(self.specs[table])]) for table in head.tables])
        return sets

    def _rows(self, head: Head, rows: Sequence[Tensor]) -> list[memoryview]:
        segments = [head.segments(self.specs, real) for real in REALS]
        device = torch.device("cpu")
        own = [[row for row in rows if row.dtype is real] for real in REALS]
        flats = [flat(part, real, device) for real, part in zip(REALS, own, strict=True)]
        return rows_to_frames(segments, flats, head.reply)

    def _table(self, head: Head) -> int:
        if head.argument >= len(self.specs):
            raise InputError(
                f"table of a request to {head.method}",
                got=head.argument,
                allowed=f"0..{len(self.specs) - 1}",
                remedy="Give workers and servers the same tables.",
            )
        return head.argument

    def _worker(self, head: Head) -> _Worker:
        """Who sent a request.

        Raises:
            InputError: one too many.
        """
        now_s = time.monotonic()
        with self._known:
            worker = self._workers.get(head.worker)
            if worker is None:
                if len(self._workers) >= self._most_workers:
                    self._forget(now_s)
                worker = self._workers[head.worker] = _Worker()
            worker.seen_s = now_s
            if head.number:
                worker.keep_s = min(head.argument, _KEEP_AT_MOST_S)
        return worker

    def _forget(self, now_s: float) -> None:
        known = len(self._workers)
        for name, one in list(self._workers.items()):
            if now_s - one.seen_s > one.keep_s:
                del self._workers[name]
        self.forgotten += known - len(self._workers)
        if len(self._workers) >= self._most_workers:
            raise InputError(
                "workers of a parameter server",
                got=f"more than {self._most_workers} that may send requests again",
                allowed=self._most_workers,
                remedy="Give workers names of their own that stay, or make them less patient.",
            )

    @contextmanager
    def _once(self, head: Head) -> Iterator[bool]:
        """Whether an update is to be applied: not if it was before; in the order of its worker."""
        worker = self._worker(head)
        with worker.lock, self._gate.updating():
            if head.number and head.number <= worker.applied:
                if head.number == worker.applied and worker.refused is not None:
                    kind, text = worker.refused
                    raise kind(text)
                yield False
                return
            worker.refused = None
            try:
                yield True
                with self._known:
                    self.updates += 1
            except ShoalError as error:  # its traceback would keep the request's frames
                worker.refused = type(error), str(error)
                raise
            except Exception as error:
                worker.refused = ShoalError, f"{type(error).__name__}: {error}"
                raise
            finally:
                if head.number:
                    worker.lost += head.number - worker.applied - 1
                    worker.applied = head.number


def _number(value: int) -> Reply:
    return json.dumps(value).encode(), []
