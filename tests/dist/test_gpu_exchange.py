"""Tables on several GPUs give the rows and outputs of one process, for every way to place them."""

from __future__ import annotations

import pytest
import torch

from support.exchange_cases import CASES, same_as_local
from support.exchange_runs import rank_runs
from support.ranks import run_ranks

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiproc,
    pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, {GPUS} here"),
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_same_as_one_process(world_size: int) -> None:
    if world_size > GPUS:
        pytest.skip(f"needs {world_size} GPUs, {GPUS} here")
    cases = CASES if world_size == 2 else CASES[::3]
    by_rank = run_ranks(world_size, rank_runs, cases, "cuda", timeout_s=540, reuse=True)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        same_as_local(case, outcomes, 1e-6)
