"""A job on the CPU whose state after n steps depends only on n, not on saves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.checkpoint.job_state import Contents
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import SGD, Adagrad, Adam
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

__all__ = ["SPECS", "CrashingJob", "Replay"]

SPECS = (
    TableSpec(
        name="users",
        segments=(Segment(dim=8, optimizer=Adagrad()),),
        expiry=Expiry(ttl_s=120),
    ),
    TableSpec(
        name="items",
        segments=(
            Segment(name="bias", dim=1, optimizer=SGD()),
            Segment(name="vec", dim=7, optimizer=Adam()),
        ),
        dtype="bfloat16",
        admission=Admission(threshold=2),
        expiry=Expiry(ttl_s=200),
    ),
    TableSpec(
        name="views",
        segments=(Segment(dim=4),),
        admission=Admission(threshold=2, counter="sketch", sketch_width=1 << 8),
    ),
)
_IDS = {"users": 6000, "items": 1500, "views": 300}
_BATCH = {"users": 500, "items": 200, "views": 60}
_STEP_S, _EVICT_STEPS = 10, 4
_LEAP_STEPS, _LEAP_S = 32, 400  # now and then so much time passes that all rows but a step's expire


class CrashingJob:
    """Three tables, whose rows expire and come back, and a dense module.

    Args:
        seed: of everything; jobs of one seed are equal after as many steps.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.shard = CpuShard(SPECS, seed=seed)
        torch.manual_seed(seed)
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.steps = 0

    def contents(self) -> Contents:
        """For a save or a load."""
        return Contents(
            tables={"main": HostedTables(specs=SPECS, shard=self.shard)},
            modules={"net": self.net},
            optimizers={"net": self.optimizer},
            state={"steps": self.steps, "last": torch.full((3,), self.steps)},
        )

    def step(self) -> None:
        """Train a step: Zipf ids, and every few steps an eviction."""
        now_s = _STEP_S * self.steps + _LEAP_S * (self.steps // _LEAP_STEPS)
        made = torch.Generator().manual_seed(self._seed * 1_000_003 + self.steps)
        ctx = StepContext(global_step=self.steps, event_time_s=now_s)
        for table, spec in enumerate(SPECS):
            drawn = torch.rand(_BATCH[spec.name], generator=made, dtype=torch.float64)
            ids_U, counts_U = torch.unique(
                (_IDS[spec.name] ** drawn).long() * 7919 - 9999, return_counts=True
            )
            grads_UD = torch.randn(ids_U.numel(), spec.dim, generator=made)
            splits = torch.tensor([0, ids_U.numel()])
            groups = IdGroups(ids_U, splits, torch.tensor([table], dtype=torch.int32))
            self.shard.apply_ids(groups, [grads_UD], counts_U, ctx=ctx)
        if self.steps % _EVICT_STEPS == 0:
            self.shard.evict(now_s)
        loss = self.net(torch.full((1, 3), float(self.steps % 7))).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def digest(self) -> dict[str, str]:
        """Of all rows, admission counts, weights and optimizer states, by name; without versions,
        which depend on snapshot points."""
        return {
            name: hashlib.sha256(
                part.contiguous().reshape(-1).view(torch.uint8).numpy()
            ).hexdigest()
            for name, part in self._parts()
        }

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        yield "steps", torch.tensor([self.steps])
        for table, spec in enumerate(SPECS):
            rows = self.shard.export(table)
            for name in ("ids", "weights", "state", "last_seen_s", "counts"):
                yield f"{spec.name}.{name}", getattr(rows, name)
            if spec.admission is not None:
                admission = self.shard.admission_state(table)
                order = torch.argsort(admission.ids)
                yield f"{spec.name} seen", admission.ids[order]
                yield f"{spec.name} occurrences", admission.counts[order]
                cells = torch.frombuffer(
                    bytearray(admission.cells) or bytearray(1), dtype=torch.uint8
                )
                yield f"{spec.name} cells", cells
        yield from self.net.state_dict().items()
        for number, state in enumerate(self.optimizer.state.values()):
            yield from ((f"{name} {number}", value) for name, value in state.items())


class Replay:
    """Digests of a job that trains from the start and never saves."""

    def __init__(self, seed: int) -> None:
        self._job = CrashingJob(seed)
        self._found: dict[int, dict[str, str]] = {}

    def digest(self, step: int) -> dict[str, str]:
        """After `step` steps; call it with ascending steps."""
        if step not in self._found:
            assert step >= self._job.steps
            while self._job.steps < step:
                self._job.step()
            self._found[step] = self._job.digest()
        return self._found[step]
