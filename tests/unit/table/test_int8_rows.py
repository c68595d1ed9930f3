"""Rows of 8 bits: stored by the core as the reference stores them, and read back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shoal import Segment, TableSpec
from shoal.errors import ConfigError
from shoal.rules.initializers import Constant
from shoal.table.cpu.shard import CpuShard
from shoal.table.factory import make_shard
from shoal.table.rows import stored
from shoal.table.shard import IdGroups, StepContext

ODD = [0.0, -0.0, 1e-30, 1.0, -127.0, 63.5, float("inf"), float("-inf"), float("nan"), 3.4e38]


def spec(dim: int, dtype: Any = "int8") -> TableSpec:
    return TableSpec(name="t", segments=(Segment(dim=dim, initializer=Constant(0.3)),), dtype=dtype)


def groups(ids: list[int]) -> IdGroups:
    splits = torch.tensor([0, len(ids)])
    return IdGroups(torch.tensor(ids), splits, torch.tensor([0], dtype=torch.int32))


def decoded(rows: torch.Tensor) -> torch.Tensor:
    """The weights that stored rows stand for."""
    return rows[:, :-4].float() * rows[:, -4:].clone().view(torch.float32)


@pytest.mark.parametrize("dim", [1, 3, 16, 33])
def test_the_core_stores_rows_as_the_reference(dim: int) -> None:
    one = spec(dim)
    weights = torch.randn(200, dim) * torch.logspace(-20, 20, 200)[:, None]
    odd = torch.tensor(ODD * dim)[: len(ODD) // dim * dim].view(-1, dim)
    weights = torch.cat([weights, odd, torch.zeros(1, dim)])
    ids = list(range(len(weights)))
    shard = CpuShard((one,))
    shard.assign(groups(ids), [weights], ctx=StepContext())
    chunk = shard.export(0)
    assert chunk.weights.dtype == torch.int8 and chunk.weights.shape == (len(ids), dim + 4)
    wanted = stored(one, weights)[chunk.ids]
    assert torch.equal(chunk.weights, wanted)
    found = shard.find(groups(chunk.ids.tolist())).weights[0]
    assert torch.equal(found, decoded(wanted))
    scale = wanted[:, -4:].clone().view(torch.float32)
    exact = weights[chunk.ids]
    fine = exact.isfinite()
    assert ((found - exact).abs() <= scale / 2 * (1 + 1e-5))[fine].all()


def test_rows_are_loaded_kept_and_copied_as_stored() -> None:
    one = spec(5)
    shard = CpuShard((one,))
    ids = list(range(5000))
    shard.assign(groups(ids), [torch.randn(5000, 5)], ctx=StepContext())
    before = shard.export(0)
    with shard.snapshot() as snapshot:
        shard.assign(groups(ids[::2]), [torch.zeros(2500, 5)], ctx=StepContext())
        kept = snapshot.read(0, 0, 1 << 64)
    assert torch.equal(kept.weights, before.weights) and torch.equal(kept.ids, before.ids)
    other = CpuShard((one,))
    other.load(0, before)
    assert torch.equal(other.export(0).weights, before.weights)
    assert torch.equal(copy.deepcopy(other).export(0).weights, before.weights)
    missing = CpuShard((one,))
    ticket = missing.find_or_init(groups([7, 8]), ctx=StepContext())
    read = missing.gather(ticket, ctx=StepContext())[0]
    assert torch.allclose(read, torch.full((2, 5), 0.3), rtol=1e-6)
    ticket.end()


def test_their_memory() -> None:
    per_row = []
    for dtype in ("float32", "float16", "int8"):
        one = spec(60, dtype)
        shard = CpuShard((one,))
        shard.assign(groups(list(range(1000))), [torch.zeros(1000, 60)], ctx=StepContext())
        per_row.append(shard.stats()[0].bytes_weights // 1000)
    assert per_row == [272, 144, 80]  # 240, 120, 64, and what fills lines up behind the state


def test_there_are_none_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="int8"):
        make_shard((spec(2),), device="cuda")
