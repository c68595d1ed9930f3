"""`Saving`: a checkpoint under way."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from shoal.checkpoint.claiming import Claim
from shoal.checkpoint.job_writing import JobWriter, Progress
from shoal.checkpoint.manifest import Manifest
from shoal.comm.collectives import Collectives
from shoal.errors import CheckpointError, describe
from shoal.table.changes import Cursor
from shoal.table.shard import Shard

__all__ = ["Saving"]


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
                describe(what, got=got, allowed="all ranks to write it", remedy="Save again.")
            )
            failure.__cause__ = error
            self._failure = failure
        finally:
            for one in self._claims:
                one.release(keep=self._manifest is None)
            self._done.set()
