"""Which device and backend a rank gets, and what one rank alone has."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shoal import comm
from shoal.comm.launch import effective_settings, pick_backend, pick_device, seed_all
from shoal.errors import ConfigError, DeviceUnavailable


def cards(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("device", "local_rank", "count", "visible", "found"),
    [
        ("auto", 0, 0, None, "cpu"),
        ("cpu", 3, 4, None, "cpu"),
        ("auto", 3, 4, None, "cuda:3"),
        ("cuda", 1, 2, None, "cuda:1"),
        ("cuda:0", 1, 2, None, "cuda:0"),
        ("auto", 3, 1, "3", "cuda:0"),
        ("cuda", 0, 1, None, "cuda:0"),
    ],
)
def test_device_of_a_rank(
    device: str,
    local_rank: int,
    count: int,
    visible: str | None,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards(monkeypatch, count, visible)
    assert str(pick_device(device, local_rank)) == found


@pytest.mark.parametrize(
    ("device", "local_rank", "count", "visible"),
    [
        ("cuda", 0, 0, None),
        ("auto", 2, 2, None),
        ("auto", 1, 1, None),
        ("auto", 2, 2, "0,1"),
        ("cuda:5", 0, 2, None),
    ],
)
def test_ranks_without_a_card(
    device: str,
    local_rank: int,
    count: int,
    visible: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards(monkeypatch, count, visible)
    with pytest.raises(DeviceUnavailable, match=r"one rank per GPU"):
        pick_device(device, local_rank)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        pick_device(device, 0)


def test_backend_of_a_device() -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda:0")
    assert pick_backend(None, cpu) == "gloo"
    assert pick_backend("gloo", card) == "gloo"
    with pytest.raises(ConfigError, match="'nccl' on cpu"):
        pick_backend("nccl", cpu)
    with pytest.raises(ConfigError, match="'mpi'"):
        pick_backend("mpi", cpu)
    if torch.distributed.is_nccl_available():
        assert pick_backend(None, card) == "nccl"
    else:
        with pytest.raises(DeviceUnavailable):
            pick_backend(None, card)


def test_seeds() -> None:
    seed_all(2**32 + 5)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    seed_all(2**32 + 5)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(2**32 + 5)
    assert drawn[0] == random.random()


def test_one_rank_alone() -> None:
    mesh = comm.init(device="cpu", timeout_s=9)
    try:
        assert (mesh.rank, mesh.world_size, mesh.backend) == (0, 1, "local")
        assert mesh.new_group("a") is None
        own = mesh.collectives("b")
        assert own.gather_objects("me", what="who") == ["me"]
        assert comm.current() is mesh
        with pytest.raises(ConfigError, match="path of collectives"):
            mesh.collectives("c", path="pigeon")  # type: ignore[arg-type]
        said = effective_settings(mesh, {"NCCL_DEBUG": "INFO", "HOME": "/x"})
        assert "single: 1 ranks" in said
        assert "timeout 9 s" in said
        assert said.endswith("NCCL_DEBUG=INFO")
    finally:
        comm.shutdown()
    assert comm.current() is None
