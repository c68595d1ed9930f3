"""The optimizer of sparse rows, with torch's manners: step, zero_grad, loss scaling, clipping.

Rules and rates belong to the tables' specs; here is when they act. `step()` applies everything
that backward recorded since the last one, each touched row once. The per-id gradient sums show
up as `.grad` of proxy parameters, one per table, made when first read: a `GradScaler` or
`torch.nn.utils.clip_grad_norm_` finds them there and may change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.embedding import EmbeddingCollection, GradientLedger
from shoal.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteGradient,
    describe,
    unknown_name,
)
from shoal.rules.schedules import Constant, Schedule
from shoal.table.shard import NanPolicy, StepContext
from shoal.table.spec import TableSpec

__all__ = ["JointOptimizer", "SparseOptimizer", "TableGradient", "clip_grad_norm_"]

RateKey = str | tuple[str, str]
NAN_POLICIES: tuple[NanPolicy, ...] = ("raise", "skip", "clip")


class TableGradient(nn.Parameter):
    """Stands for a table among an optimizer's parameters; holds no weights.

    `grad` is the gradient summed per id, [U, D] float32 (float64 for float64 tables) on the
    shard's device, of all backward passes since the last step; None before the first. It is
    worked out when read, and changes made to it in place are what `step()` applies. Setting None
    drops it.
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
    def table(self) -> str:
        """The table's name."""
        return self._ledger.shard.specs[self._table].name

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


class SparseOptimizer(torch.optim.Optimizer):
    """Steps the rows of all embedding collections in some modules.

    Several forward and backward passes before a step add up; rows nobody touched stay put.
    On CUDA a step does not wait for the device, but for a loss scaler or clipping that does, and
    for rules and compressors that kernels do not know.
    Works under `torch.amp.GradScaler` as it is. The scaler decides per optimizer whether to skip:
    put this one and the dense ones in a `JointOptimizer` to skip all or none.

    Args:
        modules: what to search for `EmbeddingCollection`s. Collections on one shard step as one.
        rates: learning rates by name: "table" or ("table", "segment") -> float or Schedule of the
            global step. What is not named keeps the rate of its spec's rule.
        nan_policy: for gradients with NaN or infinity: "raise" before anything changes, "skip"
            those rows and count them, or "clip" them to 0 and +-nan_clip. On CUDA "raise" does
            not wait: see `check`.
        nan_clip: what "clip" puts for infinities.

    Attributes:
        global_step: steps done; what schedules and the rules see.

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
        collections = _collections([modules] if isinstance(modules, nn.Module) else modules)
        self._ledgers = _share_ledgers(collections)
        self._rates = _bind_rates(collections, rates or {})
        self._nan_policy: NanPolicy = nan_policy
        # Refuses a bad clip now, not at the first step.
        self._nan_clip = StepContext(nan_clip=nan_clip).nan_clip
        self.global_step = 0
        self._announce()
        used = {(id(c.shard), name) for c in collections for name in c.tables}
        self.proxies = tuple(
            TableGradient(ledger, k)
            for ledger in self._ledgers
            for k, spec in enumerate(ledger.shard.specs)
            if (id(ledger.shard), spec.name) in used
        )
        super().__init__([{"params": list(self.proxies)}], {})

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
        rates = self.rates()
        if len(self._ledgers) > 1:
            self.check_finite()
        for ledger in self._ledgers:
            ledger.apply(
                StepContext(
                    global_step=self.global_step,
                    event_time_s=ledger.event_time_s,
                    learning_rates=rates,
                    nan_policy=self._nan_policy,
                    nan_clip=self._nan_clip,
                )
            )
        self.global_step += 1
        self._announce()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all recorded gradients; tickets end with them. Sums are always set to None."""
        for ledger in self._ledgers:
            ledger.clear()

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Learning rates of the coming step, one per segment, of the tables named in `rates`."""
        step = self.global_step
        return {name: tuple([rate(step) for rate in bound]) for name, bound in self._rates.items()}

    def state_dict(self) -> dict[str, Any]:
        """The global step. Rows and their optimizer state belong to the shard's checkpoint."""
        return {"global_step": self.global_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the global step.

        Raises:
            CheckpointError: not what `state_dict` returns.
        """
        step = state_dict.get("global_step")
        if set(state_dict) != {"global_step"} or not isinstance(step, int) or step < 0:
            raise CheckpointError(
                describe(
                    "state of a SparseOptimizer",
                    got=f"keys {sorted(map(str, state_dict))}",
                    allowed="{'global_step': steps done}",
                    remedy="Load what SparseOptimizer.state_dict() returned.",
                )
            )
        self.global_step = step
        self._announce()

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            describe(
                "copy of a SparseOptimizer",
                got="pickle or deepcopy",
                allowed="state_dict and load_state_dict",
                remedy="Make a new SparseOptimizer over the copied modules and load the state.",
            )
        )

    def _announce(self) -> None:
        for ledger in self._ledgers:
            ledger.global_step = self.global_step

    def check(self) -> None:
        """Raise what the last steps found; waits for the device. Nothing to find on the CPU.

        Call it where a loop waits anyway: when it logs, saves or ends.

        Raises:
            NonFiniteGradient: a gradient held NaN or infinity under the policy "raise".
        """
        for ledger in self._ledgers:
            ledger.shard.check()

    def check_finite(self) -> None:
        """Under the policy "raise", raise NonFiniteGradient before anything steps.

        Tables on CUDA are not asked, since that would wait for the device at every step.
        """
        for ledger in self._ledgers if self._nan_policy == "raise" else ():
            if ledger.shard.device.type == "cpu" and not ledger.finite():
                names = ", ".join(spec.name for spec in ledger.shard.specs)
                raise NonFiniteGradient(
                    describe(
                        f"gradients of tables {names}",
                        got="NaN or infinity",
                        allowed="finite values",
                        remedy="Lower the learning rate, or set nan_policy to 'skip' or 'clip'.",
                    )
                )


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, so that a loss scaler skips the step of all or of none.

    `param_groups` are the members' own, so learning-rate schedulers of the members keep working.

    Args:
        optimizers: dense and sparse ones, in the order they step.

    Raises:
        ConfigError: none given, or a parameter in two of them.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        groups = [group for member in self.optimizers for group in member.param_groups]
        params = [param for group in groups for param in group["params"]]
        if not params or len({id(param) for param in params}) != len(params):
            raise ConfigError(
                describe(
                    "members of a JointOptimizer",
                    got="a parameter twice" if params else "no parameters",
                    allowed="optimizers of distinct parameters",
                    remedy="Give each parameter to one optimizer.",
                )
            )
        super().__init__([{"params": params}], {})
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all members, or none if `check_finite` raises; a closure runs once, before that."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_finite()
        for member in self.optimizers:
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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hand each member its state.

        Raises:
            CheckpointError: not one state per member.
        """
        states = state_dict.get("optimizers", ())
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                describe(
                    "state of a JointOptimizer",
                    got=f"{len(states)} states",
                    allowed=f"{len(self.optimizers)}, one per optimizer",
                    remedy="Load what JointOptimizer.state_dict() returned.",
                )
            )
        for member, state in zip(self.optimizers, states, strict=True):
            member.load_state_dict(state)
        self.param_groups = [g for member in self.optimizers for g in member.param_groups]


def clip_grad_norm_(
    dense_params: Tensor | Iterable[Tensor],
    sparse: SparseOptimizer | Iterable[SparseOptimizer],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale dense gradients and per-id sums together so that their common norm fits.

    As `torch.nn.utils.clip_grad_norm_` on a model whose tables are dense: same factor, same
    result for a norm that is not finite. Under a loss scaler, `unscale_` both sides first.

    Returns:
        the norm before clipping, a scalar tensor.

    Raises:
        RuntimeError: the norm is not finite and error_if_nonfinite is set.
    """
    dense = [dense_params] if isinstance(dense_params, Tensor) else list(dense_params)
    members = [sparse] if isinstance(sparse, SparseOptimizer) else list(sparse)
    # An empty sum has no largest element, which the infinity norm would ask for.
    tables = [
        proxy
        for member in members
        for proxy in member.proxies
        if proxy.grad is not None and proxy.grad.numel()
    ]
    return nn.utils.clip_grad_norm_(
        [*dense, *tables], max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )


def _collections(modules: Iterable[nn.Module]) -> list[EmbeddingCollection]:
    found: dict[int, EmbeddingCollection] = {}
    for module in modules:
        for part in module.modules():
            if isinstance(part, EmbeddingCollection):
                found[id(part)] = part
    if not found:
        raise ConfigError(
            describe(
                "modules of a SparseOptimizer",
                got="no EmbeddingCollection",
                allowed="modules with one or more",
                remedy="Pass the model that holds the collection.",
            )
        )
    return list(found.values())


def _share_ledgers(collections: Sequence[EmbeddingCollection]) -> tuple[GradientLedger, ...]:
    """One ledger per shard: rows that two collections touch take one step."""
    ledgers: dict[int, GradientLedger] = {}
    for collection in collections:
        ledger = ledgers.setdefault(id(collection.shard), collection.ledger)
        if ledger.inserts != collection.init_on_lookup:
            raise ConfigError(
                describe(
                    "init_on_lookup of collections on one shard",
                    got="True and False",
                    allowed="one mode",
                    remedy="Build both with the same init_on_lookup.",
                )
            )
        if ledger is not collection.ledger:
            ledger.take_over(collection.ledger)
            collection.ledger = ledger
    return tuple(ledgers.values())


def _bind_rates(
    collections: Sequence[EmbeddingCollection], rates: Mapping[RateKey, float | Schedule]
) -> dict[str, tuple[Callable[[int], float], ...]]:
    specs: dict[str, TableSpec] = {}
    owners: dict[str, set[int]] = {}
    for collection in collections:
        specs.update(collection.tables)
        for name in collection.tables:
            owners.setdefault(name, set()).add(id(collection.shard))
    bound: dict[str, dict[str, Callable[[int], float]]] = {}
    for key, rate in sorted(rates.items(), key=lambda item: isinstance(item[0], tuple)):
        name, segment = (key, None) if isinstance(key, str) else key
        if name not in specs:
            raise unknown_name("table in rates", name, specs)
        if len(owners[name]) > 1:
            raise ConfigError(
                describe(
                    f"rate of table {name!r}",
                    got=f"a name that {len(owners[name])} shards have",
                    allowed="a name of one table",
                    remedy="Use one SparseOptimizer per module, or rename a table.",
                )
            )
        own = {part.name: part.optimizer.rate for part in specs[name].segments}
        if segment is not None and segment not in own:
            raise unknown_name(f"segment of table {name!r} in rates", segment, own)
        call = rate if isinstance(rate, Schedule) else Constant(rate)
        chosen = bound.setdefault(name, dict(own))
        chosen.update(dict.fromkeys([segment] if segment is not None else own, call))
    return {name: tuple(chosen.values()) for name, chosen in bound.items()}
