from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from shoal.errors import ConfigError, UnknownName
from shoal.models import MODELS, PLE, Inputs, MMoE, Pointwise, Predicted, Task, TaskSettings
from shoal.models.tasks import tasks_of

B, DENSE, F, D = 5, 3, 4, 6
LABELS = ("click", "cart", "buy")
INPUTS = Inputs(DENSE, F, D, labels=LABELS)
SETTINGS: dict[str, dict[str, object]] = {
    "mmoe": {"experts": 3, "expert": (8, 5), "hidden": (4,)},
    "ple": {"experts": 2, "shared": 1, "levels": 2, "expert": (8, 5), "hidden": (4,)},
    "dbmtl": {
        "bottom": (8,),
        "hidden": (4,),
        "relations": (("cart", ("click",)), ("buy", ("click", "cart"))),
    },
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, DENSE), torch.randn(B, F, D)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_logit_for_each_task_and_gradients_for_all_weights(kind: str) -> None:
    model = MODELS[kind](**SETTINGS[kind]).build(INPUTS)
    logits = model(*batch())
    assert logits.shape == (B, len(LABELS))
    logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    with_first = model(*batch(), torch.ones(B, F))
    assert with_first.shape == (B, len(LABELS))
    alone = MODELS[kind](**{k: v for k, v in SETTINGS[kind].items() if k != "relations"})
    assert alone.build(INPUTS._replace(labels=("click",)))(*batch()).shape == (B,)


def test_mmoe_mixes_experts_by_a_gate_for_each_task() -> None:
    model = MMoE(7, 2, experts=3, expert=(5,)).double()
    x = torch.randn(B, 7, dtype=torch.float64)
    experts = torch.stack([expert(x) for expert in model.experts])
    for task, found in enumerate(model(x)):
        gates = (x @ model.gates[task].gate.weight.T).exp()
        gates = gates / gates.sum(1, keepdim=True)
        expected = sum(gates[:, e : e + 1] * experts[e] for e in range(3))
        torch.testing.assert_close(found, expected)


def test_ple_reads_own_and_shared_experts_level_by_level() -> None:
    model = PLE(7, 2, experts=2, shared=1, levels=2, expert=(5,)).double()
    x = torch.randn(B, 7, dtype=torch.float64)

    def mix(gate: nn.Module, given: Tensor, outputs: list[Tensor]) -> Tensor:
        weights = (given @ gate.gate.weight.T).softmax(1)
        return sum(weights[:, k : k + 1] * y for k, y in enumerate(outputs))  # type: ignore[return-value]

    (a, b, s), gates = model.experts[0], model.gates[0]
    ya, yb, ys = ([one(x) for one in group] for group in (a, b, s))
    xa, xb = mix(gates[0], x, ya + ys), mix(gates[1], x, yb + ys)
    xs = mix(gates[2], x, ya + yb + ys)
    (a, b, s), gates = model.experts[1], model.gates[1]
    ya, yb, ys = [one(xa) for one in a], [one(xb) for one in b], [one(xs) for one in s]
    assert len(gates) == 2
    found = model(x)
    torch.testing.assert_close(found[0], mix(gates[0], xa, ya + ys))
    torch.testing.assert_close(found[1], mix(gates[1], xb, yb + ys))


def test_a_task_reads_the_towers_it_is_related_to() -> None:
    model = MODELS["dbmtl"](**SETTINGS["dbmtl"]).build(INPUTS)
    dense, embeddings = batch()
    before = model(dense, embeddings)
    with torch.no_grad():
        model.towers[0][0].weight.mul_(-2)  # the tower of click
    assert (model(dense, embeddings) != before).any(0).tolist() == [True, True, True]
    before = model(dense, embeddings)
    with torch.no_grad():
        model.towers[2][0].weight.mul_(-2)  # that of buy, which no other reads
    assert (model(dense, embeddings) != before).any(0).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("kind", "field"), [("mmoe", "expert"), ("ple", "expert"), ("dbmtl", "bottom")]
)
def test_shared_layers_are_not_left_out(kind: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of model {kind}"):
        MODELS[kind](**{field: ()})


def test_relations_in_a_circle_or_of_no_label_are_refused() -> None:
    circle = (("click", ("buy",)), ("buy", ("click",)))
    with pytest.raises(ConfigError, match="circle"):
        MODELS["dbmtl"](relations=circle).build(INPUTS)
    with pytest.raises(UnknownName, match="byu"):
        MODELS["dbmtl"](relations=(("click", ("byu",)),)).build(INPUTS)


def test_losses_are_weighted_and_limited_to_where_a_label_is() -> None:
    settings = {
        "buy": TaskSettings(weight=0.5, where="click"),
        "cart": TaskSettings(loss="focal"),
    }
    tasks = tasks_of(LABELS, settings)
    labels = torch.tensor([[1.0, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0]])
    logits, weights = torch.randn(B, 3, dtype=torch.float64), torch.rand(B, dtype=torch.float64)
    labels = labels.double()
    found = Pointwise(tasks).loss_sum(logits, labels, weights)
    expected = 0.0
    for b in range(B):
        for task in range(3):
            p, y = float(logits[b, task].sigmoid()), float(labels[b, task])
            loss = -math.log(p if y else 1 - p)
            loss *= {0: 1.0, 1: (y - p) ** 2, 2: 0.5 * float(labels[b, 0])}[task]
            expected += float(weights[b]) * loss
    assert float(found) == pytest.approx(expected)
    with pytest.raises(UnknownName, match="label in tasks"):
        tasks_of(LABELS, {"by": TaskSettings()})
    with pytest.raises(UnknownName, match="label in tasks"):
        tasks_of(LABELS, {"buy": TaskSettings(where="clik")})


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_of_tasks_are_numbers(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight of a task"):
        TaskSettings(weight=weight)


def test_one_task_is_the_plain_loss_to_the_bit() -> None:
    logits, labels, weights = torch.randn(B), torch.rand(B).round(), torch.rand(B)
    for own in (None, weights):
        found = Pointwise((Task(label="y"),)).loss_sum(logits, labels.unsqueeze(1), own)
        plain = binary_cross_entropy_with_logits(logits, labels, weight=own, reduction="sum")
        assert torch.equal(found, plain)


def test_outputs_by_name_and_as_a_table() -> None:
    labels = torch.arange(6.0).view(2, 3)
    one = Predicted("fm", (Task(label="click"),))
    assert one.columns == {"fm": 0}
    assert list(one.table(torch.zeros(2), labels)) == ["prediction", "label"]
    many = Predicted("mmoe", tasks_of(LABELS, {}))
    assert many.columns == {"mmoe/click": 0, "mmoe/cart": 1, "mmoe/buy": 2}
    table = many.table(labels / 10, labels)
    assert table["prediction_buy"].tolist() == pytest.approx([0.2, 0.5])
    assert table["label_cart"].tolist() == [1.0, 4.0]
