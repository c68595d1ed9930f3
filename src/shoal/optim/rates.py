"""Learning rates of tables as torch's schedulers see them: one param group per segment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from shoal.errors import CheckpointError, ConfigError, describe
from shoal.rules.schedules import Constant, Schedule
from shoal.table import scalars

__all__ = ["RateGroup", "check_groups", "load_groups", "saved_groups"]

_OWN = ("params", "name")


class RateGroup:
    """A segment of a table among an optimizer's `param_groups`: the group's "lr" is its rate.

    A number may be written there; the rate of a schedule is shown there, and may not.

    Args:
        name: of the group.
        table: name of the table.
        rate: of the coming steps while nobody writes another.
        named: the rate is not the spec's own.
    """

    def __init__(self, name: str, table: str, rate: Schedule, named: bool) -> None:
        self.name, self.table, self.named, self._rate = name, table, named, rate
        self._shown = rate(0)
        self.group: dict[str, Any] = {"params": [], "lr": self._shown, "name": name}

    @property
    def is_number(self) -> bool:
        """Whether the group's own rate is the same at every step."""
        return isinstance(self._rate, Constant)

    @property
    def written(self) -> bool:
        """Whether the group has another rate than its own."""
        return bool(self.group["lr"] != self._shown)

    @property
    def touched(self) -> bool:
        """Whether the rate was written, or a scheduler keeps something of its own in the group."""
        return self.written or len(self.group) > len(_OWN) + 1

    def at(self, step: int) -> float:
        """The rate at a step; shown in the group.

        Raises:
            ConfigError: somebody wrote a rate where a schedule says it.
            DTypeError, InputError: what was written is not a finite number.
        """
        written = self.group["lr"]
        if not self.written:
            self.show(step)
        elif not self.is_number:
            raise ConfigError(
                describe(
                    f"lr of param group {self.name!r}",
                    got=f"{written!r}, written where the schedule {self._rate!r} gives "
                    f"{self._shown:g}",
                    allowed="one that says the rate: the table's schedule, or who writes lr",
                    remedy="Give the table a number as its rate, or keep a torch scheduler to the "
                    "other optimizers.",
                )
            )
        value = self.group["lr"]
        value = value.item() if isinstance(value, Tensor) else value
        scalars.finite_rates({self.table: (value,)})
        return float(value)

    def show(self, step: int) -> None:
        """Put the group's own rate there."""
        self._shown = self.group["lr"] = self._rate(step)


def saved_groups(groups: Iterable[RateGroup]) -> list[dict[str, Any]]:
    """Settings by name of the groups that somebody touched."""
    return [
        {key: value for key, value in one.group.items() if key != "params"}
        for one in groups
        if one.touched
    ]


def check_groups(groups: Iterable[RateGroup], saved: object) -> None:
    """Check what `load_groups` is about to get.

    Raises:
        CheckpointError: not what `saved_groups` returns of such groups.
    """
    here = [one.name for one in groups]
    parts = saved if isinstance(saved, list | tuple) else (saved,)
    names = [part.get("name") if isinstance(part, dict) else part for part in parts]
    strangers = [name for name in names if name not in here]
    if strangers:
        raise CheckpointError(
            describe(
                "param groups of a SparseOptimizer's state",
                got=", ".join(map(repr, strangers)),
                allowed=", ".join(map(repr, here)),
                remedy="Load it into an optimizer of the same tables and segments.",
            )
        )


def load_groups(groups: Iterable[RateGroup], saved: Iterable[Mapping[str, Any]], step: int) -> None:
    """Take over what `saved_groups` returned; other groups get their own rate at a step."""
    settings = {group["name"]: group for group in saved}
    for one in groups:
        own = settings.get(one.name, {})
        one.group.update({k: v for k, v in own.items() if k not in _OWN})
        if "lr" not in own or not one.is_number:
            one.show(step)
