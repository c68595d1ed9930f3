"""Expiry by event time: the published keep and drop cases, per slot, and odd clocks."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ConfigError
from shoal.rules.expiry import Expiry

DAY = 86400
NOW = 10_000_000


@pytest.mark.parametrize(
    ("ttl_s", "last_seen_s", "dropped"),
    [
        (DAY, NOW - 86401, True),
        (DAY, NOW - 86400, True),
        (DAY, NOW - 86399, False),
        (0, NOW, True),
        (0, NOW - 1, True),
        (None, 0, False),
        (DAY, NOW + 5, False),
        (0, NOW + 5, False),
    ],
)
def test_drop_or_keep(ttl_s: int | None, last_seen_s: int, dropped: bool) -> None:
    rule = Expiry(ttl_s=ttl_s)
    assert rule.expired_N(torch.tensor([3]), torch.tensor([last_seen_s]), NOW).tolist() == [dropped]


@pytest.mark.parametrize(("layout", "shift"), [("v1", 54), ("v2", 48)])
def test_slots_have_their_own_time(layout: str, shift: int) -> None:
    rule = Expiry(ttl_s=None, per_slot=((1, 0), (2, DAY)), fid_layout=layout)  # type: ignore[arg-type]
    ids_N = torch.tensor([1 << shift, 2 << shift, 3 << shift])
    last_seen_s_N = torch.full((3,), NOW - 10)
    assert rule.expired_N(ids_N, last_seen_s_N, NOW).tolist() == [True, False, False]
    assert rule.expired_N(ids_N, last_seen_s_N, NOW + DAY).tolist() == [True, True, False]
    assert [rule.ttl(slot) for slot in (1, 2, 3)] == [0, DAY, None]


def test_times_beyond_2038_compare() -> None:
    late_s = (1 << 32) - 1
    rule = Expiry(ttl_s=DAY)
    last_seen_s_N = torch.tensor([late_s - DAY, late_s - DAY + 1])
    assert rule.expired_N(torch.tensor([1, 2]), last_seen_s_N, late_s).tolist() == [True, False]


def test_never_outlasts_every_clock() -> None:
    assert Expiry().expired_N(torch.tensor([1]), torch.tensor([0]), (1 << 32) - 1).tolist() == [
        False
    ]


def test_empty_input() -> None:
    empty_N = torch.zeros(0, dtype=torch.int64)
    assert Expiry(ttl_s=1).expired_N(empty_N, empty_N, NOW).shape == (0,)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"ttl_s": -1}, "ttl_s"),
        ({"ttl_s": 0.5}, "ttl_s"),
        ({"per_slot": ((40000, 1),)}, "slot"),
        ({"per_slot": ((1, 5), (1, 5))}, "per_slot"),
        ({"fid_layout": "v0"}, "fid_layout"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        Expiry(**settings)  # type: ignore[arg-type]
