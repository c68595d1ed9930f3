"""Random verbs on a shard and on its oracle: same answers, same errors, same rows.

The compiled core follows the reference shard; the GPU shard follows both. What only the core
defines (which rows a budget drops, how 16-bit rows round) is compared with the core.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shoal.table.cpu import CpuShard
from shoal.table.cuda import CudaShard
from shoal.table.shard import Shard
from shoal.table.spec import TableSpec
from support.fuzz_material import RICH
from support.placed_shard import PlacedShard
from support.reference_shard import ReferenceShard
from support.shard_fuzz import Fuzz

SEEDS, VERBS_A_RUN = range(16), 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ("float32", "float64", "mixed", "float16", "bfloat16")


def core(specs: Sequence[TableSpec], seed: int) -> Shard:
    return CpuShard(specs, seed=seed, threads=seed % 3 + 1)


def reference(specs: Sequence[TableSpec], seed: int) -> Shard:
    return ReferenceShard(specs, seed=seed)


def on_device(specs: Sequence[TableSpec], seed: int) -> Shard:
    return PlacedShard(CudaShard(specs, seed=seed, device=DEVICE))


@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_verbs_follow_the_reference(seed: int, dtype: str) -> None:
    Fuzz(seed, dtype, core, reference).run(VERBS_A_RUN)
