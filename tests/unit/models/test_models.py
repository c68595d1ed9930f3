from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, ShapeError
from shoal.models import (
    DCN,
    DLRM,
    MLP,
    CrossMixture,
    CrossNetwork,
    DeepFM,
    DeepFMSettings,
    Inputs,
    LogisticRegression,
    LowRankCrossNetwork,
    dot_interaction,
    fm_second_order,
)

B, DENSE, F, D = 5, 3, 4, 6

MODELS = {
    "logistic": lambda dense: LogisticRegression((dense, F, D)),
    "deepfm": lambda dense: DeepFM((dense, F, D), hidden=(8, 8)),
    "fm": lambda dense: DeepFM((dense, F, D), hidden=None),
    "wide_and_deep": lambda dense: DeepFM((dense, F, D), hidden=(8,), pairs=False),
    "dlrm": lambda dense: DLRM((dense, F, D), bottom=(8,), top=(8,)),
    "dlrm_dcnv2": lambda dense: DLRM(
        (dense, F, D), bottom=(8,), top=(8,), cross_layers=2, low_rank=3
    ),
    "dcn": lambda dense: DCN((dense, F, D), cross_layers=2, hidden=(8,)),
    "dcn_mixture": lambda dense: DCN((dense, F, D), cross_layers=2, low_rank=(3, 2), hidden=(8,)),
    "dcn_low_rank": lambda dense: DCN((dense, F, D), cross_layers=2, low_rank=3, hidden=(8,)),
    "dcn_cross_only": lambda dense: DCN((dense, F, D), hidden=()),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch(dense: int = DENSE) -> tuple[Tensor | None, Tensor, Tensor]:
    embeddings = torch.randn(B, F, D, requires_grad=True)
    first_order = torch.randn(B, F, requires_grad=True)
    return torch.randn(B, dense) if dense else None, embeddings, first_order


@pytest.mark.parametrize("dense", [DENSE, 0])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, dense: int) -> None:
    model = MODELS[name](dense)
    dense_B, embeddings, first_order = batch(dense)
    logits = model(dense_B, embeddings, first_order)
    assert logits.shape == (B,)
    nn.functional.binary_cross_entropy_with_logits(logits, torch.ones(B)).backward()
    assert first_order.grad is not None
    assert first_order.grad.abs().min() > 0
    if name != "logistic":
        assert embeddings.grad is not None
        assert embeddings.grad.abs().sum(dim=(0, 2)).min() > 0
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name


@pytest.mark.parametrize("name", [name for name in MODELS if name != "logistic"])
def test_first_order_weights_add_to_the_logit(name: str) -> None:
    model = MODELS[name](DENSE)
    dense_B, embeddings, first_order = batch()
    difference = model(dense_B, embeddings, first_order) - model(dense_B, embeddings)
    torch.testing.assert_close(difference, first_order.sum(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_wrong_shapes_raise(name: str) -> None:
    model = MODELS[name](DENSE)
    dense_B, embeddings, first_order = batch()
    with pytest.raises(ShapeError, match="dense features: got None"):
        model(None, embeddings, first_order)
    with pytest.raises(ShapeError, match="dense features"):
        model(dense_B[:, 1:], embeddings, first_order)
    with pytest.raises(ShapeError, match="embeddings"):
        model(dense_B, embeddings[:, 1:], first_order)
    with pytest.raises(ShapeError, match="embeddings"):
        model(dense_B, embeddings.flatten(1), first_order)
    with pytest.raises(ShapeError, match="first-order"):
        model(dense_B, embeddings, first_order[1:])
    with pytest.raises(ShapeError, match="allowed: None"):
        MODELS[name](0)(dense_B, embeddings, first_order)


@pytest.mark.parametrize("inputs", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_widths_are_checked(inputs: tuple[int, int, int]) -> None:
    for model in (LogisticRegression, DeepFM, DLRM, DCN):
        with pytest.raises(ConfigError, match="num_dense, num_features, dim"):
            model(inputs)


def test_named_inputs_are_a_tuple() -> None:
    inputs = Inputs(num_dense=2, num_features=3, dim=4)
    assert inputs.width == 14
    assert DeepFM(inputs, hidden=(2,))(torch.ones(1, 2), torch.ones(1, 3, 4)).shape == (1,)


def test_logistic_regression_is_the_sum_of_weights() -> None:
    model = LogisticRegression((2, 3, 1))
    with torch.no_grad():
        model.wide.bias.fill_(0.5)
        assert model.wide.dense is not None
        model.wide.dense.copy_(torch.tensor([10.0, 100.0]))
    dense = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert model(dense, weights.unsqueeze(2)).tolist() == [216.5, 115.5]
    assert model(dense, torch.zeros(2, 3, 1), weights).tolist() == [216.5, 115.5]


def test_logistic_regression_of_wide_rows_needs_first_order_weights() -> None:
    with pytest.raises(ShapeError, match="first_order_BF"):
        LogisticRegression((0, F, D))(None, torch.ones(B, F, D))


def test_fm_second_order_is_the_sum_over_pairs() -> None:
    vectors = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    # 1*3+2*4 + 1*5+2*6 + 3*5+4*6
    assert fm_second_order(vectors).tolist() == [67.0]
    many = torch.randn(B, F, D, dtype=torch.float64)
    pairs = sum((many[:, i] * many[:, j]).sum(1) for i, j in itertools.combinations(range(F), 2))
    torch.testing.assert_close(fm_second_order(many), pairs)


def test_dot_interaction_is_each_pair_once() -> None:
    vectors = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    assert dot_interaction(vectors).tolist() == [[11.0, 17.0, 39.0]]
    assert dot_interaction(vectors[:, :1]).shape == (1, 0)


def test_dlrm_top_reads_the_dense_vector_and_all_dots() -> None:
    model = DLRM((1, 2, 2), bottom=(), top=())
    assert model.bottom is not None
    with torch.no_grad():
        model.bottom[0].weight.copy_(torch.tensor([[1.0], [2.0]]))
        model.top[0].weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1e3, 1e4]]))
    vectors = torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
    # dense vector (1, 2); dots 11, 17 with it and 39 between the embeddings
    want = 1 + 20 + 100 * 11 + 1e3 * 17 + 1e4 * 39
    assert model(torch.tensor([[1.0]]), vectors).tolist() == [want]


def test_dlrm_without_anything_to_pair_is_refused() -> None:
    with pytest.raises(ConfigError):
        DLRM((0, 1, 2))


def test_cross_layer_formula() -> None:
    network = CrossNetwork(2, 2)
    first, second = network.layers
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        first.bias.copy_(torch.tensor([0.5, -1.0]))
        second.weight.copy_(torch.eye(2))
    # x1 = (1,2) * ((5,11) + (.5,-1)) + (1,2) = (6.5, 22); x2 = (1,2) * x1 + x1
    assert network(torch.tensor([[1.0, 2.0]])).tolist() == [[13.0, 66.0]]


def test_low_rank_cross_formula() -> None:
    """x1 = x0 * (U (V x0) + b) + x0, twice, as in MLPerf's DLRM-DCNv2."""
    model = LowRankCrossNetwork(3, 2, rank=2)
    x0 = torch.randn(B, 3, dtype=torch.float64)
    model.double()
    for layer in model.up:
        nn.init.normal_(layer.bias)
    x = x0
    for down, up in zip(model.down, model.up, strict=True):
        x = x0 * (x @ down.weight.T @ up.weight.T + up.bias) + x
    assert [tuple(down.weight.shape) for down in model.down] == [(2, 3)] * 2
    torch.testing.assert_close(model(x0), x)


def test_dlrm_dcnv2_crosses_the_dense_vector_with_the_embeddings() -> None:
    model = DLRM((DENSE, F, D), bottom=(8,), top=(8,), cross_layers=2, low_rank=3)
    dense_B, embeddings, _ = batch()
    vectors = torch.cat([model.bottom(dense_B).unsqueeze(1), embeddings], dim=1)
    expected = model.top(model.cross(vectors.flatten(1))).squeeze(1)
    torch.testing.assert_close(model(dense_B, embeddings), expected)


def test_deepfm_is_the_sum_of_its_parts() -> None:
    torch.manual_seed(1)
    whole = DeepFM((DENSE, F, D), hidden=(8,))
    pairs, wide_and_deep = DeepFM((DENSE, F, D), hidden=None), DeepFM((DENSE, F, D), hidden=(8,))
    pairs.load_state_dict(whole.state_dict(), strict=False)
    wide_and_deep.load_state_dict(whole.state_dict())
    wide_and_deep._pairs = False
    inputs = batch()
    alone = pairs.wide(inputs[0], inputs[2])
    torch.testing.assert_close(whole(*inputs), pairs(*inputs) + wide_and_deep(*inputs) - alone)


def test_cross_mixture_formula() -> None:
    width, rank, experts = 3, 2, 2
    network = CrossMixture(width, 1, rank=rank, experts=experts).double()
    nn.init.normal_(network.bias)
    x = torch.randn(1, width, dtype=torch.float64)
    gate = (network.gates[0].weight @ x[0]).softmax(0)
    want = x[0].clone()
    for e in range(experts):
        low = torch.tanh(network.core[0, e] @ torch.tanh(network.down[0, e] @ x[0]))
        want = want + gate[e] * x[0] * (network.up[0, e] @ low + network.bias[0])
    torch.testing.assert_close(network(x)[0], want)


@pytest.mark.parametrize("low_rank", [None, 3, (3, 2)])
def test_crosses_stay_in_the_dtype_of_autocast(low_rank: int | tuple[int, int] | None) -> None:
    model = DCN((0, 2, 4), cross_layers=2, low_rank=low_rank, hidden=())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.cross(torch.randn(B, 8)).dtype is torch.bfloat16


@pytest.mark.parametrize("args", [(0, 1), (1, 0)])
def test_crosses_need_widths(args: tuple[int, int]) -> None:
    with pytest.raises(ConfigError):
        CrossNetwork(*args)
    with pytest.raises(ConfigError):
        CrossMixture(*args, rank=1)


def test_mlp_layers() -> None:
    linear, relu = "AlignedLinear", "ReLU"
    plain = MLP(3, (4, 5), out_features=1)
    assert [type(layer).__name__ for layer in plain] == [linear, relu, linear, relu, linear]
    full = MLP(3, (4,), dropout=0.5, batch_norm=True)
    assert [type(layer).__name__ for layer in full] == [linear, "BatchNorm1d", relu, "Dropout"]
    assert (plain.out_features, full.out_features, MLP(3, ()).out_features) == (1, 4, 3)


@pytest.mark.parametrize("width", [8, 13])
def test_an_mlp_of_any_width_multiplies_as_linear_layers(width: int) -> None:
    mlp, inputs = MLP(width, (), out_features=2), torch.randn(B, width)
    plain = nn.Linear(width, 2)
    plain.load_state_dict(mlp[0].state_dict())
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in (mlp, plain):
            given = inputs.clone().requires_grad_()
            layer(given).square().sum().backward()
            found.append((given.grad, *(own.grad for own in layer.parameters())))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_autocast_leaves_doubles() -> None:
    mlp = MLP(13, (), out_features=2).double()
    inputs = torch.randn(B, 13, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mlp(inputs), nn.functional.linear(inputs, mlp[0].weight, mlp[0].bias))


def test_models_on_the_meta_device_have_shapes() -> None:
    with torch.device("meta"):
        model = DCN((2, 2, 4), hidden=(3,))
        dense, rows = torch.empty(B, 2), torch.empty(B, 2, 4)
    assert model(dense, rows).shape == (B,)


def test_mlp_is_he_initialised() -> None:
    layer = MLP(400, (400,))[0]
    assert isinstance(layer, nn.Linear)
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert layer.bias.count_nonzero() == 0


@pytest.mark.parametrize(
    "kwargs",
    [{"hidden": (0,)}, {"hidden": (4,), "dropout": 1.0}, {"hidden": (4,), "out_features": -1}],
)
def test_mlp_settings_are_checked(kwargs: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MLP(3, **kwargs)  # type: ignore[arg-type]


def test_the_largest_dropout_is_said() -> None:
    with pytest.raises(ConfigError, match=r"got 1\.0; allowed: 0\.\.0\.999"):
        DeepFMSettings(dropout=1.0)


@pytest.mark.parametrize("name", ["deepfm", "dcn"])
def test_a_small_model_learns_a_feature_pair(name: str) -> None:
    ids = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    labels = (ids[:, 0] == ids[:, 1]).float()
    tables = nn.Parameter(torch.randn(2, 4, 4) * 0.1)
    make = {"deepfm": DeepFM, "dcn": DCN}[name]
    model = make((0, 2, 4), hidden=(16,))
    optimizer = torch.optim.Adam([tables, *model.parameters()], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        embeddings = torch.stack([tables[0][ids[:, 0]], tables[1][ids[:, 1]]], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(model(None, embeddings), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
