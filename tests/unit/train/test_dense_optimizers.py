"""Dense optimizers by name and by pattern of weights, built from settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from torch import nn

from shoal import config, train
from shoal.config.tree import DenseOptimizerSettings, DenseRuleSettings
from shoal.errors import ConfigError, UnknownName
from shoal.train import dense_optimizers as made_of
from shoal.train.dense_optimizers import dense_optimizers, has_fused

SYNTHETIC = {
    "kind": "synthetic",
    "examples": 320,
    "eval_examples": 64,
    "num_features": 2,
    "vocabulary": 20,
    "num_dense": 2,
}


def settings(**dense: Any) -> config.RunConfig:
    return config.from_mapping(
        {
            "name": "dense",
            "threads": 1,
            "data": {"source": SYNTHETIC, "batch_size": 32},
            "model": {"kind": "deepfm", "hidden": [4]},
            "dense_optimizer": dense,
            "logging": {"points": 2, "tensorboard": False},
        }
    )


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False))


def stepped(made: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    batch = torch.arange(12, dtype=torch.float32).reshape(4, 3) / 7
    for _ in range(3):
        for one in optimizers:
            one.zero_grad()
        made(batch).square().sum().backward()
        for one in optimizers:
            one.step()
    return [weight.detach() for weight in made.parameters()]


@pytest.mark.parametrize(
    ("kind", "options", "theirs"),
    [
        ("adadelta", {"rho": 0.5}, torch.optim.Adadelta),
        ("adafactor", {}, torch.optim.Adafactor),
        ("adagrad", {"initial_accumulator_value": 0.1}, torch.optim.Adagrad),
        ("adam", {"betas": [0.8, 0.9]}, torch.optim.Adam),
        ("adamax", {}, torch.optim.Adamax),
        ("adamw", {"amsgrad": True}, torch.optim.AdamW),
        ("asgd", {"alpha": 0.5}, torch.optim.ASGD),
        ("muon", {"momentum": 0.8}, torch.optim.Muon),
        ("nadam", {}, torch.optim.NAdam),
        ("radam", {}, torch.optim.RAdam),
        ("rmsprop", {"momentum": 0.9, "alpha": 0.8}, torch.optim.RMSprop),
        ("rprop", {"etas": [0.4, 1.3]}, torch.optim.Rprop),
        ("sgd", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ],
)
def test_each_of_torch_s_is_built_by_its_name(
    kind: str, options: dict[str, Any], theirs: type[torch.optim.Optimizer]
) -> None:
    decay = {} if kind == "rprop" else {"weight_decay": 0.125}
    made = settings(kind=kind, lr=0.25, options=options, **decay).dense_optimizer
    ours, plain = model(), model()
    ((optimizer, rate),) = dense_optimizers(ours, made)
    assert type(optimizer) is theirs
    assert rate == 0.25
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    wanted = theirs(plain.parameters(), lr=0.25, **decay, **given)  # type: ignore[call-arg]
    torch.testing.assert_close(
        stepped(ours, [optimizer]), stepped(plain, [wanted]), rtol=1e-6, atol=1e-7
    )


def test_the_first_pattern_that_fits_counts_and_takes_over_what_it_leaves_out() -> None:
    made = settings(
        kind="adam",
        lr=0.5,
        weight_decay=0.25,
        options={"eps": 1e-4},
        parameters={"0.*": {"lr": 0.125}, "*": {"kind": "sgd", "options": {"momentum": 0.5}}},
    ).dense_optimizer
    ours = model()
    (first, _), (second, _) = dense_optimizers(ours, made)
    assert [type(one) for one in (first, second)] == [torch.optim.Adam, torch.optim.SGD]
    for one, weight, wanted in (
        (first, ours[0].weight, {"lr": 0.125, "weight_decay": 0.25, "eps": 1e-4}),  # type: ignore[index]
        (second, ours[2].weight, {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.5}),  # type: ignore[index]
    ):
        (group,) = one.param_groups
        assert group["params"] == [weight]
        assert {key: group[key] for key in wanted} == wanted


@pytest.mark.parametrize("kind", [{}, {"kind": "adam"}])
def test_a_pattern_of_the_same_kind_has_its_options(kind: dict[str, Any]) -> None:
    dense = {
        **kind,
        "lr": 0.5,
        "options": {"amsgrad": True},
        "parameters": {"a": {"kind": "adam", "lr": 0.25}, "b": {}, "c": {"kind": "sgd"}},
    }
    rules = {name: DenseRuleSettings(**own) for name, own in dense["parameters"].items()}  # type: ignore[attr-defined]
    for made in (
        settings(**dense).dense_optimizer,
        DenseOptimizerSettings(**{**dense, "parameters": rules}),  # type: ignore[arg-type]
    ):
        found = {k: (one.kind, one.lr, one.options) for k, one in made.parameters.items()}
        assert found == {
            "a": ("adam", 0.25, {"amsgrad": True}),
            "b": ("adam", 0.5, {"amsgrad": True}),
            "c": ("sgd", 0.5, {}),
        }


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_how_an_optimizer_steps_is_chosen(option: str) -> None:
    made = settings(options={option: True}).dense_optimizer
    ((optimizer, _),) = dense_optimizers(model(), made)
    assert {key: optimizer.param_groups[0][key] for key in ("foreach", "fused")} == {
        "foreach": True if option == "foreach" else None,
        "fused": True if option == "fused" else None,
    }


def test_rates_follow_the_schedule_of_their_own(tmp_path: Path) -> None:
    rate = {"kind": "piecewise", "boundaries": [1], "values": [0.5, 0.25]}
    made = settings(parameters={"*weight": {"lr": rate}}).dense_optimizer
    (_, rate_of_rest), (_, own) = dense_optimizers(nn.Linear(2, 2), made, lambda one: one)
    assert rate_of_rest == 0.001
    assert own == made.parameters["*weight"].lr


@pytest.mark.parametrize(
    ("dense", "kind", "words"),
    [
        ({"kind": "sgd", "options": {"momentun": 0.9}}, UnknownName, "option of .*momentun"),
        ({"kind": "sgd", "options": {"lr": 0.9}}, UnknownName, "option of .*'lr'"),
        ({"kind": "adam", "options": {"betas": [2, 3]}}, ConfigError, "dense_optimizer adam"),
        ({"kind": "adam", "options": {"betas": "no"}}, ConfigError, "dense_optimizer adam"),
        ({"kind": "adam", "options": {"betas": []}}, ConfigError, "dense_optimizer adam"),
        ({"options": {"betas": [0.9]}}, ConfigError, r"betas of .*got \[0.9\].*2 numbers"),
        ({"options": {"betas": [0.9, "x"]}}, ConfigError, "option betas of"),
        ({"options": {"fused": "no"}}, ConfigError, "fused of .*'?no'?.*true or false"),
        ({"options": {"amsgrad": 1}}, ConfigError, "amsgrad of .*true or false"),
        ({"options": {"eps": "1e-8"}}, ConfigError, "eps of .*a number"),
        ({"parameters": {"*weight": {}, "0.*": {}}}, ConfigError, "'0.\\*': got weights of earl"),
        ({"kind": "adam", "options": {"capturable": True}}, UnknownName, "option of .*capturable"),
        ({"kind": "rprop", "weight_decay": 0.1}, ConfigError, "rprop: got weight_decay 0.1"),
        ({"parameters": {"*wight": {}}}, UnknownName, "dense_optimizer.parameters.*wight"),
    ],
)
def test_what_an_optimizer_does_not_take_is_named(
    dense: Mapping[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        dense_optimizers(model(), settings(**dense).dense_optimizer)


def test_a_pattern_without_weights_is_fine_for_a_baseline() -> None:
    made = DenseOptimizerSettings(parameters={"nothing": DenseOptimizerSettings()})
    assert len(dense_optimizers(model(), made, all_fit=False)) == 1


PARTS = {
    "kind": "rmsprop",
    "lr": 0.01,
    "options": {"momentum": 0.5},
    "parameters": {
        "*bias": {"kind": "sgd", "lr": {"kind": "piecewise", "boundaries": [9], "values": [1, 0]}},
    },
}


def run_of(folder: Path, file: Path, epochs: int, **more: Any) -> config.RunConfig:
    source = {"kind": "parquet", "paths": [str(file)], "eval_paths": [str(file)]}
    source |= {"ids": {"u": {}}, "label": "y", "dense": ["x"]}
    base = {
        "name": "parts",
        "threads": 1,
        "data": {"source": source, "batch_size": 16, "epochs": epochs},
        "model": {"kind": "deepfm", "hidden": [4]},
        "dense_optimizer": PARTS,
        "clip_norm": 1.0,
        "logging": {"points": 2, "tensorboard": False},
        "output": {"dir": str(folder)},
    }
    return config.from_mapping({**base, **more})


@pytest.mark.slow
def test_a_run_with_two_optimizers_resumes_evaluates_and_warms_another(tmp_path: Path) -> None:
    draw, file = np.random.default_rng(1), tmp_path / "rows.parquet"
    u, x = draw.integers(0, 9, 96), draw.normal(size=96)
    y = (x + u % 2 > 0.5).astype(np.float32)
    pq.write_table(pa.table({"u": u, "x": x, "y": y}), file)
    console = Console(quiet=True)
    whole = train.run(run_of(tmp_path / "a", file, 2), console=console)
    part = train.run(run_of(tmp_path / "b", file, 1), console=console)
    resumed = train.run(run_of(tmp_path / "b", file, 2), console=console, resume=str(part.folder))
    assert resumed.metrics == whole.metrics
    again = train.evaluate(str(whole.folder), console=console)
    assert again["deepfm"] == whole.metrics["deepfm"]
    one = {"dense_optimizer": {**PARTS, "parameters": {}}}
    alike = train.run(run_of(tmp_path / "c", file, 2, **one), console=console)
    assert alike.metrics["deepfm"] != whole.metrics["deepfm"]
    warm = {"checkpoint": {"warm_start": str(part.folder)}, "baselines": []}
    warmed = train.run(run_of(tmp_path / "d", file, 1, **warm), console=console)
    assert warmed.metrics["deepfm"]["log_loss"] < part.metrics["deepfm"]["log_loss"]


class Unfused(torch.optim.SGD):
    """Takes the argument, and refuses it when it is made."""

    def __init__(self, params: Any, lr: float = 0.1, *, fused: bool = False) -> None:
        if fused:
            raise RuntimeError("`fused` is not there yet")
        super().__init__(params, lr=lr)


class UnfusedStep(Unfused):
    """Refuses it when it steps."""

    def __init__(self, params: Any, lr: float = 0.1, *, fused: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.refuses = fused

    def step(self, closure: Any = None) -> None:
        if self.refuses:
            raise NotImplementedError("no kernel")
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "fuses"),
    [
        (torch.optim.Adam, True),
        (torch.optim.RMSprop, False),
        (Unfused, False),
        (UnfusedStep, False),
    ],
)
def test_a_fused_step_is_taken_where_there_is_one(
    kind: type[torch.optim.Optimizer], fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"tried {kind.__name__}"  # answers are kept by name
    monkeypatch.setitem(made_of._KINDS, name, kind)
    assert has_fused(name, torch.device("cpu")) is fuses
    weight = nn.Parameter(torch.ones(2))
    made = made_of._made([weight], DenseRuleSettings.model_construct(kind=name, options={}), 0.1)
    weight.grad = torch.ones(2)
    made.step()
    assert (weight < 1).all()
