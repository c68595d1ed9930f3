"""A server's own checkpoints: full ones and deltas in turn, and the newest one when it starts."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from shoal.checkpoint import CheckpointStore, Contents, Manifest, begin, load, load_share
from shoal.checkpoint.job_state import read as read_job
from shoal.checkpoint.snapshot_point import keep_deletions
from shoal.checkpoint.storage import Storage
from shoal.errors import ConfigError, ServerLost, ShoalError
from shoal.ps.server import TableServer, spread_over
from shoal.table.hosting import HostedTables
from shoal.table.values import Cursor

_log = logging.getLogger(__name__)
_TABLES = "tables"


def store_of(url: str | Path, index: int, of: int) -> str:
    """The folder of one server's checkpoints below that of all."""
    return f"{url}/server-{index}-of-{of}"


class ServerSaver:
    """Saves a server's rows every so often, and what it knows of its workers, while it serves.

    Use as a context: it loads the newest checkpoint there is first, and saves once more at the
    end. A server that died loses the updates since its last save; they are counted when its
    workers come back. Where another number of servers saved last, it takes its share of what all
    of them have.

    Args:
        server: whose rows; they are empty.
        url: folder of all servers' stores.
        every_s: seconds from one save to the next.
        full_every: one save in `full_every` is full, the others are deltas.
        keep_full: full checkpoints that are kept.
        start: a checkpoint of a run, whose rows it takes a share of if no server has saved yet.
        collection: the model in it that has the tables.
        is_held: whether the server's index is its own; asked where another server has saved to
            the same store meanwhile: one of them has been replaced.

    Raises:
        ConfigError: every_s is not above 0, or longer than a thread can wait.
        CheckpointError: the newest checkpoint is damaged or of other tables.
    """

    def __init__(
        self,
        server: TableServer,
        url: str | Path,
        *,
        every_s: float = 60.0,
        full_every: int = 20,
        keep_full: int = 2,
        start: str | Path | None = None,
        collection: str = _TABLES,
        is_held: Callable[[], bool] = lambda: True,
    ) -> None:
        if not 0 < every_s <= threading.TIMEOUT_MAX:
            allowed = f"above 0, at most {threading.TIMEOUT_MAX:g}"
            remedy = "Set --save-every-s to seconds."
            raise ConfigError("seconds between saves of a server", every_s, allowed, remedy)
        self._server = server
        self._folder, self._start, self._collection = Storage(url), start, collection
        self._store = CheckpointStore(store_of(url, server.index, server.of), keep_full)
        self._every_s, self._full_every = every_s, full_every
        self._is_held = is_held
        self._tables = HostedTables(server.shard.specs, server.shard)
        self._newest: Manifest | None = None
        self._cursors: dict[str, Cursor] | None = None
        self._deltas = 0
        self._saves = 0
        self._resized = 0  # how often these rows have gone to another number of servers
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ServerSaver:
        self._restore()
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
        if kind is None:
            self.save()

    def save(self) -> Manifest:
        """Save now; serving continues meanwhile.

        Raises:
            CheckpointError: the storage refuses.
            ServerLost: another server saves in this one's place.
        """
        self._check_newest()
        delta = self._cursors is not None and self._deltas + 1 < self._full_every
        self._saves += 1
        with self._server.between_updates() as state:
            saving = begin(
                self._store.url,
                Contents(tables={_TABLES: self._tables}, state=state | {"resized": self._resized}),
                step=self._saves,
                position=0,
                kind="delta" if delta else "full",
                parent=self._newest if delta else None,
                since=self._cursors if delta else None,
            )
        self._newest = saving.wait()
        self._server.saved = saving.name
        self._cursors = dict(saving.cursors)
        saving.release()
        self._deltas = self._deltas + 1 if delta else 0
        self._store.retain()
        return self._newest

    def _check_newest(self) -> None:
        """Save above what another server has saved, or not at all if that one has the index."""
        newest = self._store.latest()
        if newest is None or newest.step <= self._saves:
            return
        if not self._is_held():
            raise ServerLost(
                f"store of server {self._server.index}",
                got=f"checkpoint {newest.name} of another server",
                allowed="only this server's",
                remedy="One of them has been replaced: stop the one that workers do not use.",
            )
        self._saves, self._cursors = newest.step, None

    def _restore(self) -> None:
        newest = self._store.latest()
        self._saves = 0 if newest is None else newest.step
        age = (-1, 0) if newest is None else _age(self._store, newest.name)
        others = [one for one in self._other_servers() if one[0] > age]
        if others or (newest is None and self._start is not None):
            (before, _), urls = max(others, default=((-1, 0), [str(self._start)]))
            self._resized = before + 1
            self._take_share(urls, _TABLES if others else self._collection)
            return
        if newest is None:
            return
        contents = Contents(tables={_TABLES: self._tables})
        loaded = load(f"{self._store.url}/{newest.name}", contents)
        keep_deletions(contents)  # from a publisher, which begins later
        self._server.resume(loaded.state)
        self._resized = age[0]
        self._newest = loaded.manifest
        self._server.saved = newest.name
        self._cursors = None if loaded.cursors is None else dict(loaded.cursors)
        self._deltas = len(self._store.chain(newest.name)) - 1

    def _take_share(self, urls: Sequence[str], collection: str) -> None:
        server = self._server
        tables = HostedTables(server.specs, server.shard, spread_over(server.specs, server.of))
        rows = load_share(urls, tables, server.index, collection=collection)
        _log.info("%d rows of %s", rows, ", ".join(urls))

    def _other_servers(self) -> list[tuple[tuple[int, int], list[str]]]:
        """How old the last saves of other numbers of servers are, and where; if all have saved."""
        found = []
        counts = {
            int(match[1])
            for name in self._folder.folders()
            if (match := re.fullmatch(r"server-\d+-of-(\d+)", name))
        }
        for of in counts - {self._server.of}:
            stores = [CheckpointStore(store_of(self._folder.url, k, of)) for k in range(of)]
            newest = [store.latest() for store in stores]
            if None in newest:
                _log.warning("of %d servers not all have saved at %s", of, self._folder.url)
                continue
            links = [(s, one) for s, one in zip(stores, newest, strict=True) if one is not None]
            # The first of them: if one has not saved since they came back, all of them are old.
            age = min(_age(store, one.name) for store, one in links)
            found.append((age, [f"{store.url}/{one.name}" for store, one in links]))
        return found

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._try()

    def _try(self) -> None:
        try:
            self.save()
        except Exception as error:  # noqa: BLE001 - the next one may succeed
            self._cursors = None  # whatever it was that a delta could not be built on
            known = isinstance(error, ShoalError | OSError | MemoryError)
            _log.error("a save failed; the next one is a full one: %s", error, exc_info=not known)


def _age(store: CheckpointStore, name: str) -> tuple[int, int]:
    """How often the rows of a save had gone to another number of servers, and when it was made.

    Clocks of two hosts differ, and may be set back: they order saves of one number of servers only.
    """
    manifest = store.manifest(name)
    return read_job(store.folder(name), manifest).state.get("resized", 0), manifest.created_s
