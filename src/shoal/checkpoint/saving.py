"""Begin to save a job: take its snapshot point, then write while training continues."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from shoal.checkpoint.contents import Contents
from shoal.checkpoint.manifest import MANIFEST, Kind, Manifest, Parent
from shoal.checkpoint.snapshot_point import Cut, cut_job
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import CheckpointStore, Claim, folder_name
from shoal.checkpoint.writing import Facts, JobWriter, Progress
from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import together
from shoal.errors import CheckpointError, InputError
from shoal.table.shard import Shard
from shoal.table.values import Cursor


class Saving:
    """What `begin` returns: this rank's part of a checkpoint under way.

    Args:
        url, name: the store's folder, and the checkpoint's in it.
        writer: does it.
        epoch: of the cut.
        cursors: by collection, for the next delta.
        shards: this rank's.
        collectives: the writer's until it is done.
        claims: on the checkpoint's folder, held on one rank until it is done.
    """

    def __init__(
        self,
        url: str,
        name: str,
        writer: JobWriter,
        *,
        epoch: int,
        cursors: Mapping[str, Cursor],
        shards: tuple[Shard, ...],
        collectives: Collectives,
        claims: Sequence[Claim] = (),
    ) -> None:
        self._claims = tuple(claims)
        self.url, self.name, self.epoch, self.collectives = url, name, epoch, collectives
        self._writer, self._cursors, self._shards = writer, dict(cursors), shards
        self._manifest: Manifest | None = None
        self._failure: CheckpointError | None = None
        self._aborted = False
        self._done = threading.Event()

    @property
    def may_run_beside(self) -> bool:
        """Whether training may go on while it is written."""
        return self._writer.concurrent

    def start(self, *, beside: bool) -> None:
        """Write, in a thread beside training or before it returns. `begin` and `save` call it."""
        if beside:
            threading.Thread(target=self._run, args=(True,), name="shoal-save", daemon=True).start()
        else:
            self._run(False)

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Ranks may differ for a moment."""
        return self._done.is_set()

    @property
    def aborted(self) -> bool:
        """Whether it was told to fail."""
        return self._aborted

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it is done, well or not. It hurries from now on."""
        self.hurry()
        self._done.wait(timeout_s)

    def hurry(self) -> None:
        """Let it take what it can get: beside training it rests between rows, on a machine with few
        processors."""
        self._writer.hurry()

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait until it is committed. It hurries from now on.

        Raises:
            CheckpointError: a rank failed, and which; on every rank. There is no checkpoint then,
                and its leftovers are removed by the next save. Only where a rank was gone when
                the others had written everything there may be one: a whole one.
            TimeoutError: it is still under way.
        """
        self.hurry()
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

    def progress(self) -> Progress:
        """How far this rank is, and what the cut costs."""
        return self._writer.progress()

    def abort(self) -> None:
        """Let it fail soon, on all ranks; `wait` says so. Does nothing once all is written."""
        self._aborted = True
        self._writer.abort()

    def release(self) -> None:
        """Let this rank's shards forget deletions that are in this checkpoint or older ones.

        Call it once no consumer needs them: no other feed of changes (a publisher's, say) is
        behind this epoch, and the next delta goes on top of this checkpoint.

        Raises:
            CheckpointError: as `wait`.
        """
        self.wait()
        for shard in self._shards:
            shard.release(self.epoch)

    def _run(self, beside: bool) -> None:
        try:
            self._manifest = self._writer.run(beside=beside)
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


_PATIENCE_S = 5.0  # with one that was aborted, when the process ends: ranks it waits for are gone

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
) -> Saving:
    """Begin to save a job into a store. Every rank calls it between the same two steps.

    It cuts the job (all shards at one epoch, dense parts, sights and state copied) and returns;
    a thread writes. Where a snapshot does not let training go on meanwhile, it writes before it
    returns. A save into the same store, or over the same collectives, that is still under way is
    waited for first. Leftovers of interrupted saves are removed.

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

    Raises:
        InputError: arguments that contradict each other; nothing was cut.
        CheckpointError: the storage refuses, the folder holds a checkpoint, the parent is another
            one, or a rank cannot be cut; on every rank.
    """
    saving = _prepared(url, contents, step, position, kind, parent, since, collectives)
    saving.start(beside=saving.may_run_beside)
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
    saving = _prepared(url, contents, step, position, kind, parent, since, collectives)
    saving.start(beside=False)
    return saving.wait()


def _prepared(
    url: str | Path,
    contents: Contents,
    step: int,
    position: int,
    kind: Kind,
    parent: Manifest | None,
    since: Mapping[str, Cursor] | None,
    collectives: Collectives | None,
) -> Saving:
    """Hold the job still, and have everything ready to write it."""
    ranks = LocalCollectives() if collectives is None else collectives
    contents.check_placed(ranks.world_size)
    root = Storage(url)
    for other in list(_begun):
        if other.collectives is ranks or other.url == root.url:
            other.join()
    name = folder_name(step, kind)
    parts = (contents.tables, contents.modules, contents.optimizers)
    wanted = (name, position, None if parent is None else parent.id, *map(tuple, parts))

    def prepare() -> tuple[object, tuple[str, int]]:
        _check_kind(kind, step, parent, since, contents)
        if ranks.rank == 0:
            claims.append(_claimed(CheckpointStore(root), name, parent))
        return wanted, (uuid.uuid4().hex, int(time.time()))

    claims: list[Claim] = []
    with ExitStack() as undone:
        undone.callback(_release, claims)
        said = together(ranks, f"beginning checkpoint {name}", prepare)
        if any(other != wanted for other, _ in said):
            raise _differ([other for other, _ in said])
        cut = cut_job(contents, since, ranks)
        undone.callback(cut.close)
        steps = together(ranks, f"last steps of checkpoint {name}", lambda: cut.last_steps)
        undone.pop_all()
    facts = Facts(
        id=said[0][1][0],
        kind=kind,
        step=step,
        position=position,
        parent=None
        if parent is None
        else Parent(folder=folder_name(parent.step, parent.kind), id=parent.id),
        created_s=said[0][1][1],
        last_steps={key: max(one[key] for one in steps) for key in contents.tables},
    )
    return _started(root, name, contents, cut, facts, ranks, claims)


@atexit.register
def _finish() -> None:
    """Let saves end before the interpreter does, which would break off threads in its midst."""
    for saving in list(_begun):
        if saving.done:
            continue
        saving.join(_PATIENCE_S if saving.aborted else None)
        if not saving.aborted:
            try:
                saving.wait()
            except CheckpointError as error:
                _log.error("when the process ended: %s", error)


def _started(
    root: Storage,
    name: str,
    contents: Contents,
    cut: Cut,
    facts: Facts,
    ranks: Collectives,
    claims: Sequence[Claim],
) -> Saving:
    writer = JobWriter(contents.tables, cut, root.child(name), facts, ranks)
    shards = {id(one.shard): one.shard for one in contents.tables.values()}
    saving = Saving(
        root.url,
        name,
        writer,
        epoch=cut.epoch,
        cursors=cut.cursors,
        shards=tuple(shards.values()),
        collectives=ranks,
        claims=claims,
    )
    _begun.add(saving)
    return saving


def _release(claims: Sequence[Claim]) -> None:
    for one in claims:
        one.release()


def _claimed(store: CheckpointStore, name: str, parent: Manifest | None) -> Claim:
    """On one rank: an empty folder to write into."""
    if parent is not None:
        there = folder_name(parent.step, parent.kind)
        found = store.manifest(there).id if store.folder(there).exists(MANIFEST) else "none"
        if found != parent.id:
            raise CheckpointError(
                f"parent of a delta in {store.url}",
                got=f"{there} of id {found}",
                allowed=f"id {parent.id}",
                remedy="Save a delta into the store of its parent, or a full checkpoint.",
            )
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
        if cursor.epoch != parent.epoch:
            got, allowed = f"epoch {cursor.epoch}", f"its parent's, {parent.epoch}"
            raise _wrong(f"cursor of collection {name!r}", got, allowed)


def _differ(said: list[object]) -> CheckpointError:
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
