"""Optimizer rules: frozen values with their parameters, their state and reference arithmetic.

Rules with moments count each row's own steps by its beta powers. The powers start at beta1 and
beta2 and multiply after the update, so a row first touched late in a run is corrected like one
touched in the first step. Rules that divide by the rate leave row and state as they are at lr = 0,
as a warm-up begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.rules.rule import Allowed, NotNegative, Positive, Rule, Share, check, whole
from shoal.rules.schedules import Rate, Schedule, as_rate

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Amsgrad",
    "BatchSoftmax",
    "Coupling",
    "DelayCompensated",
    "DynamicWdAdagrad",
    "GroupAdagrad",
    "GroupFTRL",
    "Momentum",
    "MovingAverage",
    "Optimizer",
    "RMSprop",
    "RowWiseAdagrad",
    "RuleContext",
    "SignSGD",
]

Coupling = Literal["element", "segment", "row"]
Starts = tuple[float | str, ...]

_STEP_BITS = 20  # of the low word of BatchSoftmax's last step


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule may know besides a row and its gradient.

    Args:
        global_step: optimizer steps done before this one, >= 0.
        seen_UD: [U, D] weights the gradients were computed at, for stale gradients; None means
            the present weights.
    """

    global_step: int = 0
    seen_UD: Tensor | None = None


class Optimizer(Rule, ABC):
    """One step of one segment of a row: (weights, state, gradient, rate) -> (weights, state).

    coupling: which columns one column's step reads: its own ("element"), those of its segment, or
    the whole row; placement may not split those. vectors, scalars: what state starts from, one item
    for each vector of the segment's width, then for each single float: a number or the name of
    the field that holds it. denominator: fields that a first gradient of 0 is divided by. dims: of
    its segment.

    Raises:
        ConfigError: a value out of range, or a denominator that could be 0.
    """

    __slots__ = ()

    coupling: ClassVar[Coupling] = "element"
    vectors: ClassVar[Starts] = ()
    scalars: ClassVar[Starts] = ()
    denominator: ClassVar[tuple[str, ...]] = ()
    dims: ClassVar[Allowed] = whole(1, remedy="Give the segment one column or more.")

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if names := self.denominator:
            words = "above 0" if len(names) == 1 else "one of them above 0"
            remedy = "A first gradient of 0 or near it would divide by 0; raise one of them."
            largest = max(getattr(self, name) for name in names)
            check(self, " and ".join(names), largest, Allowed(words, lambda v: v > 0, remedy))

    def state_width(self, dim: int) -> int:
        """Floats of state S that a segment of `dim` columns carries."""
        return len(self.vectors) * dim + len(self.scalars)

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """State [S] of a row that has had no step."""
        vectors, scalars = (
            [getattr(self, one) if isinstance(one, str) else one for one in starts]
            for starts in (self.vectors, self.scalars)
        )
        wide = torch.tensor(vectors, dtype=dtype, device="cpu").repeat_interleave(dim)
        return torch.cat([wide, torch.tensor(scalars, dtype=dtype, device="cpu")])

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
        check(self, "dim of a segment", dim, self.dims)


def rest_of(share: float, like: Tensor) -> Tensor:
    """1 - share, both rounded to the dtype of `like`; a scalar tensor.

    In float32, 1 - 0.999 is off by 1e-5. Beta powers start from the rounded 0.999 and so hold the
    same error, which then cancels in the bias correction.
    """
    return 1 - like.new_tensor(share)


def _state(rule: Optimizer, state_US: Tensor) -> tuple[Tensor, ...]:
    """State by its vectors [U, D] and scalars [U, 1], in the declared order."""
    many, single = len(rule.vectors), len(rule.scalars)
    dim = (state_US.shape[1] - single) // many
    return torch.split(state_US, [dim] * many + [1] * single, dim=1)


def _norm_U1(values_UD: Tensor) -> Tensor:
    return (values_UD * values_UD).sum(dim=1, keepdim=True).sqrt()


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(Optimizer):
    """w -= lr * g', g' = g + weight_decay * w. No state."""

    kind = "sgd"
    params = ("weight_decay",)

    lr: Rate = 0.01
    weight_decay: NotNegative = 0.0

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        return w_UD - lr * (grad_UD + self.weight_decay * w_UD), state_US.clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum(Optimizer):
    """Momentum with the rate inside the velocity. State: n[D].

    g' = g + weight_decay * w; n' = momentum * n - lr * g'; w += n', or with `nesterov`
    w += (1 + momentum) * n' - momentum * n.
    """

    kind = "momentum"
    params = ("momentum", "weight_decay", "nesterov")
    vectors = (0,)

    lr: Rate = 0.01
    momentum: Share = 0.9
    weight_decay: NotNegative = 0.0
    nesterov: bool = False

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        grad_UD = grad_UD + self.weight_decay * w_UD
        velocity_UD = self.momentum * state_US - lr * grad_UD
        if self.nesterov:
            ahead_UD = (1 + self.momentum) * velocity_UD - self.momentum * state_US
            return w_UD + ahead_UD, velocity_UD
        return w_UD + velocity_UD, velocity_UD


@dataclass(frozen=True, kw_only=True, slots=True)
class SignSGD(Optimizer):
    """w = w * (1 - lr * weight_decay) - lr * sign(g), sign(0) = 0. No state.

    The sparse rule of HRM's per-puzzle table; decay is decoupled and only touched rows decay.
    """

    kind = "sign_sgd"
    params = ("weight_decay",)

    lr: Rate = 0.01
    weight_decay: NotNegative = 0.0

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        return w_UD * (1 - lr * self.weight_decay) - lr * torch.sign(grad_UD), state_US.clone()


_PLAIN = Allowed(
    "any rule but DelayCompensated",
    lambda rule: isinstance(rule, Optimizer) and not isinstance(rule, DelayCompensated),
    "Wrap a plain rule once.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayCompensated(Optimizer):
    """Another rule, fed a gradient corrected for staleness. State, rate and coupling: inner's.

    g' = g + strength * g^2 * (w - seen), where w is the row as it is now and `seen` what the
    gradient was computed at (Zheng et al. 2017, "Asynchronous SGD with Delay Compensation").
    Without `ctx.seen_UD` the gradient counts as fresh and inner gets it as it is.
    `strength` is its one parameter; inner's are those of `inner`.

    Raises:
        ConfigError: an inner rule that is itself corrected.
    """

    kind = "delay_compensated"
    params = ("strength",)

    inner: Annotated[Optimizer, _PLAIN]
    strength: NotNegative = 0.1

    @property
    def coupling(self) -> Coupling:  # type: ignore[override]
        return self.inner.coupling

    @property
    def lr(self) -> float | Schedule:
        """The inner rule's rate."""
        rate: float | Schedule = getattr(self.inner, "lr", 1.0)
        return rate

    def state_width(self, dim: int) -> int:
        return self.inner.state_width(dim)

    def check_dim(self, dim: int) -> None:
        self.inner.check_dim(dim)

    def init_state(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inner.init_state(dim, dtype)

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if ctx.seen_UD is not None:
            grad_UD = grad_UD + self.strength * grad_UD * grad_UD * (w_UD - ctx.seen_UD)
        return self.inner.step(w_UD, state_US, grad_UD, lr, ctx)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad. State: n[D], from `initial_accumulator`.

    g' = g + weight_decay * w; n += g'^2; w -= lr * g' / (sqrt(n) + eps).
    """

    kind = "adagrad"
    params = ("weight_decay", "eps")
    vectors: ClassVar[Starts] = ("initial_accumulator",)
    denominator = ("initial_accumulator", "eps")

    lr: Rate = 0.001
    initial_accumulator: NotNegative = 0.1
    weight_decay: NotNegative = 0.0
    eps: NotNegative = 0.0

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        grad_UD = grad_UD + self.weight_decay * w_UD
        state_US = state_US + self._squares(grad_UD)
        return w_UD - lr * grad_UD / (state_US.sqrt() + self.eps), state_US

    def _squares(self, grad_UD: Tensor) -> Tensor:
        return grad_UD * grad_UD


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per segment. State: n[1], from `initial_accumulator`.

    g' = g + weight_decay * w; n += mean(g'^2) over the segment; w -= lr * g' / (sqrt(n) + eps).
    """

    kind = "rowwise_adagrad"
    vectors = ()
    scalars = ("initial_accumulator",)
    coupling = "segment"

    lr: Rate = 0.01

    def _squares(self, grad_UD: Tensor) -> Tensor:
        return (grad_UD * grad_UD).mean(dim=1, keepdim=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicWdAdagrad(Optimizer):
    """Adagrad with a weight decay that may follow the row. State: n[D].

    decay = weight_decay; with `dynamic`, times sigmoid((|g| - |w|) / temperature), norms over the
    segment, or with `flip` times one minus that. Coupled: g += decay * w, then Adagrad.
    With `decouple`: n += g^2; w -= lr * g / sqrt(n) + lr * decay * w.
    """

    kind = "dynamic_wd_adagrad"
    params = ("weight_decay", "temperature", "decouple", "dynamic", "flip")
    vectors = ("initial_accumulator",)
    denominator = ("initial_accumulator",)
    coupling = "segment"

    lr: Rate = 0.001
    initial_accumulator: NotNegative = 0.1
    weight_decay: NotNegative = 0.0
    decouple: bool = True
    dynamic: bool = True
    flip: bool = True
    temperature: Positive = 1.0

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        pull_UD = self._decay_U1(w_UD, grad_UD) * w_UD
        if not self.decouple:
            grad_UD = grad_UD + pull_UD
        squares_UD = state_US + grad_UD * grad_UD
        move_UD = lr * grad_UD / squares_UD.sqrt()
        if self.decouple:
            move_UD = move_UD + lr * pull_UD
        return w_UD - move_UD, squares_UD

    def _decay_U1(self, w_UD: Tensor, grad_UD: Tensor) -> Tensor:
        decay_U1 = w_UD.new_full((w_UD.shape[0], 1), self.weight_decay)
        if not self.dynamic:
            return decay_U1
        lead_U1 = _norm_U1(grad_UD) - _norm_U1(w_UD)
        share_U1 = torch.sigmoid((-lead_U1 if self.flip else lead_U1) / self.temperature)
        return decay_U1 * share_U1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adadelta(Optimizer):
    """Adadelta. State: acc[D], au[D], from 0.

    g' = g + weight_decay * w; acc = rho * acc + (1 - rho) * g'^2;
    u = g' * sqrt(au + eps) / sqrt(acc + eps); w -= lr * u; au = rho * au + (1 - rho) * u^2.
    """

    kind = "adadelta"
    params = ("rho", "eps", "weight_decay")
    vectors = (0, 0)

    lr: Rate = 0.01
    rho: Share = 0.9
    eps: Positive = 0.01
    weight_decay: NotNegative = 0.0

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        squares_UD, updates_UD = state_US.chunk(2, dim=1)
        grad_UD = grad_UD + self.weight_decay * w_UD
        rest = rest_of(self.rho, w_UD)
        squares_UD = self.rho * squares_UD + rest * grad_UD * grad_UD
        update_UD = grad_UD * (updates_UD + self.eps).sqrt() / (squares_UD + self.eps).sqrt()
        updates_UD = self.rho * updates_UD + rest * update_UD * update_UD
        return w_UD - lr * update_UD, torch.cat([squares_UD, updates_UD], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSprop(Optimizer):
    """RMSprop with 1 for epsilon, as Monolith has it. State: n[D], from 0.

    g' = g + weight_decay * w; n = momentum * n + (1 - momentum) * g'^2, or with
    `accumulate="sum"` (Monolith's RMSpropV2) n = momentum * n + g'^2;
    w -= lr * g' / (sqrt(n) + 1).
    """

    kind = "rmsprop"
    params = ("momentum", "weight_decay", "summed")
    vectors = (0,)

    lr: Rate = 0.01
    momentum: Share = 0.9
    weight_decay: NotNegative = 0.0
    accumulate: Literal["mean", "sum"] = "mean"

    @property
    def summed(self) -> bool:
        """Whether squares are added up as they are."""
        return self.accumulate == "sum"

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        grad_UD = grad_UD + self.weight_decay * w_UD
        fresh = 1.0 if self.summed else rest_of(self.momentum, w_UD)
        squares_UD = self.momentum * state_US + fresh * grad_UD * grad_UD
        return w_UD - lr * grad_UD / (squares_UD.sqrt() + 1), squares_UD


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(Optimizer):
    """Adam with Monolith's defaults. State: m[D], v[D], p1, p2.

    g' = g + weight_decay * w; lr' = lr * sqrt(1 - p2) / (1 - p1); m += (g' - m)(1 - beta1);
    v += (g'^2 - v)(1 - beta2); w -= lr' * m / (sqrt(v) + eps). With `nesterov` the step takes
    (1 - beta1) * g' + beta1 * m for m. Then p1 *= beta1, p2 *= beta2.
    """

    kind = "adam"
    params = ("beta1", "beta2", "eps", "weight_decay", "nesterov")
    vectors: ClassVar[Starts] = (0, 0)
    scalars = ("beta1", "beta2")

    lr: Rate = 0.01
    beta1: Share = 0.9
    beta2: Share = 0.99
    eps: Positive = 0.01
    weight_decay: NotNegative = 0.0
    nesterov: bool = False

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        m_UD, v_UD, *largest, p1_U1, p2_U1 = _state(self, state_US)
        grad_UD = grad_UD + self.weight_decay * w_UD
        m_UD, v_UD = _moments(self, m_UD, v_UD, grad_UD)
        largest = [torch.maximum(one_UD, v_UD) for one_UD in largest]
        lead_UD = m_UD
        if self.nesterov:
            lead_UD = rest_of(self.beta1, m_UD) * grad_UD + self.beta1 * m_UD
        rate_U1 = lr * (1 - p2_U1).sqrt() / (1 - p1_U1)
        w_UD = w_UD - rate_U1 * lead_UD / ([v_UD, *largest][-1].sqrt() + self.eps)
        powers = [p1_U1 * self.beta1, p2_U1 * self.beta2]
        return w_UD, torch.cat([m_UD, v_UD, *largest, *powers], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Amsgrad(Adam):
    """Adam whose denominator never shrinks. State: m[D], v[D], vhat[D], p1, p2.

    As Adam, with vhat = max(vhat, v) and w -= lr' * m / (sqrt(vhat) + eps).
    """

    kind = "amsgrad"
    vectors = (0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, the formula of torch.optim.AdamW. State as Adam's.

    w *= 1 - lr * weight_decay; m and v as Adam's with the plain gradient;
    w -= lr / (1 - p1) * m / (sqrt(v) / sqrt(1 - p2) + eps). Untouched rows do not decay.
    """

    kind = "adamw"
    params = ("beta1", "beta2", "eps", "weight_decay")
    vectors = (0, 0)
    scalars = ("beta1", "beta2")

    lr: Rate = 0.001
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        m_UD, v_UD, p1_U1, p2_U1 = _state(self, state_US)
        w_UD = w_UD * (1 - lr * self.weight_decay)
        m_UD, v_UD = _moments(self, m_UD, v_UD, grad_UD)
        root_UD = v_UD.sqrt() / (1 - p2_U1).sqrt() + self.eps
        w_UD = w_UD - lr / (1 - p1_U1) * m_UD / root_UD
        return w_UD, torch.cat([m_UD, v_UD, p1_U1 * self.beta1, p2_U1 * self.beta2], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LAMB(AdamW):
    """AdamW's direction with a trust ratio per segment (You et al. 2020). State as Adam's.

    mhat = m / (1 - p1), vhat = v / (1 - p2); u = mhat / (sqrt(vhat) + eps) + weight_decay * w;
    trust = |w| / |u|, or 1 if either norm is 0; w -= lr * trust * u.
    """

    kind = "lamb"
    coupling = "segment"

    eps: Positive = 1e-6

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        m_UD, v_UD, p1_U1, p2_U1 = _state(self, state_US)
        m_UD, v_UD = _moments(self, m_UD, v_UD, grad_UD)
        root_UD = (v_UD / (1 - p2_U1)).sqrt() + self.eps
        u_UD = m_UD / (1 - p1_U1) / root_UD + self.weight_decay * w_UD
        w_norm_U1 = _norm_U1(w_UD)
        u_norm_U1 = _norm_U1(u_UD)
        usable_U1 = (w_norm_U1 > 0) & (u_norm_U1 > 0)
        trust_U1 = torch.where(usable_U1, w_norm_U1 / u_norm_U1, torch.ones_like(w_norm_U1))
        w_UD = w_UD - lr * trust_U1 * u_UD
        return w_UD, torch.cat([m_UD, v_UD, p1_U1 * self.beta1, p2_U1 * self.beta2], dim=1)


def _moments(
    rule: Adam | AdamW, m_UD: Tensor, v_UD: Tensor, grad_UD: Tensor
) -> tuple[Tensor, Tensor]:
    m_UD = m_UD + (grad_UD - m_UD) * rest_of(rule.beta1, m_UD)
    v_UD = v_UD + (grad_UD * grad_UD - v_UD) * rest_of(rule.beta2, v_UD)
    return m_UD, v_UD


@dataclass(frozen=True, kw_only=True, slots=True)
class FTRL(Optimizer):
    """Follow the regularised leader (McMahan et al. 2013). State: n[D], z[D].

    n' = n + g^2; sigma = (sqrt(n') - sqrt(n)) / lr; z += g - sigma * w;
    w = 0 if |z| <= l1, else lr * (sign(z) * l1 - z) / (sqrt(n') + beta + l2 * lr).
    n starts at `initial_accumulator`, z at 0. lr = 0 changes nothing.
    """

    kind = "ftrl"
    params = ("beta", "l1", "l2")
    vectors = ("initial_accumulator", 0)
    denominator = ("beta", "initial_accumulator")

    lr: Rate = 0.01
    beta: NotNegative = 0.0
    initial_accumulator: NotNegative = 0.1
    l1: NotNegative = 0.0
    l2: NotNegative = 0.0

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if lr == 0:
            return w_UD.clone(), state_US.clone()
        n_UD, z_UD = state_US.chunk(2, dim=1)
        squares_UD = n_UD + grad_UD * grad_UD
        root_UD = squares_UD.sqrt()
        z_UD = z_UD + grad_UD - (root_UD - n_UD.sqrt()) / lr * w_UD
        return self._weights(root_UD, z_UD, lr), torch.cat([squares_UD, z_UD], dim=1)

    def _weights(self, root_UD: Tensor, z_UD: Tensor, lr: float) -> Tensor:
        shrunk_UD = torch.sign(z_UD) * self.l1 - z_UD
        moved_UD = lr * shrunk_UD / (root_UD + self.beta + self.l2 * lr)
        return torch.where(z_UD.abs() <= self.l1, torch.zeros_like(z_UD), moved_UD)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFTRL(FTRL):
    """FTRL whose l1 acts on the segment as a whole. State: n[D], z[D].

    n and z as FTRL's; w = 0 if |z|_2 <= l1, else
    -z * (1 - l1 / |z|_2) / ((sqrt(n') + beta) / lr + l2). lr = 0 changes nothing.
    """

    kind = "group_ftrl"
    coupling = "segment"

    beta: NotNegative = 1.0
    initial_accumulator: NotNegative = 0.0

    def _weights(self, root_UD: Tensor, z_UD: Tensor, lr: float) -> Tensor:
        norm_U1 = _norm_U1(z_UD)
        moved_UD = -z_UD * (1 - self.l1 / norm_U1) / ((root_UD + self.beta) / lr + self.l2)
        return torch.where(norm_U1 <= self.l1, torch.zeros_like(z_UD), moved_UD)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdagrad(Optimizer):
    """Adagrad with a lasso on the segment's norm. State: G[1], from `initial_accumulator`.

    g' = g + weight_decay * w; G += max(g'^2) over the segment; lr' = lr / (beta + sqrt(G));
    z = g' - w / lr'; w = 0 if |z|_2 <= l2, else -lr' * (|z|_2 - l2) / |z|_2 * z.
    lr = 0 changes nothing.
    """

    kind = "group_adagrad"
    params = ("beta", "l2", "weight_decay")
    scalars = ("initial_accumulator",)
    denominator = ("beta", "initial_accumulator")
    coupling = "segment"

    lr: Rate = 0.01
    beta: NotNegative = 0.0
    initial_accumulator: NotNegative = 0.1
    l2: NotNegative = 0.0
    weight_decay: NotNegative = 0.0

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if lr == 0:
            return w_UD.clone(), state_US.clone()
        grad_UD = grad_UD + self.weight_decay * w_UD
        largest_U1 = state_US + (grad_UD * grad_UD).amax(dim=1, keepdim=True)
        rate_U1 = lr / (self.beta + largest_U1.sqrt())
        z_UD = grad_UD - w_UD / rate_U1
        norm_U1 = _norm_U1(z_UD)
        moved_UD = -rate_U1 * (norm_U1 - self.l2) / norm_U1 * z_UD
        return torch.where(norm_U1 <= self.l2, torch.zeros_like(w_UD), moved_UD), largest_U1


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingAverage(Optimizer):
    """w = momentum * w + (1 - momentum) * g, where g is an observed value. No state, no rate."""

    kind = "moving_average"
    params = ("momentum",)

    momentum: Share = 0.9

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        rest = rest_of(self.momentum, w_UD)
        return self.momentum * w_UD + rest * grad_UD, state_US.clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSoftmax(Optimizer):
    """Mean gap between the steps that touch an id, so that 1 / w is how often it is sampled.

    w = (1 - lr) * w + lr * (global_step - last); last = global_step. The gradient's value is
    ignored; the segment has one column (Yi et al. 2019, "Sampling-Bias-Corrected Neural
    Modeling"). State: hi, lo with last = hi * 2^20 + lo, which float32 holds exactly below 2^44.
    """

    kind = "batch_softmax"
    scalars = (0, 0)
    dims = Allowed("1", lambda dim: dim == 1, "Give the frequency estimate a segment of its own.")

    lr: Rate = 0.1

    def step(
        self, w_UD: Tensor, state_US: Tensor, grad_UD: Tensor, lr: float, ctx: RuleContext
    ) -> tuple[Tensor, Tensor]:
        if ctx.global_step < 0:
            raise InputError(
                "global_step of BatchSoftmax",
                got=ctx.global_step,
                allowed="0 or more",
                remedy="Pass the number of optimizer steps done.",
            )
        words_U2 = state_US.to(torch.int64)
        last_U1 = (words_U2[:, :1] << _STEP_BITS) + words_U2[:, 1:]
        gap_U1 = (ctx.global_step - last_U1).to(w_UD.dtype)
        high, low = divmod(ctx.global_step, 1 << _STEP_BITS)
        state_US = state_US.new_tensor([high, low]).expand(w_UD.shape[0], 2).clone()
        return (1 - lr) * w_UD + lr * gap_U1, state_US
