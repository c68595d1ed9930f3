"""Blocks of models give what torch-rechub's and deepctr-torch's give of the same weights.

Both come with `pip install --no-deps -r bench/requirements-peers-nodeps.txt`; without them these
tests are skipped.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.models import (
    PLE,
    CrossMixture,
    CrossNetwork,
    HSTULayer,
    MMoE,
    TargetAttention,
    fm_second_order,
)

B, F, D, X, L, RANK, EXPERTS = 7, 5, 4, 12, 6, 3, 2
WHY = "compares with {}, which is not installed (bench/requirements-peers-nodeps.txt)"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def peer(name: str) -> ModuleType:
    # An installed one that lacks a dependency of its own raises ImportError, too.
    module: ModuleType = pytest.importorskip(
        name, reason=WHY.format(name.partition(".")[0]), exc_type=ImportError
    )
    return module


def copied(theirs: nn.Module, ours: nn.Sequential) -> None:
    """Give a stack of ours the linear layers of theirs, whose batch norms do nothing."""
    linears = [one for one in theirs.modules() if isinstance(one, nn.Linear)]
    own = [one for one in ours.modules() if isinstance(one, nn.Linear)]
    with torch.no_grad():
        for mine, other in zip(own, linears, strict=True):
            mine.weight.copy_(other.weight)
            mine.bias.copy_(other.bias)


def without_norms(module: nn.Module) -> Any:
    """In eval mode, with batch norms that change nothing and gates without a bias."""
    for one in module.modules():
        if isinstance(one, nn.BatchNorm1d):
            nn.init.constant_(one.weight, (1 + one.eps) ** 0.5)
    return module.eval()


def gate(theirs: nn.Module) -> Tensor:
    (linear,) = (one for one in theirs.modules() if isinstance(one, nn.Linear))
    nn.init.zeros_(linear.bias)
    return linear.weight.detach()


@pytest.mark.parametrize("name", ["torch_rechub.basic.layers", "deepctr_torch.layers"])
def test_fm(name: str) -> None:
    embeddings = torch.randn(B, F, D)
    theirs = peer(name).FM()(embeddings).reshape(B)
    torch.testing.assert_close(fm_second_order(embeddings), theirs)


def test_crosses() -> None:
    """Without biases, which theirs adds after the product with x0; the paper adds them before."""
    x = torch.randn(B, X)
    theirs = peer("torch_rechub.basic.layers").CrossNetV2(X, 3)
    ours = CrossNetwork(X, 3)
    with torch.no_grad():
        for mine, weight in zip(ours.layers, theirs.w, strict=True):
            mine.weight.copy_(weight.weight)
    torch.testing.assert_close(ours(x), theirs(x))


def test_mixtures_of_crosses() -> None:
    x = torch.randn(B, X)
    theirs = peer("torch_rechub.basic.layers").CrossNetMix(X, 2, RANK, EXPERTS)
    ours = CrossMixture(X, 2, rank=RANK, experts=EXPERTS)
    with torch.no_grad():
        for layer in range(2):
            ours.down[layer].copy_(theirs.v_list[layer].transpose(1, 2))
            ours.core[layer].copy_(theirs.c_list[layer])
            ours.up[layer].copy_(theirs.u_list[layer])
            ours.bias[layer].copy_(theirs.bias[layer].normal_().view(-1))
            # Their layers have one gate.
            gates = torch.cat([one.weight for one in theirs.gating])
            ours.gates[layer].weight.copy_(gates)
    torch.testing.assert_close(ours(x), theirs(x))


def test_mmoe() -> None:
    x = torch.randn(B, X)
    layers = peer("torch_rechub.basic.layers")
    experts = [without_norms(layers.MLP(X, False, [8, D])) for _ in range(EXPERTS)]
    gates = [without_norms(layers.MLP(X, False, [EXPERTS], activation="softmax")) for _ in "ab"]
    ours = MMoE(X, 2, experts=EXPERTS, expert=(8, D)).eval()
    for mine, theirs in zip(ours.experts, experts, strict=True):
        copied(theirs, mine)  # type: ignore[arg-type]
    for task, theirs in enumerate(gates):
        ours.gates[task].gate.weight.data.copy_(gate(theirs))
        outputs = torch.stack([one(x) for one in experts], dim=1)
        expected = (theirs(x).unsqueeze(2) * outputs).sum(1)
        torch.testing.assert_close(ours(x)[task], expected)


def test_ple() -> None:
    x = torch.randn(B, X)
    cgc = peer("torch_rechub.models.multi_task.ple").CGC
    levels = [without_norms(cgc(k, 2, 2, EXPERTS, 1, X, {"dims": [D]})) for k in (1, 2)]
    ours = PLE(X, 2, experts=EXPERTS, shared=1, levels=2, expert=(D,)).eval()
    for theirs, groups, gates in zip(levels, ours.experts, ours.gates, strict=True):
        for mine, other in zip(
            [one for group in groups for one in group],  # type: ignore[union-attr]
            [*theirs.experts_specific, *theirs.experts_shared],
            strict=True,
        ):
            copied(other, mine)
        shared = [theirs.gate_shared] if theirs is levels[0] else []
        for mine, other in zip(gates, [*theirs.gates_specific, *shared], strict=True):  # type: ignore[arg-type]
            mine.gate.weight.data.copy_(gate(other))
    expected = levels[1](levels[0]([x] * 3))
    for mine, other in zip(ours(x), expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("normalise", [False, True])
def test_target_attention(normalise: bool) -> None:
    query, steps, lengths = torch.randn(B, D), torch.randn(B, L, D), torch.randint(1, L + 1, (B,))
    pooling = peer("deepctr_torch.layers").AttentionSequencePoolingLayer
    theirs = pooling((8,), "relu", weight_normalization=normalise, embedding_dim=D).eval()
    ours = TargetAttention(D, (8,), normalise=normalise)
    copied(theirs, ours.score)
    expected = theirs(query.unsqueeze(1), steps, lengths.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(ours(query, steps, lengths), expected)


def test_hstu_layer() -> None:
    """With one number a head their scale of scores is 1, as it is here; and no bias of distance."""
    layer = peer("torch_rechub.basic.layers").HSTULayer
    theirs = layer(D, D, 1, 1, 0.0, max_seq_len=L).eval()
    for parameter in theirs.rab.parameters():
        nn.init.zeros_(parameter)
    nn.init.zeros_(theirs.proj1.bias)
    ours = HSTULayer(D, D, L).eval()
    with torch.no_grad():
        q, k, u, v = theirs.proj1.weight.chunk(4)
        ours.joint.weight.copy_(torch.cat([u, v, q, k]))
        ours.out.load_state_dict(theirs.proj2.state_dict())
        ours.distance.zero_()
    x = torch.randn(B, L, D)
    lengths = torch.randint(1, L + 1, (B,))
    places = torch.arange(L)
    valid = places < lengths.unsqueeze(1)
    distance = (places.unsqueeze(1) - places).expand(B, L, L)
    found = ours(x, distance, (distance >= 0) & valid.unsqueeze(1))
    torch.testing.assert_close(found, x + theirs(x, padding_mask=valid))
