"""Items in parts: one draw of them is one of all items."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Sampler, SamplerSettings, TensorSource
from shoal.data.samplers import Sampled, joined, split_counts
from shoal.errors import ConfigError, DataError, InputError
from shoal.ragged import Ragged

ITEMS = np.arange(100, 140)
WEIGHTS = 1.0 + np.arange(40) % 5
OWN, USERS = np.array([100, 101, 139, 999]), np.array([1, 2, 1, 3])
EDGES = np.array([1, 1, 2, 2, 7]), np.array([100, 120, 121, 100, 130])
HARD = np.array([1] * 6 + [2]), np.array([110, 111, 112, 113, 100, 120, 130])
PARTS = 3


def settings(**more: Any) -> SamplerSettings:
    return SamplerSettings(items="items", id="item", count=16, **more)


def sampler(settings: SamplerSettings, share: tuple[int, int], **more: Any) -> Sampler:
    kinds = Ragged.from_lists([[int(one)] * (int(one) % 3) for one in ITEMS])
    source = TensorSource({"item": torch.from_numpy(ITEMS), "kind": kinds}, torch.zeros(40))
    return Sampler(source, settings, weights=WEIGHTS, seed=3, share=share, **more)


def draw(parts: list[Sampler], key: int, own: Any = OWN, users: Any = USERS) -> Sampled:
    told = [one.part(own) for one in parts]
    counts = split_counts(told, (0, key, 0), len(own))
    found = [
        one.sample(own, users, (0, key, 0), count) for one, count in zip(parts, counts, strict=True)
    ]
    return joined(found, told, len(own))


def parts_of(made: SamplerSettings, **more: Any) -> list[Sampler]:
    return [sampler(made, (number, PARTS), **more) for number in range(PARTS)]


def test_items_and_expected_counts_are_those_of_a_draw_of_all() -> None:
    ids, negatives, _ = draw(parts_of(settings()), 0)
    drawn = ids["item"].values.tolist()
    assert len(drawn) == 16
    assert not {100, 101, 139} & set(drawn)
    assert ids.to_lists()["kind"] == [[one] * (one % 3) for one in drawn]
    left = WEIGHTS.sum() - WEIGHTS[[0, 1, 39]].sum()
    wanted = [math.log(16 * WEIGHTS[one - 100] / left) for one in drawn]
    assert negatives.log_counts_N.tolist() == pytest.approx(wanted, abs=1e-5)


def test_items_are_drawn_in_proportion_to_their_weights() -> None:
    parts = parts_of(settings())
    counts: Counter[int] = Counter()
    for key in range(600):
        counts.update(draw(parts, key).ids["item"].values.tolist())
    left = WEIGHTS.sum() - WEIGHTS[[0, 1, 39]].sum()
    for item, weight in zip(ITEMS.tolist(), WEIGHTS.tolist(), strict=True):
        wanted = 0.0 if item in (100, 101, 139) else 600 * 16 * weight / left
        assert counts[item] == pytest.approx(wanted, abs=4.5 * wanted**0.5)


def test_edges_and_hard_negatives_are_those_of_all_items() -> None:
    made = settings(kind="no_edge", user="user", edges="edges", hard_edges="hard", hard_count=2)
    parts = parts_of(made, edges=EDGES, hard_edges=HARD)
    seen: Counter[int] = Counter()
    for key in range(300):
        ids, negatives, _ = draw(parts, key)
        drawn = ids["item"].values.tolist()
        among = [*OWN.tolist(), *drawn[:16]]
        edges = set(zip(*(one.tolist() for one in EDGES), strict=True))
        wanted = {
            (row, at)
            for row, user in enumerate(USERS.tolist())
            for at, item in enumerate(among)
            if (user, item) in edges and row != at
        }
        pairs = [(row, at) for row, at in negatives.known.tolist()]
        assert set(pairs) == wanted
        assert len(pairs) == len(wanted)
        # User 1 has an edge to 100 and 120, which leaves 110..113; user 2 has 130 alone.
        rows = negatives.hard_H.tolist()
        assert rows == [0, 0, 1, 2, 2]
        hard = drawn[16:]
        assert hard[2] == 130
        assert len({*hard[:2]}) == 2
        seen.update(hard[:2])
    assert seen.keys() == {110, 111, 112, 113}
    for count in seen.values():
        assert count == pytest.approx(150, abs=4.5 * (300 * 0.25) ** 0.5)


def test_a_draw_is_a_function_of_its_key() -> None:
    one, other = (draw(parts_of(settings()), 5) for _ in range(2))
    assert torch.equal(one.ids["item"].values, other.ids["item"].values)
    assert not torch.equal(one.ids["item"].values, draw(parts_of(settings()), 6).ids["item"].values)


def test_a_batch_without_examples_draws_nothing() -> None:
    none = np.empty(0, np.int64)
    assert draw(parts_of(settings()), 0, none, none).ids.batch_size == 0


def test_what_cannot_be_drawn_is_named() -> None:
    with pytest.raises(InputError, match="all are in the batch"):
        draw(parts_of(settings()), 0, ITEMS, ITEMS)
    with pytest.raises(DataError, match="items of server 0"):
        Sampler(
            TensorSource({"item": torch.tensor([2])}, torch.zeros(1)), settings(), share=(0, 99)
        )
    with pytest.raises(ConfigError, match=r"spread of data\.sampler"):
        settings(spread=True)
