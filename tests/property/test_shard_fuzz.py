"""Random verbs on a shard and on its oracle: same answers, same errors, same rows.

The compiled core follows the reference shard; the GPU shard follows both. What only the core
defines (which rows a budget drops, how 16-bit rows round) is compared with the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shoal.table.cpu.shard import CpuShard
from shoal.table.cuda.shard import CudaShard
from shoal.table.shard import Shard
from shoal.table.spec import TableSpec
from support.fuzz_material import NARROW, PLAIN, RICH
from support.placed_shard import PlacedShard
from support.reference_shard import ReferenceShard
from support.shard_fuzz import Fuzz
from support.shares import SHARE

SEEDS, VERBS_A_RUN = range(16), 32
# On a GPU, where most of the time goes into kernels that are compiled.
GPU_SEEDS, GPU_VERBS = range(3), 48
AS_REFERENCE = replace(NARROW, on_full=("raise",), capacities=PLAIN.capacities, clears=False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ("float32", "float64", "mixed", "float16", "bfloat16")


def core(specs: Sequence[TableSpec], seed: int) -> Shard:
    return CpuShard(specs, seed=seed, threads=seed % 3 + 1)


def reference(specs: Sequence[TableSpec], seed: int) -> Shard:
    return ReferenceShard(specs, seed=seed)


def on_device(specs: Sequence[TableSpec], seed: int) -> Shard:
    return PlacedShard(CudaShard(specs, seed=seed, device=DEVICE))


@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed"])
@pytest.mark.parametrize(
    "seed", [*SEEDS[:6], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[6:])]
)
def test_random_verbs_follow_the_reference(seed: int, dtype: str) -> None:
    Fuzz(seed, dtype, core, reference).run(VERBS_A_RUN)


# Interpreted kernels add non-finite numbers up with numpy, which warns.
interpreted = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.mark.slow
@interpreted
@pytest.mark.skipif(DEVICE == "cuda", reason="runs there at full length")
@pytest.mark.parametrize(("seed", "dtype"), [(2, "mixed")])
def test_a_gpu_shard_follows_the_reference(seed: int, dtype: str) -> None:
    Fuzz(seed, dtype, on_device, reference, late=True).run(12)


@pytest.mark.slow
@interpreted
@pytest.mark.skipif(DEVICE == "cuda", reason="runs there at full length")
@pytest.mark.parametrize(("seed", "dtype"), [(5, "float32"), (9, "bfloat16")])
def test_a_gpu_shard_follows_the_core(seed: int, dtype: str) -> None:
    Fuzz(seed, dtype, on_device, core, late=True, menu=RICH).run(14)


@interpreted
@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="runs there at full length")
@pytest.mark.parametrize("seed", range(10, 30, SHARE))
def test_a_gpu_shard_follows_both_for_longer(seed: int) -> None:
    Fuzz(seed, DTYPES[seed % 3], on_device, reference, late=True).run(VERBS_A_RUN)
    Fuzz(seed, DTYPES[seed % 5], on_device, core, late=True, menu=RICH).run(VERBS_A_RUN)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", GPU_SEEDS)
def test_on_a_gpu(seed: int, dtype: str) -> None:
    Fuzz(seed, dtype, on_device, core, late=True, menu=NARROW).run(GPU_VERBS)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_on_a_gpu_as_the_reference(seed: int) -> None:
    Fuzz(seed, DTYPES[seed], on_device, reference, late=True, menu=AS_REFERENCE).run(VERBS_A_RUN)
