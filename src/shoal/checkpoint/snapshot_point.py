"""A snapshot point: what a job is between two steps, held on one rank while it is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint import contents as job_state
from shoal.checkpoint import dense
from shoal.checkpoint.contents import Contents
from shoal.comm.collectives import Collectives
from shoal.comm.consensus import together
from shoal.errors import CheckpointError
from shoal.placement import Hosted, row_wise
from shoal.table.hosting import HostedTables, hosted_spec
from shoal.table.shard import Shard, Snapshot
from shoal.table.spec import TableSpec
from shoal.table.values import AdmissionState, Cursor

_MOST_CUTS = 1 << 16  # to catch up with other ranks: more is no job that cuts together


@dataclass(frozen=True, slots=True, eq=False)
class LocalSlice:
    """A column slice of a whole table, and where this rank has it.

    Args:
        table: index into its shard's specs; None: not on this rank.
        spec: of the slice.
    """

    hosted: Hosted
    spec: TableSpec
    table: int | None


@dataclass(eq=False)
class Cut:
    """One rank's part of a job as it was between two steps.

    Args:
        epoch: closed by all shards of all ranks.
        snapshots: by collection; collections with one shard have one snapshot.
        cursors: by collection; of a consumer that has everything up to the cut.
        sights: by collection and table, of the first slice, where this rank has it.
        seed, last_steps: of the shards.
        dense, state, rank_state: copies.
    """

    epoch: int
    snapshots: Mapping[str, Snapshot]
    cursors: Mapping[str, Cursor]
    sights: Mapping[tuple[str, str], AdmissionState]
    seed: int
    last_steps: Mapping[str, int]
    dense: dense.DenseCapture
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any]

    @property
    def concurrent(self) -> bool:
        """Whether training may go on while it is read."""
        return all(snapshot.concurrent for snapshot in self.snapshots.values())

    def close(self) -> None:
        """Let go of the rows."""
        for snapshot in self.snapshots.values():
            snapshot.close()


def slices_of(tables: HostedTables, spec: TableSpec, rank: int) -> tuple[LocalSlice, ...]:
    """A whole table's slices, left to right."""
    names = {one.name: index for index, one in enumerate(tables.shard.specs)}
    if tables.placement is None:
        (whole,) = row_wise(spec.name, spec.dim, 1)
        return (LocalSlice(whole, spec, names[spec.name]),)
    found = []
    for hosted in tables.placement.of(spec.name):
        part = hosted_spec(spec, hosted)
        found.append(LocalSlice(hosted, part, names[part.name] if rank in hosted.ranks else None))
    return tuple(found)


def cut_job(
    contents: Contents, since: Mapping[str, Cursor] | None, collectives: Collectives
) -> Cut:
    """Hold a job still, on all ranks at the same epoch. Called between the same steps everywhere.

    Raises:
        CheckpointError: a rank could not; nothing is held then.
    """
    held: list[_Held] = []

    def take() -> int:
        held.append(_Held(contents, since))
        return held[0].take(0)

    try:
        epochs = together(collectives, "cut of a job", take)
        if len(set(epochs)) > 1:
            # A rank that was restarted alone, say: it closes epochs until it is where others are.
            epochs = together(
                collectives, "cut of a job at one epoch", lambda: held[0].take(max(epochs) + 2)
            )
        if len(set(epochs)) > 1:
            raise _disagree(epochs)
        cuts = []

        def copied() -> None:
            cuts.append(held[0].copied(epochs[0], collectives.rank))

        together(collectives, "copies at a cut of a job", copied)
        return cuts[0]
    except BaseException:
        for one in held:
            one.close()
        raise


class _Held:
    """The snapshots of one rank's shards."""

    def __init__(self, contents: Contents, since: Mapping[str, Cursor] | None) -> None:
        self._contents = contents
        self._since = since
        self._open: dict[int, Snapshot] = {}

    def take(self, epoch: int) -> int:
        """Snapshots of all shards at one epoch; which one. 0: the next that they all may close."""
        found = self._taken(epoch)
        if len(found) > 1:
            found = self._taken(max(found) + 2)
        if len(found) > 1:
            raise _disagree(sorted(found))
        return max(found, default=epoch)

    def _taken(self, epoch: int) -> set[int]:
        self.close()
        for shard, since in self._shards():
            if epoch:
                _catch_up(shard, epoch)
            self._open[id(shard)] = shard.snapshot(since)
        return {snapshot.epoch for snapshot in self._open.values()}

    def copied(self, epoch: int, rank: int) -> Cut:
        """The snapshots, and copies of all else."""
        contents = self._contents
        job_state.check_state(contents.state, "state of a job")
        job_state.check_state(contents.rank_state, f"state of rank {rank}")
        shards = {name: tables.shard for name, tables in contents.tables.items()}
        return Cut(
            epoch=epoch,
            snapshots={name: self._open[id(shard)] for name, shard in shards.items()},
            cursors={name: Cursor(shard.incarnation, epoch) for name, shard in shards.items()},
            sights=dict(_sights(contents, rank)),
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


def _catch_up(shard: Shard, epoch: int) -> None:
    """Close epochs until the next cut closes `epoch`, which is 2 or more ahead of any shard's."""
    first = now = shard.cut()
    if epoch - first > _MOST_CUTS:
        raise _disagree((first, epoch))
    while now < epoch - 1:
        now = shard.cut()


def _sights(contents: Contents, rank: int) -> Iterator[tuple[tuple[str, str], AdmissionState]]:
    for name, tables in contents.tables.items():
        for spec in tables.specs:
            first = slices_of(tables, spec, rank)[0]
            if spec.admission is not None and first.table is not None:
                yield (name, spec.name), tables.shard.admission_state(first.table)


def _disagree(epochs: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        "epochs of the shards of a job",
        got=", ".join(map(str, epochs)),
        allowed=f"one epoch, or shards that are less than {_MOST_CUTS} behind",
        remedy="Make every cut on all shards of all ranks, and load a checkpoint on all.",
    )
