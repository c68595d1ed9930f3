"""Batch normalisation over ranks is torch's over the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.collectives import LocalCollectives
from shoal.comm.launch import init
from shoal.distributed.batch_norm import BatchNormOverRanks, normalise_over_ranks
from shoal.errors import InputError
from support.ranks import run_ranks


def model(**options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.ReLU(), nn.Linear(4, 1))


def trained(made: nn.Module, batches: list[torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Gradients of the last batch and all state, after some steps."""
    for batch in batches:
        made.zero_grad()
        (made(batch).square().sum() * share).backward()
    grads = {f"grad {name}": p.grad for name, p in made.named_parameters() if p.grad is not None}
    made.eval()
    return {**grads, **made.state_dict(), "eval": made(torch.ones(2, 3)).detach()}


def batches() -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(size, 3) for size in (7, 2, 9)]


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"eps": 0.1}])
def test_one_rank_is_torch(options: dict[str, Any]) -> None:
    made = model(**options)
    ours = normalise_over_ranks(copy.deepcopy(made), LocalCollectives())
    assert isinstance(ours[1], BatchNormOverRanks)  # type: ignore[index]
    want, found = trained(made, batches(), 1.0), trained(ours, batches(), 1.0)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_far_from_zero() -> None:
    ours = normalise_over_ranks(nn.BatchNorm1d(4), LocalCollectives())
    plain = nn.BatchNorm1d(4).double()
    for _ in range(3):
        far = torch.tensor([0.0, 30.0, -1000.0, 20_000.0]) + torch.randn(64, 4)
        torch.testing.assert_close(ours(far), plain(far.double()).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_var, plain.running_var.float(), rtol=1e-5, atol=1e-5)


def test_images_and_half_precision() -> None:
    plain = nn.BatchNorm2d(3)
    ours = normalise_over_ranks(copy.deepcopy(plain), LocalCollectives())
    images = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(ours(images), plain(images), rtol=1e-5, atol=1e-5)
    assert ours(images.bfloat16()).dtype == torch.bfloat16


def test_one_value_has_no_variance() -> None:
    ours = normalise_over_ranks(model(), LocalCollectives())
    with pytest.raises(InputError, match="values of a channel"):
        ours(torch.ones(1, 3))


@pytest.mark.parametrize("examples", [0, 1])
def test_where_examples_may_be_missing_statistics_stay(examples: int) -> None:
    ours = normalise_over_ranks(nn.BatchNorm1d(3), LocalCollectives(), lone=True)
    ours(torch.randn(5, 3))
    before = {name: one.clone() for name, one in ours.state_dict().items()}
    batch = torch.ones(examples, 3, requires_grad=True)
    found = ours(batch)
    assert found.tolist() == [[0.0] * 3] * examples  # the bias
    found.sum().backward()
    assert batch.grad is not None and not batch.grad.any()
    assert ours.weight.grad.isfinite().all() and ours.bias.grad.tolist() == [float(examples)] * 3
    for name, one in ours.state_dict().items():
        assert torch.equal(one, before[name]), name


def shared() -> dict[str, torch.Tensor]:
    mesh = init(device="cpu")
    made = normalise_over_ranks(model(), mesh.collectives("moments"))
    # 7 = 7 + 0, 2 = 1 + 1, 9 = 4 + 5 examples
    cuts = [(7, 0), (1, 1), (4, 5)]
    own = [b.split(cut)[mesh.rank] for b, cut in zip(batches(), cuts, strict=True)]
    found = trained(made, own, 1.0)
    grads = {name: value for name, value in found.items() if name.startswith("grad")}
    for name, value in grads.items():
        (found[name],) = mesh.control.all_reduce(value, "sum", what=name).wait()
    return found


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_are_one() -> None:
    want = trained(model(), batches(), 1.0)
    for found in run_ranks(2, shared):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
