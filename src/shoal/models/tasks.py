"""What models predict: tasks, their losses, and how a dense module is called.

A dense module takes (dense [B, n] or None, embeddings [B, F, D], first-order weights [B, F] or
None), and of sequences their rows [B, S, L, D] and lengths [B, S]. Its outputs are what its
`Objective` makes a loss and logits of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from shoal.errors import ConfigError, ShapeError, known_name
from shoal.ragged import KeyedRagged

EMBEDDINGS, FIRST_ORDER = "embeddings", "first_order"
SEQUENCES, LENGTHS, IDS = "sequences", "lengths", "ids"
"""Names of a dense module's inputs."""
_INTEGERS = (LENGTHS, IDS)
AMP_DTYPES = {"none": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LossName = Literal["log_loss", "focal"]
_FOCUS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """How a label of several counts; `where` names a label: where that is 0, this is not trained.

    Raises:
        ConfigError: a weight that is negative or not finite.
    """

    weight: float = 1.0
    loss: LossName = "log_loss"
    where: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            allowed, remedy = "a finite number, 0 or more", "Change it."
            raise ConfigError("weight of a task", self.weight, allowed, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A label that a model predicts.

    Args:
        label: its name.
        column: its place among a batch's labels.
        weight: of its loss in the sum over tasks.
        loss: "log_loss", or "focal" (Lin et al. 2017, gamma 2).
        where: place of another label: examples where that is 0 do not train this task.
    """

    label: str
    column: int = 0
    weight: float = 1.0
    loss: LossName = "log_loss"
    where: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Negatives:
    """Items that the B examples of a batch are compared with; they follow these in its ids.

    Args:
        log_counts_N: float32 [N], of the N items that all share: log of how often each is expected
            among them.
        hard_H: int64 [H], of the H items after them: whose hard negative each is, ascending.
        known: int64 [K, 2]: (example, place among the B + N) of items that are none.
        most_hard: hard negatives of an example, at most.
    """

    log_counts_N: Tensor
    hard_H: Tensor
    known: Tensor
    most_hard: int = 0

    @property
    def size(self) -> int:
        """N + H."""
        return self.log_counts_N.numel() + self.hard_H.numel()

    def moved(self, move: Callable[[Tensor], Tensor]) -> Negatives:
        """With each tensor elsewhere."""
        return Negatives(
            move(self.log_counts_N), move(self.hard_H), move(self.known), self.most_hard
        )


class Objective(Protocol):
    """The loss of a model's outputs."""

    def loss_sum(self, outputs: Tensor, labels_BT: Tensor, weights_B: Tensor | None) -> Tensor:
        """Sum over examples of their weighted losses, a scalar."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [B], or [B, T] of several tasks."""
        ...


def log_loss_sum(logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> Tensor:
    """Sum of the cross entropies."""
    return binary_cross_entropy_with_logits(logits_B, labels_B, weight=weights_B, reduction="sum")


def focal_loss_sum(logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> Tensor:
    """Sum of the cross entropies, each times (1 - probability of its label)^2."""
    each_B = binary_cross_entropy_with_logits(
        logits_B, labels_B, weight=weights_B, reduction="none"
    )
    missed_B = (labels_B - logits_B.sigmoid()).abs()
    return (missed_B**_FOCUS * each_B).sum()


_LOSSES: dict[LossName, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "log_loss": log_loss_sum,
    "focal": focal_loss_sum,
}
assert tuple(_LOSSES) == get_args(LossName)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A loss of each example and task, added up. Outputs are logits [B], or [B, T] of tasks."""

    tasks: tuple[Task, ...]

    def loss_sum(self, outputs: Tensor, labels_BT: Tensor, weights_B: Tensor | None) -> Tensor:
        """Sum over tasks and examples."""
        total = None
        for number, task in enumerate(self.tasks):
            own_B = weights_B
            if task.where is not None:
                own_B = (labels_BT[:, task.where] > 0).to(labels_BT.dtype)
                own_B = own_B if weights_B is None else own_B * weights_B
            logits_B = outputs if outputs.ndim == 1 else outputs[:, number]
            loss = _LOSSES[task.loss](logits_B, labels_BT[:, task.column], own_B)
            loss = loss if task.weight == 1.0 else task.weight * loss
            total = loss if total is None else total + loss
        assert total is not None, "a model has a task"
        return total

    def logits(self, outputs: Tensor) -> Tensor:
        """The outputs themselves."""
        return outputs


@dataclass(frozen=True, slots=True)
class InBatchSoftmax:
    """Softmax over items: an example's own against those of the others of a batch, or sampled ones.

    Outputs are scores [B, B or more], row b of example b, whose own item is on the diagonal, or
    with `own_first` in column 0; or in evaluation its own alone [B]. An example counts as much as
    its first label: 0 is no positive.
    """

    own_first: bool = False

    def loss_sum(self, outputs: Tensor, labels_BT: Tensor, weights_B: Tensor | None) -> Tensor:
        """Sum over examples."""
        own_B = labels_BT[:, 0] if weights_B is None else labels_BT[:, 0] * weights_B
        if outputs.ndim == 1:
            return log_loss_sum(outputs, labels_BT[:, 0], weights_B)
        each_B = torch.logsumexp(outputs, 1) - self._own(outputs)
        return (each_B * own_B).sum()

    def logits(self, outputs: Tensor) -> Tensor:
        """Scores of the examples' own items [B]."""
        # A view would keep all [B, B] alive for as long as logits are.
        return outputs if outputs.ndim == 1 else self._own(outputs).clone()

    def _own(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0] if self.own_first else outputs.diagonal()


def sampled_logits(outputs: Tensor, rates_B: Tensor) -> Tensor:
    """Logits of the stream that a model trains on, of which negatives were left out.

    Where a negative is kept with chance r, odds of a positive are those of all examples, divided by
    r: logit - ln r, as Monolith's `LogitCorrection` (native_training/layers/logit_correction.py)
    without `sample_bias`. The loss is of these, so that the model's own logits are of all examples
    and need nothing in serving. Inverts the re-calibration p / (p + (1 - p) / r) of He et al.,
    Practical Lessons from Predicting Clicks on Ads at Facebook (2014), section 6.3.

    Args:
        outputs: logits [B], or [B, T] of tasks.
        rates_B: r of each example, of positives, too: float32 [B], above 0 and up to 1.
    """
    shift_B = rates_B.log()
    return outputs - (shift_B if outputs.ndim == 1 else shift_B.unsqueeze(1))


def tasks_of(
    labels: Sequence[str], settings: Mapping[str, TaskSettings], *, many: bool = True
) -> tuple[Task, ...]:
    """A task for each label, in order, or of the first one alone; settings by label.

    Raises:
        UnknownName: a label that is none of them.
    """
    wheres = [own.where for own in settings.values() if own.where is not None]
    for name in (*settings, *wheres):
        known_name("label in tasks", name, labels)
    made = []
    for column, label in enumerate(labels):
        own = settings.get(label, TaskSettings())
        where = None if own.where is None else labels.index(own.where)
        made.append(Task(label=label, column=column, weight=own.weight, loss=own.loss, where=where))
    return tuple(made if many else made[:1])


@dataclass(frozen=True, slots=True)
class Predicted:
    """The outputs of a model by name: its own, or with several tasks "model/label" each."""

    model: str
    tasks: tuple[Task, ...]

    @property
    def columns(self) -> dict[str, int]:
        """The column of each output's label."""
        many = len(self.tasks) > 1
        return {f"{self.model}/{t.label}" if many else self.model: t.column for t in self.tasks}

    def split(self, found: Iterable[Tensor]) -> dict[str, list[Tensor]]:
        """Logits or probabilities of batches, [B] or [B, T], as [B] by output."""
        parts = list(found)
        if len(self.tasks) == 1:
            return {self.model: parts}
        return {name: [one[:, k] for one in parts] for k, name in enumerate(self.columns)}

    @property
    def names(self) -> list[str]:
        """Columns of a table: prediction and label, or by task prediction_TASK, ..., label_TASK."""
        ends = [f"_{task.label}" for task in self.tasks] if len(self.tasks) > 1 else [""]
        return [f"{column}{end}" for column in ("prediction", "label") for end in ends]

    def table(self, found: Tensor, labels_BT: Tensor) -> dict[str, Tensor]:
        """Float32 columns [B] by `names`."""
        predictions = [one_B for (one_B,) in self.split([found]).values()]
        labels = [labels_BT[:, task.column].float() for task in self.tasks]
        return dict(zip(self.names, [*predictions, *labels], strict=True))


def columns_of(every: Iterable[Predicted]) -> dict[str, int]:
    """The column of each output's label, of several models."""
    return {name: column for one in every for name, column in one.columns.items()}


def split_all(
    every: Iterable[Predicted], found: Mapping[str, Iterable[Tensor]]
) -> dict[str, list[Tensor]]:
    """What several models predicted of batches, as `Predicted.split`; found: by model."""
    parts = (one.split(found[one.model]) for one in every)
    return {name: own for by_output in parts for name, own in by_output.items()}


def inputs_of_ids(
    ids: KeyedRagged, sequences: Sequence[str], id_feature: str | None
) -> dict[str, Tensor]:
    """Inputs of a dense module that are ids and lengths, by name.

    Args:
        ids: of a batch.
        sequences: features whose lengths [B, S] it takes.
        id_feature: whose ids [B] it takes; None: of none.

    Raises:
        ShapeError: not one id an example of `id_feature`, or sequences of unequal lengths.
    """
    found: dict[str, Tensor] = {}
    if sequences:
        lengths_SB = ids.host_lengths[[ids.keys.index(name) for name in sequences]]
        if not torch.equal(lengths_SB, lengths_SB[:1].expand_as(lengths_SB)):
            at = int((lengths_SB != lengths_SB[0]).any(dim=0).nonzero()[0])
            got = f"{lengths_SB[:, at].tolist()} of example {at}"
            what = f"lengths of sequences {list(sequences)}"
            raise ShapeError(what, got, "one", "Fill up the shorter ones.")
        found[LENGTHS] = torch.stack([ids[name].lengths for name in sequences], dim=1)
    if id_feature is not None:
        found[IDS] = ids[id_feature].values
        lengths_B = ids.host_lengths[ids.keys.index(id_feature)]
        if (lengths_B != 1).any():
            got = f"{int(lengths_B[lengths_B != 1][0])} of an example"
            raise ShapeError(f"ids of {id_feature!r}", got, "one each", "Set model.item_id.")
    return found


def outputs_of(
    module: Callable[..., Tensor],
    dense_B: Tensor | None,
    rows: Mapping[str, Tensor],
    dtype: torch.dtype,
    device_type: str = "cpu",
    negatives: Negatives | None = None,
    *,
    vectors: bool = False,
) -> Tensor:
    """Float32 outputs of a dense module, over dense columns and its other inputs by name.

    dtype: of its products (`AMP_DTYPES`); vectors: of users and items, in place of outputs.
    """
    # Rows of float64 tables, too: dense weights are float32.
    inputs = {name: one if name in _INTEGERS else one.float() for name, one in rows.items()}
    sequences = [inputs[name] for name in (SEQUENCES, LENGTHS) if name in inputs]
    ids: dict[str, Any] = {"ids_B": inputs[IDS]} if IDS in inputs else {}
    ids |= {} if negatives is None else {"negatives": negatives}
    ids |= {"vectors": True} if vectors else {}
    with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
        outputs = module(dense_B, inputs[EMBEDDINGS], inputs.get(FIRST_ORDER), *sequences, **ids)
    return outputs.float()
