"""Rows on the wire in fewer bytes: bounds of the error, and what is no ordinary number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.errors import ConfigError
from shoal.exchange.wire import Wire, WireKind, decode, encode, wire_dtype, wire_elements

SEGMENTS = ((3, 5), (0, 7), (2, 1), (4, 5), (1, 5), (1, 9), (1, 2), (2, 0), (6, 64))
KINDS: tuple[WireKind | None, ...] = (None, "bfloat16", "float16", "int8")
# Largest error as a part of the row's largest value.
BOUNDS = {None: 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 254 + 1e-6}
INF, NAN = math.inf, math.nan


def rows_of(segments: tuple[tuple[int, int], ...], real: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = sum(rows * width for rows, width in segments)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(real)


def round_trip(values: Tensor, width: int, kind: WireKind | None) -> Tensor:
    segments = [(values.numel() // width, width)]
    return decode(encode(values, segments, kind), segments, kind, values.dtype)


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_stay_in_bounds(kind: WireKind | None, real: torch.dtype) -> None:
    rows_E = rows_of(SEGMENTS, real)
    wire = encode(rows_E, SEGMENTS, kind)
    assert wire.dtype == wire_dtype(kind, real)
    assert wire.numel() == sum(wire_elements(rows, width, kind) for rows, width in SEGMENTS)
    back_E = decode(wire, SEGMENTS, kind, real)
    assert back_E.dtype == real
    start = 0
    for rows, width in SEGMENTS:
        if rows * width:
            part = slice(start, start + rows * width)
            wanted, got = rows_E[part].view(rows, width), back_E[part].view(rows, width)
            bound = BOUNDS[kind] * wanted.abs().amax(1, keepdim=True)
            assert ((wanted - got).abs() <= bound).all()
            start += rows * width


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=12
    ),
    st.sampled_from(["bfloat16", "int8"]),
)
def test_any_row_stays_in_bounds(values: list[float], kind: WireKind) -> None:
    rows_E = torch.tensor(values)
    largest = rows_E.abs().max()
    back_E = round_trip(rows_E, len(values), kind)
    # A scale may be subnormal where the row's largest is; such rows keep their magnitude only.
    assert ((rows_E - back_E).abs() <= BOUNDS[kind] * largest + 1e-37).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: WireKind | None) -> None:
    assert torch.equal(round_trip(torch.zeros(12), 4, kind), torch.zeros(12))


@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_nan_arrive_as_such(kind: WireKind | None) -> None:
    values = torch.tensor([1.0, INF, -INF, -2.0, NAN, 0.5, 3.0, -3.0])
    got = round_trip(values, 4, kind)
    assert torch.equal(got.isinf(), values.isinf())
    assert torch.equal(got.isnan(), values.isnan())
    assert got[1] == INF
    assert got[2] == -INF
    beside = torch.tensor([1.0, -2.0, 0.5, 3.0, -3.0])
    wanted = torch.zeros(5) if kind == "int8" else beside
    assert torch.equal(got[got.isfinite()], wanted)


def test_rows_beside_an_infinite_one_keep_their_values() -> None:
    got = round_trip(torch.tensor([INF, 1.0, 127.0, -1.0]), 2, "int8")
    assert got.tolist() == [INF, 0.0, 127.0, -1.0]


def test_float16_saturates() -> None:
    got = round_trip(torch.tensor([1e6, -1e6, 65504.0]), 1, "float16")
    assert got.tolist() == [65504.0, -65504.0, 65504.0]


def test_float64_beyond_float32_saturates_under_int8() -> None:
    got = round_trip(torch.tensor([1e300, -1e300], dtype=torch.float64), 1, "int8")
    assert got.isfinite().all()
    assert got[0] > 1e40
    assert got[1] == -got[0]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_wire_decode_alone(kind: WireKind | None) -> None:
    segments = ((2, 3), (3, 8))
    rows_E = rows_of(segments, torch.float32)
    wire = encode(rows_E, segments, kind)
    first = wire_elements(2, 3, kind)
    whole_E = decode(wire, segments, kind)
    assert torch.equal(decode(wire[:first], segments[:1], kind), whole_E[:6])
    assert torch.equal(decode(wire[first:], segments[1:], kind), whole_E[6:])


def test_no_rows() -> None:
    for kind in KINDS:
        assert decode(encode(torch.empty(0), [], kind), [], kind).numel() == 0


def test_an_unknown_precision_is_refused() -> None:
    for name in ("rows", "grads"):
        with pytest.raises(ConfigError, match="int4"):
            Wire(**{name: "int4"})
