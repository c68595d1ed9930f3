"""Several optimizers that step as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.errors import CheckpointError, ConfigError, all_of_kind
from shoal.optim.sparse import SparseOptimizer, evaluated, not_copied
from shoal.uncompiled import uncompiled


@uncompiled
class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, so that a loss scaler skips the step of all or of none.

    `param_groups` are the members' own, as they are now: learning-rate schedulers work on this
    optimizer as on its members.

    Args:
        optimizers: dense and sparse ones, in the order they step.

    Raises:
        ConfigError: none given, or a parameter in two of them.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        own = all_of_kind("optimizers of a JointOptimizer", optimizers, torch.optim.Optimizer)
        groups = [group for member in own for group in member.param_groups]
        params = [param for group in groups for param in group["params"]]
        if not params or len({id(param) for param in params}) != len(params):
            got, remedy = "a parameter twice" if params else "no parameters", "Give each to one."
            allowed = "optimizers of distinct parameters"
            raise ConfigError("members of a JointOptimizer", got, allowed, remedy)
        super().__init__([{"params": params}], {})
        self.optimizers = own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The members' groups, in order."""
        return [group for member in self.optimizers for group in member.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """torch's constructor begins with none; there are no others than the members'."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a group belongs to a member.

        Raises:
            ConfigError: always, once made.
        """
        if self.optimizers:
            what, remedy = "param group of a JointOptimizer", "Add it to the member that steps it."
            raise ConfigError(what, "one to add", "groups of its members", remedy)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all members, or none if `check_finite` raises; a closure runs once, before that."""
        loss = evaluated(closure)
        self.check_finite()
        for member in self.optimizers:
            if isinstance(member, SparseOptimizer):
                member.finite_checked = True
            member.step()
        return loss

    def check_finite(self) -> None:
        """`SparseOptimizer.check_finite` of the sparse members, before any has stepped."""
        for member in self.optimizers:
            if isinstance(member, SparseOptimizer | JointOptimizer):
                member.check_finite()

    def check(self) -> None:
        """`SparseOptimizer.check` of the sparse members; waits for the device."""
        for member in self.optimizers:
            if isinstance(member, SparseOptimizer | JointOptimizer):
                member.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all members."""
        for member in self.optimizers:
            member.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The members' states, in order."""
        return {"optimizers": [member.state_dict() for member in self.optimizers]}

    def __getstate__(self) -> dict[str, Any]:
        raise not_copied("a JointOptimizer")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hand each member its state.

        Raises:
            CheckpointError: not one state per member.
        """
        states = state_dict.get("optimizers", ())
        if len(states) != len(self.optimizers):
            got, allowed = f"{len(states)} states", f"{len(self.optimizers)}, one per optimizer"
            remedy = "Load what JointOptimizer.state_dict() returned."
            raise CheckpointError("state of a JointOptimizer", got, allowed, remedy)
        for member, state in zip(self.optimizers, states, strict=True):
            member.load_state_dict(state)
