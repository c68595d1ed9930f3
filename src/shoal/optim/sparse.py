"""The optimizer of embedding rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import (
    CheckpointError,
    NonFiniteGradient,
    ShoalError,
    describe,
    unknown_name,
)
from shoal.ledger import GradientLedger
from shoal.optim.agreement import anywhere, shared
from shoal.optim.binding import (
    RateKey,
    find_collections,
    group_rates,
    hosted_rates,
    share_ledgers,
)
from shoal.optim.proxies import FiniteFlag, TableGradient, not_copied
from shoal.optim.rates import check_groups, load_groups, saved_groups
from shoal.rules.schedules import Schedule
from shoal.table.shard import NanPolicy, StepContext
from shoal.uncompiled import uncompiled

__all__ = ["NAN_POLICIES", "SparseOptimizer"]

NAN_POLICIES: tuple[NanPolicy, ...] = ("raise", "skip", "clip")


@uncompiled
class SparseOptimizer(torch.optim.Optimizer):
    """Steps the rows of all embedding collections in some modules.

    Several forward and backward passes before a step add up; rows nobody touched stay put.
    On CUDA a step does not wait for the device, but for a loss scaler or clipping that does, and
    for rules and compressors that kernels do not know.
    Works under `torch.amp.GradScaler` as it is. The scaler decides per optimizer whether to skip:
    put this one and the dense ones in a `JointOptimizer` to skip all or none. Where tables are
    spread over ranks, all ranks skip or none: a `FiniteFlag` among the parameters tells the
    scaler, and "raise" raises on all ranks.

    torch's learning-rate schedulers work: there is a param group per table (per segment, where a
    table has several), and an "lr" that is written there is the rate of the coming steps. Of a
    table whose rate is a schedule, "lr" shows the rate, and writing another is an error at the
    next step.

    Args:
        modules: what to search for `EmbeddingCollection`s. Collections on one shard step as one.
        rates: learning rates by name: "table" or ("table", "segment") -> float or Schedule of the
            global step. What is not named keeps the rate of its spec's rule.
        nan_policy: for gradients with NaN or infinity, also where only a row's sum over all that
            was recorded is: "raise" before anything changes, "skip" those rows and count them, or
            "clip" the sum to 0 and +-nan_clip. Of a table placed in
            column slices, "skip" skips the slices that are hit. On CUDA "raise" does not wait:
            see `check`.
        nan_clip: what "clip" puts for infinities.

    Attributes:
        global_step: steps done; what schedules and the rules see.
        proxies: one parameter per table of this process's shards, whose `.grad` has its sums.
        ledgers: where backward writes, one per shard.

    Raises:
        ConfigError: no collection in the modules, or an unknown policy.
        UnknownName: a rate for a table or segment that does not exist.
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        *,
        rates: Mapping[RateKey, float | Schedule] | None = None,
        nan_policy: NanPolicy = "raise",
        nan_clip: float = 1.0,
    ) -> None:
        if nan_policy not in NAN_POLICIES:
            raise unknown_name("nan_policy", nan_policy, NAN_POLICIES)
        collections = find_collections([modules] if isinstance(modules, nn.Module) else modules)
        self.ledgers = share_ledgers(collections)
        self._tables = {name: spec for c in collections for name, spec in c.tables.items()}
        self._nan_policy: NanPolicy = nan_policy
        # Refuses a bad clip now, not at the first step.
        self._nan_clip = StepContext(nan_clip=nan_clip).nan_clip
        # Whoever steps several optimizers has asked them all before.
        self.vouched = False
        used = {(id(c.shard), name) for c in collections for name in c.tables}
        self._spread = spread = {id(c.shard) for c in collections if c.distributed}
        self.proxies = tuple(
            TableGradient(ledger, k)
            for ledger in self.ledgers
            for k, spec in enumerate(ledger.shard.specs)
            if id(ledger.shard) in spread or (id(ledger.shard), spec.name) in used
        )
        self._flag = None if shared(self.ledgers) is None else FiniteFlag(self.ledgers)
        self._rates = group_rates(collections, self.proxies, rates or {})
        self._groups = [group for groups in self._rates.values() for group in groups]
        if self._flag is not None:
            self._groups[0].group["params"].append(self._flag)
        super().__init__([group.group for group in self._groups], {})
        self.resume(max(ledger.claim(self) for ledger in self.ledgers))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply all gradients recorded since the last step; ends their tickets.

        closure: evaluates the model again and returns the loss, as in torch.

        Raises:
            NonFiniteGradient: a gradient holds NaN or infinity under the policy "raise"; no table
                was changed, and the records stay until `zero_grad`. Tables on CUDA leave the bad
                rows alone, step the others, and `check` raises.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        contexts = [
            StepContext(
                global_step=self.global_step,
                event_time_s=ledger.event_time_s,
                learning_rates=self._rates_of(ledger),
                nan_policy=self._nan_policy,
                nan_clip=self._nan_clip,
            )
            for ledger in self.ledgers
        ]
        several = len(self.ledgers) > 1 or shared(self.ledgers) is not None
        vouched, self.vouched = self.vouched, False
        if several and not vouched:
            self.check_finite()
        for ledger, ctx in zip(self.ledgers, contexts, strict=True):
            ledger.apply(ctx)
        self.resume(self.global_step + 1)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all recorded gradients; tickets end with them. Sums are always set to None."""
        for ledger in self.ledgers:
            ledger.clear()

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Learning rates of the coming step, one per segment, of the tables that `rates` names,
        whose "lr" in `param_groups` was written or that a scheduler of torch drives.

        Raises:
            ConfigError: an "lr" was written of a table whose rate is a schedule.
            DTypeError, InputError: what was written is not a finite number.
        """
        return {k: row for ledger in self.ledgers for k, row in self._written(ledger).items()}

    def _written(self, ledger: GradientLedger) -> dict[str, tuple[float, ...]]:
        return {
            table: tuple([group.at(self.global_step) for group in groups])
            for (shard, table), groups in self._rates.items()
            if shard == id(ledger.shard) and any(group.named or group.touched for group in groups)
        }

    def _rates_of(self, ledger: GradientLedger) -> dict[str, tuple[float, ...]]:
        rates = self._written(ledger)
        if id(ledger.shard) not in self._spread:
            return rates
        return hosted_rates(ledger.shard.specs, rates, self._tables)

    def resume(self, step: int) -> None:
        """Go on as after so many steps; a checkpoint that loads the tables calls it."""
        self.global_step = step
        for ledger in self.ledgers:
            ledger.global_step = step
        for group in self._groups:
            if not (group.written or group.is_number):
                group.show(step)

    def state_dict(self) -> dict[str, Any]:
        """The global step, and the settings of `param_groups` that somebody changed.

        Rows and their optimizer state belong to the shard's checkpoint.
        """
        groups = saved_groups(self._groups)
        return {"global_step": self.global_step, **({"param_groups": groups} if groups else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the global step, and rates that were written into `param_groups`.

        Raises:
            CheckpointError: not what `state_dict` returns; nothing was changed.
        """
        self.check_state_dict(state_dict)
        step = state_dict["global_step"]
        load_groups(self._groups, state_dict.get("param_groups", ()), step)
        self.resume(step)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check what `load_state_dict` is about to get.

        Raises:
            CheckpointError: not what `state_dict` returns.
        """
        step = state_dict.get("global_step")
        known = {"global_step"} <= set(state_dict) <= {"global_step", "param_groups"}
        if not known or not isinstance(step, int) or step < 0:
            raise CheckpointError(
                describe(
                    "state of a SparseOptimizer",
                    got=f"keys {sorted(map(str, state_dict))}",
                    allowed="{'global_step': steps done}, and 'param_groups' where some changed",
                    remedy="Load what SparseOptimizer.state_dict() returned.",
                )
            )
        check_groups(self._groups, state_dict.get("param_groups", ()))

    def __getstate__(self) -> dict[str, Any]:
        raise not_copied("a SparseOptimizer")

    def check(self) -> None:
        """Raise what the last steps found; waits for the device. Nothing to find on the CPU.

        Call it where a loop waits anyway: when it logs, saves or ends; on all ranks.

        Raises:
            NonFiniteGradient: a gradient held NaN or infinity under the policy "raise", here or
                on another rank.
        """
        if shared(self.ledgers) is None:
            for ledger in self.ledgers:
                ledger.shard.check()
            return
        found: ShoalError | None = None
        for ledger in self.ledgers:
            found = _found(ledger) or found
        self._raise_together(torch.tensor(found is not None, device="cpu"), found)

    def check_finite(self) -> None:
        """Under the policy "raise", raise NonFiniteGradient on all ranks before anything steps.

        Tables on CUDA are not asked, since that would wait for the device at every step.
        """
        asked = [ledger for ledger in self.ledgers if ledger.shard.device.type == "cpu"]
        if self._nan_policy != "raise" or not asked:
            return
        if shared(self.ledgers) is None:
            for ledger in asked:
                if not ledger.finite():
                    raise _not_finite(_names([ledger]))
            return
        bad = [ledger for ledger in asked if not ledger.finite()]
        self._raise_together(
            torch.tensor(bool(bad), device="cpu"), _not_finite(_names(bad)) if bad else None
        )

    def _raise_together(self, here: Tensor, found: ShoalError | None) -> None:
        """Raise on every rank what any of them found; a collective call."""
        ranks = anywhere(self.ledgers, [here]).nonzero().flatten().tolist()
        if found is not None:
            raise found
        if ranks:
            raise _not_finite(f"{_names(self.ledgers)} on ranks {ranks}")


def _found(ledger: GradientLedger) -> NonFiniteGradient | None:
    try:
        ledger.shard.check()
    except NonFiniteGradient as error:
        return error
    return None


def _names(ledgers: Iterable[GradientLedger]) -> str:
    return ", ".join(spec.name for ledger in ledgers for spec in ledger.shard.specs)


def _not_finite(tables: str) -> NonFiniteGradient:
    return NonFiniteGradient(
        describe(
            f"gradients of tables {tables}",
            got="NaN or infinity",
            allowed="finite values",
            remedy="Lower the learning rate, or set nan_policy to 'skip' or 'clip'.",
        )
    )
