"""Formulas: truths are numbers, and a missing number is carried through them."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.data.expressions import Formula
from shoal.errors import ConfigError

NAN = float("nan")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(a > 1) + (b > 1)", [2.0, 0.0, NAN]),
        ("-(a > 1)", [-1.0, 0.0, NAN]),
        ("isnan(a) + isnan(a)", [0.0, 0.0, 2.0]),
        ("(not a) + 1 + True", [2.0, 2.0, NAN]),
        ("a < 2", [0.0, 1.0, NAN]),
        ("1 < a < 5", [1.0, 0.0, NAN]),
        ("a > 1 or b > 0", [1.0, 1.0, NAN]),
        ("a > 1 and b < 0", [0.0, 0.0, NAN]),
        ("b if a > 1 else 7", [3.0, 7.0, NAN]),
        ("where(a, b, 7)", [3.0, 1.0, NAN]),
        ("7 if isnan(a) else a", [2.0, 1.0, 7.0]),
        ("a ** 0", [1.0, 1.0, NAN]),
    ],
)
def test_truths_and_missing_numbers(text: str, expected: list[float]) -> None:
    columns = {"a": np.array([2.0, 1.0, NAN]), "b": np.array([3.0, 1.0, 1.0])}
    np.testing.assert_array_equal(Formula(text).evaluate(columns), expected)


@pytest.mark.parametrize("text", ["where(a)", "where(a, a)"])
def test_where_takes_three_arguments(text: str) -> None:
    with pytest.raises(ConfigError, match="expression"):
        Formula(text).check(["a"])
