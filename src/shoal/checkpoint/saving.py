"""Begin to save a job: take its snapshot point, then write while training continues."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import torch

from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.manifest import MANIFEST, SCHEMA, Kind, Manifest, Parent
from shoal.checkpoint.snapshot_point import CONSUMER, take_snapshot_point
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore, Claim, folder_name
from shoal.checkpoint.writing import JobWriter, Progress
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import together
from shoal.errors import CheckpointError, InputError
from shoal.table.values import Cursor


class Saving:
    """What `begin` returns: this rank's part of a checkpoint under way.

    Args:
        url: the store's folder.
        writer: does it.
        claims: on the checkpoint's folder, held on one rank until it is done.
    """

    def __init__(self, url: str, writer: JobWriter, claims: Sequence[Claim] = ()) -> None:
        self._claims = tuple(claims)
        self.url, self.name = url, writer.folder.name
        self.id, self.version = writer.draft.id, writer.draft.version
        self.collectives = writer.collectives
        self._writer, self._cursors = writer, dict(writer.point.cursors)
        self._shards = {id(one.shard): one.shard for one in writer.tables.values()}.values()
        self._manifest: Manifest | None = None
        self._failure: CheckpointError | None = None
        self._aborted = False
        self._done = threading.Event()

    def start(self, *, concurrent: bool) -> None:
        """Write before it returns, or in a thread where training may continue meanwhile.

        `begin` and `save` call it.
        """
        if concurrent and self._writer.point.concurrent:
            threading.Thread(target=self._run, args=(True,), name="shoal-save", daemon=True).start()
        else:
            self._run(False)

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Ranks may differ for a moment."""
        return self._done.is_set()

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it is done, well or not. It is throttled no more."""
        self.stop_throttling()
        self._done.wait(timeout_s)

    def stop_throttling(self) -> None:
        """Let it take what it can get: while training continues it pauses between rows, on a
        machine with few processors."""
        self._writer.stop_throttling()

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait until it is committed. It is throttled no more.

        Raises:
            CheckpointError: a rank failed, and which; on every rank. There is no checkpoint then,
                and its leftovers are removed by the next save. Only where a rank was gone when
                the others had written everything there may be one: a whole one.
            TimeoutError: it is still under way.
        """
        self.stop_throttling()
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"checkpoint {self.url}/{self.name} is still under way")
        if self._failure is not None:
            raise self._failure
        assert self._manifest is not None
        return self._manifest

    @property
    def cursors(self) -> Mapping[str, Cursor]:
        """What a delta on top of this checkpoint passes as `since`; waits until it is committed.

        Raises:
            CheckpointError: as `wait`.
        """
        self.wait()
        return self._cursors

    @property
    def point(self) -> Mapping[str, Cursor]:
        """Cursors of its snapshot point by collection, whether or not it will be committed."""
        return self._cursors

    def progress(self) -> Progress:
        """How far this rank is, and what the snapshot point costs."""
        return self._writer.progress()

    def abort(self) -> None:
        """Let it fail soon, on all ranks; `wait` reports it. Does nothing once all is written."""
        self._aborted = True
        self._writer.abort()

    def release(self) -> None:
        """Let this rank's shards forget deletions that are in this checkpoint or older ones.

        Call it once the next delta builds on this checkpoint. Those that another consumer known
        to a shard (see `Shard.release`) still wants stay.

        Raises:
            CheckpointError: as `wait`.
        """
        self.wait()
        for shard in self._shards:
            shard.release(self.version, CONSUMER)

    def _run(self, concurrent: bool) -> None:
        try:
            self._manifest = self._writer.run(concurrent=concurrent)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            what = f"checkpoint {self.url}/{self.name}"
            got = " ".join(f"{type(error).__name__}: {error}".split())
            failure = CheckpointError(
                what, got=got, allowed="all ranks to write it", remedy="Save again."
            )
            failure.__cause__ = error
            self._failure = failure
        finally:
            for one in self._claims:
                one.release(keep=self._manifest is None)
            self._done.set()


_ABORTED_S = 5.0  # to wait for one that was aborted, at exit: ranks that it waits for are gone

_log = logging.getLogger(__name__)
_begun: weakref.WeakSet[Saving] = weakref.WeakSet()
os.register_at_fork(after_in_child=_begun.clear)  # a child has none of the threads that write


def begin(
    url: str | Path,
    contents: Contents,
    *,
    step: int,
    position: int,
    kind: Kind = "full",
    parent: Manifest | None = None,
    since: Mapping[str, Cursor] | None = None,
    collectives: Collectives | None = None,
    concurrent: bool = True,
) -> Saving:
    """Begin to save a job into a store. Every rank calls it between the same two steps.

    It takes a snapshot point of the job (all shards at one version; dense parts, admission
    counters and state copied) and returns; a thread writes. Where a snapshot does not let training
    continue meanwhile, it writes before it returns. A save into the same store, or over the same
    collectives, that is still under way is waited for first. Leftovers of interrupted saves are
    removed.

        saving = begin(url, contents, step=100, position=6400, collectives=ranks)
        ... train ...
        manifest = saving.wait()
        later = begin(url, contents, step=200, position=12800, collectives=ranks,
                      kind="delta", parent=manifest, since=saving.cursors)

    Args:
        url: the store's folder.
        contents: the job; the same names on every rank.
        step: optimizer steps done.
        position: global samples consumed.
        kind: "full", or "delta": what changed since `parent`.
        parent: of a delta, in the same store.
        since: of a delta, this rank's cursors at its parent, by collection: `Saving.cursors`, or
            after a load `Loaded.cursors`.
        collectives: of all ranks, for checkpoints only: they are in use until the save is done.
            None: this rank alone.
        concurrent: write while training continues, if snapshots let it; False: before it returns,
            with all threads of the shards, as `save` does.

    Raises:
        InputError: arguments that contradict each other; nothing is held.
        CheckpointError: the storage refuses, the folder holds a checkpoint, the parent is another
            one, or a rank has no snapshot; on every rank.
    """
    ranks = LocalCollectives() if collectives is None else collectives
    contents.check_placed(ranks.world_size)
    root = Storage(url)
    for other in list(_begun):
        if other.collectives is ranks or other.url == root.url:
            other.join()
    name = folder_name(step, kind)
    parts = (contents.tables, contents.modules, contents.optimizers)
    wanted = (name, position, None if parent is None else parent.id, *map(tuple, parts))

    claims: list[Claim] = []
    with ExitStack() as undone:

        def prepare() -> tuple[object, tuple[str, int]]:
            _check_kind(kind, step, parent, since, contents)
            if ranks.rank == 0:
                claims.append(_claimed(CheckpointStore(root), name, parent))
                undone.callback(claims[0].release)
            return wanted, (uuid.uuid4().hex, int(time.time()))

        said = together(ranks, f"beginning checkpoint {name}", prepare)
        if any(other != wanted for other, _ in said):
            raise _differ([other for other, _ in said])
        point = take_snapshot_point(contents, since, ranks)
        undone.callback(point.close)
        steps = together(ranks, f"last steps of checkpoint {name}", lambda: point.last_steps)
        undone.pop_all()
    draft = Manifest(
        schema=SCHEMA,
        id=said[0][1][0],
        kind=kind,
        step=step,
        position=position,
        version=point.version,
        parent=None
        if parent is None
        else Parent(folder=folder_name(parent.step, parent.kind), id=parent.id),
        seed=point.seed,
        last_steps={key: max(one[key] for one in steps) for key in contents.tables},
        world_size=ranks.world_size,
        created_s=said[0][1][1],
        packages={"torch": torch.__version__, "python": platform.python_version()},
        modules=point.dense.modules,
        optimizers=point.dense.optimizers,
    )
    writer = JobWriter(contents.tables, point, root.child(name), draft, ranks)
    saving = Saving(root.url, writer, claims)
    _begun.add(saving)
    saving.start(concurrent=concurrent)
    return saving


def save(
    url: str | Path,
    contents: Contents,
    *,
    step: int,
    position: int,
    kind: Kind = "full",
    parent: Manifest | None = None,
    since: Mapping[str, Cursor] | None = None,
    collectives: Collectives | None = None,
) -> Manifest:
    """As `begin`, but it writes before it returns, with all threads of the shards.

    Raises:
        InputError, CheckpointError: as `begin` and `Saving.wait`.
    """
    return begin(**locals(), concurrent=False).wait()


@atexit.register
def _finish() -> None:
    """Let saves end before the interpreter does, which would stop their threads midway."""
    for saving in list(_begun):
        if saving.done:
            continue
        saving.join(_ABORTED_S if saving.aborted else None)
        if not saving.aborted:
            try:
                saving.wait()
            except CheckpointError as error:
                _log.error("when the process ended: %s", error)


def _claimed(store: CheckpointStore, name: str, parent: Manifest | None) -> Claim:
    """On one rank: an empty folder to write into."""
    if parent is not None:
        there = folder_name(parent.step, parent.kind)
        found = store.manifest(there).id if store.folder(there).exists(MANIFEST) else "none"
        if found != parent.id:
            what, got = f"parent of a delta in {store.url}", f"{there} of id {found}"
            remedy = "Save a delta into the store of its parent, or a full checkpoint."
            raise CheckpointError(what, got, f"id {parent.id}", remedy)
        store.chain(there)  # one of which a link is gone could never be loaded
    return store.claim(name)


def _check_kind(
    kind: str,
    step: int,
    parent: Manifest | None,
    since: Mapping[str, Cursor] | None,
    contents: Contents,
) -> None:
    if kind not in get_args(Kind):
        raise _wrong("kind of a checkpoint", repr(kind), ", ".join(get_args(Kind)))
    if kind == "full":
        if parent is not None or since is not None:
            raise _wrong("parent and cursors of a full checkpoint", "some", "none")
        return
    if parent is None or since is None:
        raise _wrong("parent and cursors of a delta", "none", "those of its parent")
    if since.keys() != contents.tables.keys():
        raise _wrong("collections of cursors", sorted(since), sorted(contents.tables))
    if step <= parent.step:  # of one step the full one counts as the newest
        raise _wrong("step of a delta", step, f"more than its parent's, {parent.step}")
    for name, cursor in since.items():
        if cursor.version != parent.version:
            got, allowed = f"version {cursor.version}", f"its parent's, {parent.version}"
            raise _wrong(f"cursor of collection {name!r}", got, allowed)


def _differ(said: Sequence[object]) -> CheckpointError:
    return CheckpointError(
        "checkpoint that all ranks begin",
        got="; ".join(f"on rank {rank}: {one}" for rank, one in enumerate(said)),
        allowed="one step, kind, position, parent, and names of collections, modules and "
        "optimizers",
        remedy="Call it alike on every rank, between the same steps.",
    )


def _wrong(what: str, got: object, allowed: object) -> InputError:
    remedy = "See `shoal.checkpoint.begin`."
    return InputError(what, got=got, allowed=allowed, remedy=remedy)
