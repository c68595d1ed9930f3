"""Compressors: serving codes, and what training's forward and backward see of them."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.errors import ConfigError
from shoal.rules.compressors import Compressor, FixedR8, Float16, Float32, OneBit

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [Float32(), Float16()])
def test_plain_storage_is_the_identity_in_training(rule: Compressor, dtype: torch.dtype) -> None:
    w_ND, grad_ND = torch.randn(2, 3, 5, dtype=dtype)
    assert torch.equal(rule.retrieve(w_ND, 9), w_ND)
    assert torch.equal(rule.retrieve_backward(w_ND, grad_ND, 9), grad_ND)


@pytest.mark.parametrize(
    ("rule", "bytes_per_value"), [(Float32(), 4), (Float16(), 2), (FixedR8(), 1), (OneBit(), 1)]
)
def test_storage_sizes(rule: Compressor, bytes_per_value: int) -> None:
    assert rule.encode(torch.ones(2, 3)).element_size() == bytes_per_value
    assert rule.decode(rule.encode(torch.ones(2, 3))).dtype == torch.float32


def test_float16_rounds_to_nearest() -> None:
    w_ND = torch.tensor([[0.1, 1 + 2.0**-12]])
    assert Float16().decode(Float16().encode(w_ND)).tolist() == [[0.0999755859375, 1.0]]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0),
        (0.5 / 128, 1),
        (-0.5 / 128, -1),
        (1.5 / 128, 2),
        (-1.5 / 128, -2),
        (2.5 / 128, 3),
        (0.49999997 / 128, 0),
        (1.0, 127),
        (-1.0, -128),
        (1e9, 127),
        (-1e9, -128),
        (math.inf, 127),
        (-math.inf, -128),
        (math.nan, 0),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_r8_codes(value: float, code: int, dtype: torch.dtype) -> None:
    w_ND = torch.tensor([[value]], dtype=dtype)
    assert FixedR8().encode(w_ND).tolist() == [[code]]
    assert FixedR8().retrieve(w_ND, 0).tolist() == [[code / 128]]


@pytest.mark.parametrize("r", [1.0, 0.3, 4.0])
def test_fixed_r8_training_reads_what_serving_will(r: float) -> None:
    rule = FixedR8(r)
    w_ND = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    seen_ND = rule.retrieve(w_ND, 3)
    assert torch.equal(seen_ND, rule.decode(rule.encode(w_ND)))
    inside_ND = w_ND.abs() < r * 126 / 128
    assert ((seen_ND - w_ND).abs()[inside_ND] <= r / 256 * 1.0001).all()


def test_fixed_r8_backward_is_the_identity_outside_the_grid_too() -> None:
    w_ND, grad_ND = torch.tensor([[0.1, 50.0]]), torch.tensor([[2.0, 3.0]])
    assert torch.equal(FixedR8().retrieve_backward(w_ND, grad_ND, 0), grad_ND)


@pytest.mark.parametrize(
    ("step", "scale"),
    [
        (0, 1.0),
        (199, 1.0),
        (200, math.sqrt(2)),
        (399, math.sqrt(2)),
        (600, 2.0),
        (10**12, 10000.0),
    ],
)
def test_one_bit_scale_is_a_function_of_the_step(step: int, scale: float) -> None:
    assert OneBit().scale(step) == pytest.approx(scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0, 600])
def test_one_bit_backward_is_the_gradient_of_forward(step: int, dtype: torch.dtype) -> None:
    rule = OneBit(amplitude=0.5)
    w_ND = torch.tensor([[-1.0, 0.0, 0.3, 2.0]], dtype=dtype, requires_grad=True)
    grad_ND = torch.tensor([[1.0, -2.0, 3.0, 4.0]], dtype=dtype)
    seen_ND = rule.retrieve(w_ND, step)
    (expected_ND,) = torch.autograd.grad(seen_ND, w_ND, grad_ND)
    torch.testing.assert_close(rule.retrieve_backward(w_ND.detach(), grad_ND, step), expected_ND)
    torch.testing.assert_close(seen_ND, 0.5 * torch.tanh(rule.scale(step) * w_ND))


def test_one_bit_serves_signs() -> None:
    rule = OneBit()
    code_ND = rule.encode(torch.tensor([[-0.001, 0.0, 5.0]]))
    assert code_ND.tolist() == [[-1, 1, 1]]
    torch.testing.assert_close(rule.decode(code_ND), torch.tensor([[-0.1, 0.1, 0.1]]))


def test_one_bit_training_converges_to_what_serving_reads() -> None:
    rule = OneBit()
    w_ND = torch.tensor([[-0.2, 0.3]])
    late_ND = rule.retrieve(w_ND, 10**9)
    torch.testing.assert_close(late_ND, rule.decode(rule.encode(w_ND)))


@pytest.mark.parametrize("rule", [Float32(), Float16(), FixedR8(), OneBit()])
def test_empty_and_shapes(rule: Compressor) -> None:
    for rows in (0, 2):
        w_ND = torch.rand(rows, 3)
        assert rule.retrieve(w_ND, 1).shape == (rows, 3)
        assert rule.retrieve_backward(w_ND, w_ND, 1).shape == (rows, 3)
        assert rule.decode(rule.encode(w_ND)).shape == (rows, 3)


def test_what_the_core_is_told() -> None:
    assert [rule.kind for rule in (Float32(), Float16(), FixedR8(), OneBit())] == [
        "float32",
        "float16",
        "fixed_r8",
        "one_bit",
    ]
    assert (FixedR8.params, FixedR8(2).param_values()) == (("r",), (2.0,))
    assert OneBit.params == ("step_size", "init_scale", "max_scale", "amplitude")
    assert OneBit().param_values() == (200.0, 1.0, 10000.0, 0.1)


@pytest.mark.parametrize(
    ("rule", "settings", "names"),
    [
        (FixedR8, {"r": 0}, "r of"),
        (OneBit, {"step_size": 0}, "step_size"),
        (OneBit, {"init_scale": 0}, "init_scale"),
        (OneBit, {"max_scale": 0.5}, "max_scale"),
        (OneBit, {"amplitude": -0.1}, "amplitude"),
    ],
)
def test_wrong_numbers_are_refused(
    rule: type[Compressor], settings: dict[str, object], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        rule(**settings)
