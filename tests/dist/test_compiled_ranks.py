"""Runs with `compile` on two ranks are runs without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from shoal import config, train
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
# The last batch of a pass is smaller, and one rank has no example of it.
SOURCE = {
    "kind": "synthetic", "examples": 161, "eval_examples": 60, "num_features": 3,
    "vocabulary": 20, "num_dense": 2,
}  # fmt: skip
TABLE = {"dim": 4, "optimizer": {"kind": "adagrad", "lr": 0.3}}
BASE: dict[str, Any] = {
    "name": "tiny",
    "threads": 1,
    "data": {"source": SOURCE, "batch_size": 32, "epochs": 2},
    "tables": {"default": TABLE},
    "model": {"kind": "dcn", "hidden": [4], "low_rank": 2},
    "baselines": [],
    "logging": {"points": 2, "tensorboard": False},
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"accumulation": 2, "clip_norm": 0.5, "amp": "bfloat16"},
    "batch normalisation": {"model": {"kind": "dlrm", "hidden": [4], "batch_norm": True}},
    "fsdp2": {"distributed": {"dense": "fsdp2"}, "amp": "bfloat16"},
}


made = torch.compile


def traced(function: Any, mode: str) -> Any:
    """Traced, and differentiated, by the compiler; kernels are those of an eager run."""
    return made(function, backend="aot_eager")


def metrics(folder: Path, how: bool) -> list[tuple[dict[str, Any], int]]:
    """Of each case, and the graphs that it made."""
    counters, found = torch._dynamo.utils.counters, []
    for number, changes in enumerate(CASES.values()):
        torch._dynamo.reset()
        counters.clear()
        output = {"dir": str(folder / str(number)), "save_model": False}
        settings = config.from_mapping({**BASE, **changes, "output": output, "compile": how})
        with patch.object(torch, "compile", traced):
            result = train.run(settings, console=Console(quiet=True))
        found.append((dict(result.metrics), counters["stats"]["unique_graphs"]))
    return found


def both(folder: Path) -> list[list[tuple[dict[str, Any], int]]]:
    return [metrics(folder / str(how), how) for how in (False, True)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (first, _) = run_ranks(2, partial(both, tmp_path_factory.mktemp("runs")), timeout_s=300)
    return first


@pytest.mark.parametrize("case", range(len(CASES)), ids=list(CASES))
def test_two_ranks_compiled_are_two_ranks(found: Any, case: int) -> None:
    (eager, none), (compiled, graphs) = (side[case] for side in found)
    assert compiled == eager
    assert none == 0
    assert graphs > 0
