"""Optimizers of a model's dense weights: torch's, by name and by pattern of the weights' names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.config.tree import DenseOptimizerSettings, DenseRuleSettings
from shoal.errors import ConfigError, known_name, unknown_name
from shoal.rules.schedules import Schedule, as_rate

Rate = float | Schedule
_KINDS = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
# Set elsewhere, or not for a training loop to choose.
_NO_OPTIONS = {"params", "lr", "weight_decay", "capturable", "differentiable"}
_REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AssertionError)


def dense_optimizers(
    module: nn.Module,
    settings: DenseOptimizerSettings,
    rate_of: Callable[[Rate], Rate] = lambda rate: rate,
    *,
    all_fit: bool = True,
) -> list[tuple[Optimizer, Rate]]:
    """An optimizer and its learning rate for each settings that have weights: those of most first.

    Args:
        module: whose weights are stepped.
        settings: of most weights, and by pattern.
        rate_of: what becomes of a learning rate.
        all_fit: each pattern has to fit a weight.

    Raises:
        UnknownName: a pattern that fits no weight, or an argument that an optimizer does not have.
        ConfigError: an argument that it refuses, or a pattern whose weights all fit earlier ones.
    """
    weights = dict(module.named_parameters())
    rules: list[tuple[str | None, DenseRuleSettings]] = [(None, settings)]
    rules += settings.parameters.items()
    found: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern, _ in rules}
    for name, weight in weights.items():
        fitting = (one for one in settings.parameters if fnmatchcase(name, one))
        found[next(fitting, None)].append(weight)
    for pattern in settings.parameters if all_fit else ():
        if not any(fnmatchcase(name, pattern) for name in weights):
            remedy = "Patterns are of the model's weights by name."
            raise unknown_name("dense_optimizer.parameters", pattern, weights, remedy=remedy)
        if not found[pattern]:
            what, got = f"dense_optimizer.parameters {pattern!r}", "weights of earlier ones only"
            remedy = "Put it before them, or leave it out: the first pattern that fits counts."
            raise ConfigError(what, got, "a pattern with weights of its own", remedy)
    rates = {pattern: rate_of(rule.lr) for pattern, rule in rules}
    return [
        (_made(found[pattern], rule, as_rate(rates[pattern], 0)), rates[pattern])
        for pattern, rule in rules
        if found[pattern]
    ]


def _made(weights: Sequence[nn.Parameter], rule: DenseRuleSettings, lr: float) -> Optimizer:
    kind, what = _KINDS[rule.kind], f"dense_optimizer {rule.kind}"
    known = inspect.signature(kind).parameters
    given: dict[str, Any] = {key: _as_argument(value) for key, value in rule.options.items()}
    for key, value in given.items():
        known_name(f"option of {what}", key, known.keys() - _NO_OPTIONS)
        _check_like(f"option {key} of {what}", value, known[key].default, key)
    if "weight_decay" in known:
        given["weight_decay"] = rule.weight_decay
    elif rule.weight_decay:
        raise ConfigError(what, f"weight_decay {rule.weight_decay}", "0", "It has none.")
    if not given.get("foreach") and _fuses(rule.kind, weights):
        given = {"fused": True, **given}
    try:
        made: Optimizer = kind(weights, lr=lr, **given)
    except _REFUSALS as error:
        remedy = "Change its options, or the pattern of its weights."
        raise ConfigError(what, str(error), "what torch.optim takes", remedy) from error
    return made


def _check_like(what: str, value: Any, default: Any, key: str) -> None:
    """torch takes any text for true, and misses a number of a pair only when it steps."""
    if isinstance(default, bool) or key in ("foreach", "fused"):
        fine, allowed = isinstance(value, bool) or value is default, "true or false"
    elif isinstance(default, tuple):
        fine = isinstance(value, tuple) and len(value) == len(default)
        fine = fine and all(_is_number(a) or a is b for a, b in zip(value, default, strict=True))
        allowed = f"{len(default)} numbers"
    else:
        fine, allowed = not _is_number(default) or _is_number(value), "a number"
    if not fine:
        got = list(value) if isinstance(value, tuple) else value
        raise ConfigError(what, got, allowed, f"By default it is {default}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_argument(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _fuses(kind: str, weights: Sequence[nn.Parameter]) -> bool:
    """Whether torch has a fused step: of weights that FSDP2 splits for Adam only."""
    if any(isinstance(weight, DTensor) for weight in weights):
        return kind in ("adam", "adamw")
    return all(has_fused(kind, weight.device) for weight in weights)


@functools.cache
def has_fused(kind: str, device: torch.device) -> bool:
    """Whether this torch has a fused step of an optimizer there; one of a number is tried.

    Versions differ in what they refuse, and where they have kernels.
    """
    if "fused" not in inspect.signature(_KINDS[kind]).parameters:
        return False
    number = nn.Parameter(torch.zeros(1, device=device))
    number.grad = torch.zeros_like(number)
    try:
        _KINDS[kind]([number], fused=True).step()
    except RuntimeError:
        return False
    return True
