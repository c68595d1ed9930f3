"""What an optimizer rule is: a frozen value with reference arithmetic in plain torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.rules.schedules import as_rate

Coupling = Literal["element", "segment", "row"]


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule may know beside a row and its gradient.

    Args:
        global_step: optimizer steps done before this one, >= 0.
        seen_UD: [U, D] weights the gradients were computed at, for stale gradients; None means
            the present weights.
    """

    global_step: int = 0
    seen_UD: Tensor | None = None


class Optimizer(ABC):
    """One step of one segment of a row: (weights, state, gradient, rate) -> (weights, state).

    Leaves are frozen dataclasses whose numeric fields, but for `lr`, go to the compiled core by
    name. `kind` is the rule's name there. `coupling` says which columns one column's step reads:
    its own ("element"), those of its segment, or the whole row; placement may not cut those.
    """

    __slots__ = ()

    kind: ClassVar[str]

    @property
    @abstractmethod
    def coupling(self) -> Coupling:
        """The columns that the step of one column reads."""

    @abstractmethod
    def state_width(self, dim: int) -> int:
        """Floats of state S that a segment of `dim` columns carries."""

    @abstractmethod
    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """State [S] of a row that has had no step."""

    @abstractmethod
    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        """One step of U rows; inputs stay as they are.

        All tensors share one floating dtype, in which the step is computed; U may be 0.

        Returns:
            new weights [U, D] and new state [U, S].
        """

    def rate(self, step: int) -> float:
        """The learning rate at a global step; 1.0 for a rule without one."""
        return as_rate(getattr(self, "lr", 1.0), step)

    def check_dim(self, dim: int) -> None:
        """Check that the rule can drive a segment of `dim` columns.

        Raises:
            ConfigError: it cannot.
        """
        if dim < 1:
            raise ConfigError(
                f"dim of a segment with {type(self).__name__}",
                got=dim,
                allowed="at least 1",
                remedy="Give the segment one column or more.",
            )

    def core_params(self) -> dict[str, float]:
        """The numbers the compiled core gets: numeric fields by name but `lr`, bools as 0 or 1."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {
            name: float(value)
            for name, value in values.items()
            if name != "lr" and isinstance(value, (int, float))
        }


def rest_of(share: float, like: Tensor) -> Tensor:
    """1 - share, both rounded to the dtype of `like`; a scalar tensor.

    In float32, 1 - 0.999 is off by 1e-5. Beta powers start from the rounded 0.999 and so hold the
    same error, which then cancels in the bias correction.
    """
    return 1 - like.new_tensor(share)
