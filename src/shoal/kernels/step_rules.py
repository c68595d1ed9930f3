"""Optimizer rules in registers: one step of a tile of rows, in the order of `csrc/rules_impl.h`.

A rule sees weights, summed gradient and up to three state vectors as [R, D] tiles, and up to two
numbers of state per row and the rate as [R]. It returns all but gradient and rate as they are
after the step. Divisions and roots are the exact ones: `/` alone is an approximation in float32.

A rule's function names its declared parameters last, in capitals and in the declared order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from shoal.errors import ConfigError
from shoal.rules.optimizers import Optimizer

# Bits of the low word of BatchSoftmax's last step.
_STEP_BITS, _STEP_MASK = tl.constexpr(20), tl.constexpr((1 << 20) - 1)


@dataclass(frozen=True, slots=True)
class KernelRule:
    """A rule as kernels take it: its kind, its state's vectors [D] and numbers, its parameters."""

    kind: str
    vectors: int
    scalars: int
    params: tuple[float, ...]


def kernel_rule(rule: Optimizer) -> KernelRule | None:
    """The kernel form of a rule, or None if kernels do not know it.

    Raises:
        ConfigError: the rule declares other parameters than its kernel reads.
    """
    if rule.kind not in _STEPS:
        return None
    named = [name.lower() for name in _STEPS[rule.kind].arg_names if name.isupper()]
    if tuple(named) != rule.params:
        raise ConfigError(
            f"parameters of {rule.kind}",
            got=rule.params,
            allowed=f"{tuple(named)}, which its kernel reads",
            remedy="Declare the rule and write its kernel with the same ones in the same order.",
        )
    return KernelRule(rule.kind, len(rule.vectors), len(rule.scalars), rule.param_values())


@triton.jit
def _ratio(a, b):  # type: ignore[no-untyped-def]
    return tl.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def _root(a):  # type: ignore[no-untyped-def]
    return tl.sqrt_rn(a) if a.dtype == tl.float32 else tl.sqrt(a)


@triton.jit  # type: ignore[untyped-decorator]
def _rest(like, SHARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 - SHARE as rows of this dtype compute it: `rules.optimizers.rest_of`."""
    return 1.0 - tl.full(like.shape, SHARE, like.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _sgd(w, g, lr, WEIGHT_DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    return w - lr * (g + WEIGHT_DECAY * w)


@triton.jit  # type: ignore[untyped-decorator]
def _sign_sgd(w, g, lr, WEIGHT_DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    sign = (g > 0).to(w.dtype) - (g < 0).to(w.dtype)
    return w * (1.0 - lr * WEIGHT_DECAY) - lr * sign


@triton.jit  # type: ignore[untyped-decorator]
def _moving_average(w, g, MOMENTUM: tl.constexpr):  # type: ignore[no-untyped-def]
    return MOMENTUM * w + _rest(w, MOMENTUM) * g


@triton.jit  # type: ignore[untyped-decorator]
def _momentum(  # type: ignore[no-untyped-def]
    w, g, n, lr, MOMENTUM: tl.constexpr, WEIGHT_DECAY: tl.constexpr, NESTEROV: tl.constexpr
):  # fmt: skip
    new = MOMENTUM * n - lr * (g + WEIGHT_DECAY * w)
    move = (1 + MOMENTUM) * new - MOMENTUM * n if NESTEROV != 0 else new
    return w + move, new


@triton.jit  # type: ignore[untyped-decorator]
def _adagrad(w, g, n, lr, WEIGHT_DECAY: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    g = g + WEIGHT_DECAY * w
    n = n + g * g
    return w - _ratio(lr * g, _root(n) + EPS), n


@triton.jit  # type: ignore[untyped-decorator]
def _rowwise_adagrad(  # type: ignore[no-untyped-def]
    w, g, n, lr, dim: tl.constexpr, WEIGHT_DECAY: tl.constexpr, EPS: tl.constexpr
):  # fmt: skip
    g = g + WEIGHT_DECAY * w
    total = tl.sum(g * g, axis=1)
    n = n + _ratio(total, tl.full(total.shape, dim, total.dtype))
    return w - _ratio(lr * g, (_root(n) + EPS)[:, None]), n


@triton.jit  # type: ignore[untyped-decorator]
def _adadelta(  # type: ignore[no-untyped-def]
    w, g, sq, up, lr, RHO: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr
):  # fmt: skip
    rest = _rest(w, RHO)
    g = g + WEIGHT_DECAY * w
    sq = RHO * sq + rest * g * g
    move = _ratio(g * _root(up + EPS), _root(sq + EPS))
    return w - lr * move, sq, RHO * up + rest * move * move


@triton.jit  # type: ignore[untyped-decorator]
def _moments(m, v, g, BETA1: tl.constexpr, BETA2: tl.constexpr):  # type: ignore[no-untyped-def]
    return m + (g - m) * _rest(g, BETA1), v + (g * g - v) * _rest(g, BETA2)


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    w, g, m, v, top, p1, p2, rate, amsgrad: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    rate = _ratio(rate * _root(1.0 - p2), 1.0 - p1)
    g = g + WEIGHT_DECAY * w
    m, v = _moments(m, v, g, BETA1, BETA2)
    second = v
    if amsgrad:
        top = tl.where(top > v, top, v)
        second = top
    first = _rest(g, BETA1) * g + BETA1 * m if NESTEROV != 0 else m
    w = w - _ratio(rate[:, None] * first, _root(second) + EPS)
    return w, m, v, top, p1 * BETA1, p2 * BETA2


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    w, g, m, v, p1, p2, rate,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr,
):  # fmt: skip
    keep = 1.0 - rate * WEIGHT_DECAY
    rate = _ratio(rate, 1.0 - p1)
    root = _root(1.0 - p2)
    m, v = _moments(m, v, g, BETA1, BETA2)
    under = _ratio(_root(v), root[:, None]) + EPS
    w = w * keep[:, None] - _ratio(rate[:, None] * m, under)
    return w, m, v, p1 * BETA1, p2 * BETA2


@triton.jit  # type: ignore[untyped-decorator]
def _ftrl(w, g, n, z, lr, BETA: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr):  # type: ignore[no-untyped-def]
    # A rate of 0 changes nothing; 1 stands in for it where it divides.
    still = lr == 0
    lr = tl.where(still, 1.0, lr)
    grown = n + g * g
    root = _root(grown)
    moved = z + (g - _ratio(root - _root(n), lr) * w)
    shrunk = tl.where(moved < 0, -L1 - moved, L1 - moved)
    kept = _ratio(lr * shrunk, root + BETA + L2 * lr)
    stepped_w = tl.where(tl.abs(moved) <= L1, 0.0, kept)
    return tl.where(still, w, stepped_w), tl.where(still, n, grown), tl.where(still, z, moved)


@triton.jit  # type: ignore[untyped-decorator]
def _rmsprop(  # type: ignore[no-untyped-def]
    w, g, n, lr, MOMENTUM: tl.constexpr, WEIGHT_DECAY: tl.constexpr, SUMMED: tl.constexpr
):  # fmt: skip
    g = g + WEIGHT_DECAY * w
    n = MOMENTUM * n + (g * g if SUMMED != 0 else _rest(w, MOMENTUM) * g * g)
    return w - _ratio(lr * g, _root(n) + 1.0), n


@triton.jit
def _batch_softmax(w, high, low, lr, global_step):  # type: ignore[no-untyped-def]
    last = (high.to(tl.int64) << _STEP_BITS) + low.to(tl.int64)
    gap = (global_step - last).to(w.dtype)
    now = last * 0 + global_step
    high = (now >> _STEP_BITS).to(high.dtype)
    low = (now & _STEP_MASK).to(low.dtype)
    return (1.0 - lr) * w + lr * gap[:, None], high, low


@triton.jit
def _norm(a, inside):  # type: ignore[no-untyped-def]
    a = tl.where(inside, a, 0.0)
    return _root(tl.sum(a * a, axis=1))


@triton.jit  # type: ignore[untyped-decorator]
def _lamb(  # type: ignore[no-untyped-def]
    w, g, m, v, p1, p2, rate, inside,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr,
):  # fmt: skip
    m, v = _moments(m, v, g, BETA1, BETA2)
    under = _root(_ratio(v, (1.0 - p2)[:, None])) + EPS
    move = _ratio(_ratio(m, (1.0 - p1)[:, None]), under) + WEIGHT_DECAY * w
    w_norm, move_norm = _norm(w, inside), _norm(move, inside)
    usable = (w_norm > 0) & (move_norm > 0)
    trust = tl.where(usable, _ratio(w_norm, tl.where(usable, move_norm, 1.0)), 1.0)
    return w - (rate * trust)[:, None] * move, m, v, p1 * BETA1, p2 * BETA2


@triton.jit  # type: ignore[untyped-decorator]
def _group_ftrl(w, g, n, z, lr, inside, BETA: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr):  # type: ignore[no-untyped-def]
    still = lr == 0
    lr = tl.where(still, 1.0, lr)
    grown = n + g * g
    root = _root(grown)
    moved = z + (g - _ratio(root - _root(n), lr) * w)
    norm = _norm(moved, inside)
    gone = norm <= L1
    keep = tl.where(gone, 0.0, 1.0 - _ratio(norm * 0.0 + L1, tl.where(gone, 1.0, norm)))
    kept = _ratio(-moved * keep[:, None], _ratio(root + BETA, lr) + L2)
    new = tl.where(gone[:, None], 0.0, kept)
    return tl.where(still, w, new), tl.where(still, n, grown), tl.where(still, z, moved)


@triton.jit  # type: ignore[untyped-decorator]
def _group_adagrad(  # type: ignore[no-untyped-def]
    w, g, n, rate, inside, BETA: tl.constexpr, L2: tl.constexpr, WEIGHT_DECAY: tl.constexpr
):  # fmt: skip
    still = rate == 0
    g = g + WEIGHT_DECAY * w
    grown = n + tl.max(g * g, axis=1)
    scale = _ratio(tl.where(still, 1.0, rate), BETA + _root(grown))
    moved = g - _ratio(w, scale[:, None])
    norm = _norm(moved, inside)
    gone = norm <= L2
    keep = tl.where(gone, 0.0, _ratio(norm - L2, tl.where(gone, 1.0, norm)))
    new = -(scale * keep)[:, None] * moved
    return tl.where(still[:, None], w, new), tl.where(still, n, grown)


@triton.jit  # type: ignore[untyped-decorator]
def _dynamic_wd_adagrad(  # type: ignore[no-untyped-def]
    w, g, n, rate, inside,
    WEIGHT_DECAY: tl.constexpr, TEMPERATURE: tl.constexpr,
    DECOUPLE: tl.constexpr, DYNAMIC: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    decay = rate * 0.0 + WEIGHT_DECAY
    if DYNAMIC != 0:
        lead = _norm(g, inside) - _norm(w, inside)
        turned = lead if FLIP != 0 else -lead
        decay = _ratio(decay, 1.0 + tl.exp(_ratio(turned, decay * 0.0 + TEMPERATURE)))
    pull = decay[:, None] * w
    if DECOUPLE == 0:
        g = g + pull
    n = n + g * g
    move = _ratio(rate[:, None] * g, _root(n))
    if DECOUPLE != 0:
        move = move + rate[:, None] * pull
    return w - move, n


_STEPS: dict[str, Any] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adadelta": _adadelta,
    "adam": _adam,
    "amsgrad": _adam,
    "adamw": _adamw,
    "ftrl": _ftrl,
    "rmsprop": _rmsprop,
    "batch_softmax": _batch_softmax,
    "sign_sgd": _sign_sgd,
    "moving_average": _moving_average,
    "lamb": _lamb,
    "group_ftrl": _group_ftrl,
    "group_adagrad": _group_adagrad,
    "dynamic_wd_adagrad": _dynamic_wd_adagrad,
}


@triton.jit  # type: ignore[untyped-decorator]
def stepped(  # type: ignore[no-untyped-def]
    w, g, s0, s1, s2, p0, p1, rate, inside, global_step,
    DIM: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The rule's step; P are `KernelRule.params`. What a rule does not have stays as it is.

    inside: [R, D], true where there is a row and a column.
    """
    lr = rate[:, None]
    if RULE == "sgd":
        w = _sgd(w, g, lr, P[0])
    elif RULE == "momentum":
        w, s0 = _momentum(w, g, s0, lr, P[0], P[1], P[2])
    elif RULE == "adagrad":
        w, s0 = _adagrad(w, g, s0, lr, P[0], P[1])
    elif RULE == "rowwise_adagrad":
        w, p0 = _rowwise_adagrad(w, g, p0, lr, DIM, P[0], P[1])
    elif RULE == "adadelta":
        w, s0, s1 = _adadelta(w, g, s0, s1, lr, P[0], P[1], P[2])
    elif RULE == "adam" or RULE == "amsgrad":
        w, s0, s1, s2, p0, p1 = _adam(
            w, g, s0, s1, s2, p0, p1, rate, RULE == "amsgrad", P[0], P[1], P[2], P[3], P[4]
        )
    elif RULE == "adamw":
        w, s0, s1, p0, p1 = _adamw(w, g, s0, s1, p0, p1, rate, P[0], P[1], P[2], P[3])
    elif RULE == "ftrl":
        w, s0, s1 = _ftrl(w, g, s0, s1, lr, P[0], P[1], P[2])
    elif RULE == "rmsprop":
        w, s0 = _rmsprop(w, g, s0, lr, P[0], P[1], P[2])
    elif RULE == "batch_softmax":
        w, p0, p1 = _batch_softmax(w, p0, p1, lr, global_step)
    elif RULE == "sign_sgd":
        w = _sign_sgd(w, g, lr, P[0])
    elif RULE == "moving_average":
        w = _moving_average(w, g, P[0])
    elif RULE == "lamb":
        w, s0, s1, p0, p1 = _lamb(w, g, s0, s1, p0, p1, rate, inside, P[0], P[1], P[2], P[3])
    elif RULE == "group_ftrl":
        w, s0, s1 = _group_ftrl(w, g, s0, s1, lr, inside, P[0], P[1], P[2])
    elif RULE == "group_adagrad":
        w, p0 = _group_adagrad(w, g, p0, rate, inside, P[0], P[1], P[2])
    else:
        tl.static_assert(RULE == "dynamic_wd_adagrad")
        w, s0 = _dynamic_wd_adagrad(w, g, s0, rate, inside, P[0], P[1], P[2], P[3], P[4])
    return w, s0, s1, s2, p0, p1
