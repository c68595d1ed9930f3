"""Several labels from shared inputs: MMoE, PLE, and towers that read each other (DBMTL)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, known_name
from shoal.models.mlp import MLP, Deep, Inputs, Widths


class _Mixture(nn.Module):
    """A softmax gate over experts: inputs [B, X], experts' outputs [B, E, H] -> [B, H]."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, inputs_BX: Tensor, outputs_BEH: Tensor) -> Tensor:
        gates_BE = self.gate(inputs_BX).softmax(dim=1)
        return torch.einsum("be,beh->bh", gates_BE, outputs_BEH)


class MMoE(nn.Module):
    """Multi-gate mixture of experts (Ma et al. 2018), [B, X] -> one vector [B, H] for each task.

    Args:
        width: X.
        tasks: T.
        experts: how many.
        expert: widths of each; the last one is H.
        layers: `dropout` and `batch_norm`, as `MLP` takes them.
    """

    def __init__(
        self, width: int, tasks: int, *, experts: int, expert: tuple[int, ...], **layers: Any
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(width, expert, **layers) for _ in range(experts))
        self.gates = nn.ModuleList(_Mixture(width, experts) for _ in range(tasks))

    def forward(self, inputs_BX: Tensor) -> list[Tensor]:
        """A vector [B, H] for each task."""
        outputs_BEH = torch.stack([expert(inputs_BX) for expert in self.experts], dim=1)
        return [gate(inputs_BX, outputs_BEH) for gate in self.gates]


class PLE(nn.Module):
    """Progressive layered extraction (Tang et al. 2020), [B, X] -> one vector [B, H] for each task.

    A task's gate reads its own experts and the shared ones, level by level. But for the last one,
    a level also has a shared gate, which reads all experts.

    Args:
        width: X.
        tasks: T.
        experts: of each task and level; shared: that all tasks read, of each level.
        levels: how many.
        expert: widths of each; the last one is H.
        layers: `dropout` and `batch_norm`, as `MLP` takes them.
    """

    def __init__(
        self,
        width: int,
        tasks: int,
        *,
        experts: int,
        shared: int,
        levels: int,
        expert: tuple[int, ...],
        **layers: Any,
    ) -> None:
        super().__init__()
        self.experts, self.gates = nn.ModuleList(), nn.ModuleList()
        counts = [*[experts] * tasks, shared]  # the last group is the shared one
        for level in range(levels):
            size = width if level == 0 else expert[-1]
            self.experts.append(
                nn.ModuleList(
                    nn.ModuleList(MLP(size, expert, **layers) for _ in range(n)) for n in counts
                )
            )
            read = [experts + shared] * tasks + [sum(counts)] * (level < levels - 1)
            self.gates.append(nn.ModuleList(_Mixture(size, n) for n in read))

    def forward(self, inputs_BX: Tensor) -> list[Tensor]:
        """A vector [B, H] for each task."""
        given: list[Tensor] = []
        for groups, gates in zip(self.experts, self.gates, strict=True):
            given = given or [inputs_BX] * len(groups)  # type: ignore[arg-type]
            outputs = [
                torch.stack([expert(x) for expert in group], dim=1)
                for group, x in zip(groups, given, strict=True)  # type: ignore[call-overload]
            ]
            read = [torch.cat([own, outputs[-1]], dim=1) for own in outputs[:-1]]
            read.append(torch.cat(outputs, dim=1))
            # The last level has no shared gate, and nothing after it reads what all shared.
            given = [gate(x, y) for gate, x, y in zip(gates, given, read, strict=False)]  # type: ignore[call-overload]
        return given


class SharedBottom(nn.Module):
    """One MLP for all tasks, [B, X] -> one vector [B, H], the same for each task.

    Args:
        width: X.
        tasks: how many.
        expert: widths of the MLP's layers; the last is H.
        layers: further settings of `MLP`.
    """

    def __init__(self, width: int, tasks: int, *, expert: tuple[int, ...], **layers: Any) -> None:
        super().__init__()
        self.bottom, self._tasks = MLP(width, expert, **layers), tasks

    def forward(self, inputs_BX: Tensor) -> list[Tensor]:
        """A vector [B, H] for each task."""
        return [self.bottom(inputs_BX)] * self._tasks


class TaskTowers(nn.Module):
    """What tasks share, a tower for each, and towers that read others': logits [B, T].

    Args:
        inputs: widths, and names of the T labels.
        extract: makes of (width, tasks) what maps inputs [B, width] to a vector for each task;
            its outputs have `extracted` columns.
        extracted: H.
        hidden: widths of each tower.
        relations: label -> labels whose towers its last layers read next to its own; a relation
            tower of the same widths joins them. Labels must not need each other in a circle.
        layers: `dropout` and `batch_norm`, as `MLP` takes them.

    Raises:
        ConfigError: no labels, or a circle of relations.
        UnknownName: a relation of a label that is none.
    """

    def __init__(
        self,
        inputs: Widths,
        extract: Callable[[int, int], nn.Module],
        *,
        extracted: int,
        hidden: tuple[int, ...],
        relations: Mapping[str, Sequence[str]] | None = None,
        **layers: Any,
    ) -> None:
        super().__init__()
        self._inputs = Inputs(*inputs).require()
        labels = self._inputs.labels
        if not labels or not hidden:
            remedy = "Name the labels of the data, and widths of the towers."
            raise ConfigError("labels and towers of tasks", (labels, hidden), "one each", remedy)
        self.extract = extract(self._inputs.width, len(labels))
        self.towers = nn.ModuleList(MLP(extracted, hidden, **layers) for _ in labels)
        self._order, self._read = _order_of(labels, relations or {})
        self.relations = nn.ModuleDict(
            {
                str(task): MLP(hidden[-1] * (1 + len(read)), hidden, **layers)
                for task, read in enumerate(self._read)
                if read
            }
        )
        self.heads = nn.ModuleList(MLP(hidden[-1], (), out_features=1) for _ in labels)

    def forward(
        self, dense_B: Tensor | None, embeddings_BFD: Tensor, first_order_BF: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T], or [B] of one task; first-order weights, if any, are added to each.

        Raises:
            ShapeError: a shape differs.
        """
        self._inputs.check(dense_B, embeddings_BFD, first_order_BF)
        shared = self.extract(self._inputs.flatten(dense_B, embeddings_BFD))
        found = [tower(vector_BH) for tower, vector_BH in zip(self.towers, shared, strict=True)]
        for task in self._order:
            if self._read[task]:
                joined_BX = torch.cat([found[task], *(found[t] for t in self._read[task])], dim=1)
                found[task] = self.relations[str(task)](joined_BX)
        logits_BT = torch.cat(
            [head(vector_BH) for head, vector_BH in zip(self.heads, found, strict=True)], dim=1
        )
        if first_order_BF is not None:
            logits_BT = logits_BT + first_order_BF.sum(dim=1, keepdim=True)
        return logits_BT.squeeze(1) if len(self.heads) == 1 else logits_BT


def _order_of(
    labels: Sequence[str], relations: Mapping[str, Sequence[str]]
) -> tuple[list[int], list[list[int]]]:
    """The tasks, each after those it reads, and by task the ones it reads."""
    for name in [*relations, *(one for read in relations.values() for one in read)]:
        known_name("label of model.relations", name, labels)
    read = [[labels.index(one) for one in relations.get(label, ())] for label in labels]
    order: list[int] = []
    while len(order) < len(labels):
        ready = [t for t in range(len(labels)) if t not in order and set(read[t]) <= set(order)]
        if not ready:
            remedy = "Let one of them read no other."
            raise ConfigError("model.relations", "a circle", "labels in an order", remedy)
        order += ready
    return order, read


@dataclass(frozen=True, slots=True, kw_only=True)
class MMoESettings(Deep):
    """Experts that tasks mix by gates of their own; `hidden` are each task's tower."""

    kind: ClassVar[str] = "mmoe"
    multi_task: ClassVar[bool] = True
    needed: ClassVar[tuple[str, ...]] = ("expert",)
    hidden: tuple[int, ...] = (64,)
    experts: int = 4
    expert: tuple[int, ...] = (128, 64)

    def build(self, inputs: Inputs) -> nn.Module:
        """`TaskTowers` over an `MMoE`."""

        def extract(width: int, tasks: int) -> nn.Module:
            return MMoE(width, tasks, experts=self.experts, expert=self.expert, **self.layers)

        return TaskTowers(
            inputs, extract, extracted=self.expert[-1], hidden=self.hidden, **self.layers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PLESettings(Deep):
    """Experts of each task and `shared` ones, in `levels`; `hidden` are each task's tower."""

    kind: ClassVar[str] = "ple"
    multi_task: ClassVar[bool] = True
    needed: ClassVar[tuple[str, ...]] = ("expert",)
    hidden: tuple[int, ...] = (64,)
    experts: int = 2
    shared: int = 2
    levels: int = 2
    expert: tuple[int, ...] = (128, 64)

    def build(self, inputs: Inputs) -> nn.Module:
        """`TaskTowers` over a `PLE`."""

        def extract(width: int, tasks: int) -> nn.Module:
            return PLE(
                width,
                tasks,
                experts=self.experts,
                shared=self.shared,
                levels=self.levels,
                expert=self.expert,
                **self.layers,
            )

        return TaskTowers(
            inputs, extract, extracted=self.expert[-1], hidden=self.hidden, **self.layers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DBMTLSettings(Deep):
    """A shared bottom, or an MMoE with `experts`; `relations` say which towers read which.

    `relations` of {buy: [click]}: the tower of buy reads that of click.
    """

    kind: ClassVar[str] = "dbmtl"
    multi_task: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {**Deep.limits, "experts": (0, 1024)}
    needed: ClassVar[tuple[str, ...]] = ("bottom",)
    hidden: tuple[int, ...] = (64,)
    bottom: tuple[int, ...] = (128, 64)
    experts: int = 0
    relations: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def build(self, inputs: Inputs) -> nn.Module:
        """`TaskTowers` with relations."""

        def extract(width: int, tasks: int) -> nn.Module:
            if self.experts:
                return MMoE(width, tasks, experts=self.experts, expert=self.bottom, **self.layers)
            return SharedBottom(width, tasks, expert=self.bottom, **self.layers)

        return TaskTowers(
            inputs,
            extract,
            extracted=self.bottom[-1],
            hidden=self.hidden,
            relations=dict(self.relations),
            **self.layers,
        )
