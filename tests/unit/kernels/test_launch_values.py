"""What a compiled kernel is found by, as Triton tells kernels apart."""

from __future__ import annotations

import pytest
import torch

from shoal import _core

WORDS = torch.zeros(64, dtype=torch.int64)


def kinds(value: object, *, only_width: bool = False) -> bytes:
    return _core.launch_values((value,), bytes([only_width]))[0]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (WORDS, WORDS[2:], True),
        (WORDS, WORDS[1:], False),
        (WORDS, WORDS.view(torch.float64), False),
        (3, 5, True),
        (1, 3, False),
        (3, 16, False),
        (16, -32, True),
        (3, 3 + 2**40, False),
        (3 - 2**40, 3 + 2**70, True),
        (2**31 - 1, -(2**31) + 1, True),
        (2**31 - 1, 2**31 + 1, False),
        (1.0, 2.0, True),
        (1, 1.0, False),
        (1, True, False),
    ],
)
def test_kinds(one: object, other: object, equal: bool) -> None:
    assert (kinds(one) == kinds(other)) is equal


@pytest.mark.parametrize(("other", "equal"), [(1, True), (16, True), (2**31, False)])
def test_only_the_width_of_some_integers_matters(other: int, equal: bool) -> None:
    assert (kinds(3, only_width=True) == kinds(other, only_width=True)) is equal


def test_tensors_become_addresses() -> None:
    _, values = _core.launch_values((WORDS[1:], 7, 2**70, 0.5), bytes(4))
    assert values == (WORDS.data_ptr() + 8, 7, 2**70, 0.5)


def test_order_matters() -> None:
    one, other = _core.launch_values((1, 3), bytes(2)), _core.launch_values((3, 1), bytes(2))
    assert one[0] != other[0]
