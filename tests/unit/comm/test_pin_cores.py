"""Ranks of one host keep to a share of its cores, unless something else decides."""

from __future__ import annotations

import os

import pytest
import torch

from shoal import config
from shoal.comm.launch import pin_cores
from shoal.comm.launch_environment import Launch
from shoal.train import ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores"
)


def bound(monkeypatch: pytest.MonkeyPatch, cores: set[int], of: int) -> list[frozenset[int]]:
    """The cores this process is bound to from here on, on a host that has `of`."""
    kept: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: kept.append(frozenset(chosen)))
    monkeypatch.setattr(os, "cpu_count", lambda: of)
    return kept


@pytest.mark.parametrize(("rank", "want"), [(0, {0, 1}), (1, {2, 3}), (2, {4, 5})])
def test_each_rank_has_its_share(
    monkeypatch: pytest.MonkeyPatch, rank: int, want: set[int]
) -> None:
    kept = bound(monkeypatch, set(range(7)), 7)
    assert pin_cores(rank, 3) == want
    assert kept == [want]


@pytest.mark.parametrize(("cores", "of", "ranks"), [({0, 1}, 2, 1), ({0, 1}, 2, 4), ({0, 1}, 8, 2)])
def test_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], of: int, ranks: int
) -> None:
    """One rank, more ranks than cores, or a process that is bound already."""
    kept = bound(monkeypatch, cores, of)
    assert pin_cores(0, ranks) == frozenset()
    assert kept == []


def test_a_run_without_gpus_pins_whatever_its_device_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Met(Exception):
        pass

    def meet(**_: object) -> None:
        raise Met

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ranks, "detect", lambda: Launch("torchrun", 1, 2, 1, 2, "127.0.0.1", 1))
    monkeypatch.setattr(ranks, "pin_cores", lambda *place: asked.append(place))
    monkeypatch.setattr(ranks, "init", meet)
    data = {"source": "synthetic"}
    for device in ("cpu", "auto"):
        with pytest.raises(Met):
            ranks.gather_ranks(config.from_mapping({"name": "a", "device": device, "data": data}))
    assert asked == [(1, 2), (1, 2)]
