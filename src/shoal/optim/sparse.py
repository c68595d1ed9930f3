"""The optimizer of embedding rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.optim.optimizer as hooks
from torch import Tensor, nn

from shoal import errors
from shoal.comm.collectives import Collectives
from shoal.comm.consensus import flagged, reduced
from shoal.embedding.collection import EmbeddingCollection
from shoal.embedding.gradients import GradientLedger
from shoal.errors import CheckpointError, ConfigError, NonFiniteGradient, known_name, unknown_name
from shoal.rules.schedules import ConstantRate, Schedule
from shoal.table import shard
from shoal.table.rows import real_dtype
from shoal.table.shard import NanPolicy, Shard, StepContext
from shoal.uncompiled import uncompiled


def shared(accumulators: Sequence[GradientLedger]) -> GradientLedger | None:
    """One of the accumulators whose tables are spread over ranks; None if there is none."""
    return next((ledger for ledger in accumulators if ledger.world_size > 1), None)


def anywhere(accumulators: Sequence[GradientLedger], here: Sequence[Tensor]) -> Tensor:
    """Which ranks say yes to any of some bool scalars, uint8 [W]; a collective call."""
    device = accumulators[0].shard.device
    mine = torch.stack([flag.to(device) for flag in here]).any()
    collectives = _collectives(accumulators)
    if collectives is None:
        return mine.to(torch.uint8).reshape(1)
    return flagged(collectives, mine, what="vote on finite gradients")


def summed(accumulators: Sequence[GradientLedger], value: Tensor) -> Tensor:
    """A scalar, added up over ranks; a collective call."""
    collectives = _collectives(accumulators)
    return value if collectives is None else reduced(collectives, value, "sum", what=_NORM)


def worst(accumulators: Sequence[GradientLedger], value: Tensor) -> Tensor:
    """The largest of a scalar over ranks, NaN if any is; a collective call."""
    collectives = _collectives(accumulators)
    if collectives is None:
        return value
    # Whether the maximum of a NaN is one depends on what carries it.
    pair = torch.stack([value.nan_to_num(0.0, posinf=torch.inf), value.isnan().to(value.dtype)])
    found = reduced(collectives, pair, "max", what=_NORM)
    return torch.where(found[1] > 0, torch.nan, found[0])


_NORM = "norm of gradients"


def _collectives(accumulators: Sequence[GradientLedger]) -> Collectives | None:
    """Of the ranks that share the tables, at the accumulator's step; None for one rank."""
    ledger = shared(accumulators)
    if ledger is None or ledger.collectives is None:
        return None
    ledger.collectives.step = ledger.global_step
    return ledger.collectives


_OWN = ("params", "name")


class RateGroup:
    """A segment of a table among an optimizer's `param_groups`: the group's "lr" is its rate.

    A number may be written there; the rate of a schedule is shown there, and may not.

    Args:
        name: of the group.
        table, segment: names of these.
        rate: of the coming steps while nobody writes another.
        named: the rate is not the spec's own.
    """

    def __init__(self, name: str, table: str, segment: str, rate: Schedule, named: bool) -> None:
        self.name, self.table, self.segment = name, table, segment
        self.named, self._rate = named, rate
        self._shown = rate(0)
        self.group: dict[str, Any] = {"params": [], "lr": self._shown, "name": name}

    @property
    def is_number(self) -> bool:
        """Whether the group's own rate is the same at every step."""
        return isinstance(self._rate, ConstantRate)

    @property
    def written(self) -> bool:
        """Whether the group has another rate than its own."""
        return bool(self.group["lr"] != self._shown)

    @property
    def touched(self) -> bool:
        """Whether the rate was written, or a scheduler keeps something of its own in the group."""
        return bool(self.group["lr"] != self._shown) or len(self.group) > len(_OWN) + 1

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
                f"lr of param group {self.name!r}",
                got=f"{written!r}, written where the schedule {self._rate!r} gives {self._shown:g}",
                allowed="one that says the rate: the table's schedule, or who writes lr",
                remedy="Give the table a number as its rate, or keep a torch scheduler to the "
                "other optimizers.",
            )
        value = self.group["lr"]
        value = value.item() if isinstance(value, Tensor) else value
        shard.finite_rates({self.table: (value,)})
        return float(value)

    def show(self, step: int) -> None:
        """Put the group's own rate there."""
        self._shown = self.group["lr"] = self._rate(step)


def check_groups(groups: Iterable[RateGroup], saved: object) -> None:
    """Check the param groups of a state that is about to be loaded.

    Raises:
        CheckpointError: not what `state_dict` has of such groups.
    """
    here = [one.name for one in groups]
    parts = saved if isinstance(saved, list | tuple) else (saved,)
    for part in parts:
        rate = part.get("lr", 0.0) if isinstance(part, dict) else 0.0
        rate = rate.item() if isinstance(rate, Tensor) and rate.numel() == 1 else rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate):
            raise CheckpointError(
                f"lr of param group {part.get('name')!r} of a SparseOptimizer's state",
                got=repr(rate),
                allowed="a finite number",
                remedy="Load what SparseOptimizer.state_dict() returned.",
            )
    names = [part.get("name") if isinstance(part, dict) else part for part in parts]
    strangers = [name for name in names if name not in here]
    if strangers:
        raise CheckpointError(
            "param groups of a SparseOptimizer's state",
            got=", ".join(map(repr, strangers)),
            allowed=", ".join(map(repr, here)),
            remedy="Load it into an optimizer of the same tables and segments.",
        )


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure that `step` was given; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def not_copied(what: str) -> ConfigError:
    """What pickle, deepcopy and torch.save of a part of a sparse optimizer raise."""
    remedy = "Make a new optimizer over the copied modules and load the state."
    got, allowed = "pickle, torch.save or deepcopy", "state_dict and load_state_dict"
    return ConfigError(f"copy of {what}", got=got, allowed=allowed, remedy=remedy)


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
        device = ledger.shard.device
        made = super().__new__(cls, torch.empty(0, spec.dim, dtype=real_dtype(spec), device=device))
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
    """Reports to the loss scalers of all ranks that some rank's rows have a non-finite gradient.

    `grad` is float32 [1] on the shard's device: infinity if so, else 0. Reading it the first time
    in a step is a collective call of all ranks; None before the first backward.
    """

    _ledgers: tuple[GradientLedger, ...]
    _known: tuple[tuple[int, ...], Tensor] | None

    def __new__(cls, accumulators: Sequence[GradientLedger]) -> FiniteFlag:
        made = super().__new__(
            cls, torch.zeros(1, dtype=torch.float32, device=accumulators[0].shard.device)
        )
        made._ledgers, made._known = tuple(accumulators), None
        return made

    def __init__(self, accumulators: Sequence[GradientLedger]) -> None:
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


RateKey = str | tuple[str, str]


def find_collections(modules: Iterable[nn.Module]) -> list[EmbeddingCollection]:
    found: dict[int, EmbeddingCollection] = {}
    for module in errors.all_of_kind("modules of a SparseOptimizer", modules, nn.Module):
        for part in module.modules():
            if isinstance(part, EmbeddingCollection):
                found[id(part)] = part
    if not found:
        what, remedy = "modules of a SparseOptimizer", "Pass the model that holds the collection."
        raise ConfigError(what, "no EmbeddingCollection", "modules with one or more", remedy)
    return list(found.values())


def share_accumulators(collections: Sequence[EmbeddingCollection]) -> tuple[GradientLedger, ...]:
    """One accumulator per shard: rows that two collections touch take one step."""
    accumulators: dict[int, GradientLedger] = {}
    for collection in collections:
        ledger = accumulators.setdefault(id(collection.shard), collection.ledger)
        if ledger.inserts != collection.init_on_lookup:
            what = "init_on_lookup of collections on one shard"
            remedy = "Build both with the same init_on_lookup."
            raise ConfigError(what, "True and False", "one mode", remedy)
        if ledger is not collection.ledger:
            ledger.take_over(collection.ledger)
            collection.ledger = ledger
    return tuple(accumulators.values())


def bind_rates(
    own: Mapping[tuple[int, str], dict[str, Schedule]], rates: Mapping[RateKey, float | Schedule]
) -> set[str]:
    """Put the rates that are named in place of tables' own; returns the tables that they name.

    own: by shard and table the rate of each segment by name; changed in place.
    """
    named: set[str] = set()
    for key, rate in sorted(rates.items(), key=lambda item: isinstance(item[0], tuple)):
        name, segment = (key, None) if isinstance(key, str) else key
        found = [segments for (_, table), segments in own.items() if table == name]
        if not found:
            raise unknown_name("table in rates", name, [table for _, table in own])
        if len(found) > 1:
            what, got = f"rate of table {name!r}", f"a name that {len(found)} shards have"
            remedy = "Use one SparseOptimizer per module, or rename a table."
            raise ConfigError(what, got, "a name of one table", remedy)
        (segments,) = found
        if segment is not None and segment not in segments:
            raise unknown_name(f"segment of table {name!r} in rates", segment, segments)
        segments.update(dict.fromkeys(segments if segment is None else [segment], _schedule(rate)))
        named.add(name)
    return named


def _schedule(rate: float | Schedule) -> Schedule:
    return rate if isinstance(rate, Schedule) else ConstantRate(rate)


RateGroups = Mapping[tuple[int, str], tuple[RateGroup, ...]]


def group_rates(
    collections: Sequence[EmbeddingCollection],
    proxies: Iterable[TableGradient],
    rates: Mapping[RateKey, float | Schedule],
) -> RateGroups:
    """The param groups of every table, one per segment, by the id of its shard and its name.

    A table's proxies are in its first group. Groups are named "table", or "table/segment" where
    there are several; "#2" and so on distinguishes tables of one name on several shards.
    """
    own = {
        (id(collection.shard), table): {
            # 1 for a rule without one.
            part.name: _schedule(getattr(part.optimizer, "lr", 1.0))
            for part in spec.segments
        }
        for collection in collections
        for table, spec in collection.tables.items()
    }
    named, taken = bind_rates(own, rates), Counter[str]()
    groups: dict[tuple[int, str], tuple[RateGroup, ...]] = {}
    for (owner, table), segments in own.items():
        taken[table] += 1
        name = table if taken[table] == 1 else f"{table}#{taken[table]}"
        groups[owner, table] = tuple(
            RateGroup(
                f"{name}/{segment}" if len(segments) > 1 else name,
                table,
                segment,
                rate,
                table in named,
            )
            for segment, rate in segments.items()
        )
    every = next(iter(groups.values()))
    for proxy in proxies:
        (group, *_) = groups_of(groups, proxy.shard, proxy.table) or every
        group.group["params"].append(proxy)
    return groups


def groups_of(groups: RateGroups, shard: Shard, table: str) -> tuple[RateGroup, ...]:
    """Those of a shard's table, which may be a column slice; none of tables of no collection."""
    whole = table.rpartition("[")[0]
    return groups.get((id(shard), table)) or groups.get((id(shard), whole)) or ()


def _watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks or a profiler want to know of a step: torch's wrapper costs one 5 % of it."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everywhere = hooks._global_optimizer_pre_hooks or hooks._global_optimizer_post_hooks
    return bool(own or everywhere or torch._C._autograd._profiler_enabled())


NAN_POLICIES: tuple[NanPolicy, ...] = ("raise", "skip", "clip")


@uncompiled
class SparseOptimizer(torch.optim.Optimizer):
    """Steps the rows of all embedding collections in some modules.

    Several forward and backward passes before a step add up; rows nobody touched stay put.
    On CUDA a step does not wait for the device, but for a loss scaler or clipping that does, and
    for rules and compressors that kernels do not know.
    Works under `torch.amp.GradScaler` as it is. The scaler decides per optimizer whether to skip:
    put this one and the dense ones in a `JointOptimizer` to skip all or none. Where tables are
    spread over ranks, all ranks skip or none: a `FiniteFlag` among the parameters informs the
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
        accumulators: of gradients, where backward writes, one per shard.

    Raises:
        ConfigError: no collection in the modules, or an unknown policy.
        UnknownName: a rate for a table or segment that does not exist.
    """

    _built = False

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        *,
        rates: Mapping[RateKey, float | Schedule] | None = None,
        nan_policy: NanPolicy = "raise",
        nan_clip: float = 1.0,
    ) -> None:
        known_name("nan_policy", nan_policy, NAN_POLICIES)
        rates = errors.of_kind("rates of tables", {} if rates is None else rates, Mapping)
        collections = find_collections([modules] if isinstance(modules, nn.Module) else modules)
        self.accumulators = share_accumulators(collections)
        self._nan_policy: NanPolicy = nan_policy
        # Refuses a bad clip now, not at the first step.
        self._nan_clip = StepContext(nan_clip=nan_clip).nan_clip
        # Whoever steps several optimizers has asked them all before.
        self.finite_checked = False
        used = {(id(c.shard), name) for c in collections for name in c.tables}
        spread = {id(c.shard) for c in collections if c.distributed}
        self.proxies = tuple(
            TableGradient(ledger, k)
            for ledger in self.accumulators
            for k, spec in enumerate(ledger.shard.specs)
            if id(ledger.shard) in spread or (id(ledger.shard), spec.name) in used
        )
        self._flag = None if shared(self.accumulators) is None else FiniteFlag(self.accumulators)
        self._rates = group_rates(collections, self.proxies, rates)
        self._groups = [group for groups in self._rates.values() for group in groups]
        self._scheduled = [group for group in self._groups if not group.is_number]
        if self._flag is not None:
            self._groups[0].group["params"].append(self._flag)
        super().__init__([group.group for group in self._groups], {})
        self._built = True
        self.resume(max(ledger.claim(self.resume) for ledger in self.accumulators))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: tables are given at construction; dense parameters have optimizers of torch.

        Raises:
            ConfigError: always, once made.
        """
        if self._built:
            raise ConfigError(
                "param group of a SparseOptimizer",
                got="one to add",
                allowed="a group for each segment of its tables",
                remedy="Make it over all modules with tables; give dense parameters to an "
                "optimizer of torch's, together with it in a JointOptimizer.",
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply all gradients recorded since the last step; ends their tickets.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            what the closure returned; None without one.

        Raises:
            NonFiniteGradient: a gradient holds NaN or infinity under the policy "raise"; no table
                was changed, and the records stay until `zero_grad`. Tables on CUDA leave the bad
                rows alone, step the others, and `check` raises.
        """
        step = self._watched_step if _watched(self) else self._step
        return step() if closure is None else step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps it in what `_watched` asks for

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        with torch.no_grad():
            self._apply()
        return loss

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _apply(self) -> None:
        contexts = [
            StepContext(
                global_step=self.global_step,
                event_time_s=ledger.event_time_s,
                learning_rates=self._rates_of(ledger),
                nan_policy=self._nan_policy,
                nan_clip=self._nan_clip,
            )
            for ledger in self.accumulators
        ]
        several = len(self.accumulators) > 1 or shared(self.accumulators) is not None
        finite_checked, self.finite_checked = self.finite_checked, False
        if several and not finite_checked:
            self.check_finite()
        for ledger, ctx in zip(self.accumulators, contexts, strict=True):
            ledger.apply(ctx)
        self.resume(self.global_step + 1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all recorded gradients; tickets end with them. Sums are always set to None."""
        for ledger in self.accumulators:
            ledger.clear()

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Learning rates of the coming step, one per segment, of the tables that `rates` names,
        whose "lr" in `param_groups` was written or that a scheduler of torch drives.

        Raises:
            ConfigError: an "lr" was written of a table whose rate is a schedule.
            DTypeError, InputError: what was written is not a finite number.
        """
        return {
            table: tuple([group.at(self.global_step) for group in groups])
            for (_, table), groups in self._rates.items()
            if any(group.named or group.touched for group in groups)
        }

    def _rates_of(self, ledger: GradientLedger) -> dict[str, tuple[float, ...]]:
        """As `rates`, of the tables of a shard, which may be column slices."""
        found: dict[str, tuple[float, ...]] = {}
        if not any([group.named or group.touched for group in self._groups]):
            return found  # as mostly
        for spec in ledger.shard.specs:
            groups = groups_of(self._rates, ledger.shard, spec.name)
            if any(group.named or group.touched for group in groups):
                rates = {group.segment: group.at(self.global_step) for group in groups}
                found[spec.name] = tuple(rates[segment.name] for segment in spec.segments)
        return found

    def resume(self, step: int) -> None:
        """Continue as after this many steps; a checkpoint that loads the tables calls it."""
        self.global_step = step
        for ledger in self.accumulators:
            ledger.global_step = step
        for group in self._scheduled:
            if not group.written:
                group.show(step)

    def state_dict(self) -> dict[str, Any]:
        """The global step, and the settings of `param_groups` that somebody changed.

        Rows and their optimizer state belong to the shard's checkpoint.
        """
        groups = [
            {key: value for key, value in one.group.items() if key != "params"}
            for one in self._groups
            if one.touched
        ]
        return {"global_step": self.global_step, **({"param_groups": groups} if groups else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the global step, and rates that were written into `param_groups`.

        Raises:
            CheckpointError: not what `state_dict` returns; nothing was changed.
        """
        self.check_state_dict(state_dict)
        step = state_dict["global_step"]
        saved = {group["name"]: group for group in state_dict.get("param_groups", ())}
        for one in self._groups:
            own = saved.get(one.name, {})
            one.group.update({k: v for k, v in own.items() if k not in _OWN})
            if "lr" not in own or not one.is_number:
                one.show(step)
        self.resume(step)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check what `load_state_dict` is about to get.

        Raises:
            CheckpointError: not what `state_dict` returns.
        """
        state = errors.of_kind("state of a SparseOptimizer", state_dict, Mapping)
        step = state.get("global_step")
        known = {"global_step"} <= set(state_dict) <= {"global_step", "param_groups"}
        if not known or type(step) is not int or not 0 <= step < 1 << 63:
            raise CheckpointError(
                "state of a SparseOptimizer",
                got=f"keys {sorted(map(str, state_dict))}, global_step {step!r}",
                allowed="{'global_step': steps done, from 0 to 2^63 - 1}, and 'param_groups' where "
                "some changed",
                remedy="Load what SparseOptimizer.state_dict() returned.",
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
        found = list(filter(None, map(_found, self.accumulators)))
        self._raise_together(found[0] if found else None)

    def check_finite(self) -> None:
        """Under the policy "raise", raise NonFiniteGradient on all ranks before anything steps.

        Tables on CUDA are not asked, since that would wait for the device at every step.

        Raises:
            NonFiniteGradient: a row's sum is NaN or infinite.
        """
        asked = [ledger for ledger in self.accumulators if ledger.shard.device.type == "cpu"]
        if self._nan_policy != "raise" or not asked:
            return
        bad = [ledger for ledger in asked if not ledger.finite()]
        self._raise_together(_not_finite(_names(bad)) if bad else None)

    def _raise_together(self, found: NonFiniteGradient | None) -> None:
        """Raise on every rank what any of them found; a collective call over several."""
        if shared(self.accumulators) is not None:
            here = torch.tensor(found is not None, device="cpu")
            ranks = anywhere(self.accumulators, [here]).nonzero().flatten().tolist()
            if ranks and found is None:
                found = _not_finite(f"{_names(self.accumulators)} on ranks {ranks}")
        if found is not None:
            raise found


def _found(ledger: GradientLedger) -> NonFiniteGradient | None:
    try:
        ledger.shard.check()
    except NonFiniteGradient as error:
        return error
    return None


def _names(accumulators: Iterable[GradientLedger]) -> str:
    return ", ".join(spec.name for ledger in accumulators for spec in ledger.shard.specs)


def _not_finite(tables: str) -> NonFiniteGradient:
    return NonFiniteGradient(
        f"gradients of tables {tables}",
        got="NaN or infinity",
        allowed="finite values",
        remedy="Lower the learning rate, or set nan_policy to 'skip' or 'clip'.",
    )
