"""Small jobs that are trained, saved and loaded, on one rank or split over several.

Gradients are eighths that add up exactly, and no id comes twice in a step, so that a job's rows
have the same bits on every device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from shoal.checkpoint import saving
from shoal.checkpoint.job_state import Contents
from shoal.placement import Placement, hash_ids, owners
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import SGD, Adagrad, Adam
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import (
    HostedTables,
    hosted_admission,
    hosted_rows,
    hosted_spec,
    hosted_specs,
    plan_placement,
)
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec
from shoal.table.values import RowChunk
from support.placed_shard import PlacedCuda, PlacedShard, PlacedTiered

__all__ = [
    "FEW",
    "KINDS",
    "MANY",
    "SPECS",
    "Home",
    "Job",
    "Outcome",
    "Sizes",
    "check_part",
    "group_of",
    "placed_job",
    "row_bytes",
    "small_files",
]

KINDS = ("row_wise", "table_wise", "column_wise", "table_row_wise", "grid", "data_parallel")

SPECS = (
    TableSpec(name="users", segments=(Segment(dim=8, optimizer=Adagrad()),)),
    TableSpec(
        name="items",
        segments=(
            Segment(name="bias", dim=1, optimizer=SGD()),
            Segment(name="vec", dim=7, optimizer=Adam()),
        ),
        dtype="bfloat16",
    ),
    TableSpec(
        name="tags",
        segments=(Segment(dim=4),),
        admission=Admission(threshold=2),
        expiry=Expiry(ttl_s=150),
    ),
    TableSpec(
        name="views",
        segments=(Segment(dim=4),),
        admission=Admission(threshold=2, counter="sketch", sketch_width=1 << 20, sketch_depth=1),
        dtype="float64",
    ),
)

Home = Literal["cpu", "cuda", "tiered"]  # what kind of shard a job's rows are in

HOMES: Mapping[Home, Callable[..., Any]] = {
    "cpu": CpuShard,
    "cuda": PlacedCuda,
    "tiered": PlacedTiered,
}


class Sizes(NamedTuple):
    """Of each of `SPECS`: how many ids it knows, and how many of them a step trains."""

    ids: tuple[int, ...]
    batch: tuple[int, ...]


MANY = Sizes(ids=(4000, 900, 400, 300), batch=(1500, 400, 150, 100))
FEW = Sizes(ids=(80, 30, 40, 30), batch=(30, 15, 16, 10))
"""So few that interpreted kernels train them in a second a step."""


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Files and pieces so small that small tables have several."""
    smaller = functools.partial(saving.split, file_bytes=60_000, small_bytes=30_000)
    pieces = functools.partial(saving.plan_writing, piece_bytes=25_000)
    with (
        mock.patch.object(saving, "split", smaller),
        mock.patch.object(saving, "plan_writing", pieces),
    ):
        yield


@dataclass
class Outcome:
    """The tables of a job: rows by table, exact admission counts as pairs."""

    rows: Mapping[str, RowChunk]
    admission: Mapping[str, Any]


class Job:
    """This rank's part of a job whose training does not depend on its placement."""

    def __init__(
        self,
        placement: Placement | None = None,
        rank: int = 0,
        *,
        home: Home = "cpu",
        sizes: Sizes = MANY,
    ) -> None:
        self.rank, self.placement, self.sizes = rank, placement, sizes
        specs = SPECS if placement is None else hosted_specs(SPECS, placement, rank)
        self.shard = HOMES[home](specs, seed=3)
        bare = self.shard.inner if isinstance(self.shard, PlacedShard) else self.shard
        self.tables = HostedTables(SPECS, bare, placement)
        torch.manual_seed(5)
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.steps = 0

    def contents(self) -> Contents:
        return Contents(
            tables={"main": self.tables},
            modules={"net": self.net},
            optimizers={"net": self.optimizer},
            state={"steps": self.steps},
            rank_state={"rank": self.rank, "drawn": torch.arange(self.steps)},
        )

    def step(self) -> None:
        """One step of all tables, with ids that depend on the step's number."""
        made = torch.Generator().manual_seed(self.steps)
        ctx = StepContext(global_step=self.steps, event_time_s=100 * self.steps)
        for spec, known, batch in zip(SPECS, *self.sizes, strict=True):
            ids_U = torch.randperm(known, generator=made)[:batch] * 7919
            grads_UD = torch.randint(-8, 9, (ids_U.numel(), spec.dim), generator=made).double() / 8
            for table, mine_U, columns in self._parts(spec, ids_U):
                dtype = torch.float64 if spec.dtype == "float64" else torch.float32
                grads = grads_UD[mine_U, columns].to(dtype).contiguous()
                self.shard.apply_ids(group_of(table, ids_U[mine_U]), [grads], ctx=ctx)
        loss = self.net(torch.full((1, 3), float(self.steps))).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def evict(self) -> None:
        """Drop rows that are expired now."""
        self.shard.evict(100 * self.steps)

    def outcome(self) -> Outcome:
        return Outcome(
            {spec.name: self.shard.export(k) for k, spec in enumerate(self.shard.specs)},
            {
                spec.name: sorted(zip(state.ids.tolist(), state.counts.tolist(), strict=True))
                for k, spec in enumerate(self.shard.specs)
                if spec.admission is not None
                for state in [self.shard.admission_state(k)]
            },
        )

    def _parts(self, spec: TableSpec, ids_U: Tensor) -> Iterator[tuple[int, Tensor, slice]]:
        if self.placement is None:
            yield SPECS.index(spec), torch.ones_like(ids_U, dtype=torch.bool), slice(None)
            return
        names = [one.name for one in self.shard.specs]
        for one in self.placement.of(spec.name):
            if self.rank in one.ranks:
                mine_U = torch.ones_like(ids_U, dtype=torch.bool)
                if not one.replicated:
                    mine_U = owners(one, hash_ids(spec.hash_name, ids_U)) == self.rank
                at = names.index(hosted_spec(spec, one).name)
                yield at, mine_U, slice(one.start, one.stop)


def placed_job(
    kind: str, world_size: int, rank: int, *, home: Home = "cpu", sizes: Sizes = MANY
) -> Job:
    """A job of one sharding type; of a table-row-wise or grid one nodes have two ranks."""
    nodes = 2 if kind in ("table_row_wise", "grid") else None
    placement = plan_placement(SPECS, world_size, default=kind, local_world_size=nodes)
    return Job(placement, rank, home=home, sizes=sizes)


def check_part(found: Outcome, job: Job, whole: Job) -> None:
    """A rank's tables are its part of a whole job's, row versions left out."""
    assert job.placement is not None
    for k, spec in enumerate(SPECS):
        chunk, admission = whole.shard.export(k), whole.shard.admission_state(k)
        for one in job.placement.of(spec.name):
            if job.rank not in one.ranks:
                continue
            name = hosted_spec(spec, one).name
            want = hosted_rows(spec, one, job.rank, chunk)
            for field in fields(RowChunk):
                if field.name not in ("table", "versions"):
                    here = getattr(found.rows[name], field.name)
                    there = getattr(want, field.name)
                    assert torch.equal(here, there), (name, field.name)
            if spec.admission is not None and spec.admission.counter == "exact":
                kept = hosted_admission(spec, one, job.rank, admission)
                pairs = sorted(zip(kept.ids.tolist(), kept.counts.tolist(), strict=True))
                assert found.admission[name] == pairs, name


def group_of(table: int, ids_U: Tensor) -> IdGroups:
    return IdGroups(
        ids_U, torch.tensor([0, ids_U.numel()]), torch.tensor([table], dtype=torch.int32)
    )


def row_bytes(folder: Path) -> dict[str, bytes]:
    """Of all row files, deletions and exact admission counts of a checkpoint, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for kind in ("rows", "deleted", "admission")
        for path in sorted((folder / kind).glob("*.arrow"))
    }
