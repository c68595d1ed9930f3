"""Saves a run while it trains: when, what kind, and what happens if a save is late or fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.checkpoint import CheckpointStore, Manifest
from shoal.checkpoint.manifest import Kind
from shoal.checkpoint.saving import Saving, begin
from shoal.checkpoint.snapshot_point import keep_deletions
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.store import folder_name
from shoal.comm.collectives import Collectives
from shoal.config.tree import CheckpointSettings
from shoal.errors import CheckpointError, CollectiveFailed, ShoalError
from shoal.table.values import Cursor
from shoal.train.learner import contents_of, skipped_in_slices
from shoal.train.run_state import RunState

_log = logging.getLogger("shoal.train")


@dataclass(frozen=True, slots=True)
class SavedChain:
    """The newest checkpoint of a run, on which a delta may go.

    Args:
        manifest: its; None before the first.
        cursors: of this rank's tables at it, by collection.
        deltas: since the full one that it builds on.
    """

    manifest: Manifest | None = None
    cursors: Mapping[str, Cursor] | None = None
    deltas: int = 0


class Saver:
    """The saves of a run. Use it as a context manager around training; then `finish`.

    All ranks save after the same steps: counts of steps are alike everywhere, and for seconds rank
    0's clock decides, which the others learn from the pipeline. A save that is due while
    the one before is still being written is left out, and counted in a log line; unless saves are
    not written in the background. One that fails is logged and counted, and the next delta holds
    what it would have; the run ends after more failures in a row than are allowed, when the last
    save fails, or when ranks no longer agree on how one ended.

    Args:
        url: folder of all checkpoints of the run.
        settings: when, and what kind.
        run_state: what is saved, and who trains together: a collective call over several ranks.
        job: what else a later process has to know of this run; the same on every rank.
        chain: what the run continues from.
        clock: seconds.

    Attributes:
        on_begin: called with every save that begins, which may still fail.
        kept: name of a checkpoint that stays, whatever comes later.
    """

    def __init__(
        self,
        url: str | Storage,
        settings: CheckpointSettings,
        run_state: RunState,
        *,
        job: Mapping[str, Any],
        chain: SavedChain = SavedChain(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = CheckpointStore(url, settings.keep_full)
        self._settings = settings
        self._run_state, self._job = run_state, dict(job)
        self._ranks = run_state.ranks
        self._collectives: Collectives | None = self._ranks.background("checkpoints")
        self._chain = chain
        self._clock = clock
        self._began_s = clock()
        self._asked = False  # for a pause that has not come
        self._saving: Saving | None = None
        self.on_begin: Callable[[Saving], None] = lambda _: None
        self.kept: str | None = None
        self._skipped = 0
        self._begun = self._saved
        self._failures = 0  # in a row
        # Rows that column slices had skipped: when the newest checkpoint began, and the last save.
        self._skips = self._skips_begun = 0
        if chain.cursors is not None:
            keep_deletions(contents_of(run_state.learners))

    def __enter__(self) -> Saver:
        self._began_s = self._clock()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._saving is not None:
            self._saving.abort()

    def overdue(self) -> bool:
        """Whether this rank wants a pause for steps that no checkpoint has; from any thread.

        It says so until `silent`, or a pause that training asked for.
        """
        every_s, steps = self._settings.every_s, self._run_state.steps
        if every_s is None or not self._ranks.leads or steps <= self._saved:
            return False
        return self._asked or self._clock() - self._began_s >= every_s

    def silent(self) -> None:
        """A stream is silent, and all ranks are here: steps that no save has are saved if due."""
        self._run_state.check()
        self.check()
        due = self.overdue()
        if due:  # what fails, or waits for a save under way, is due again so much later
            self._began_s, self._asked = self._clock(), False
        unsaved = self._run_state.steps > self._begun
        # Ranks may differ for a moment in whether a save has failed.
        if self._ranks.any(due and unsaved, what="vote on a save while a stream is silent"):
            self.on_pause()

    def due_after(self, step: int) -> bool:
        """Whether training pauses after so many steps; the same on every rank, asked ahead."""
        every = self._settings.every_steps
        return every is not None and step % every == 0

    def wants_pause(self) -> bool:
        """Whether this rank wants training to pause soon; one that does is enough."""
        every_s = self._settings.every_s
        if every_s is None or not self._ranks.leads or self._clock() - self._began_s < every_s:
            return False
        # Asked once; the next one is due so much later.
        self._began_s, self._asked = self._clock(), True
        return True

    def on_pause(self) -> None:
        """Begin to save what is due: all ranks are here, after the same step."""
        self._asked = False
        self.check()
        # On any rank.
        if self._ranks.any(self._saving is not None, what="vote on a save under way"):
            if self._settings.background:
                self._skipped += 1
                if self._ranks.leads:
                    _log.warning(
                        "no save after step %d: the one of %s is still being written"
                        " (%d left out so far)",
                        self._run_state.steps,
                        self._saving.name if self._saving else "another rank",
                        self._skipped,
                    )
                if self._saving is not None:
                    self._saving.stop_throttling()
                return
            self._end()
        kind: Kind = "delta" if self._can_be_delta() else "full"
        try:
            self._begin(kind)
        except CollectiveFailed:
            raise
        except (ShoalError, MemoryError) as error:  # on every rank, if not of one class
            self._chain = replace(self._chain, cursors=None)  # it may be why: a full one needs none
            self._count(error)
        if not self._settings.background:
            self._end()

    def check(self) -> None:
        """Take note of a save that is committed, or failed.

        Raises:
            CheckpointError: more saves in a row failed than are allowed; on every rank.
        """
        if self._saving is not None and self._saving.done:
            self._end()

    def _end(self) -> None:
        try:
            self._wait()
        except CheckpointError as error:
            self._count(error)

    def _count(self, error: ShoalError | MemoryError) -> None:
        """Continue without a save that failed on every rank alike, if so many may."""
        self._failures, self._begun = self._failures + 1, self._saved
        allowed = self._settings.failures_allowed
        if self._failures > allowed or isinstance(error.__cause__, CollectiveFailed):
            raise error
        if self._ranks.leads:
            _log.error(
                "a save failed (%d in a row, more than %d end the run); training continues, and "
                "the next save holds what this one would have: %s",
                self._failures,
                allowed,
                error,
            )

    def status(self) -> str | None:
        """How much of the save under way this rank has written; None: there is none."""
        if self._saving is None:
            return None
        progress = self._saving.progress()
        share = progress.bytes_done / progress.bytes_total if progress.bytes_total else 0.0
        return f"saving {100 * share:.0f} %"

    def finish(self, *, model: bool) -> None:
        """Wait for what is under way, and save the trained model as a full checkpoint.

        Args:
            model: whether to save it.

        Raises:
            CheckpointError: the last save failed, on any rank; on every rank.
        """
        if model:
            self._end()
            self._save_whole()
        else:
            self._wait()

    @property
    def full_name(self) -> str:
        """Of a full checkpoint after this step."""
        return folder_name(self._run_state.steps, "full")

    def has(self, name: str | None) -> bool:
        """Whether the run has a checkpoint of that name."""
        return name is not None and name in {entry.name for entry in self._store.list()}

    def keep(self) -> bool:
        """Save in full, wait for it, and keep that in place of what was kept before.

        Returns:
            whether it was saved.

        Raises:
            CheckpointError: more saves in a row failed than are allowed.
        """
        self._end()
        before, self.kept = self.kept, self.full_name
        try:
            self._save_whole()
        except CollectiveFailed:
            raise
        except (ShoalError, MemoryError) as error:
            self.kept = before
            self._count(error)
            return False
        return True

    @property
    def _saved(self) -> int:
        """Step of the newest checkpoint that is committed; -1 before the first."""
        newest = self._chain.manifest
        return -1 if newest is None else newest.step

    def _save_whole(self) -> None:
        """Save in full, unless the newest checkpoint is that, and wait for it."""
        newest = self._chain.manifest
        if newest is None or (newest.step, newest.kind) != (self._run_state.steps, "full"):
            self._begin("full")
            self._wait()

    def _can_be_delta(self) -> bool:
        """Whether the next save may hold changes only; a collective call, if it may be one."""
        chain = self._chain
        if chain.manifest is None or chain.cursors is None:
            return False
        if chain.deltas + 1 >= self._settings.full_every:
            return False
        return not self._is_broken() and not self._slices_differ()

    def _is_broken(self) -> bool:
        """Whether the chain lost a link, so that no delta can build on it; a collective call."""
        broken, newest = False, self._chain.manifest
        if self._ranks.leads and newest is not None:
            try:
                self._store.chain(folder_name(newest.step, newest.kind))
            except CheckpointError as error:
                _log.warning("a full save in place of a delta: %s", error)
                broken = True
        return self._ranks.any(broken, what="vote on a chain of checkpoints")

    def _slices_differ(self) -> bool:
        """Whether column slices of any rank skipped rows since the newest checkpoint; a collective
        call over several ranks, where tables lie in slices."""
        more = self._slice_skips() > self._skips
        if not self._ranks.any(more, what="vote on rows that column slices skipped"):
            return False
        if self._ranks.leads:
            _log.info(
                "a full checkpoint after step %d: column slices skipped gradients of other "
                "rows than their neighbours did, so that no delta can join them",
                self._run_state.steps,
            )
        return True

    def _slice_skips(self) -> int:
        """Rows that column slices skipped so far."""
        skip = [one for one in self._run_state.learners if one.nan_policy == "skip"]
        return sum(skipped_in_slices(one.tables.hosted) for one in skip)

    def _begin(self, kind: Kind) -> None:
        state, own = self._run_state.state()
        contents = contents_of(self._run_state.learners, {**self._job, "run_state": state}, own)
        delta = kind == "delta"
        self._skips_begun = self._slice_skips()
        self._began_s, self._begun = self._clock(), self._run_state.steps
        self._saving = begin(
            self._store.url,
            contents,
            step=self._run_state.steps,
            position=self._run_state.position,
            kind=kind,
            parent=self._chain.manifest if delta else None,
            since=self._chain.cursors if delta else None,
            collectives=self._collectives,
        )
        self.on_begin(self._saving)

    def _wait(self) -> None:
        """Wait until a save is committed, and let go of what it makes needless."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        manifest = saving.wait()
        deltas = self._chain.deltas + 1 if manifest.kind == "delta" else 0
        self._chain = SavedChain(manifest, saving.cursors, deltas)
        saving.release()
        self._failures, self._skips = 0, self._skips_begun
        if self._ranks.leads:
            try:
                names = folder_name(manifest.step, manifest.kind), self.kept
                self._store.retain(in_use=[name for name in names if name is not None])
            except CheckpointError as error:
                # What training needs is safe; the next save tries again.
                _log.warning("old checkpoints stay in %s: %s", self._store.url, error)
