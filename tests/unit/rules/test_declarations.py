"""What a rule declares is what the core and the kernels read, or they refuse it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.config import tree
from shoal.errors import ConfigError
from shoal.kernels.step_rules import kernel_rule
from shoal.rules.compressors import Compressor, FixedR8
from shoal.rules.initializers import Initializer, Uniform
from shoal.rules.optimizers import SGD, Adagrad, Optimizer
from shoal.rules.rule import Positive
from shoal.table.factory import make_shard
from shoal.table.spec import Segment, TableSpec

OPTIMIZERS = [cls() for kind, cls in tree.OPTIMIZERS.items() if kind != "delay_compensated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Longer(Adagrad):
    """Says that it has a parameter that no backend knows."""

    params = (*Adagrad.params, "power")

    power: Positive = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Turned(Adagrad):
    params = Adagrad.params[::-1]


@dataclass(frozen=True, slots=True)
class Wider(Uniform):
    params = ("minval", "maxval", "maxval")


@dataclass(frozen=True, slots=True)
class Bare(FixedR8):
    params = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unheard(SGD):
    kind = "unheard_of"


def shard_of(**parts: Any) -> Any:
    spec = TableSpec(name="t", segments=(Segment(dim=1, **parts),))
    return make_shard([spec], seed=0, device="cpu")


@pytest.mark.parametrize("rule", OPTIMIZERS, ids=lambda rule: rule.kind)
def test_core_and_kernels_read_what_a_rule_declares(rule: Optimizer) -> None:
    shard_of(optimizer=rule)
    form = kernel_rule(rule)
    assert form is not None
    assert form.params == rule.param_values()
    width = form.vectors * 3 + form.scalars
    assert rule.state_width(3) == width == len(rule.init_state(3))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"optimizer": Longer()}, "adagrad: 3, the core reads 2"),
        ({"optimizer": Unheard()}, "does not know unheard_of"),
        ({"initializer": Wider()}, "uniform: 3, the core reads 2"),
        ({"compressor": Bare()}, "fixed_r8: 0, the core reads 1"),
    ],
)
def test_the_core_refuses_other_parameters(
    parts: dict[str, Optimizer | Initializer | Compressor], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shard_of(**parts)


@pytest.mark.parametrize("rule", [Longer(), Turned()], ids=lambda rule: type(rule).__name__)
def test_kernels_refuse_other_parameters(rule: Optimizer) -> None:
    with pytest.raises(ConfigError, match="parameters of adagrad"):
        kernel_rule(rule)


def test_kernels_leave_rules_they_do_not_know_to_torch() -> None:
    assert kernel_rule(Unheard()) is None


def test_a_made_up_rule_has_its_fields_checked() -> None:
    with pytest.raises(ConfigError, match="power of Longer"):
        Longer(power=0)
    torch.testing.assert_close(Longer().init_state(2), torch.tensor([0.1, 0.1]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", "adagrad"),
        ("optimizer", Adagrad),
        ("optimizer", torch.optim.Adagrad),
        ("initializer", Uniform),
        ("compressor", None),
        ("admission", 3),
        ("expiry", 3600),
        ("segments", Segment(dim=2)),
        ("segments", (2,)),
    ],
)
def test_parts_are_objects_of_their_kind(field: str, value: object) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(
        ConfigError, match=f"{field} of .*; allowed: (an object of|a tuple of) [A-Z]"
    ):
        if field in ("optimizer", "initializer", "compressor"):
            Segment(dim=2, **given)
        else:
            TableSpec(**{"name": "t", "segments": (Segment(dim=2),), **given})
