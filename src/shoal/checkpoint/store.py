"""The folder of a job's checkpoints: names, chains, retention, leftovers, its one writer."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import weakref
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shoal.checkpoint.manifest import MANIFEST, Kind, Manifest, occupied, read_manifest
from shoal.checkpoint.storage import Storage, storage_errors
from shoal.errors import CheckpointError
from shoal.table.shard import MAX_ID, whole

WRITER = ".writer"  # in the folder while somebody writes there

_log = logging.getLogger(__name__)

# Of file systems that have no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP}


class Claim:
    """A lock on a local folder, which ends with its process. Object stores have none: there, and
    on file systems without locks, it stands for nothing.

    Args:
        path: of the file that is locked.
        fd: of it; None: nothing is locked.
    """

    def __init__(self, path: str = "", fd: int | None = None) -> None:
        self._path, self._fd = path, fd
        if fd is not None:
            _held.add(self)

    def release(self, *, keep: bool = True) -> None:
        """Let others have the folder. A second call does nothing.

        keep: leave the file where it is; it is removed with the folder.
        """
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            if not keep:
                os.unlink(self._path)
        except OSError as error:  # what was written is whole all the same
            _log.warning("%s stays: %s", self._path, error)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also where a child that was just forked has it open
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: the lock is its parent's alone."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_held: weakref.WeakSet[Claim] = weakref.WeakSet()


def claim(folder: Storage, *, make: bool = True) -> Claim | None:
    """Have a folder for oneself; None: another process, or another save of this one, has it.

    Args:
        folder: to lock.
        make: it where it is missing; else a missing folder is nobody's, and None.

    Raises:
        CheckpointError: the folder cannot be made or written.
    """
    if make:
        folder.make()
    local = folder.local
    if local is None:
        return Claim()
    path = f"{local}/{WRITER}"
    with storage_errors(path):
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                if not make:
                    return None
                folder.make()
                continue
            with ExitStack() as undone:
                undone.callback(os.close, fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(fd), os.stat(path)):
                        undone.pop_all()
                        return Claim(path, fd)
                except BlockingIOError:
                    return None
                except FileNotFoundError:  # it was removed before it was locked
                    continue
                except OSError as error:
                    if error.errno in _NO_LOCKS:
                        return Claim()
                    raise


def _forget_all() -> None:
    for one in list(_held):
        one.forget()


os.register_at_fork(after_in_child=_forget_all)


_NAME = re.compile(r"step-(\d{12,})-(full|delta)")


def folder_name(step: int, kind: Kind) -> str:
    """Of the checkpoint of a step.

    Raises:
        DTypeError, InputError: no int from 0 to 2^63 - 1.
    """
    whole("step of a checkpoint", step, 0, MAX_ID, remedy="Count steps done; use int(x).")
    return f"step-{step:012d}-{kind}"


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A committed checkpoint of a store."""

    name: str
    step: int
    kind: Kind


class CheckpointStore:
    """All checkpoints of a job; what lies in its folder besides is left alone.

    Args:
        url: the folder; it need not exist yet.
        keep_full: how many full checkpoints `retain` keeps, with the deltas that start from them;
            None: all.

    Raises:
        CheckpointError: keep_full below 1, or a protocol without its package.
    """

    def __init__(self, url: str | Path | Storage, keep_full: int | None = None) -> None:
        _check_keep(keep_full)
        self.storage = url if isinstance(url, Storage) else Storage(url)
        self.keep_full = keep_full

    @property
    def url(self) -> str:
        """Of the folder."""
        return self.storage.url

    def name(self, step: int, kind: Kind) -> str:
        """Of the folder of the checkpoint of a step."""
        return folder_name(step, kind)

    def folder(self, name: str) -> Storage:
        """A checkpoint's folder."""
        return self.storage.child(name)

    def list(self) -> tuple[CheckpointEntry, ...]:
        """The committed checkpoints, oldest first; of one step the full one last."""
        found = [
            CheckpointEntry(name, int(match[1]), cast(Kind, match[2]))
            for name in self.storage.folders()
            if (match := _NAME.fullmatch(name)) and self.folder(name).exists(MANIFEST)
        ]
        return tuple(sorted(found, key=_age))

    def latest(self) -> CheckpointEntry | None:
        """The newest committed checkpoint."""
        return max(self.list(), key=_age, default=None)

    def manifest(self, name: str) -> Manifest:
        """Of a checkpoint by its folder's name.

        Raises:
            CheckpointError: as `read_manifest`; or the folder's name is that of another step or
                kind, as of a copy: it would pass for the newest.
        """
        manifest = read_manifest(self.folder(name))
        true = folder_name(manifest.step, manifest.kind)
        if _NAME.fullmatch(name) and name != true:
            raise CheckpointError(
                f"checkpoint folder {self.folder(name).url}",
                got=f"the {manifest.kind} checkpoint of step {manifest.step}",
                allowed=f"the name {true} for it in a store",
                remedy="Rename it back, or move the copy out of the store.",
            )
        return manifest

    def chain(self, name: str) -> tuple[Manifest, ...]:
        """What a checkpoint is made of: a full one, then the deltas up to it.

        Raises:
            CheckpointError: a parent is missing, is another checkpoint than the one the delta
                was made from, or comes after it.
        """
        what = f"parent of checkpoint {name} in {self.url}"
        links = [self.manifest(name)]
        while (parent := links[-1].parent) is not None:
            if not self.folder(parent.folder).exists(MANIFEST):
                allowed = f"the one of id {parent.id} that it is a delta of"
                remedy = "Copy the whole chain, or load an older checkpoint."
                raise CheckpointError(what, f"no checkpoint {parent.folder}", allowed, remedy)
            link = self.manifest(parent.folder)
            if link.id != parent.id:
                got, allowed = f"{parent.folder} of id {link.id}", f"id {parent.id}"
                remedy = "Folders of two runs are mixed: put the right one there."
                raise CheckpointError(what, got, allowed, remedy)
            if any(link.id == one.id for one in links) or link.step > links[-1].step:
                got = f"{parent.folder} of step {link.step}"
                allowed = f"a step of at most {links[-1].step}, not in the chain yet"
                remedy = "The manifests were changed: load another checkpoint."
                raise CheckpointError(what, got, allowed, remedy)
            links.append(link)
        return tuple(reversed(links))

    def clean(self) -> tuple[str, ...]:
        """Remove what interrupted saves and removals left: our folders without a manifest.

        Folders that another process is writing stay, where the file system has locks, and so do
        symbolic links. Returns the names.
        """
        left = []
        for name in self.storage.folders():
            folder = self.folder(name)
            if _NAME.fullmatch(name) and not folder.is_link and not folder.exists(MANIFEST):
                held = claim(folder, make=False)
                if held is None:
                    continue
                try:
                    if not folder.exists(MANIFEST):  # it may have been committed just now
                        folder.remove_tree()
                        left.append(name)
                finally:
                    held.release()
        return tuple(left)

    def claim(self, name: str) -> Claim:
        """An empty folder for a checkpoint, which nobody else writes until it is released.

        Raises:
            CheckpointError: it holds a checkpoint, another save is writing it, or the storage
                refuses.
        """
        folder = self.folder(name)
        if not folder.exists(MANIFEST):
            self.clean()
            held = claim(folder)
            if held is None:
                what, got = "checkpoint folder", f"{folder.url}, which another save is writing"
                remedy = "Give each job a folder of its own, or wait for the other one."
                raise CheckpointError(what, got, "one writer at a time", remedy)
            if not folder.exists(MANIFEST):
                return held
            held.release(keep=False)
        raise occupied(folder)

    def retain(
        self, keep_full: int | None = None, *, in_use: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Remove checkpoints older than the newest full ones, with the deltas on top of those.

        A chain is kept whole: with its full one, up to its newest delta. The chain of the newest
        delta is kept even where a newer full one was compacted from it, since the next delta goes
        on top; so is that of the one saved last by the clock, if a job went back to an older
        one. Returns the names removed.

        Args:
            keep_full: how many full ones to keep; None: as the store says.
            in_use: names whose chains are kept, too.

        Raises:
            CheckpointError: keep_full below 1.
        """
        _check_keep(keep_full)
        keep = keep_full if keep_full is not None else self.keep_full
        if keep is None:
            return ()
        entries = self.list()
        fulls = [entry for entry in entries if entry.kind == "full"]
        if len(fulls) <= keep:
            return ()
        lines: dict[str, list[str]] = {}  # each, and those that it was made from
        made_s: dict[str, int] = {}
        for entry in entries:  # parents come first
            manifest = self.manifest(entry.name)
            made_s[entry.name] = manifest.created_s
            parent = None if manifest.parent is None else manifest.parent.folder
            before = [] if parent is None else lines.get(parent, [parent])
            lines[entry.name] = [entry.name, *before]
        newest = [e.name for e in entries if e.kind == "delta" and e.step >= fulls[-1].step]
        newest.append(max(entries, key=lambda entry: (made_s[entry.name], *_age(entry))).name)
        roots = {entry.name for entry in fulls[-keep:]}
        roots |= {lines[name][-1] for name in (*in_use, *newest) if name in lines}
        names, oldest = {entry.name for entry in fulls}, fulls[-keep].step
        doomed = [
            entry.name
            for entry in entries
            if (root := lines[entry.name][-1]) not in roots
            and (root in names or entry.step < oldest)
        ]
        gone = sorted(doomed, key=lambda name: len(lines[name]), reverse=True)
        for folder in map(self.folder, gone):
            if not folder.is_link:  # what a link leads to is not ours
                folder.remove(MANIFEST)  # from here on `clean` would finish it
            folder.remove_tree()
        return tuple(gone)


def locate(url: str | Path) -> tuple[CheckpointStore, str]:
    """A checkpoint by its own folder, or the newest one of a folder of them, or of a run's folder.

    Returns:
        the store that it lies in, and its name there.

    Raises:
        CheckpointError: neither.
    """
    storage = Storage(url)
    if storage.exists(MANIFEST):
        return CheckpointStore(storage.parent()), storage.name
    store = CheckpointStore(storage)
    if (newest := store.latest()) is not None:
        return store, newest.name
    # Below a run's folder; early ones had the trained model apart, which goes before its equal.
    below = [CheckpointStore(storage.child(name)) for name in ("model", "checkpoints")]
    found = [(one, newest) for one in below if (newest := one.latest()) is not None]
    if found:
        store, newest = max(found, key=lambda pair: pair[1].step)
        return store, newest.name
    raise CheckpointError(
        "checkpoint",
        got=f"{storage.url}, which neither is one nor holds one",
        allowed="the folder of a finished save, the folder of those, or a run's folder",
        remedy="Check the path; an interrupted save leaves no checkpoint, and those of a run with "
        "checkpoint.dir are there.",
    )


def _age(entry: CheckpointEntry) -> tuple[int, bool]:
    return entry.step, entry.kind == "full"


def _check_keep(keep_full: int | None) -> None:
    if keep_full is not None and keep_full < 1:
        what, allowed = "full checkpoints to keep", "1 or more, or None for all"
        raise CheckpointError(what, keep_full, allowed, "Keep at least one.")
