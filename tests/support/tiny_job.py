"""A job so small that its checkpoints can be damaged byte by byte."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.job_state import Contents
from shoal.checkpoint.loading import Loaded, load
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.saving import begin
from shoal.rules.admission import Admission
from shoal.rules.expiry import Expiry
from shoal.rules.optimizers import Adagrad, Adam
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, StepContext
from shoal.table.spec import Segment, TableSpec

__all__ = ["ITEMS", "VIEWS", "TinyJob"]

ITEMS = TableSpec(
    name="items",
    segments=(
        Segment(name="bias", dim=1, optimizer=Adam()),
        Segment(name="vec", dim=3, optimizer=Adagrad()),
    ),
    admission=Admission(threshold=2),
    expiry=Expiry(ttl_s=15),
)
VIEWS = TableSpec(
    name="views",
    segments=(Segment(dim=2),),
    admission=Admission(threshold=2, counter="sketch", sketch_width=1 << 6),
)


class TinyJob:
    """Tables that admit exactly and by a sketch, a module with an optimizer.

    Args:
        seed: of the numbers, not of the ids: jobs of two seeds have checkpoints of equal sizes.
    """

    def __init__(self, seed: int = 0, specs: tuple[TableSpec, ...] = (ITEMS, VIEWS)) -> None:
        self.seed, self.specs = seed, specs
        self.shard = CpuShard(specs, seed=seed)
        torch.manual_seed(seed)
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.5)
        self.steps = 0
        self.parent: Manifest | None = None
        self.since: Any = None

    def contents(self) -> Contents:
        return Contents(
            tables={"main": HostedTables(specs=self.specs, shard=self.shard)},
            modules={"net": self.net},
            optimizers={"net": self.optimizer},
            state={"steps": self.steps},
        )

    def step(self) -> None:
        """Ids move on, so that some expire, some come back and some have only been seen."""
        made = torch.Generator().manual_seed(1000 * self.seed + self.steps)
        ctx = StepContext(global_step=self.steps, event_time_s=10 * self.steps)
        for table, spec in enumerate(self.specs):
            first = 5 * self.steps if self.steps % 4 else 0
            ids_U = (torch.arange(20) + first) * 7919
            groups = IdGroups(
                ids_U, torch.tensor([0, 20]), torch.tensor([table], dtype=torch.int32)
            )
            grads = torch.randn(20, spec.dim, generator=made)
            self.shard.apply_ids(groups, [grads], ctx=ctx)
        self.shard.evict(10 * self.steps)
        self.net(torch.full((1, 2), float(self.steps + self.seed))).sum().backward()
        self.optimizer.step()
        self.steps += 1

    def save(self, root: str | Path, *, full: bool = False) -> Manifest:
        """A full checkpoint, or a delta on the last one that was committed."""
        options: Any = {}
        if not full and self.parent is not None:
            options = {"kind": "delta", "parent": self.parent, "since": self.since}
        saving = begin(root, self.contents(), step=self.steps, position=self.steps, **options)
        found = saving.wait()
        self.parent, self.since = found, saving.cursors
        saving.release()
        return found

    def load(self, root: Path) -> Loaded:
        """Fill it; it continues from there."""
        loaded = load(root, self.contents())
        self.steps = loaded.state["steps"]
        self.parent, self.since = loaded.manifest, loaded.cursors
        return loaded

    def everything(self) -> dict[str, Any]:
        """Rows, admission counts, weights and optimizer state, copied; without versions."""
        found: dict[str, Any] = {"last step": self.shard.last_step}
        for table, spec in enumerate(self.specs):
            rows, admission = self.shard.export(table), self.shard.admission_state(table)
            for name in ("ids", "weights", "state", "last_seen_s", "counts"):
                found[f"{spec.name}.{name}"] = getattr(rows, name)
            pairs = zip(admission.ids.tolist(), admission.counts.tolist(), strict=True)
            found[f"{spec.name}.admission"] = sorted(pairs)
            found[f"{spec.name}.cells"] = admission.cells
        found |= {f"net.{k}": v.clone() for k, v in self.net.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"adam.{number}.{k}": copy.deepcopy(v) for k, v in state.items()}
        return found
