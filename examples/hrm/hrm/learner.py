"""A model, its table and their optimizers on one or many ranks: one optimizer step a call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hrm.adam_atan2 import AdamATan2
from hrm.carry import Batch, Carry, Outputs
from hrm.losses import LossKind
from hrm.model import ReasoningModel, exploration
from hrm.model_config import ModelConfig
from hrm.puzzle_table import TABLE, PuzzleTable
from hrm.sampler import Share, TestWindow
from hrm.schedule import WarmupCosine
from hrm.segment import Segment
from shoal import DistributedModelParallel, SparseOptimizer, comm
from shoal.errors import ConfigError
from shoal.optim import ParameterAverage

__all__ = ["Learner", "LearnerConfig", "Placing", "PuzzleModel"]

Placing = Literal["data_parallel", "row_wise"]
Step = tuple[Tensor, Carry, dict[str, Tensor], Outputs]
Keep = Callable[[TestWindow, Outputs], None]


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How to learn; the defaults are HRM's.

    Args:
        lr, puzzle_emb_lr: rates of the model and of rows, both on the same course.
        weight_decay, puzzle_emb_weight_decay: decoupled; of rows that a step touches.
        total_steps: where the rate's course ends.
        placement: rows on every rank, or spread over them.
        freeze_table: rows are read and never moved.
        ema_decay: of averaged parameters that evaluations use; None for none (TRM: 0.999).
        compiled: run the model and its loss through `torch.compile`.
        graphed: replay training steps of the model as CUDA graphs.
        seed: of parameters and exploration, the same on every rank.
    """

    lr: float = 1e-4
    lr_min_ratio: float = 1.0
    lr_warmup_steps: int = 2000
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    puzzle_emb_lr: float = 1e-2
    puzzle_emb_weight_decay: float = 0.1
    total_steps: int
    loss_type: LossKind = "stablemax_cross_entropy"
    placement: Placing = "data_parallel"
    freeze_table: bool = False
    ema_decay: float | None = None
    compiled: bool = False
    graphed: bool = False
    seed: int = 0

    def rate(self, base: float) -> WarmupCosine:
        """The course of a rate."""
        return WarmupCosine(base, self.lr_warmup_steps, self.total_steps, self.lr_min_ratio)


class PuzzleModel(nn.Module):
    """The model with the rows of the puzzles at work, up to the loss."""

    def __init__(self, segment: Segment, table: PuzzleTable | None, *, frozen: bool) -> None:
        super().__init__()
        self.segment, self.table = segment, table
        self.frozen = frozen

    def forward(self, carry: Carry, least_steps_B: Tensor | None = None) -> Step:
        """One step: the loss summed over the batch, the new carry, sums of figures, and answers.

        Only the loss has a graph.
        """
        given = [*carry.state_dict().values(), least_steps_B]
        if self.table is not None:
            # Without gradients nothing is inserted: a frozen table does not change.
            with torch.no_grad() if self.frozen else contextlib.nullcontext():
                given.append(self.table(carry.puzzle_ids_B))
        loss, *rest = self.segment(*given)
        (z_H, z_L, steps, halted), sums, answers = tree_map(Tensor.detach, rest)
        logits, q_halt, q_continue = answers
        carry = dataclasses.replace(carry, z_H_BTD=z_H, z_L_BTD=z_L, steps_B=steps, halted_B=halted)
        return loss, carry, sums, Outputs(logits, q_halt, q_continue, None)


class Learner:
    """Steps and evaluations; every rank calls them alike.

    Args:
        model_config, config: what to learn and how.
        share: this rank's part of global batches.
        mesh: the ranks, from `shoal.comm.init`.

    Raises:
        ConfigError: CUDA graphs on another device.

    Attributes:
        step: optimizer steps done.
        carry: the slots' work in progress; None before the first step.
    """

    def __init__(
        self, model_config: ModelConfig, config: LearnerConfig, share: Share, mesh: comm.Mesh
    ) -> None:
        self.config, self.share, self.mesh = config, share, mesh
        if config.graphed and mesh.device.type != "cuda":
            raise ConfigError(
                "cuda_graphs",
                got=f"true on {mesh.device.type}",
                allowed="true on cuda, or false",
                remedy="Leave out cuda_graphs, or set device=cuda.",
            )
        self.model = ReasoningModel(model_config, seed=config.seed).to(mesh.device)
        segment = Segment(self.model, config.loss_type, compiled=config.compiled)
        if config.graphed:
            segment.record(share.count, row_grads=not config.freeze_table)
        self.table = self._make_table(model_config)
        whole = PuzzleModel(segment, self.table, frozen=config.freeze_table)
        placement = None if self.table is None else {TABLE: config.placement}
        self.whole = DistributedModelParallel(whole, placement=placement, mesh=mesh)
        self.dense = AdamATan2(
            self.model.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self.sparse: SparseOptimizer | None = None
        if self.table is not None and not config.freeze_table:
            rate = config.rate(config.puzzle_emb_lr)
            self.sparse = SparseOptimizer(self.whole, rates={TABLE: rate})
        self.average: ParameterAverage | None = None
        if config.ema_decay is not None:
            self.average = ParameterAverage(self.model, config.ema_decay)
        self._figures = mesh.collectives("figures")
        self._rate = config.rate(config.lr)
        self.step = 0
        self.carry: Carry | None = None

    @property
    def rate(self) -> float:
        """The model's learning rate at the next step."""
        return self._rate(self.step)

    def _make_table(self, model_config: ModelConfig) -> PuzzleTable | None:
        if not model_config.puzzle_dim:
            return None
        return PuzzleTable(
            model_config.puzzle_dim,
            lr=self.config.puzzle_emb_lr,
            weight_decay=self.config.puzzle_emb_weight_decay,
            device=str(self.mesh.device),
        )

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        """One optimizer step, for which halted slots take the batch's examples.

        Args:
            batch: this rank's part of the global batch, on the CPU or the device.

        Returns:
            sums of this rank's figures, on the device; see `totals`. The next step may overwrite
            them.
        """
        self.whole.train()
        share, device = self.share, self.mesh.device
        batch = batch.to(device, non_blocking=True)
        going = Carry.empty(self.model.config, batch) if self.carry is None else self.carry
        least_B = exploration(
            self.model.config,
            seed=self.config.seed,
            step=self.step,
            global_batch=share.global_batch,
            first=share.first,
            count=share.count,
        )
        going = self.model.admit(going, batch)
        loss, self.carry, sums, _ = self._run(going, least_B.to(device, non_blocking=True))
        # Ranks' gradients are averaged: so this is the global sum over the global batch's size.
        (loss / share.count).backward()  # type: ignore[no-untyped-call]
        for group in self.dense.param_groups:
            group["lr"] = self._rate(self.step)
        if self.sparse is not None:
            self.sparse.step()
        self.dense.step()
        self.dense.zero_grad()
        if self.average is not None:
            self.average.update()
        self.step += 1
        return sums

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Within, nothing is learned and averaged parameters count, if there are any."""
        self.whole.eval()
        lent = contextlib.nullcontext() if self.average is None else self.average.applied()
        with torch.no_grad(), lent:
            yield

    def answers(self, batch: Batch) -> Iterator[tuple[Outputs, dict[str, Tensor]]]:
        """Outputs of each of the M steps for a batch, and sums of figures; within `judging`."""
        batch = batch.to(self.mesh.device, non_blocking=True)
        carry = self.model.admit(Carry.empty(self.model.config, batch), batch)
        for _ in range(self.model.config.halt_max_steps):
            _, carry, sums, outputs = self._run(carry, None)
            yield outputs, sums

    def evaluate(
        self, windows: Iterable[TestWindow], keep: Keep | None = None
    ) -> dict[str, dict[str, float]]:
        """Figures of each set after all steps, with averaged parameters if there are any.

        Args:
            keep: is called with each window and the outputs of the last step.
        """
        sums: dict[str, dict[str, Tensor]] = {}
        with self.judging():
            for window in windows:
                *_, (outputs, found) = self.answers(window.batch)
                if keep is not None:
                    keep(window, outputs)
                into = sums.setdefault(window.set_name, {})
                for name, value in found.items():
                    into[name] = into[name] + value if name in into else value
        return {name: self._means(found, None) for name, found in sums.items()}

    def _run(self, carry: Carry, least_steps_B: Tensor | None) -> Step:
        found: Step = self.whole(carry, least_steps_B)
        return found

    def totals(self, sums: Mapping[str, Tensor], steps: int = 1) -> dict[str, float]:
        """Figures of steps on all ranks: means of what halted, losses per slot, the count.

        A collective call that waits for the device.

        Args:
            sums: what `learn` returned, added up over `steps` of them.
        """
        return self._means(sums, self.share.global_batch * steps)

    def _means(self, sums: Mapping[str, Tensor], slots: int | None) -> dict[str, float]:
        names = sorted(sums)
        values = torch.stack([sums[name].double() for name in names])
        reduced = self._figures.all_reduce(values, "sum", what="figures").wait()[0].tolist()
        total = dict(zip(names, reduced, strict=True))
        count = max(total["count"], 1)
        means = {
            name: value / (slots if slots is not None and name.endswith("loss") else count)
            for name, value in total.items()
        }
        return {**means, "count": total["count"]}

    def state_dict(self) -> dict[str, Any]:
        """All but the table's rows; the carry is this rank's."""
        state: dict[str, Any] = {
            "step": self.step,
            "model": self.model.state_dict(),
            "dense": self.dense.state_dict(),
            "carry": None if self.carry is None else self.carry.state_dict(),
        }
        if self.sparse is not None:
            state["sparse"] = self.sparse.state_dict()
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another learner of the same configuration; rows are loaded separately."""
        self.model.load_state_dict(state["model"])
        self.dense.load_state_dict(state["dense"])
        if self.sparse is not None:
            self.sparse.load_state_dict(state["sparse"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        carry = state["carry"]
        self.carry = None if carry is None else Carry.from_state(carry).to(self.mesh.device)
        self.step = state["step"]
