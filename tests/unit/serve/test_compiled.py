"""Compiled modules give the numbers of the module, with weights of their own, or are the module."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.models import deepfm
from shoal.serve.compiled import Compiler
from shoal.serve.signature import ServedTensor

SHAPES = ((4,), (3, 8), (3,))
INPUTS = [
    ServedTensor(name, "float32", (-1, *shape))
    for name, shape in zip(("dense", "embeddings", "first_order"), SHAPES, strict=True)
]


def module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = deepfm.DeepFM((4, 3, 8), hidden=(16,), batch_norm=True)
    for buffer in made.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return made.eval()


@pytest.mark.slow  # compiles
@pytest.mark.timeout(900)
def test_one_package_serves_the_weights_of_each(tmp_path: Path) -> None:
    first, other = module(0), module(1)
    folder = tmp_path / "cache"
    pair = [Compiler(folder).compiled(one, INPUTS) for one in (first, other)]
    assert len(list(folder.glob("*.pt2"))) == 1
    assert all(one is not plain for one, plain in zip(pair, (first, other), strict=True))
    for size in (1, 5, 200):
        inputs = [torch.randn(size, *shape) for shape in SHAPES]
        with torch.inference_mode():
            for one, plain in zip(pair, (first, other), strict=True):
                torch.testing.assert_close(one(*inputs), plain(*inputs))


def test_a_folder_that_others_write_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    plain = module(0)
    with caplog.at_level(logging.WARNING):
        assert Compiler(tmp_path).compiled(plain, INPUTS) is plain
    assert "others" in caplog.text


def test_a_module_that_cannot_be_exported_runs_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Branching(nn.Module):
        def forward(self, dense: Tensor, *others: None) -> Tensor:
            return dense.sum(1) if float(dense.sum()) > 0 else dense.mean(1)

    plain = Branching().eval()
    with caplog.at_level(logging.WARNING):
        assert Compiler(tmp_path).compiled(plain, INPUTS[:1]) is plain
    assert "not compiled" in caplog.text
