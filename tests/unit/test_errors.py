"""What messages show of what was got and what is allowed."""

from __future__ import annotations

import pytest

from shoal.errors import InputError


def test_long_parts_are_cut() -> None:
    ranks = list(range(70_000))
    text = str(InputError("ranks", got=ranks, allowed=", ".join(map(str, ranks)), remedy="Fewer."))
    assert len(text) < 20_000
    assert text.startswith("ranks: got [0, 1, 2, ")
    assert f"... ({len(str(ranks)):,} letters); allowed: 0, 1, 2, " in text
    assert text.endswith(" letters). Fewer.")


@pytest.mark.parametrize(
    ("allowed", "shown"),
    [("0..-1", "none"), ("splits of tables 0..-1, rising", "splits of tables none, rising")]
    + [(same, same) for same in ("0..-10", "10..-1", "-0..-1", "0..1", "10..12")],
)
def test_a_range_of_nothing_is_none(allowed: str, shown: str) -> None:
    text = str(InputError("number of an example", got=3, allowed=allowed, remedy="Take another."))
    assert text == f"number of an example: got 3; allowed: {shown}. Take another."
