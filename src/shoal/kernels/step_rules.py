"""Optimizer rules in registers: one step of a tile of rows, in the order of `csrc/rules_impl.h`.

A rule sees weights, summed gradient and up to three state vectors as [R, D] tiles, and up to two
numbers of state per row and the rate as [R]. It returns all but gradient and rate as they are
after the step. Divisions and roots are the exact ones: `/` alone is an approximation in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from shoal.rules.adagrad import Adadelta, Adagrad, DynamicWdAdagrad, RMSprop, RowWiseAdagrad
from shoal.rules.adam import LAMB, Adam, AdamW, Amsgrad
from shoal.rules.gradient_descent import SGD, Momentum, SignSGD
from shoal.rules.rule import Optimizer
from shoal.rules.running import BatchSoftmax, MovingAverage
from shoal.rules.sparse_group import FTRL, GroupAdagrad, GroupFTRL

_NUMBERS = {
    SGD: 0,
    Momentum: 1,
    Adagrad: 2,
    RowWiseAdagrad: 3,
    Adadelta: 4,
    Adam: 5,
    Amsgrad: 6,
    AdamW: 7,
    FTRL: 8,
    RMSprop: 9,
    BatchSoftmax: 10,
    SignSGD: 11,
    MovingAverage: 12,
    LAMB: 13,
    GroupFTRL: 14,
    GroupAdagrad: 15,
    DynamicWdAdagrad: 16,
}
_SGD, _MOMENTUM, _ADAGRAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ROWWISE_ADAGRAD, _ADADELTA, _ADAM = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_AMSGRAD, _ADAMW, _FTRL = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
_RMSPROP, _BATCH_SOFTMAX, _SIGN_SGD = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)
_MOVING_AVERAGE, _LAMB, _GROUP_FTRL = tl.constexpr(12), tl.constexpr(13), tl.constexpr(14)
_GROUP_ADAGRAD = tl.constexpr(15)  # and DynamicWdAdagrad is whatever is left
# Bits of the low word of BatchSoftmax's last step.
_STEP_BITS, _STEP_MASK = tl.constexpr(20), tl.constexpr((1 << 20) - 1)

PARAMS = 7


@dataclass(frozen=True, slots=True)
class KernelRule:
    """A rule as kernels take it: its number, its state's vectors [D] and numbers, its constants."""

    number: int
    vectors: int
    scalars: int
    params: tuple[float, ...]


def kernel_rule(rule: Optimizer, real: torch.dtype) -> KernelRule | None:
    """The kernel form of a rule for rows of dtype `real`, or None if kernels do not know it."""
    number = _NUMBERS.get(type(rule))
    if number is None:
        return None
    scalars = rule.state_width(1) - (rule.state_width(2) - rule.state_width(1))
    vectors = rule.state_width(1) - scalars
    values = _params(rule, lambda share: _rest(share, real))
    return KernelRule(number, vectors, scalars, values + (0.0,) * (PARAMS - len(values)))


def _params(rule: Optimizer, rest: Callable[[float], float]) -> tuple[float, ...]:
    match rule:
        case SGD() | SignSGD():
            return (rule.weight_decay,)
        case Momentum():
            return (rule.momentum, rule.weight_decay, float(rule.nesterov))
        case Adagrad() | RowWiseAdagrad():
            return (rule.weight_decay, rule.eps)
        case Adadelta():
            return (rule.weight_decay, rule.eps, rule.rho, rest(rule.rho))
        case Adam() | Amsgrad():
            moments = (rule.beta1, rest(rule.beta1), rule.beta2, rest(rule.beta2))
            return (*moments, rule.eps, rule.weight_decay, float(rule.nesterov))
        case AdamW() | LAMB():
            moments = (rule.beta1, rest(rule.beta1), rule.beta2, rest(rule.beta2))
            return (*moments, rule.eps, rule.weight_decay)
        case FTRL() | GroupFTRL():
            return (rule.beta, rule.l1, rule.l2)
        case GroupAdagrad():
            return (rule.beta, rule.l2, rule.weight_decay)
        case DynamicWdAdagrad():
            switches = (float(rule.decouple), float(rule.dynamic), float(rule.flip))
            return (rule.weight_decay, rule.temperature, *switches)
        case RMSprop():
            fresh = 1.0 if rule.accumulate == "sum" else rest(rule.momentum)
            return (rule.momentum, fresh, rule.weight_decay)
        case MovingAverage():
            return (rule.momentum, rest(rule.momentum))
        case _:
            return ()


def _rest(share: float, real: torch.dtype) -> float:
    """1 - share as rows of this dtype compute it: `rules.rule.rest_of`."""
    return float(1 - torch.tensor(share, dtype=real, device="cpu"))


@triton.jit
def _ratio(a, b):  # type: ignore[no-untyped-def]
    return tl.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def _root(a):  # type: ignore[no-untyped-def]
    return tl.sqrt_rn(a) if a.dtype == tl.float32 else tl.sqrt(a)


@triton.jit  # type: ignore[untyped-decorator]
def _momentum(w, g, n, lr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr, NESTEROV: tl.constexpr):  # type: ignore[no-untyped-def]
    new = MOMENTUM * n - lr * (g + DECAY * w)
    move = (1 + MOMENTUM) * new - MOMENTUM * n if NESTEROV != 0 else new
    return w + move, new


@triton.jit  # type: ignore[untyped-decorator]
def _adagrad(w, g, n, lr, DECAY: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    g = g + DECAY * w
    n = n + g * g
    return w - _ratio(lr * g, _root(n) + EPS), n


@triton.jit  # type: ignore[untyped-decorator]
def _rowwise_adagrad(w, g, n, lr, DIM: tl.constexpr, DECAY: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    g = g + DECAY * w
    total = tl.sum(g * g, axis=1)
    n = n + _ratio(total, tl.full(total.shape, DIM, total.dtype))
    return w - _ratio(lr * g, (_root(n) + EPS)[:, None]), n


@triton.jit  # type: ignore[untyped-decorator]
def _adadelta(  # type: ignore[no-untyped-def]
    w, g, sq, up, lr, DECAY: tl.constexpr, EPS: tl.constexpr, RHO: tl.constexpr, REST: tl.constexpr
):
    g = g + DECAY * w
    sq = RHO * sq + REST * g * g
    move = _ratio(g * _root(up + EPS), _root(sq + EPS))
    return w - lr * move, sq, RHO * up + REST * move * move


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    w,
    g,
    m,
    v,
    top,
    p1,
    p2,
    rate,
    B1: tl.constexpr,
    REST1: tl.constexpr,
    B2: tl.constexpr,
    REST2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    AMSGRAD: tl.constexpr,
):
    rate = _ratio(rate * _root(1.0 - p2), 1.0 - p1)
    g = g + DECAY * w
    m = m + (g - m) * REST1
    v = v + (g * g - v) * REST2
    second = v
    if AMSGRAD:
        top = tl.where(top > v, top, v)
        second = top
    first = REST1 * g + B1 * m if NESTEROV != 0 else m
    w = w - _ratio(rate[:, None] * first, _root(second) + EPS)
    return w, m, v, top, p1 * B1, p2 * B2


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    w,
    g,
    m,
    v,
    p1,
    p2,
    rate,
    B1: tl.constexpr,
    REST1: tl.constexpr,
    B2: tl.constexpr,
    REST2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
):
    keep = 1.0 - rate * DECAY
    rate = _ratio(rate, 1.0 - p1)
    root = _root(1.0 - p2)
    m = m + (g - m) * REST1
    v = v + (g * g - v) * REST2
    under = _ratio(_root(v), root[:, None]) + EPS
    w = w * keep[:, None] - _ratio(rate[:, None] * m, under)
    return w, m, v, p1 * B1, p2 * B2


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
def _rmsprop(w, g, n, lr, MOMENTUM: tl.constexpr, FRESH: tl.constexpr, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    g = g + DECAY * w
    n = MOMENTUM * n + FRESH * g * g
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
    B1: tl.constexpr, REST1: tl.constexpr, B2: tl.constexpr, REST2: tl.constexpr,
    EPS: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    m = m + (g - m) * REST1
    v = v + (g * g - v) * REST2
    under = _root(_ratio(v, (1.0 - p2)[:, None])) + EPS
    move = _ratio(_ratio(m, (1.0 - p1)[:, None]), under) + DECAY * w
    w_norm, move_norm = _norm(w, inside), _norm(move, inside)
    usable = (w_norm > 0) & (move_norm > 0)
    trust = tl.where(usable, _ratio(w_norm, tl.where(usable, move_norm, 1.0)), 1.0)
    return w - (rate * trust)[:, None] * move, m, v, p1 * B1, p2 * B2


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
    w, g, n, rate, inside, BETA: tl.constexpr, L2: tl.constexpr, DECAY: tl.constexpr
):  # fmt: skip
    still = rate == 0
    g = g + DECAY * w
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
    DECAY: tl.constexpr, TEMPERATURE: tl.constexpr,
    DECOUPLE: tl.constexpr, DYNAMIC: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    decay = rate * 0.0 + DECAY
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


@triton.jit  # type: ignore[untyped-decorator]
def stepped(  # type: ignore[no-untyped-def]
    w, g, s0, s1, s2, p0, p1, rate, inside, global_step,
    DIM: tl.constexpr, RULE: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The rule's step; A to G are `KernelRule.params`. What a rule does not have stays as it is.

    inside: [R, D], true where there is a row and a column.
    """
    lr = rate[:, None]
    if RULE == _SGD:
        w = w - lr * (g + A * w)
    elif RULE == _MOMENTUM:
        w, s0 = _momentum(w, g, s0, lr, A, B, C)
    elif RULE == _ADAGRAD:
        w, s0 = _adagrad(w, g, s0, lr, A, B)
    elif RULE == _ROWWISE_ADAGRAD:
        w, p0 = _rowwise_adagrad(w, g, p0, lr, DIM, A, B)
    elif RULE == _ADADELTA:
        w, s0, s1 = _adadelta(w, g, s0, s1, lr, A, B, C, D)
    elif RULE == _ADAM:
        w, s0, s1, s2, p0, p1 = _adam(w, g, s0, s1, s2, p0, p1, rate, A, B, C, D, E, F, G, False)
    elif RULE == _AMSGRAD:
        w, s0, s1, s2, p0, p1 = _adam(w, g, s0, s1, s2, p0, p1, rate, A, B, C, D, E, F, G, True)
    elif RULE == _ADAMW:
        w, s0, s1, p0, p1 = _adamw(w, g, s0, s1, p0, p1, rate, A, B, C, D, E, F)
    elif RULE == _FTRL:
        w, s0, s1 = _ftrl(w, g, s0, s1, lr, A, B, C)
    elif RULE == _RMSPROP:
        w, s0 = _rmsprop(w, g, s0, lr, A, B, C)
    elif RULE == _BATCH_SOFTMAX:
        w, p0, p1 = _batch_softmax(w, p0, p1, lr, global_step)
    elif RULE == _SIGN_SGD:
        sign = (g > 0).to(w.dtype) - (g < 0).to(w.dtype)
        w = w * (1.0 - lr * A) - lr * sign
    elif RULE == _MOVING_AVERAGE:
        w = A * w + B * g
    elif RULE == _LAMB:
        w, s0, s1, p0, p1 = _lamb(w, g, s0, s1, p0, p1, rate, inside, A, B, C, D, E, F)
    elif RULE == _GROUP_FTRL:
        w, s0, s1 = _group_ftrl(w, g, s0, s1, lr, inside, A, B, C)
    elif RULE == _GROUP_ADAGRAD:
        w, p0 = _group_adagrad(w, g, p0, rate, inside, A, B, C)
    else:
        w, s0 = _dynamic_wd_adagrad(w, g, s0, rate, inside, A, B, C, D, E)
    return w, s0, s1, s2, p0, p1
