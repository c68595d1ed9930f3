"""The common parts of all models: inputs and their widths, dense layers, and what a spec declares.

A config names a spec by its kind and sets its fields; `build` makes the module of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, ShapeError, all_of_kind, known_name
from shoal.models.tasks import Objective, Pointwise, Task

BIAS = "bias"
"""Segment of a row: its first-order weight."""
VEC = "vec"
"""Segment of a row: its embedding."""
_WIDTHS = (1, 1 << 16)
_MOST = 64  # layers, or names


class Inputs(NamedTuple):
    """Widths of a model's inputs; a plain (num_dense, num_features, dim) tuple works too.

    num_dense: dense features, 0 for none; num_features F: pooled embeddings of one example; dim
    D: their width. Models that ask for features by name need more: names of the F features, of
    the S sequences, whose rows are not pooled, the `length` L of each, and the labels that are
    predicted.
    """

    num_dense: int
    num_features: int
    dim: int
    names: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    length: int = 0
    labels: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, num_dense: int, dim: int, features: Mapping[str, int], tasks: tuple[Task, ...]
    ) -> Inputs:
        """Of features by name.

        Args:
            num_dense: dense columns.
            dim: of an embedding.
            features: their lengths as sequences, 0 of those that are pooled.
            tasks: whose labels the model has an output for.
        """
        pooled = tuple(name for name, length in features.items() if not length)
        sequences = tuple(name for name in features if name not in pooled)
        length = max(features.values(), default=0)
        labels = tuple(task.label for task in tasks)
        return cls(num_dense, len(pooled), dim, pooled, sequences, length, labels)

    @property
    def width(self) -> int:
        """num_dense + F * D."""
        return self.num_dense + self.num_features * self.dim

    def require(self) -> Inputs:
        """Return self if the widths are valid.

        Raises:
            ConfigError: a negative num_dense, or F or D below 1.
        """
        if self.num_dense < 0 or self.num_features < 1 or self.dim < 1:
            raise ConfigError(
                "(num_dense, num_features, dim)",
                got=tuple(self)[:3],
                allowed="at least (0, 1, 1)",
                remedy="Count the dense columns and the pooled embeddings of the data.",
            )
        return self

    def check(
        self, dense_B: Tensor | None, embeddings_BFD: Tensor, first_order_BF: Tensor | None
    ) -> None:
        """Check a batch against the widths; dense_B is None exactly if num_dense is 0.

        Raises:
            ShapeError: a shape differs.
        """
        shape = tuple(embeddings_BFD.shape)
        if embeddings_BFD.ndim != 3 or shape[1:] != (self.num_features, self.dim):
            raise _shape_error("embeddings", shape, f"[B, {self.num_features}, {self.dim}]")
        batch = shape[0]
        dense = None if dense_B is None else tuple(dense_B.shape)
        if dense != ((batch, self.num_dense) if self.num_dense else None):
            allowed = f"[{batch}, {self.num_dense}]" if self.num_dense else "None"
            raise _shape_error("dense features", dense, allowed)
        if first_order_BF is not None and first_order_BF.shape[:-1] != (batch,):
            got = tuple(first_order_BF.shape)
            raise _shape_error("first-order weights", got, f"[{batch}, F]")

    def places(self, features: tuple[str, ...]) -> list[int]:
        """Where features are among the F.

        Raises:
            UnknownName: one is none of them.
        """
        for name in features:
            remedy = "Name pooled features of the data."
            known_name("feature of the model", name, self.names, remedy=remedy)
        return [self.names.index(name) for name in features]

    def flatten(self, dense_B: Tensor | None, embeddings_BFD: Tensor) -> Tensor:
        """Dense features and embeddings, concatenated, [B, width]; under autocast in its dtype."""
        flat_BX = in_autocast(embeddings_BFD.flatten(1))
        return flat_BX if dense_B is None else torch.cat([in_autocast(dense_B), flat_BX], dim=1)


Widths = Inputs | tuple[int, int, int]


def in_autocast(inputs: Tensor) -> Tensor:
    """In the dtype of autocast's products, where it is on.

    Autocast casts again for each product, and leaves a product times float32 inputs in float32. It
    leaves float64 as it is.
    """
    device = inputs.device.type
    # The meta device has no autocast to ask for.
    if inputs.is_meta or inputs.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return inputs
    return inputs.to(torch.get_autocast_dtype(device))


class AlignedLinear(nn.Linear):
    """A linear layer of any number of inputs; products in 16 bits are over a multiple of 8.

    GPUs multiply others many times slower. Zeros fill up inputs and weights on the way.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[B, in_features] -> [B, out_features]."""
        given, missing = in_autocast(input), -self.in_features % 8
        if not missing or given.element_size() != 2:
            return super().forward(given)
        fill = nn.functional.pad
        weight = fill(in_autocast(self.weight), (0, missing))
        return nn.functional.linear(fill(given, (0, missing)), weight, self.bias)


class MLP(nn.Sequential):
    """Dense layers with ReLU, He-initialised: [B, in_features] -> [B, out_features].

    Args:
        in_features: input width.
        hidden: widths of the ReLU layers; () leaves a linear layer, or nothing.
        out_features: width of a last linear layer; 0 ends after the last ReLU.
        dropout: share of each hidden layer dropped in training.
        batch_norm: normalise before each ReLU.

    Raises:
        ConfigError: a width below 1, or dropout outside [0, 1).
    """

    def __init__(
        self,
        in_features: int,
        hidden: tuple[int, ...],
        *,
        out_features: int = 0,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        hidden = all_of_kind("hidden of an MLP", hidden, Integral)
        all_of_kind("sizes of an MLP", (in_features, out_features, dropout), Real)
        if min((in_features, *hidden)) < 1 or out_features < 0 or not 0 <= dropout < 1:
            raise ConfigError(
                "(in_features, hidden, out_features, dropout) of an MLP",
                got=(in_features, hidden, out_features, dropout),
                allowed="widths of at least 1 (out_features 0 or more), dropout in [0, 1)",
                remedy="Leave a layer out rather than giving it no width.",
            )
        super().__init__()
        width = in_features
        for size in hidden:
            self.append(_linear(width, size, "relu"))
            if batch_norm:
                self.append(nn.BatchNorm1d(size))
            self.append(nn.ReLU())
            if dropout:
                self.append(nn.Dropout(dropout))
            width = size
        if out_features:
            self.append(_linear(width, out_features, "linear"))
            width = out_features
        self.out_features = width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Settings of a model; the specs of models are its only subclasses.

    Attributes:
        kind: its name in configs.
        segments: of a row that it reads: `BIAS` as first-order weights, the last one as embeddings.
        takes_sequences: features with `combiner: first_n` are sequences to it; to other models
            they are their rows' mean.
        multi_task: it has an output for each label; other models predict the first.
        limits: least and largest numbers of a field; without one those of a width.
        needed: fields that are not empty.

    Raises:
        ConfigError: a number out of its limits, or an empty field.
    """

    kind: ClassVar[str]
    segments: ClassVar[tuple[str, ...]] = (VEC,)
    takes_sequences: ClassVar[bool] = False
    multi_task: ClassVar[bool] = False
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    needed: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            every = value if isinstance(value, tuple) else (value,)
            numbers = [n for n in every if isinstance(n, int | float) and not isinstance(n, bool)]
            low, high = self.limits.get(field.name, _WIDTHS)
            least = field.name in self.needed
            if not least <= len(every) <= _MOST or not all(low <= one <= high for one in numbers):
                raise ConfigError(
                    f"{field.name} of model {self.kind}",
                    got=list(every) if isinstance(value, tuple) else value,
                    allowed=f"{low:g}..{high:.16g}, {least:d} to {_MOST} of them",
                    remedy="Change the setting.",
                )

    def build(self, inputs: Inputs) -> nn.Module:
        """The module, whose inputs have these widths and names.

        Raises:
            UnknownName: a feature or label that the inputs do not have.
            ConfigError: widths that do not fit.
        """
        raise NotImplementedError

    def objective(self, tasks: tuple[Task, ...]) -> Objective:
        """The loss of its outputs."""
        return Pointwise(tasks)

    def check_negatives(self, features: Sequence[str] | None) -> None:
        """Check what sampled items have, the feature of their ids first; None: none are sampled.

        Raises:
            ConfigError: the model takes none, needs some, or needs other features.
        """
        if features is not None:
            allowed, remedy = "a model with a softmax over items", "Leave data.sampler out."
            raise ConfigError("model that data.sampler gives items to", self.kind, allowed, remedy)

    @property
    def id_feature(self) -> str | None:
        """The feature whose ids [B] it reads in training."""
        return None

    @property
    def item_features(self) -> tuple[str, ...]:
        """Features of an item, that of its ids first, where user and item have a vector each; its
        module then takes `vectors`. Empty: they do not."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deep(ModelSpec):
    """What models with dense layers share.

    hidden: widths of the hidden layers; dropout: share of them dropped in training; batch_norm:
    normalise each.
    """

    hidden: tuple[int, ...] = (128, 64)
    dropout: float = 0.0
    batch_norm: bool = False
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "dropout": (0.0, math.nextafter(1.0, 0.0)),
        "cross_layers": (0, 64),
    }

    @property
    def layers(self) -> dict[str, Any]:
        """`dropout` and `batch_norm`, as an `MLP` takes them."""
        return {"dropout": self.dropout, "batch_norm": self.batch_norm}


def _linear(in_features: int, out_features: int, then: str) -> nn.Linear:
    layer = AlignedLinear(in_features, out_features)
    nn.init.kaiming_normal_(layer.weight, nonlinearity=then)  # type: ignore[arg-type]
    nn.init.zeros_(layer.bias)
    return layer


def _shape_error(what: str, got: object, allowed: str) -> ShapeError:
    remedy = "Build the model with the widths of its data."
    return ShapeError(f"shape of {what}", got=got, allowed=allowed, remedy=remedy)
