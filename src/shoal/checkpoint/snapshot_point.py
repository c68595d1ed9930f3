"""A snapshot point: what a job is between two steps, held on one rank while it is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        dense, state, rank_state: copies.
    """

    version: int
    snapshots: Mapping[str, Snapshot]
    cursors: Mapping[str, Cursor]
    admission: Mapping[tuple[str, str], AdmissionState]
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


def keep_deletions(contents: Contents) -> None:
    """A delta on what was loaded needs those that other consumers are done with."""
    for tables in contents.tables.values():
        tables.shard.release(0, CONSUMER)


def take_snapshot_point(
    contents: Contents, since: Mapping[str, Cursor] | None, collectives: Collectives
) -> SnapshotPoint:
    """Hold a job's state, on all ranks at one version. Called between the same steps everywhere.

    Raises:
        CheckpointError: a rank could not; nothing is held then.
    """
    shards = {
        id(tables.shard): (tables.shard, None if since is None else since[name])
        for name, tables in contents.tables.items()
    }
    held: dict[int, Snapshot] = {}
    points: list[SnapshotPoint] = []
    versions: set[int] = set()

    def close() -> None:
        for snapshot in held.values():
            snapshot.close()
        held.clear()

    def take() -> set[int]:
        """Snapshots of all shards, the next of each or at a later version; which they are."""
        close()
        for key, (shard, cursor) in shards.items():
            if versions:
                # A rank that was restarted alone, say, or whose publisher takes its own snapshot
                # points: it closes versions until it is where others are.
                _catch_up(shard, max(versions) + 16)
            held[key] = shard.snapshot(cursor)
            shard.release(0, CONSUMER)  # other consumers are not to let go of what a delta needs
        return {snapshot.version for snapshot in held.values()}

    def copy_all() -> None:
        snapshots = {name: held[id(one.shard)] for name, one in contents.tables.items()}
        points.append(_copied(contents, snapshots, max(versions, default=0), collectives.rank))

    try:
        for _ in range(1 + _TRIES):
            versions = set().union(*together(collectives, "snapshot point of a job", take))
            if len(versions) <= 1:
                break
        else:
            raise _disagree(sorted(versions))
        together(collectives, "copies at a snapshot point of a job", copy_all)
        return points[0]
    except BaseException:
        close()
        raise


def _copied(
    contents: Contents, snapshots: Mapping[str, Snapshot], version: int, rank: int
) -> SnapshotPoint:
    """The snapshots, and copies of all else."""
    job_state.check_state(contents.state, "state of a job")
    job_state.check_state(contents.rank_state, f"state of rank {rank}")
    shards = {name: tables.shard for name, tables in contents.tables.items()}
    return SnapshotPoint(
        version=version,
        snapshots=snapshots,
        cursors={name: Cursor(shard.incarnation, version) for name, shard in shards.items()},
        admission=dict(_admission(contents, rank)),
        dense=dense.capture(contents.modules, contents.optimizers, rank=rank),
        state=copy.deepcopy(dict(contents.state)) if rank == 0 else {},
        rank_state=copy.deepcopy(dict(contents.rank_state)),
    )


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
