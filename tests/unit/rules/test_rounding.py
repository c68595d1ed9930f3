"""Stochastic rounding to 16-bit rows: neighbours, odds, edges, dependence on the step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.errors import DTypeError
from shoal.rules.initializers import column_words, stream_key
from support.rounding import rounding_domain, stochastic_round

KEY = stream_key(7, "user")
HALVES = [torch.float16, torch.bfloat16]

HALF_BITS = [[11878, -19866, 168], [17050, -32768, 25810]]
BRAIN_BITS = [[15821, -16820, 14119], [16467, -19924, 17563]]


def rounded(values_UD: Tensor, dtype: torch.dtype, *, step: int = 0, start: int = 0) -> Tensor:
    ids_U = torch.arange(values_UD.shape[0])
    return stochastic_round(
        values_UD, dtype, key=KEY, ids_U=ids_U, column_start=start, global_step=step
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 300.0])
def test_result_is_one_of_the_two_neighbours(dtype: torch.dtype, scale: float) -> None:
    values_UD = torch.randn(200, 7, generator=torch.Generator().manual_seed(0)) * scale
    nearest_UD = values_UD.to(dtype)
    error_UD = (rounded(values_UD, dtype).double() - values_UD.double()).abs()
    spacing_UD = torch.maximum(
        (torch.nextafter(nearest_UD, torch.full_like(nearest_UD, math.inf)) - nearest_UD).abs(),
        (torch.nextafter(nearest_UD, torch.full_like(nearest_UD, -math.inf)) - nearest_UD).abs(),
    ).double()
    assert (error_UD < spacing_UD).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_values_that_fit_stay(dtype: torch.dtype) -> None:
    values_UD = torch.tensor([[0.0, -0.0, 1.0, -1.5, 2.0**-14, 1024.0, -65280.0]]).repeat(50, 1)
    got_UD = rounded(values_UD, dtype)
    assert torch.equal(got_UD.float(), values_UD)
    assert torch.equal(got_UD.signbit(), values_UD.signbit())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [0.25, 0.75])
def test_odds_follow_the_distance(dtype: torch.dtype, sign: float, share: float) -> None:
    step = torch.finfo(dtype).eps
    values_UD = torch.full((4000, 5), sign * (1 + share * step))
    got_UD = rounded(values_UD, dtype).float().abs()
    assert set(got_UD.unique().tolist()) == {1.0, 1 + step}
    assert (got_UD > 1).double().mean().item() == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_float16_below_its_smallest_value(sign: float) -> None:
    tiny = 2.0**-24
    values_UD = torch.full((4000, 4), sign * tiny / 4)
    got_UD = rounded(values_UD, torch.float16)
    assert set(got_UD.float().abs().unique().tolist()) == {0.0, tiny}
    assert (got_UD.float().abs() > 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert bool(got_UD.signbit().all()) == (sign < 0)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_passes_through(dtype: torch.dtype) -> None:
    got_UD = rounded(torch.tensor([[math.inf, -math.inf, math.nan]]), dtype)
    assert got_UD[0, :2].tolist() == [math.inf, -math.inf]
    assert got_UD[0, 2].isnan()


def test_float16_beyond_its_range_converts_plainly() -> None:
    values_UD = torch.tensor([[65504.0, 65519.0, 65521.0, -65519.0, -1e6]]).repeat(30, 1)
    assert torch.equal(rounded(values_UD, torch.float16), values_UD.to(torch.float16))


def test_bfloat16_by_the_bits() -> None:
    values_UD = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    words_UD = column_words(
        torch.arange(20), key=KEY, column_start=2, dim=6, domain=rounding_domain(11)
    )
    got_UD = rounded(values_UD, torch.bfloat16, step=11, start=2)
    for value, word, got in zip(
        values_UD.flatten(), words_UD.flatten().tolist(), got_UD.flatten(), strict=True
    ):
        bits = value.view(torch.int32).item() & 0xFFFFFFFF
        assert got.view(torch.int16).item() & 0xFFFF == ((bits + (word & 0xFFFF)) >> 16) & 0xFFFF


def test_golden_bits() -> None:
    values_UD = torch.tensor([[0.1, -0.2, 1e-5], [3.3, -1e-8, 1234.567]])
    half_UD = rounded(values_UD, torch.float16, step=4, start=6)
    brain_UD = rounded(values_UD, torch.bfloat16, step=4, start=6)
    assert half_UD.view(torch.int16).tolist() == HALF_BITS
    assert brain_UD.view(torch.int16).tolist() == BRAIN_BITS


@pytest.mark.parametrize("dtype", HALVES)
def test_every_step_draws_anew_and_repeats_exactly(dtype: torch.dtype) -> None:
    values_UD = torch.rand(50, 8, generator=torch.Generator().manual_seed(2))
    first_UD = rounded(values_UD, dtype, step=0)
    assert torch.equal(rounded(values_UD, dtype, step=0), first_UD)
    assert not torch.equal(rounded(values_UD, dtype, step=1), first_UD)


@pytest.mark.parametrize(
    ("step", "domain"), [(0, 1), (1, 3), ((1 << 31) - 1, (1 << 32) - 1), (1 << 31, 1)]
)
def test_domain_of_a_step(step: int, domain: int) -> None:
    assert rounding_domain(step) == domain


@pytest.mark.parametrize("dtype", HALVES)
def test_small_updates_are_not_lost(dtype: torch.dtype) -> None:
    w_UD = torch.ones(500, 4)
    for step in range(100):
        w_UD = rounded(w_UD + 1e-4, dtype, step=step).float()
    assert w_UD.mean().item() == pytest.approx(1.01, abs=1e-3)


@pytest.mark.parametrize("dtype", HALVES)
def test_segments_are_cuts_of_the_row(dtype: torch.dtype) -> None:
    values_UD = torch.rand(10, 9, generator=torch.Generator().manual_seed(3))
    whole_UD = rounded(values_UD, dtype)
    assert torch.equal(rounded(values_UD[:, 3:8], dtype, start=3), whole_UD[:, 3:8])


@pytest.mark.parametrize("dtype", HALVES)
def test_no_rows(dtype: torch.dtype) -> None:
    assert rounded(torch.zeros(0, 3), dtype).shape == (0, 3)


@pytest.mark.parametrize(
    ("source", "target"), [(torch.float64, torch.float16), (torch.float32, torch.float32)]
)
def test_other_dtypes_are_refused(source: torch.dtype, target: torch.dtype) -> None:
    with pytest.raises(DTypeError, match="stochastic rounding"):
        rounded(torch.zeros(1, 1, dtype=source), target)
