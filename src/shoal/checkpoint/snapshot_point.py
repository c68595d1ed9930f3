"""A snapshot point: what a job is between two steps, held on one rank while it is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.checkpoint import dense, job_state
from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.sharded_rows import slices_of
from shoal.comm.collectives import Collectives
from shoal.comm.consensus import together
from shoal.errors import CheckpointError
from shoal.table.shard import Shard, Snapshot
from shoal.table.values import AdmissionState, Cursor

CONSUMER = "checkpoint"
"""Of deletions: what a delta has to say since its parent."""
_TRIES = 8  # a publisher may close a version meanwhile
_MOST_BEHIND = 1 << 16  # versions to catch up with other ranks: more is no job of one state


@dataclass(eq=False)
class SnapshotPoint:
    """One rank's part of a job as it was between two steps.

    Args:
        version: that all shards of all ranks show.
        snapshots: by collection; collections with one shard have one snapshot.
        cursors: by collection; of a consumer that has everything up to it.
        admission: by collection and table, of the first slice, where this rank has it.
        seed, last_steps: of the shards.
        dense, state, rank_state: copies.
    """

    version: int
    snapshots: Mapping[str, Snapshot]
    cursors: Mapping[str, Cursor]
    admission: Mapping[tuple[str, str], AdmissionState]
    seed: int
    last_steps: Mapping[str, int]
    dense: dense.DenseCapture
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any]

    @property
    def concurrent(self) -> bool:
        """Whether training may continue while it is read."""
        return all(snapshot.concurrent for snapshot in self.snapshots.values())

    def close(self) -> None:
        """Let go of the rows."""
        for snapshot in self.snapshots.values():
            snapshot.close()


def take_snapshot_point(
    contents: Contents, since: Mapping[str, Cursor] | None, collectives: Collectives
) -> SnapshotPoint:
    """Hold a job's state, on all ranks at one version. Called between the same steps everywhere.

    Raises:
        CheckpointError: a rank could not; nothing is held then.
    """
    held = _OpenPoint(contents, since)
    try:
        what = "snapshot point of a job"
        versions = set().union(*together(collectives, what, lambda: held.take(0)))
        for _ in range(_TRIES):
            if len(versions) <= 1:
                break
            # A rank that was restarted alone, say, or whose publisher takes its own snapshot
            # points: it closes versions until it is where others are.
            again = max(versions) + 16
            what = "snapshot point of a job at one version"
            versions = set().union(*together(collectives, what, partial(held.take, again)))
        if len(versions) > 1:
            raise _disagree(sorted(versions))
        points: list[SnapshotPoint] = []
        version = max(versions, default=0)

        def copied() -> None:
            points.append(held.copied(version, collectives.rank))

        together(collectives, "copies at a snapshot point of a job", copied)
        return points[0]
    except BaseException:
        held.close()
        raise


class _OpenPoint:
    """The snapshots of one rank's shards."""

    def __init__(self, contents: Contents, since: Mapping[str, Cursor] | None) -> None:
        self._contents = contents
        self._since = since
        self._open: dict[int, Snapshot] = {}

    def take(self, version: int) -> set[int]:
        """Snapshots of all shards at a version, 0: the next of each; which they are."""
        self.close()
        for shard, since in self._shards():
            if version:
                _catch_up(shard, version)
            self._open[id(shard)] = shard.snapshot(since)
            shard.release(0, CONSUMER)  # other consumers are not to let go of what a delta needs
        return {snapshot.version for snapshot in self._open.values()}

    def copied(self, version: int, rank: int) -> SnapshotPoint:
        """The snapshots, and copies of all else."""
        contents = self._contents
        job_state.check_state(contents.state, "state of a job")
        job_state.check_state(contents.rank_state, f"state of rank {rank}")
        shards = {name: tables.shard for name, tables in contents.tables.items()}
        return SnapshotPoint(
            version=version,
            snapshots={name: self._open[id(shard)] for name, shard in shards.items()},
            cursors={name: Cursor(shard.incarnation, version) for name, shard in shards.items()},
            admission=dict(_admission(contents, rank)),
            seed=next((shard.seed for shard in shards.values()), 0),
            last_steps={name: shard.last_step for name, shard in shards.items()},
            dense=dense.capture(contents.modules, contents.optimizers, rank=rank),
            state=copy.deepcopy(dict(contents.state)) if rank == 0 else {},
            rank_state=copy.deepcopy(dict(contents.rank_state)),
        )

    def close(self) -> None:
        for snapshot in self._open.values():
            snapshot.close()
        self._open.clear()

    def _shards(self) -> Iterator[tuple[Shard, Cursor | None]]:
        seen = set()
        for name, tables in self._contents.tables.items():
            if id(tables.shard) not in seen:
                seen.add(id(tables.shard))
                yield tables.shard, None if self._since is None else self._since[name]


def _catch_up(shard: Shard, version: int) -> None:
    """Close versions until the next snapshot closes that one, 2 or more ahead of any shard's."""
    first = now = shard.close_version()
    if version - first > _MOST_BEHIND:
        raise _disagree((first, version))
    while now < version - 1:
        now = shard.close_version()


def _admission(contents: Contents, rank: int) -> Iterator[tuple[tuple[str, str], AdmissionState]]:
    for name, tables in contents.tables.items():
        for spec in tables.specs:
            first = slices_of(tables, spec, rank)[0]
            if spec.admission is not None and first.table is not None:
                yield (name, spec.name), tables.shard.admission_state(first.table)


def _disagree(versions: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        "versions of the shards of a job",
        got=", ".join(map(str, versions)),
        allowed=f"one version, or shards that are less than {_MOST_BEHIND} behind",
        remedy="Make every snapshot point on all shards of all ranks, and load a checkpoint on "
        "all.",
    )
