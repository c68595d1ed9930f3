"""Numbers of distinct ids, against ids that were drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data import Loader, Sampler, SamplerSettings, TensorSource
from shoal.errors import ConfigError, UnknownName
from shoal.planner.statistics import (
    Counter,
    TableStatistics,
    check_known,
    profile_data,
    read_statistics,
    statistics_text,
    zipf,
)


def drawn(ids: int, exponent: float, count: int, seed: int) -> np.ndarray:
    weights = np.arange(1, ids + 1, dtype=float) ** -exponent
    return np.random.default_rng(seed).choice(ids, size=count, p=weights / weights.sum())


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_distinct_ids_are_those_of_draws(exponent: float) -> None:
    one = zipf(20_000, exponent, ids_per_sample=2.0)
    batches = [np.unique(drawn(20_000, exponent, 6000, seed)) for seed in range(8)]
    assert one.distinct(3000) == pytest.approx(np.mean([len(x) for x in batches]), rel=0.02)
    common = [len(np.intersect1d(a, b)) for a, b in zip(batches[::2], batches[1::2], strict=True)]
    assert one.shared(3000) == pytest.approx(np.mean(common), rel=0.05)
    missed = np.mean([(x >= 1000).sum() for x in batches])
    assert one.missed(3000, 1000) == pytest.approx(missed, rel=0.03)


def test_a_law_over_many_rows() -> None:
    one = zipf(1e12, 1.05, ids_per_sample=3.0)
    assert one.ids == pytest.approx(1e12) and len(one.frequency) < 300
    assert 0 < one.distinct(65536) < 3 * 65536
    assert one.hot_share(1e12) == pytest.approx(1) and 0.5 < one.hot_share(1e6) < 0.9
    assert zipf(1, 1.0).distinct(100) == pytest.approx(1)


def test_counting_gives_the_law_back() -> None:
    counter = Counter()
    for k in range(20):
        counter.add(drawn(500, 1.0, 4000, k), 2000)
    found, true = counter.statistics(), zipf(500, 1.0, ids_per_sample=2.0)
    assert found.ids_per_sample == 2 and found.new_per_sample == 0
    assert found.distinct(300) == pytest.approx(true.distinct(300), rel=0.02)
    assert found.hot_share(50) == pytest.approx(true.hot_share(50), rel=0.05)


def test_ids_of_the_second_half_are_growth() -> None:
    counter = Counter()
    counter.add(np.arange(100), 100)
    counter.add(np.arange(50, 150), 100)
    assert counter.statistics().new_per_sample == 0.5
    with pytest.raises(ConfigError, match="ids of a table"):
        Counter().statistics()


def test_sampled_items_are_ids_of_the_examples() -> None:
    rows = torch.arange(1000)
    source = TensorSource({"user": rows % 300, "item": rows % 500}, torch.ones(1000))
    items = TensorSource({"item": torch.arange(500)}, torch.zeros(500))
    sampler = Sampler(items, SamplerSettings(items="", id="item", count=500))
    loader = Loader(source, 250, sampler=sampler)
    found = profile_data(loader.batches(), {"user": "users", "item": "items"}, most=3)
    assert found["users"].ids_per_sample == 1
    assert found["items"].ids_per_sample == 1 + 500 / 250


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "statistics.json"
    known = {"user": zipf(1000, new_per_sample=0.25), "item": zipf(5, 0.0)}
    file.write_text(statistics_text(known))
    assert read_statistics(file) == known
    with pytest.raises(UnknownName, match="user"):
        check_known(known, ["users", "item"])
    file.write_text("{}")
    for path in (file, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="profile-data"):
            read_statistics(path)


@pytest.mark.parametrize(
    ("per_sample", "frequency", "new"),
    [(-1, ((1, 1.0),), 0), (1, (), 0), (1, ((1, 0.5),), 0), (1, ((0, 1.0),), 0),
     (1, ((1, 1.0),), -1), (float("nan"), ((1, 1.0),), 0)],
)  # fmt: skip
def test_numbers_that_cannot_be(per_sample: float, frequency: tuple, new: float) -> None:
    with pytest.raises(ConfigError, match="statistics"):
        TableStatistics(ids_per_sample=per_sample, frequency=frequency, new_per_sample=new)
    for ids, exponent in ((0, 1.0), (10, -1.0), (float("inf"), 1.0)):
        with pytest.raises(ConfigError, match="Zipf"):
            zipf(ids, exponent)
