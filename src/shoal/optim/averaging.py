"""A moving average of dense parameters, for evaluation; tables keep their own rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError, of_kind

__all__ = ["ParameterAverage"]


class ParameterAverage:
    """average = decay * average + (1 - decay) * parameter, after each step.

    Training continues with the raw parameters, which are saved next to the average.

    Args:
        module: whose parameters are averaged, from their present values on.
        decay: 0 keeps the last parameters, near 1 averages over about 1 / (1 - decay) steps.
    """

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.decay = decay
        self._live = dict(of_kind("module", module, nn.Module).named_parameters())
        self._mean = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the present parameters to the average."""
        mean = list(self._mean.values())
        torch._foreach_lerp_(mean, [p.detach() for p in self._live.values()], 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the module computes with the average; only its parameters are swapped."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._live.items():
            kept = parameter.detach().clone()
            parameter.copy_(self._mean[name])
            self._mean[name].copy_(kept)

    def restart(self) -> None:
        """Begin with the present parameters, which were loaded say."""
        self.load_state_dict(self._live)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(self._mean)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over averages.

        Raises:
            CheckpointError: of another model.
        """
        if set(state) != set(self._mean):
            raise CheckpointError(
                "averaged parameters",
                got=f"others: {sorted(set(state) ^ set(self._mean))}",
                allowed="those of the model",
                remedy="Build the model that the average was saved of.",
            )
        for name, value in state.items():
            self._mean[name].copy_(value)
