"""Parameters that stand for tables where torch looks for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, describe
from shoal.ledger import GradientLedger
from shoal.optim.agreement import anywhere
from shoal.table.shard import Shard

__all__ = ["FiniteFlag", "TableGradient", "not_copied"]


def not_copied(what: str) -> ConfigError:
    """What pickle, deepcopy and torch.save of a part of a sparse optimizer raise."""
    remedy = "Make a new optimizer over the copied modules and load the state."
    got, allowed = "pickle, torch.save or deepcopy", "state_dict and load_state_dict"
    return ConfigError(describe(f"copy of {what}", got=got, allowed=allowed, remedy=remedy))


class _Proxy(nn.Parameter):
    """A parameter that stands for rows elsewhere, so that it cannot be copied by itself."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied("a SparseOptimizer's parameter")

    __deepcopy__ = __reduce_ex__


class TableGradient(_Proxy):
    """Stands for a table among an optimizer's parameters; holds no weights.

    `grad` is the gradient summed per id, [U, D] float32 (float64 for float64 tables) on the
    shard's device, of all backward passes since the last step; None before the first. It is
    worked out when read, and changes made to it in place are what `step()` applies. Setting None
    drops it. Where tables are spread over ranks, it has the rows that this rank owns.
    """

    _ledger: GradientLedger
    _table: int

    def __new__(cls, ledger: GradientLedger, table: int) -> TableGradient:
        spec = ledger.shard.specs[table]
        dtype = torch.float64 if spec.dtype == "float64" else torch.float32
        device = ledger.shard.device
        made = super().__new__(cls, torch.empty(0, spec.dim, dtype=dtype, device=device))
        made._ledger, made._table = ledger, table
        return made

    def __init__(self, ledger: GradientLedger, table: int) -> None:
        """All is done in `__new__`, as tensors are."""

    @property
    def shard(self) -> Shard:
        """Whose rows these are."""
        return self._ledger.shard

    @property
    def table(self) -> str:
        """The table's name; a column slice of one is named "table[start:stop]"."""
        return self._ledger.shard.specs[self._table].name

    @property
    def speaks_for_itself(self) -> bool:
        """Whether no other rank has the same rows to count."""
        return self.table not in self._ledger.silent

    @property
    def ids(self) -> Tensor | None:
        """The ids of `grad`'s rows, int64 [U], or None."""
        if self.grad is None:
            return None
        summed = self._ledger.summed()
        return summed.ids[summed.tables.index(self._table)]

    @property
    def grad(self) -> Tensor | None:
        return self._ledger.sums_of(self._table)

    @grad.setter
    def grad(self, sums_UD: Tensor | None) -> None:
        self._ledger.replace_sums(self._table, sums_UD)


class FiniteFlag(_Proxy):
    """Tells a loss scaler on every rank that some rank's rows have a gradient that is not finite.

    `grad` is float32 [1] on the shard's device: infinity if so, else 0. Reading it the first time
    in a step is a collective call of all ranks; None before the first backward.
    """

    _ledgers: tuple[GradientLedger, ...]
    _known: tuple[tuple[int, ...], Tensor] | None

    def __new__(cls, ledgers: Sequence[GradientLedger]) -> FiniteFlag:
        made = super().__new__(
            cls, torch.zeros(1, dtype=torch.float32, device=ledgers[0].shard.device)
        )
        made._ledgers, made._known = tuple(ledgers), None
        return made

    def __init__(self, ledgers: Sequence[GradientLedger]) -> None:
        """All is done in `__new__`, as tensors are."""

    @property
    def grad(self) -> Tensor | None:
        if not any(len(ledger) for ledger in self._ledgers):
            return None
        # What was written is the same on every rank, so all ask again or none.
        at = tuple(ledger.revision for ledger in self._ledgers)
        if self._known is None or self._known[0] != at:
            # A scaler reads the sums: they may overflow where the gradients do not.
            for ledger in self._ledgers:
                ledger.summed()
            bad_W = anywhere(self._ledgers, [~ledger.all_finite() for ledger in self._ledgers])
            flag = torch.where(bad_W.any().bool(), torch.inf, 0.0).to(torch.float32).reshape(1)
            self._known = at, flag.to(self.device)
        return self._known[1]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._known = None
